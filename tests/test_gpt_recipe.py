"""recipes/gpt_shakespeare.py: text, tokens and windows against slow references, and short runs of the whole script."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common import data
from common.arguments import UserError, parse_args
from tests.conftest import REPOSITORY, load_recipe
from tests.forked import ForkedParent, Result

RECIPE = REPOSITORY / "recipes" / "gpt_shakespeare.py"
MODELS = REPOSITORY / "recipes" / "configs" / "models"
TEXT = "the quick brown fox jumps over the lazy dog; é and\ttabs\n" * 40
# 2 layers of width 32 that see 16 characters.
FLAGS = [
    "--config=gpt_shakespeare_demo", "--config_overrides=n_layer=2,n_head=2,n_embd=32,n_positions=16",
    "--max_seq_length=16", "--total_batch_size=8", "--max_steps=5", "--warmup_steps=0", "--learning_rate=1e-2",
    "--min_learning_rate=1e-2", "--eval_steps=5", "--eval_on_start", "--logging_steps=1", "--max_new_tokens=40",
]  # fmt: skip


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe(RECIPE)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def run(
    forked: ForkedParent, output: Path, *flags: str, config: str = "single_device", num_processes: int = 1
) -> Result:
    return forked.run(
        RECIPE, *FLAGS, f"--output_dir={output}", *flags, config=config, num_processes=num_processes,
        launcher_flags=["--mixed_precision", "no"],
    )  # fmt: skip


def read_metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# Text, characters, windows


def test_text_is_cut_where_nanogpt_cuts_it(recipe: ModuleType, shared_data: Path) -> None:
    file = shared_data / "shakespeare" / "input.txt"
    train, validation = recipe.read_text(recipe.GPTArguments(text_file=str(file)))
    assert (len(train), len(validation)) == (1_003_854, 111_540)
    assert len(recipe.character_tokenizer(train + validation)) == 65
    assert train + validation == file.read_text()


@pytest.mark.parametrize(("size", "num_validation"), [(0.25, 3), (4, 4)])
def test_validation_size_is_a_fraction_or_characters(
    recipe: ModuleType, tmp_path: Path, size: float, num_validation: int
) -> None:
    (tmp_path / "a.txt").write_text("0123456789ab", encoding="utf-8")
    _, validation = recipe.read_text(recipe.GPTArguments(text_file=str(tmp_path / "a.txt"), validation_size=size))
    assert validation == "0123456789ab"[-num_validation:]


@pytest.mark.parametrize("is_new", [True, False])
def test_long_text_is_tokenized_in_pieces(recipe: ModuleType, is_new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n\n" + "".join(recipe.read_text(recipe.GPTArguments())) + "\n \n"
    tokenizer: Any = AutoTokenizer.from_pretrained(REPOSITORY / "recipes" / "samples" / "tokenizer")
    if is_new:
        tokenizer = recipe.character_tokenizer(text)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(recipe, "PIECE_CHARACTERS", 1000)
    pieces = list(recipe.paragraphs(text))
    assert "".join(pieces) == text and len(pieces) > 10 and max(map(len, pieces)) < 5000
    assert recipe.encode(tokenizer, text, "--text_file").tolist() == whole
    assert recipe.encode(tokenizer, "", "--prompt").tolist() == []


def test_embedded_articles_are_the_default_text(recipe: ModuleType) -> None:
    train, validation = recipe.read_text(recipe.GPTArguments())
    assert 60_000 < len(train) + len(validation) < 120_000
    assert not train.isspace() and len(set(train + validation)) < 100


def test_character_tokenizer_gives_back_every_text(recipe: ModuleType, tmp_path: Path) -> None:
    text = "  two  spaces ,\n\n\ttab\r\n é 中😀 it's n't ."
    tokenizer = recipe.character_tokenizer(text)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = each(text)["input_ids"]
        assert ids == [sorted(set(text)).index(character) for character in text]
        assert each.decode(ids) == text
    with pytest.raises(UserError, match=r"^--prompt: 'XZ' is not in the tokenizer's vocabulary"):
        recipe.encode(tokenizer, "aXZ", "--prompt")


def test_windows_and_labels(recipe: ModuleType) -> None:
    args = recipe.GPTArguments(max_seq_length=7, character_level=True)
    train_text, eval_text = TEXT[:100], TEXT[100:130]
    train, validation = recipe.load_blocks(args, recipe.character_tokenizer(TEXT), train_text, eval_text)
    ids = {character: index for index, character in enumerate(sorted(set(TEXT)))}

    assert len(train) == 100 - 7  # every offset that has a target for each position
    for offset in range(len(train)):
        assert train[offset]["input_ids"].tolist() == [ids[c] for c in train_text[offset : offset + 7]]
        assert train[offset]["labels"].tolist() == [ids[c] for c in train_text[offset + 1 : offset + 8]]
    assert train[0]["input_ids"].base is train[50]["labels"].base
    with pytest.raises(IndexError):
        train[len(train)]

    # Each character but the first is a target once, and has what stands before it in its block as input.
    inputs, targets = zip(*((row["input_ids"].tolist(), row["labels"].tolist()) for row in validation), strict=True)
    assert [len(row) for row in targets] == [7, 7, 7, 7, 1]
    assert [token for row in targets for token in row] == [ids[c] for c in eval_text[1:]]
    assert [token for row in inputs for token in row] == [ids[c] for c in eval_text[:-1]]
    assert len(data.head(validation, 2)) == 2 and data.head(validation, 2)[1]["labels"].tolist() == targets[1]

    batch = data.collate_windows([validation[3], validation[4]])
    assert {name: values.dtype for name, values in batch.items()} == dict.fromkeys(["input_ids", "labels"], torch.int64)
    assert batch["labels"].tolist() == [targets[3], [*targets[4], *[-100] * 6]]
    assert batch["input_ids"].tolist() == [inputs[3], [*inputs[4], *[0] * 6]]


def test_initial_weights_follow_gpt2() -> None:
    """Normal with standard deviation 0.02; projections into the residual stream divided by the root of their number."""
    config = AutoConfig.from_pretrained(MODELS / "gpt_char_gpu")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    num_checked = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            wanted = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.1 * wanted, name
            num_checked += 1
        else:
            assert parameter.unique().tolist() == [1.0 if "ln_" in name and name.endswith("weight") else 0.0], name
    assert num_checked == 2 + 4 * config.n_layer  # embeddings of tokens and positions; the head is tied


@pytest.mark.parametrize(
    ("model", "millions"),
    # 128,256 x 4096 twice, 32 layers of 4096 x (4096 x 2 + 1024 x 2 + 14336 x 3), norms: Llama 3 8B.
    [("gpt_char_cpu", 0.81), ("gpt_char_gpu", 10.77), ("gpt_124m", 123.85), ("gpt_1b", 1076.17), ("gpt_8b", 8030.26)],
)
def test_shapes_of_the_presets(model: str, millions: float) -> None:
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS / model)).num_parameters()
    assert count / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize("preset", sorted(path.stem for path in (MODELS.parent).glob("gpt_shakespeare_*.yaml")))
def test_presets_fit_their_models(recipe: ModuleType, preset: str) -> None:
    args = parse_args(recipe.GPTArguments, ["--config", preset])
    config = AutoConfig.from_pretrained(args.model_config_path)
    if config.model_type == "gpt2":  # whose positions are weights: what is not trained would be untrained
        assert args.max_seq_length == config.n_positions
    assert args.max_seq_length <= config.max_position_embeddings
    assert args.max_steps > args.warmup_steps


# ---------------------------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def trained(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> tuple[Path, str]:
    """(output folder, what was printed) of a run with a greedy answer to a prompt."""
    output = tmp_path_factory.mktemp("trained") / "run"
    result = run(forked, output, f"--text_file={text_file}", "--prompt=the qu", "--temperature=0")
    assert result.exit_code == 0, result.output
    return output, result.output


def test_the_output_folder_says_how_it_was_made(trained: tuple[Path, str]) -> None:
    output, printed = trained
    comment = [line[2:] for line in (output / "config.yaml").read_text().splitlines() if line.startswith("# ")]
    start = printed.index("== ")
    assert printed[start:].startswith("\n".join(comment)) and any("one device" in line for line in comment)
    assert f"curves {output / 'report.html'}" in printed
    assert all(part in (output / "report.html").read_text() for part in ("one device", "eval_loss", "newPlot"))


def test_loss_falls_and_evaluation_is_exact(recipe: ModuleType, trained: tuple[Path, str]) -> None:
    lines = read_metrics(trained[0])
    losses = [line["loss"] for line in lines if "loss" in line]
    before, after = (line for line in lines if "eval_loss" in line)
    assert len(losses) == 5
    num_characters = len(set(TEXT))
    assert losses[0] == pytest.approx(math.log(num_characters), abs=0.1)
    assert losses[-1] < losses[0] - 0.2
    assert after["eval_loss"] < before["eval_loss"] - 0.2

    # The exported model over the validation text, block by block.
    model = AutoModelForCausalLM.from_pretrained(trained[0] / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained[0] / "model")
    assert model.config.vocab_size == len(tokenizer) == num_characters
    validation = TEXT[int(len(TEXT) * 0.9) :]
    tokens = torch.tensor(tokenizer(validation)["input_ids"])
    nll = correct = 0.0
    for start in range(0, len(tokens) - 1, 16):
        targets = tokens[start + 1 : start + 17]
        with torch.no_grad():
            logits = model(tokens[start : start + len(targets)][None]).logits[0]
        nll -= logits.double().log_softmax(-1)[torch.arange(len(targets)), targets].sum().item()
        correct += (logits.argmax(-1) == targets).sum().item()
    loss = nll / (len(tokens) - 1)
    assert after["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert after["eval_token_accuracy"] == pytest.approx(correct / (len(tokens) - 1))
    assert after["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    num_bytes = len(validation.encode())
    assert num_bytes > len(validation)
    assert after["eval_bits_per_byte"] == pytest.approx(loss / math.log(2) * len(tokens) / num_bytes, rel=1e-5)
    assert after["eval_examples"] == math.ceil((len(tokens) - 1) / 16)


def test_bits_per_byte_of_a_part_of_the_validation_text(forked: ForkedParent, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abc " * 300 + "\u00e9\u00e8 " * 60, encoding="utf-8")  # the last 138 characters are evaluated
    flags = [f"--text_file={file}", "--max_steps=0", "--validation_size=260", "--max_eval_samples=3", "--prompt=a"]
    result = run(forked, tmp_path / "run", *flags)
    assert result.exit_code == 0, result.output
    (line,) = read_metrics(tmp_path / "run")
    assert line["eval_examples"] == 3, "48 characters of a byte each"
    assert line["eval_bits_per_byte"] == pytest.approx(line["eval_loss"] / math.log(2))


def answer(output: str) -> str:
    return output.rpartition("-- answer\n")[2].rstrip("\n")


def test_the_export_continues_the_prompt_in_the_same_way(
    forked: ForkedParent, trained: tuple[Path, str], text_file: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained[0] / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained[0] / "model")
    tokens = tokenizer("the qu", return_tensors="pt")["input_ids"]
    context = tokens
    while tokens.shape[1] < 6 + 40:  # token by token, without a cache; full at 16, it goes on from its last 8
        if context.shape[1] == 16:
            context = context[:, -8:]
        with torch.no_grad():
            new = model(context).logits[:, -1:].argmax(-1)
        tokens, context = torch.cat([tokens, new], dim=1), torch.cat([context, new], dim=1)
    expected = tokenizer.decode(tokens[0])
    assert answer(trained[1]) == expected.rstrip("\n")

    flags = [f"--model_name_or_path={trained[0] / 'model'}", "--max_steps=0", "--config_overrides=n_layer=2"]
    again = run(forked, tmp_path / "again", f"--text_file={text_file}", "--prompt=the qu", "--temperature=0", *flags)
    assert again.exit_code == 0, again.output
    assert answer(again.output) == expected.rstrip("\n")
    losses = [read_metrics(folder)[-1]["eval_loss"] for folder in (trained[0], tmp_path / "again")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert not (tmp_path / "again" / "model").exists()


@pytest.mark.parametrize(("config", "num_processes"), [("fsdp_full_shard", 2), ("fsdp1_full_shard", 2), ("ddp", 2)])
def test_same_losses_and_answer_under_every_strategy(
    forked: ForkedParent, trained: tuple[Path, str], text_file: Path, tmp_path: Path, config: str, num_processes: int
) -> None:
    result = run(
        forked, tmp_path / "run", f"--text_file={text_file}", "--prompt=the qu", "--temperature=0", config=config,
        num_processes=num_processes,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    losses, reference = (
        [line[key] for line in read_metrics(folder) for key in ("loss", "eval_loss") if key in line]
        for folder in (tmp_path / "run", trained[0])
    )
    assert losses == pytest.approx(reference, rel=1e-4)
    assert answer(result.output) == answer(trained[1])


def test_sampling_is_seeded_and_equal_on_all_processes(
    forked: ForkedParent, trained: tuple[Path, str], text_file: Path, tmp_path: Path
) -> None:
    flags = [f"--model_name_or_path={trained[0] / 'model'}", "--config_overrides=n_layer=2", "--max_steps=0"]
    answers = []
    for name, config, num_processes, seed in [
        ("a", "single_device", 1, 1),
        ("b", "single_device", 1, 1),
        ("c", "fsdp_full_shard", 2, 1),
        ("d", "single_device", 1, 2),
    ]:
        result = run(
            forked, tmp_path / name, f"--text_file={text_file}", *flags, "--prompt=fox", f"--seed={seed}",
            config=config, num_processes=num_processes,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        answers.append(answer(result.output))
    assert answers[0] == answers[1] == answers[2] != answers[3]
    assert len(set(answers[0][3:])) > 5  # sampled from a model that is hardly trained: no loop of one token


def test_llama_shape_with_a_subword_tokenizer(forked: ForkedParent, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 2048,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = [f"--model_config_path={tmp_path / 'config.json'}", "--config_overrides=num_hidden_layers=3"]
    flags += [
        "--character_level=false",
        f"--tokenizer_name_or_path={REPOSITORY}/recipes/samples/tokenizer",
        "--prompt=Put the rice",
    ]
    result = run(forked, tmp_path / "run", *flags, config="fsdp_full_shard", num_processes=2)
    assert result.exit_code == 0, result.output
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2048), abs=0.2) and losses[-1] < losses[0] - 0.2
    assert answer(result.output).startswith("Put the rice")
    exported = AutoConfig.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert (exported.eos_token_id, exported.num_hidden_layers) == (tokenizer.eos_token_id, 3)
    rest = tokenizer(tokenizer.decode(tokenizer("Tap the bottom, °C")["input_ids"], skip_special_tokens=True))
    assert rest["input_ids"] == tokenizer("Tap the bottom, °C")["input_ids"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text_file=missing.txt"], "--text_file missing.txt: cannot be read"),
        (
            ["--text_file=short.txt", "--prompt="],
            "--text_file short.txt: 9 training and 1 validation tokens are too few",
        ),
        (["--text_file=latin1.txt"], "latin1.txt line 1: not UTF-8 text"),
        (["--prompt=Ω"], "--prompt 'Ω': 'Ω' is not in the tokenizer's vocabulary"),
        (
            ["--config_overrides=n_layer=0", "--text_file=missing.txt"],
            "GPT2LMHeadModel has no layers (n_layer is 0): give it some, --config_overrides n_layer=N",
        ),
        (["--max_seq_length=17"], "--max_seq_length 17: the model has 16 positions"),
        (["--tokenizer_name_or_path=x"], "--character_level makes its own tokenizer"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(forked: ForkedParent, tmp_path: Path, flags: list[str], message: str) -> None:
    (tmp_path / "short.txt").write_text("0123456789", encoding="utf-8")
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin-1") * 1000)
    result = forked.run(
        RECIPE, *FLAGS, f"--output_dir={tmp_path / 'run'}", *flags, config="single_device", cwd=tmp_path
    )
    assert result.exit_code == 2, result.output
    errors = [line for line in result.output.splitlines() if message in line]
    assert len(errors) == 1, result.output
    assert "Traceback" not in result.output


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_step_takes_little_longer_than_in_a_plain_loop(shared_data: Path) -> None:
    """In many windows that take turns. What else the machine does hits one of the two numbers; a slower loop, both."""
    command = [sys.executable, "benchmarks/char_cpu.py", "--rounds=3", "--steps=60"]
    command += ["--text_file", str(shared_data / "shakespeare" / "input.txt")]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = re.search(r"^ratio +([\d.]+) \(medians\), ([\d.]+) \(least\)$", result.stdout, re.MULTILINE)
    assert found and min(map(float, found.groups())) < 1.3, result.stdout
