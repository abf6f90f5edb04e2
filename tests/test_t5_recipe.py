"""Bad input through the real recipe under two processes: one line, exit code 2, nothing written, nothing lost."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BartConfig, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from tests.forked import CONFIGS, REPOSITORY, ForkedParent, Result

RECIPE = REPOSITORY / "recipes" / "t5_summarize.py"
TOKENIZER = REPOSITORY / "recipes" / "samples" / "tokenizer"
EARLIER_RUN = {
    "config.yaml": "seed: 1\n",
    "metrics.jsonl": '{"step": 1}\n',
    "model/config.json": "{}",
    "best/config.json": "{}",
    "checkpoints/step_00000001/manifest.json": "{}",
    "notes.txt": "mine",
}


def start(forked: ForkedParent, *flags: str, config: str | Path = "fsdp_full_shard", precision: str = "no") -> Result:
    return forked.run(
        RECIPE, *flags, config=config, num_processes=2, launcher_flags=["--mixed_precision", precision], timeout=100
    )


def error_of(result: Result) -> str:
    """The error, if it is what a user should see: once, in one or two lines, without a traceback, nothing after it."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.output.count("error: ") == 1, result.output
    before, _, message = result.output.partition("error: ")
    noise = [line for line in before.replace("\r", "\n").split("\n") if line.strip() and "/s]" not in line]
    assert not noise, f"only progress bars may come before it: {noise}"
    lines = message.rstrip("\n").split("\n")
    assert 1 <= len(lines) <= 2, message
    return message


def earlier_run(folder: Path) -> dict[str, str]:
    for name, text in EARLIER_RUN.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@dataclass
class Case:
    name: str
    words: list[str]
    """What the error must name."""
    flags: Callable[[Path], list[str]]
    """From a folder that the case may fill."""
    config: str = "fsdp_full_shard"
    edit: tuple[str, str] | None = None
    precision: str = "no"


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def preset(text: str) -> Callable[[Path], list[str]]:
    return lambda folder: [f"--config={written(folder / 'preset.yaml', text)}"]


def train_file(text: str, name: str = "articles.csv") -> Callable[[Path], list[str]]:
    return lambda folder: [f"--train_file={written(folder / name, text)}"]


def llama(folder: Path) -> list[str]:
    config = LlamaConfig(vocab_size=99, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder / "llama")
    return [f"--model_name_or_path={folder / 'llama'}"]


def small_vocabulary(folder: Path) -> list[str]:
    config = T5Config(vocab_size=99, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder / "t5")
    return [f"--model_name_or_path={folder / 't5'}"]


def few_positions(folder: Path) -> list[str]:
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "encoder_layers": 1, "decoder_layers": 1}
    config = BartConfig(**sizes, encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=128)
    config.save_pretrained(folder / "bart")
    return [f"--model_config_path={folder / 'bart'}"]


NO_SHORT_SUMMARY = "text,headline\n" + "Boil the water.,Take a pot and boil the water.\n" * 3 + ",Boil.\n"

CASES = [
    Case("unknown flag", ["--learnin_rate", "--learning_rate"], lambda _: ["--learnin_rate=1"]),
    Case("unknown key", ["preset.yaml", "'learnin_rate'", "'learning_rate'"], preset("learnin_rate: 1\n")),
    Case("type of a flag", ["--max_source_length", "int", "'long'"], lambda _: ["--max_source_length=long"]),
    Case("type of a key", ["preset.yaml", "'num_beams'", "int", "'many'"], preset("num_beams: many\n")),
    Case("no such preset", ["--config absent", "t5_summarize_demo"], lambda _: ["--config=absent"]),
    Case("out of range", ["--num_beams", "0"], lambda _: ["--num_beams=0"]),
    Case("missing file", ["--train_file", "absent.csv"], lambda _: ["--train_file=absent.csv"]),
    Case(
        "WikiHow is missing",
        ["wikihowAll.csv", "headline", "https://github.com/mahnazkoupaee/WikiHow-Dataset", "t5_summarize_demo"],
        lambda folder: [f"--train_file={folder}/wikihowAll.csv"],
    ),
    Case("missing validation file", ["--validation_file", "absent.csv"], lambda _: ["--validation_file=absent.csv"]),
    Case(
        "columns",
        ["articles.csv", "body, short", "--document_column", "--summary_column"],
        train_file("body,short\na,b\n"),
    ),
    Case("column names", ["--document_column", "--summary_column"], lambda _: ["--document_column=text"]),
    Case("empty file", ["articles.csv", "empty"], train_file("")),
    Case("no rows", ["articles.csv", "no rows"], train_file("text,headline\n")),
    Case("nothing left", ["articles.csv", "3 summary not shorter", "1 empty text"], train_file(NO_SHORT_SUMMARY)),
    Case("not JSON", ["articles.jsonl", "line 1", "not JSON"], train_file("nonsense\n", "articles.jsonl")),
    Case(
        "total batch",
        ["--total_batch_size 15", "2 processes x 4", "8 or 16"],
        lambda _: ["--total_batch_size=15", "--per_device_train_batch_size=4"],
    ),
    Case("kind of model", ["LlamaConfig", "'llama'", "encoder-decoder"], llama),
    Case("vocabulary", ["vocab_size is 99", "--tokenizer_name_or_path"], small_vocabulary),
    Case("positions", ["--max_source_length 320", "128 positions"], few_positions),
    Case("override", ["--config_overrides", "'layers=1'", "T5Config"], lambda _: ["--config_overrides=layers=1"]),
    Case("missing model", ["no such folder", "/absent/model"], lambda _: ["--model_name_or_path=/absent/model"]),
    Case(
        "hub: model",
        ["google-t5/t5-3b", 'make download ARGS="--model google-t5/t5-3b"', "demo preset runs offline"],
        lambda _: ["--model_name_or_path=google-t5/t5-3b"],
    ),
    Case("hub: dataset", ["cnn_dailymail", "--train_file"], lambda _: ["--dataset_name=abisee/cnn_dailymail"]),
    Case(
        "wrap class",
        ["fsdp_transformer_layer_cls_to_wrap", "BertLayer", "T5Block"],
        lambda _: ["--train_file=absent.csv"],  # the config alone is enough to know
        edit=("fsdp_config:", "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: BertLayer"),
    ),
    Case(
        "wrapping by size",
        ["SIZE_BASED_WRAP", "encoder-decoder", "TRANSFORMER_BASED_WRAP"],
        lambda _: ["--train_file=absent.csv"],
        edit=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP\n  fsdp_min_num_params: 1000"),
    ),
    Case("fp16", ["fp16", "T5", "bf16"], lambda _: [], precision="fp16"),
    Case("float64", ["--param_dtype float64", "bf16"], lambda _: ["--param_dtype=float64"], precision="bf16"),
    Case("two mechanisms", ["--gradient_checkpointing", "YAML"], lambda _: ["--gradient_checkpointing"]),
    Case("reduce_dtype", ["--reduce_dtype", "FSDP"], lambda _: ["--reduce_dtype=fp32"], config="ddp"),
    Case("tracker", ["--report_to", "'tensorbord'"], lambda _: ["--report_to=tensorbord"]),
    Case("rouge_samples", ["--rouge_samples", "-1"], lambda _: ["--rouge_samples=-1"]),
    Case("validation_size", ["validation"], lambda _: ["--validation_size=5000"]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: Case, forked: ForkedParent, tmp_path: Path) -> None:
    """A folder that holds another run keeps it, also where that run was to be replaced."""
    config: str | Path = case.config
    if case.edit:
        text = (CONFIGS / f"{case.config}.yaml").read_text()
        assert text.count(case.edit[0]) == 1
        config = Path(written(tmp_path / "accelerate.yaml", text.replace(*case.edit)))
    output = tmp_path / "run"
    before = earlier_run(output)
    flags = ["--config=t5_summarize_demo", f"--output_dir={output}", "--overwrite_output_dir", "--max_steps=1"]
    flags += case.flags(tmp_path)
    message = error_of(start(forked, *flags, config=config, precision=case.precision))
    assert all(word in message for word in case.words), message
    assert contents(output) == before


@pytest.mark.parametrize(
    "flags",
    [["--train_file=absent.csv"], ["--config_overrides=layers=1"], ["--total_batch_size=15"]],
    ids=lambda f: f[0],
)
def test_after_a_mistake_the_same_folder_can_be_used(flags: list[str], forked: ForkedParent, tmp_path: Path) -> None:
    """What a failed start leaves behind must not make the corrected command say "holds another run"."""
    output = tmp_path / "run"
    error_of(start(forked, "--config=t5_summarize_demo", f"--output_dir={output}", *flags))
    assert not output.exists()


def test_a_folder_with_another_run_is_refused(forked: ForkedParent, tmp_path: Path) -> None:
    before = earlier_run(tmp_path / "run")
    message = error_of(start(forked, "--config=t5_summarize_demo", f"--output_dir={tmp_path / 'run'}"))
    for word in ("config.yaml", "metrics.jsonl", "--resume_from_checkpoint latest", "--overwrite_output_dir"):
        assert word in message
    assert contents(tmp_path / "run") == before


def test_an_output_folder_that_is_a_file(forked: ForkedParent, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    message = error_of(start(forked, "--config=t5_summarize_demo", f"--output_dir={tmp_path / 'run'}"))
    assert f"--output_dir {tmp_path / 'run'}" in message and (tmp_path / "run").read_text() == "mine"


def test_overwriting_replaces_the_run_and_nothing_else(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    earlier_run(output)
    result = start(
        forked, "--config=t5_summarize_demo", f"--output_dir={output}", "--overwrite_output_dir", "--max_steps=1",
        "--total_batch_size=2", "--per_device_train_batch_size=1", "--max_source_length=16", "--max_target_length=8",
        "--eval_strategy=no", "--save_strategy=no", "--config_overrides=num_layers=1,num_decoder_layers=1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    [line] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 1 and (output / "model" / "model.safetensors").is_file()
    assert (output / "notes.txt").read_text() == "mine"
    assert not (output / "best").exists() and not (output / "checkpoints").exists()
    assert "seed: 42" in (output / "config.yaml").read_text()


def test_two_runs_do_not_share_a_folder(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = ["--config=t5_summarize_demo", f"--output_dir={output}", "--max_steps=1000", "--eval_strategy=no"]
    first = forked.start(RECIPE, *options, config="single_device", launcher_flags=["--mixed_precision", "no"])
    deadline = time.monotonic() + 60
    while not (output / "config.yaml").exists():
        assert time.monotonic() < deadline, first.output
        time.sleep(0.1)
    first.send_signal(signal.SIGSTOP)  # it need not compute while the second waits for it
    second = start(forked, *options, "--overwrite_output_dir")
    first.kill()
    assert second.exit_code == 2 and "another run is writing to it" in second.output, second.output
    assert first.wait().exit_codes == [-9]
    assert (output / "config.yaml").exists()


def test_help_is_shown_once(forked: ForkedParent) -> None:
    result = start(forked, "--help")
    assert result.exit_code == 0 and result.output.count("usage: t5_summarize.py") == 1
    assert result.output.count("--max_source_length ") == 1 and "Traceback" not in result.output


def test_debug_shows_the_traceback(forked: ForkedParent) -> None:
    result = start(forked, "--train_file=absent.csv", "--debug", "--num_beams=0")
    assert result.exit_code == 2 and "Traceback" in result.output and "--num_beams" in result.output
