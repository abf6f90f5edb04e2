"""tools/generate.py: the same text from an export and from each kind of checkpoint, and from transformers itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GPT2Config,
    PreTrainedTokenizerFast,
)

from common.generation import _Printer
from tests import tiny
from tests.conftest import REPOSITORY
from tests.forked import ForkedParent
from tools import generate

LAYOUTS = [("single_device", 1), ("ddp", 2), ("fsdp_full_shard", 2), ("fsdp1_full_shard", 2)]
TEXT = "the quick brown fox jumps over the lazy dog; é and\ttabs\n" * 40
NUM_POSITIONS = 16
PROMPTS = ["the qu", "jumps over the lazy dog;", "é"]  # the second is longer than the model's positions


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout[0])
def gpt_run(
    request: pytest.FixtureRequest, forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """(folder, what it printed) of a run of characters whose last step is saved and exported."""
    config, num_processes = request.param
    root = tmp_path_factory.mktemp("gpt")
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    result = forked.run(
        REPOSITORY / "recipes" / "gpt_shakespeare.py", "--config=gpt_shakespeare_demo", f"--text_file={root}/text.txt",
        f"--config_overrides=n_layer=2,n_head=2,n_embd=32,n_positions={NUM_POSITIONS}", "--max_seq_length=16",
        "--total_batch_size=8", "--max_steps=10", "--warmup_steps=0", "--learning_rate=1e-2", "--eval_strategy=no",
        f"--output_dir={root}/run", *tiny.saving(10), f"--prompt={PROMPTS[0]}", "--max_new_tokens=40",
        "--temperature=0", config=config, num_processes=num_processes, launcher_flags=["--mixed_precision", "no"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return root / "run", result.output


@pytest.fixture(scope="module", params=LAYOUTS[::2], ids=lambda layout: layout[0])
def t5_run(request: pytest.FixtureRequest, forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, num_processes = request.param
    folder = tmp_path_factory.mktemp("t5") / "run"
    tiny.train(forked, folder, *tiny.saving(2), "--max_steps=2", config=config, num_processes=num_processes)
    return folder


def text_of(capsys: pytest.CaptureFixture[str], *flags: Any) -> str:
    capsys.readouterr()
    assert generate.main([str(flag) for flag in flags]) == 0
    streams = capsys.readouterr()
    assert not streams.err
    return streams.out


def test_a_prompt_goes_on_as_in_training(gpt_run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """40 tokens, more than the model has positions."""
    folder, printed = gpt_run
    flags = ("--prompt", PROMPTS[0], "--max_new_tokens", 40)
    sources = (folder, folder / "checkpoints" / "step_00000010", folder / "model")
    texts = {text_of(capsys, source, *flags) for source in sources}
    assert len(texts) == 1
    text = texts.pop()
    assert len(text) == 41 and text[-1] == "\n"
    assert printed.endswith(f"-- answer\n{PROMPTS[0]}{text}")


def test_a_run_without_checkpoints_stands_for_its_model(
    gpt_run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(gpt_run[0] / "model", tmp_path / "run" / "model")
    texts = [text_of(capsys, folder, "--prompt", "the") for folder in (tmp_path / "run", gpt_run[0])]
    assert texts[0] == texts[1]


def test_samples_are_those_of_the_seed(gpt_run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    def sample(source: Path, seed: int, temperature: float = 1.0, top_k: int = 0) -> str:
        return text_of(
            capsys,
            source,
            "--prompt",
            PROMPTS[0],
            "--temperature",
            temperature,
            "--top_k",
            top_k,
            "--seed",
            seed,
            "--max_new_tokens",
            20,
        )

    folder, _ = gpt_run
    assert sample(folder, 1) == sample(folder / "model", 1)
    assert sample(folder, 1) != sample(folder, 2)
    greedy = text_of(capsys, folder, "--prompt", PROMPTS[0], "--max_new_tokens", 20)
    assert sample(folder, 1, top_k=1) == greedy != sample(folder, 1)


def test_prompts_of_a_file_do_not_depend_on_each_other(
    gpt_run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = gpt_run
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(["", *PROMPTS, ""]), encoding="utf-8")
    lines = text_of(capsys, folder, "--prompt_file", file, "--max_new_tokens", 6, "--batch_size", 2).splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["prompt"] for answer in answers] == PROMPTS
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        seen = ids if len(ids) < NUM_POSITIONS else ids[-NUM_POSITIONS // 2 :]
        for _ in range(6):
            with torch.no_grad():
                seen = [*seen, int(model(torch.tensor([seen])).logits[0, -1].argmax())]
        assert answer["text"] == tokenizer.decode(seen[-6:])


def test_what_is_printed_over_several_windows_is_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder that leaves out the space of the first word."""
    backend = Tokenizer(WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2}))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    printer = _Printer(tokenizer, skip_prompt=True)
    for window in ([0, 1], [2, 1], [1]):
        printer.put(torch.tensor([[9, 9]]))
        for token in window:
            printer.put(torch.tensor([token]))
        printer.end()
    printer.finish()
    assert capsys.readouterr().out == tokenizer.decode([0, 1, 2, 1, 1]) == "a bc b b"


@pytest.mark.parametrize("num_beams", [1, 3])
def test_encoder_decoder_models(
    num_beams: int, t5_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["summarize: Boil the water.", "Peel", "Cut the vegetables and fry them in a pan with oil."]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))
    flags = ("--max_new_tokens", 12, "--num_beams", num_beams)
    outputs = [
        text_of(capsys, source, "--prompt_file", file, "--batch_size", 2, *flags)
        for source in (t5_run / "checkpoints" / "step_00000002", t5_run / "model")
    ]
    assert outputs[0] == outputs[1]
    model = AutoModelForSeq2SeqLM.from_pretrained(t5_run / "model")
    tokenizer = AutoTokenizer.from_pretrained(t5_run / "model")
    assert model.config.prefix == "summarize: "
    for prompt, line in zip(prompts, outputs[0].splitlines(), strict=True):
        seen = f"summarize: {prompt.removeprefix('summarize: ')}"
        output = model.generate(
            **tokenizer(seen, return_tensors="pt"), max_new_tokens=12, num_beams=num_beams, do_sample=False
        )
        expected = tokenizer.decode(output[0], skip_special_tokens=True)
        assert json.loads(line) == {"prompt": prompt, "text": expected}
        assert text_of(capsys, t5_run, "--prompt", prompt, *flags) == expected + "\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "the", "--max_new_tokens", "0"], "--max_new_tokens is 0; it must be at least 1"),
        (["--prompt", "the", "--temperature", "-1"], "--temperature is -1.0; it must not be negative"),
        (["--prompt", "the", "--temperature", "1e-45"], "--temperature is 1e-45; 0 takes the likeliest"),
        (["--prompt", "the", "--seed", "9" * 20], "--seed is 99999999999999999999; it must be below 2**63"),
        (["--prompt", "the", "--top_p", "0", "--temperature", "1"], "--top_p is 0.0; it must be above 0"),
        (["--prompt", "the", "--top_k", "5"], "add --temperature 1, or drop them"),
        (["--prompt_file", "absent.txt"], "--prompt_file absent.txt: cannot be read"),
        (["--prompt", "the"], "no such folder; give an exported model, a checkpoint or a run"),
    ],
)
def test_mistakes(flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(tmp_path / "absent"), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_folders_and_prompts_that_do_not_work(
    gpt_run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = gpt_run
    (tmp_path / "broken").mkdir()
    GPT2Config(n_layer=1, architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{}")
    damaged = Path(shutil.copytree(folder / "checkpoints" / "step_00000010", tmp_path / "damaged"))
    (damaged / "manifest.json").unlink()
    foreign = Path(shutil.copytree(folder / "checkpoints" / "step_00000010", tmp_path / "foreign"))
    (foreign / "manifest.json").write_text('{"format_version": "new", "checksum": "x"}')

    def exported(name: str, *absent: str, **config: Any) -> Path:
        """A copy of the run's model without some files, and with another config."""
        copy = Path(shutil.copytree(folder / "model", tmp_path / name, ignore=shutil.ignore_patterns(*absent)))
        content = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(content | config))
        return copy

    cut = exported("cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:5000])
    lacking = exported("lacking")
    weights = load_file(lacking / "model.safetensors")
    weights.pop("transformer.h.0.mlp.c_fc.bias")
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    stopped = tmp_path / "stopped"  # by a kill, before it saved a checkpoint
    shutil.copytree(folder / "model", stopped / "best")
    for source, prompt, words in (
        (foreign, "the", "its manifest.json is damaged"),
        (cut, "the", "cannot be loaded"),
        (lacking, "the", "1 weights are missing, the first is transformer.h.0.mlp.c_fc.bias"),
        (exported("unknown", architectures=["MyGPT"]), "the", "architecture MyGPT is not one"),
        (exported("other", architectures=["GPT2ForSequenceClassification"]), "the", "is not one of transformers that"),
        (exported("mute", "tokenizer*", "special*"), "the", "it has no vocabulary"),
        (tmp_path, "the", f"no complete checkpoint in {tmp_path}.\n"),
        (stopped, "the", f"no complete checkpoint in {stopped}, but an exported model: {stopped / 'best'}."),
        (damaged, "the", "it has no manifest.json"),
        (tmp_path / "broken", "the", "cannot be loaded"),
        (folder, "the Z", "prompt 'the Z': the checkpoint's tokenizer cannot encode it"),
        (folder, "", "there is no token in it to go on from"),
    ):
        assert generate.main([str(source), "--prompt", prompt]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_weights_of_another_model_are_refused(
    gpt_run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from common import checkpoint

    copied = Path(shutil.copytree(gpt_run[0] / "checkpoints" / "step_00000010", tmp_path / "step_00000010"))
    config = copied / "huggingface" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layer": 3}))
    manifest = json.loads((copied / "manifest.json").read_text())
    monkeypatch.setattr(checkpoint, "check_contents", lambda checkpoint: None)
    monkeypatch.setattr(checkpoint, "read_checkpoint", lambda folder: checkpoint.Checkpoint(folder, manifest))
    assert generate.main([str(copied), "--prompt", "the"]) == 1
    assert "12 are missing and 0 unknown, the first is transformer.h.2.ln_1.weight" in capsys.readouterr().err
