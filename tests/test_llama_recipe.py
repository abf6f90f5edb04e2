"""recipes/llama_pretrain.py: short runs of the whole script, with a real model where there is one."""

import json
import math
import re
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import prepare
from common.arguments import UserError, parse_args
from common.prepare import Settings
from common.sources import Mixture, SourceSampler, TokenRows
from tests.conftest import REPOSITORY, load_recipe
from tests.forked import ForkedParent, Result, patched
from tests.test_sources import write

RECIPE = REPOSITORY / "recipes" / "llama_pretrain.py"
TOKENIZER = REPOSITORY / "recipes" / "samples" / "tokenizer"
SIZE = "num_hidden_layers=1,hidden_size=32,intermediate_size=64,num_attention_heads=2,num_key_value_heads=1"
FLAGS = [
    "--config=llama_pretrain_demo", f"--config_overrides={SIZE}", "--max_seq_length=32", "--total_batch_size=4",
    "--per_device_train_batch_size=1", "--logging_steps=1", "--eval_strategy=no", "--eval_on_start=false", "--prompt=",
    "--warmup_steps=0", "--max_steps=9", "--validation_size=0", "--forgetting_dataset=",
]  # fmt: skip


def run(
    forked: ForkedParent, output: Path, *flags: str, config: str = "fsdp_full_shard", num_processes: int = 2
) -> Result:
    return forked.run(
        RECIPE, *flags, f"--output_dir={output}", config=config, num_processes=num_processes,
        launcher_flags=["--mixed_precision", "no"], cwd=REPOSITORY,
    )  # fmt: skip


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def series(output: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines(output) if "loss" in line]


# ---------------------------------------------------------------------------------------------------------------------
# Data


@pytest.fixture(scope="module")
def news(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("text") / "news.jsonl", 40, 1)


@pytest.fixture(scope="module")
def by_files(forked: ForkedParent, news: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "files"
    result = run(forked, output, *FLAGS, f"--train_file={news}")
    assert result.exit_code == 0, result.output
    assert "news: 40 documents" in result.output
    return output


@pytest.fixture
def recipe() -> ModuleType:
    return load_recipe(RECIPE)


def test_training_samples_are_limited_and_a_stream_has_its_steps_for_an_epoch(recipe: ModuleType, news: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)

    def load(*flags: str) -> tuple[Mixture, SourceSampler, dict[str, TokenRows]]:
        args = parse_args(recipe.LlamaArguments, [*FLAGS, f"--train_file={news}", *flags])
        return recipe.load_data(args, tokenizer, 4)

    mixture, sampler, _ = load()
    assert len(mixture) == sampler.num_examples > 20
    mixture, sampler, _ = load("--max_train_samples=5")
    assert len(mixture) == sampler.num_examples == 5
    assert load("--streaming")[1].num_examples == 9 * 4


def test_bits_per_byte_of_a_part_of_the_held_out_text(recipe: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in (*["rice"] * 40, *["é è ü"] * 40)))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    flags = [f"--validation_file={file}", "--eval_strategy=steps", "--eval_steps=1", "--per_device_eval_batch_size=1"]
    args = parse_args(recipe.LlamaArguments, [*FLAGS, *flags, "--max_eval_batches=2"])
    _, _, held_out = recipe.load_data(args, tokenizer, 4)
    checkpoints: Any = SimpleNamespace(before_training={}, found=None)
    evaluation = recipe.Evaluation(args, Accelerator(cpu=True), tokenizer, held_out, checkpoints)
    batches, targets_per_byte = evaluation.sets[""]
    assert batches.num_examples == 2 < len(held_out[""])
    targets = [token for index in range(2) for token in held_out[""][index]["labels"].tolist() if token != -100]
    num_bytes = len(tokenizer.decode(targets, skip_special_tokens=True).encode())
    assert targets_per_byte == len(targets) / num_bytes != held_out[""].targets_per_byte()


def test_tokenized_folder_gives_the_same_losses(
    forked: ForkedParent, by_files: Path, news: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    prepare.prepare({"train": [news]}, tmp_path / "prepared", tokenizer, Settings("text", 32))
    result = run(forked, tmp_path / "run", *FLAGS, f"--train_file={tmp_path / 'prepared'}")
    assert result.exit_code == 0, result.output
    assert series(tmp_path / "run") == series(by_files)


def test_streaming_gives_the_same_losses_and_resumes_exactly_twice_in_a_row(
    forked: ForkedParent, by_files: Path, news: Path, tmp_path: Path
) -> None:
    flags = [*FLAGS, f"--train_file={news}", "--streaming", "--save_strategy=steps", "--save_steps=3"]
    result = run(forked, tmp_path / "run", *flags)
    assert result.exit_code == 0, result.output
    expected = series(tmp_path / "run")
    assert expected == series(by_files)
    for step in (3, 6):
        checkpoint = tmp_path / "run" / "checkpoints" / f"step_0000000{step}"
        result = run(forked, tmp_path / "run", *flags, f"--resume_from_checkpoint={checkpoint}", "--max_steps=9")
        assert result.exit_code == 0, result.output
        assert series(tmp_path / "run") == expected


# Says from where on files are read: a stream that goes on must not tokenize again what it has had.
READING = """
from common import sources

def read_and_say(self, position):
    print(f"{self.files[0].name} from {position}", flush=True)
    return read(self, position)

read, sources.FileReader.read = sources.FileReader.read, read_and_say
"""


def test_mixture_is_logged_and_a_stream_in_windows_resumes_in_another_layout(
    forked: ForkedParent, news: Path, tmp_path: Path
) -> None:
    web = write(tmp_path / "web.jsonl", 60, 2)
    flags = [*FLAGS, f"--train_file={news};{web}", "--source_weights=3,1", "--streaming", "--shuffle_window=5"]
    flags += ["--save_strategy=steps", "--save_steps=7", "--param_dtype=float64", "--lr_scheduler_type=constant"]
    result = run(forked, tmp_path / "run", *flags, "--max_steps=20")
    assert result.exit_code == 0, result.output
    last = lines(tmp_path / "run")[-1]
    assert last["num_sequences/news"] + last["num_sequences/web"] == 80
    assert last["num_sequences/news"] == pytest.approx(60, abs=1)
    assert last["seconds_left"] == 0
    expected = series(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000014"
    script = patched(RECIPE, tmp_path, READING)
    result = forked.run(
        script, *flags, f"--output_dir={tmp_path / 'run'}", "--max_steps=20",
        f"--resume_from_checkpoint={checkpoint}", config="ddp", num_processes=1,
        launcher_flags=["--mixed_precision", "no"], cwd=REPOSITORY,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert re.search(r"^web\.jsonl from \[0, [1-9]\d*\]$", result.output, re.MULTILINE), result.output
    for found, wanted in zip(series(tmp_path / "run"), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-9)


def test_a_spike_is_reported_with_its_documents(forked: ForkedParent, news: Path, tmp_path: Path) -> None:
    """The learning rate throws the model out; the run goes on, or ends with the names."""
    flags = [*FLAGS, f"--train_file={news}", "--max_steps=16", "--learning_rate=30", "--max_grad_norm=0"]
    flags += ["--lr_scheduler_type=linear", "--warmup_steps=15", "--spike_factor=1.2"]
    result = run(forked, tmp_path / "warn", *flags, num_processes=1)
    assert result.exit_code == 0, result.output
    assert "warning: step 1" in result.output and "; its batch has news.jsonl:" in result.output
    flags += ["--spike_action=stop", "--report_to=tensorboard"]
    result = run(forked, tmp_path / "stop", *flags, num_processes=2)
    assert result.exit_code == 1 and "its batch has news.jsonl:" in result.output, result.output
    assert "Traceback" not in result.output
    assert (tmp_path / "stop" / "report.html").is_file(), "the curves of a run that failed are those to be seen"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train_file=a.txt;b.txt"], "--source_weights: 2 sources need"),
        (["--train_file=a.txt;b.txt", "--source_weights=1"], "for each of the sources is expected, and there are 2 "),
        (["--source_weights=much"], "--source_weights much: numbers with commas"),
        (["--streaming"], "--streaming: a stream's length is not known; give --max_steps"),
        (["--streaming", "--max_steps=5"], "--streaming: give --validation_file"),
        (["--streaming", "--max_steps=5", "--dataloader_num_workers=1"], "set --dataloader_num_workers 0"),
        (["--document_masking", "--attn_implementation=flash_attention_2"], "would let documents see each other"),
        (["--validation_size=1"], "--validation_size is 1.0; a fraction below 1"),
        (["--max_seq_length=1"], "--max_seq_length is 1; it is too small"),
        (["--spike_factor=0"], "--spike_factor is 0.0; it must be greater than 0"),
        (["--spike_factor=0.5"], "--spike_factor is 0.5; it must be above 1"),
        (["--train_file= "], "--train_file is empty"),
    ],
)
def test_mistakes_in_arguments(flags: list[str], message: str) -> None:
    recipe = load_recipe(RECIPE)
    with pytest.raises(UserError) as raised:
        parse_args(recipe.LlamaArguments, ["--config=llama_pretrain_demo", *flags])
    assert message in str(raised.value)


def test_labels_that_teach_nothing_end_the_run(forked: ForkedParent, tmp_path: Path) -> None:
    rows = {"input_ids": [[5, 6, 7, 8]] * 40, "labels": [[5, -100, -100, -100]] * 40}  # a first token is no target
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "silent")
    flags = [*FLAGS, f"--train_file={tmp_path / 'silent'}", "--eval_strategy=no", "--max_steps=9"]
    result = run(forked, tmp_path / "run", *flags, num_processes=2)
    assert result.exit_code == 1 and "Traceback" not in result.output, result.output
    assert "error: step 5: the gradient has been 0 for 5 steps" in result.output and "silent row " in result.output


def test_labels_that_teach_nothing_now_and_then_do_not_end_the_run(forked: ForkedParent, tmp_path: Path) -> None:
    """One of three rows, in each epoch once: never five in a row, and more than five in all."""
    rows = {"input_ids": [[5, 6, 7, 8]] * 3, "labels": [[5, -100, -100, -100], [5, 6, 7, 8], [5, 6, 7, 8]]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "third")
    flags = [*FLAGS, f"--train_file={tmp_path / 'third'}", "--total_batch_size=1", "--max_steps=18"]
    result = run(forked, tmp_path / "run", *flags, num_processes=1)
    assert result.exit_code == 0, result.output
    assert [line["grad_norm"] == 0 for line in lines(tmp_path / "run")].count(True) == 6


def test_forgetting_is_of_the_same_text_or_of_none(forked: ForkedParent, news: Path, tmp_path: Path) -> None:
    """Under the name of a set, another text has no loss of the model before training to be compared with."""
    flags = [*FLAGS, f"--train_file={news}", "--eval_on_start=true", "--eval_strategy=steps", "--eval_steps=2"]
    flags += ["--save_strategy=steps", "--save_steps=2", "--validation_size=0.2"]
    texts = []
    for number in (2, 3):
        (tmp_path / str(number)).mkdir()
        texts.append(write(tmp_path / str(number) / "general.jsonl", 12, number))

    def train(num_steps: int, text: Path | None, *more: str) -> Result:
        more = (f"--max_steps={num_steps}", *([f"--forgetting_dataset={text}"] if text else []), *more)
        return run(forked, tmp_path / "run", *flags, *more, num_processes=1)

    resume, allow = "--resume_from_checkpoint=latest", "--allow_changed=evaluation_data"
    assert (first := train(2, texts[0])).exit_code == 0, first.output
    for other in (train(4, texts[1], resume), train(4, texts[0], resume, "--max_eval_batches=1")):
        assert other.exit_code == 2 and "different run: evaluation_data: " in other.output, other.output
        assert "no general_forgetting" not in other.output
    assert "(--max_eval_batches None -> 1)" in other.output, other.output
    unknown = "no general_forgetting: these examples were not evaluated before training"
    for num_steps, text, more, is_unknown in (
        (4, texts[0], [resume], False),
        (6, texts[1], [resume, allow], True),
        (8, texts[1], [resume], True),
        (10, None, [resume], False),
        (12, texts[1], [resume], True),
        (14, texts[0], [resume, allow], False),
    ):
        done = train(num_steps, text, *more)
        assert done.exit_code == 0 and (unknown in done.output) == is_unknown, done.output
        assert "choosing begins anew" not in done.output, "the validation text is the same"
    evaluations = {line["step"]: line for line in lines(tmp_path / "run") if "eval_general_loss" in line}
    assert list(evaluations) == [0, 2, 4, 6, 8, 12, 14]
    forgetting = {step: line.get("eval_general_forgetting") for step, line in evaluations.items()}
    assert [step for step, value in forgetting.items() if value is None] == [6, 8, 12]
    before = evaluations[0]["eval_general_loss"]
    assert all(forgetting[step] == evaluations[step]["eval_general_loss"] - before for step in (0, 2, 4, 14))


def test_the_demo_measures_forgetting_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(RECIPE)
    flags = ["--config=llama_pretrain_demo", "--eval_on_start=false"]
    args = parse_args(recipe.LlamaArguments, flags)
    assert args.forgetting_dataset == str(REPOSITORY / "recipes" / "samples" / "stories.jsonl") and args.eval_on_start
    assert not parse_args(recipe.LlamaArguments, [*flags, "--forgetting_dataset="]).eval_on_start


def test_mistakes_in_data_are_one_line(forked: ForkedParent, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a few words")
    result = run(forked, tmp_path / "run", *FLAGS, f"--train_file={tmp_path / 'a.txt'}")
    assert result.exit_code == 2 and result.output.count("training tokens do not fill one sequence") == 1
    assert "Traceback" not in result.output and not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------------
# A real model


def sequences(tokenizer: Any, texts: list[str], length: int) -> list[list[list[int]]]:
    """Documents, packed, cut into sequences; each as the documents' parts in it."""
    stream = [
        (token, document)
        for document, text in enumerate(texts)
        for token in [1, *tokenizer(text, add_special_tokens=False)["input_ids"], 2]
    ]  # fmt: skip
    found = []
    for start in range(0, len(stream), length):
        piece = stream[start : start + length]
        documents = sorted({document for _, document in piece})
        found.append([[token for token, each in piece if each == document] for document in documents])
    return found


def independent_loss(model: Any, tokenizer: Any, texts: list[str], length: int) -> float:
    """Each document's part of a sequence by itself."""
    nll, count = 0.0, 0
    for sequence in sequences(tokenizer, texts, length):
        for part in sequence:
            ids = torch.tensor([part])
            with torch.no_grad():
                log_probabilities = model(ids).logits[0].double().log_softmax(-1)
            nll -= log_probabilities[torch.arange(len(part) - 1), ids[0, 1:]].sum().item()
            count += len(part) - 1
    return nll / count


def documents(shared_data: Path, domain: str) -> list[str]:
    """About 90,000 characters of real text, in documents of some paragraphs."""
    if domain == "plays":
        text, size = (shared_data / "shakespeare" / "input.txt").read_text(), 8
    else:
        with zipfile.ZipFile(shared_data / "corpora" / "state_union.zip") as archive:
            names = ("1963-Kennedy", "1998-Clinton", "2006-GWBush")
            text = "\n".join(archive.read(f"state_union/{name}.txt").decode("latin-1") for name in names)
        text, size = "\n\n".join(filter(str.strip, text.splitlines())), 4
    paragraphs = text[:90_000].split("\n\n")
    return ["\n\n".join(paragraphs[index : index + size]) for index in range(0, len(paragraphs), size)]


@pytest.mark.full
@pytest.mark.parametrize("domain", ["plays", "state_union"])
def test_real_model_goes_on_with_other_text_and_forgetting_is_reported(
    forked: ForkedParent, shared_data: Path, tmp_path: Path, domain: str
) -> None:
    folder = shared_data / "stories260K_hf"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    start = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    torch.manual_seed(0)
    stories = tokenizer.batch_decode(
        model.generate(start.repeat(12, 1), do_sample=True, max_new_tokens=150), skip_special_tokens=True
    )
    train, held_out = (texts := documents(shared_data, domain))[:-6], texts[-6:]
    for name, each in (("train", train), ("held_out", held_out), ("stories", stories)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in each))

    flags = [
        "--config=llama_pretrain_260k", f"--model_name_or_path={folder}", "--max_seq_length=128",
        f"--train_file={tmp_path / 'train.jsonl'}", f"--validation_file={tmp_path / 'held_out.jsonl'}",
        f"--forgetting_dataset={tmp_path / 'stories.jsonl'}", "--max_new_tokens=30", "--num_train_epochs=0.75",
        "--evals_per_epoch=2", "--logging_steps=1", "--metric_for_best_model=eval_bits_per_byte",
        "--learning_rate=3e-3",
    ]  # fmt: skip
    result = run(forked, tmp_path / "run", *flags)
    assert result.exit_code == 0, result.output
    evaluations = [line for line in lines(tmp_path / "run") if "eval_loss" in line]
    before, after = evaluations[0], evaluations[-1]
    num_sequences = sum(len(tokenizer(text)["input_ids"]) for text in train) // 128
    num_steps = len(series(tmp_path / "run"))
    assert num_steps == pytest.approx(0.75 * num_sequences / 8, abs=2) and num_steps > 30

    assert before["step"] == 0
    assert before["eval_loss"] == pytest.approx(independent_loss(model, tokenizer, held_out, 128), rel=1e-5)
    assert before["eval_stories_loss"] == pytest.approx(independent_loss(model, tokenizer, stories, 128), rel=1e-5)
    assert before["eval_perplexity"] == pytest.approx(math.exp(before["eval_loss"]))
    num_targets = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in held_out)
    bits = before["eval_loss"] / math.log(2) * num_targets / sum(len(text.encode()) for text in held_out)
    assert before["eval_bits_per_byte"] == pytest.approx(bits)
    assert before["eval_stories_forgetting"] == 0

    assert after["eval_loss"] < before["eval_loss"] - 0.3
    assert after["eval_stories_forgetting"] == after["eval_stories_loss"] - before["eval_stories_loss"]
    assert after["eval_stories_forgetting"] > 0.05
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert after["eval_loss"] == pytest.approx(independent_loss(trained, tokenizer, held_out, 128), rel=1e-5)
    best = json.loads((tmp_path / "run" / "best" / "best_step.json").read_text())["step"]
    assert best == min(evaluations, key=lambda line: line["eval_bits_per_byte"])["step"]

    rates = [line["learning_rate"] for line in lines(tmp_path / "run") if "loss" in line]
    assert rates[-1] == 1e-4  # --min_learning_rate, exactly
    greedy = tokenizer.decode(model.generate(start, do_sample=False, max_new_tokens=30)[0], skip_special_tokens=True)
    answers = [part.partition("\n  ")[0] for part in result.output.split("-- answer\n")[1:]]
    assert answers[0].startswith(greedy) and not answers[-1].startswith(greedy)

    # From a checkpoint, the comparison is still with the model before training.
    checkpoint = next((tmp_path / "run" / "checkpoints").iterdir())
    result = run(
        forked, tmp_path / "again", *flags, f"--resume_from_checkpoint={checkpoint}", "--max_steps=0", num_processes=1,
        config="single_device",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    again = lines(tmp_path / "again")[-1]
    assert again["eval_stories_forgetting"] == pytest.approx(
        again["eval_stories_loss"] - before["eval_stories_loss"], rel=1e-12
    )
