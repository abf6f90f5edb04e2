"""Defaults < preset < flags, mistakes in both, and the batch arithmetic."""

import argparse
import dataclasses
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from common import arguments
from common.arguments import (
    BatchArguments,
    BatchPlan,
    RunArguments,
    TrainArguments,
    UserError,
    arg,
    num_training_steps,
    parse_args,
    plan_batch,
    tracker_names,
)
from tests.conftest import REPOSITORY, load_recipe

CONFIGS = REPOSITORY / "recipes" / "configs"
RECIPES = sorted((REPOSITORY / "recipes").glob("*.py"))


@dataclass
class Arguments(TrainArguments):
    presets: ClassVar[tuple[str, str]] = ("small", "large")

    prefix: str = arg("read: ", "Put before every text.")
    text_column: str | None = arg(None, "Column of the text (default: by name).")
    shuffle: bool = arg(False, "Shuffle.")


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    return tmp_path / "preset.yaml"


def parse(preset: Path, text: str, *flags: str) -> Arguments:
    preset.write_text(text)
    return parse_args(Arguments, ["--config", str(preset), *flags])


def recipe_arguments(path: Path) -> type[TrainArguments]:
    [found] = [
        item
        for item in vars(load_recipe(path)).values()
        if isinstance(item, type) and issubclass(item, TrainArguments) and item is not TrainArguments
    ]
    return found


def test_flags_win_over_the_preset_and_the_preset_over_defaults(preset: Path) -> None:
    args = parse(preset, "learning_rate: 3e-4\nseed: 7\nprefix: 'a: '\n", "--seed", "8", "--text_column=body")
    assert (args.learning_rate, args.seed, args.prefix, args.text_column) == (3e-4, 8, "a: ", "body")
    changed = {"learning_rate", "seed", "prefix", "text_column", "output_dir"}
    defaults = {field.name: field.default for field in dataclasses.fields(Arguments)}
    assert {name for name, value in args.to_dict().items() if value != defaults[name]} == changed
    assert (args.preset, args.preset_reason) == (str(preset), "--config")
    assert args.output_dir == "runs/preset"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("eval_strategy: no", "eval_strategy", "no"),  # YAML itself reads a bare no as false
        ("save_strategy: no", "save_strategy", "no"),
        ("learning_rate: 1e-5", "learning_rate", 1e-5),  # YAML itself reads text
        ("learning_rate: 1", "learning_rate", 1.0),
        ("shuffle: yes", "shuffle", True),
        ("shuffle: 'false'", "shuffle", False),
        ("run_name: 2026-01-31", "run_name", "2026-01-31"),
        ("run_name: 007", "run_name", "007"),
        ("run_name: no", "run_name", "no"),
        ("run_name: common", "run_name", "common"),  # also the name of a folder in the repository
        ("prefix: ''", "prefix", ""),
        ("prefix: '--strange: '", "prefix", "--strange: "),
        ("prefix: " + "long " * 200 + "end", "prefix", "long " * 200 + "end"),
        ('prefix: "two\\nlines"', "prefix", "two\nlines"),
        ("text_column:", "text_column", None),
        ("max_grad_norm: 0", "max_grad_norm", 0.0),
        ("param_dtype: bf16", "param_dtype", "bfloat16"),
        ("reduce_dtype: fp32", "reduce_dtype", "float32"),
        ("warmup_steps: 0.1", "warmup_steps", 0.1),
    ],
)
def test_values_of_a_preset(preset: Path, line: str, name: str, value: object) -> None:
    assert getattr(parse(preset, line + "\n"), name) == value


def test_empty_preset(preset: Path) -> None:
    assert parse(preset, "# nothing\n").learning_rate == TrainArguments().learning_rate


def test_a_switch_of_the_preset_can_be_switched_off(preset: Path) -> None:
    assert parse(preset, "shuffle: true\n").shuffle
    assert not parse(preset, "shuffle: true\n", "--shuffle", "false").shuffle
    assert parse(preset, "", "--shuffle").shuffle


def test_flags_with_hyphens(preset: Path) -> None:
    assert parse(preset, "", "--learning-rate", "2e-3").learning_rate == 2e-3


# What the message must name besides the file: the key, what was found, what was expected.
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learnin_rate: 1\n", ["'learnin_rate'", "did you mean 'learning_rate'?"]),
        ("zzz: 1\n", ["unknown key 'zzz'"]),
        ("config: other.yaml\n", ["unknown key 'config'"]),
        ("help: 1\n", ["unknown key 'help'"]),
        ("seed: many\n", ["'seed'", "int", "'many'"]),
        ("seed: 1.5\n", ["'seed'", "int", "'1.5'"]),
        ("seed: true\n", ["'seed'", "int", "'true'"]),
        ("learning_rate: fast\n", ["'learning_rate'", "float", "'fast'"]),
        ("shuffle: perhaps\n", ["'shuffle'", "perhaps", "true/false"]),
        ("optim: sgd\n", ["'optim'", "'sgd'", "adamw", "adafactor", "adadelta"]),
        ("learning_rate:\n", ["'learning_rate'", "no value"]),
        ("optim: null\n", ["'optim'", "no value"]),
        ("report_to: [wandb, tensorboard]\n", ["'report_to'", "single value", "sequence"]),
        ("seed: {a: 1}\n", ["'seed'", "single value", "mapping"]),
        ("seed: 1\nseed: 2\n", ["'seed'", "twice", "line 2"]),
        ("- seed\n", ["key: value", "seq"]),
        ("seed 1\n", ["key: value", "str"]),
        ("seed: [1\n", ["not a readable YAML file"]),
        ("seed: 1\n\ttab: 1\n", ["not a readable YAML file"]),
    ],
)
def test_mistakes_in_a_preset(preset: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(preset, text)
    message = str(caught.value)
    assert message.startswith(f"{preset}: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_preset_that_is_no_text(preset: Path) -> None:
    preset.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="line 1: not UTF-8 text"):
        parse_args(Arguments, ["--config", str(preset)])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learnin_rate", "1"], ["--learnin_rate", "did you mean --learning_rate?"]),
        (["--learnin_rate=1"], ["--learnin_rate", "did you mean --learning_rate?"]),
        (["--zzz"], ["unknown flag --zzz."]),
        (["--lr", "1"], ["unknown flag --lr."]),  # neither an abbreviation nor near anything
        (["--learning", "1"], ["unknown flag --learning"]),  # no abbreviations
        (["stray"], ["unknown flag stray"]),
        (["--seed", "x"], ["--seed", "int", "'x'"]),
        (["--seed"], ["--seed", "expected one argument"]),
        (["--shuffle", "perhaps"], ["--shuffle", "perhaps"]),
        (["--optim", "sgd"], ["--optim", "'sgd'", "adamw"]),
    ],
)
def test_mistakes_in_flags(preset: Path, flags: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(preset, "", *flags)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(["total_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"], ["0"]),
        *itertools.product(["per_device_eval_batch_size", "logging_steps", "eval_steps", "save_steps"], ["0", "-3"]),
        *itertools.product(["max_train_samples", "max_eval_samples", "max_eval_batches"], ["0"]),
        *itertools.product(["num_train_epochs", "learning_rate"], ["0", "-1", "nan", "inf"]),
        *itertools.product(["weight_decay", "warmup_steps", "max_grad_norm", "min_learning_rate"], ["-0.5", "nan"]),
        *itertools.product(["adam_beta1", "adam_beta2"], ["-0.1", "1", "nan"]),
        *itertools.product(["seed"], ["-1", str(2**32)]),
        ("save_total_limit", "0"),
        ("lr_gamma", "-1"),
        ("ddp_timeout", "0"),
        ("max_steps", "-2"),
    ],
)
def test_values_out_of_range(preset: Path, name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"--{name} is"):
        parse(preset, "", f"--{name}={value}")
    with pytest.raises(UserError, match=name):
        parse(preset, f"{name}: {value}\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--eval_strategy", "steps"], ["--eval_steps"]),
        (["--save_strategy", "steps"], ["--save_steps"]),
        (["--min_learning_rate", "1"], ["--min_learning_rate 1.0", "--learning_rate 5e-05"]),
        (["--model_name_or_path", "a", "--model_config_path", "b"], ["--model_name_or_path", "--model_config_path"]),
    ],
)
def test_flags_that_contradict_each_other(preset: Path, flags: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(preset, "", *flags)
    assert all(word in str(caught.value) for word in words), caught.value


# A flag, what else stands there, the setting that leaves it without effect, and one that does not.
IDLE = [
    ("--eval_steps=5", "eval_strategy: no", "--eval_strategy no of the preset", "--eval_strategy=steps"),
    ("--eval_steps=5", "", "--eval_strategy epoch:", "--eval_strategy=steps"),
    ("--evals_per_epoch=2", "", "--eval_strategy steps", "--eval_strategy=epoch"),
    ("--max_eval_batches=2", "eval_strategy: no", "--eval_strategy no", "--eval_on_start"),
    ("--per_device_eval_batch_size=2", "eval_strategy: no", "--eval_strategy no", "--eval_strategy=epoch"),
    ("--metric_for_best_model=x", "eval_strategy: no", "--eval_strategy no", "--max_steps=0"),
    ("--save_steps=5", "", "--save_strategy epoch", "--save_strategy=steps"),
    ("--async_save", "save_strategy: no", "--save_strategy no", "--save_strategy=epoch"),
    ("--save_only_model", "save_strategy: no", "--save_strategy no", "--save_strategy=epoch"),
    ("--allow_changed=seed", "", "without --resume_from_checkpoint", "--resume_from_checkpoint=latest"),
    ("--num_train_epochs=3", "max_steps: 60", "--max_steps 60 of the preset", "--max_steps=-1"),
    ("--lr_gamma=0.7", "", "--lr_scheduler_type linear", "--lr_scheduler_type=step"),
    ("--min_learning_rate=1e-6", "lr_scheduler_type: constant", "--lr_scheduler_type constant",
     "--lr_scheduler_type=linear"),
    ("--adam_beta1=0.8", "optim: adafactor", "--optim adafactor", "--optim=adamw"),
    ("--adam_beta2=0.8", "optim: adadelta", "--optim adadelta", "--optim=adamw"),
    ("--adam_epsilon=1e-6", "optim: adafactor", "--optim adafactor", "--optim=adamw"),
    ("--wandb_project=x", "", "--report_to none", "--report_to=wandb"),
    ("--wandb_entity=x", "", "--report_to none", "--report_to=wandb"),
    ("--run_name=x", "", "--report_to none", "--report_to=wandb"),
    ("--spike_action=stop", "", "without --spike_factor", "--spike_factor=3"),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "text", "reason", "remedy"), IDLE)
def test_a_flag_that_cannot_act_is_refused(preset: Path, flag: str, text: str, reason: str, remedy: str) -> None:
    name, _, value = flag.removeprefix("--").partition("=")
    others = ["--eval_strategy=steps", "--eval_steps=9"] if reason == "--eval_strategy steps" else []
    with pytest.raises(UserError) as caught:
        parse(preset, text + "\n", flag, *others)
    message = str(caught.value)
    assert (
        message.startswith(f"--{name} ")
        and f" does nothing {'' if 'without' in reason else 'with '}{reason}" in message
    )
    assert parse(preset, text + "\n", flag, remedy).to_dict()[name] is not None
    # A preset may hold what waits for another choice.
    assert parse(preset, f"{text}\n{name}: {value or 'true'}\n", *others).to_dict()[name] is not None


def test_a_flag_may_bring_back_the_default(preset: Path) -> None:
    text = "optim: adafactor\nadam_beta1: 0.8\nsave_strategy: no\nasync_save: true\n"
    args = parse(preset, text, "--adam_beta1=0.9", "--async_save=false")
    assert (args.adam_beta1, args.async_save) == (0.9, False)


def test_seeds_at_the_limits_are_usable(preset: Path) -> None:
    import torch
    from transformers import set_seed

    from common.loop import seed_step

    for seed in (0, 2**32 - 1):
        assert parse(preset, "", f"--seed={seed}").seed == seed
        set_seed(seed)
        seed_step(seed, 10**7, 10**4)
        assert 0 <= torch.initial_seed() < 2**64


def test_model_flags_replace_the_presets_model(preset: Path) -> None:
    """A model from elsewhere brings its own tokenizer: the preset's would give it wrong ids without an error."""
    text = "model_config_path: a\ntokenizer_name_or_path: t\n"
    args = parse(preset, text, "--model_name_or_path", "b")
    assert (args.model_config_path, args.model_name_or_path, args.tokenizer_name_or_path) == (None, "b", None)
    args = parse(preset, text, "--model_name_or_path", "b", "--tokenizer_name_or_path", "u")
    assert args.tokenizer_name_or_path == "u"
    args = parse(preset, "model_name_or_path: a\ntokenizer_name_or_path: t\n", "--model_config_path", "b")
    assert (args.model_config_path, args.model_name_or_path, args.tokenizer_name_or_path) == ("b", None, "t")


def test_paths_of_a_preset_lie_in_the_working_directory_or_in_the_repository(
    preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "tokenizer_name_or_path: recipes/samples\n"
    assert parse(preset, text).tokenizer_name_or_path == str(REPOSITORY / "recipes" / "samples")
    (tmp_path / "recipes" / "samples").mkdir(parents=True)
    assert parse(preset, text).tokenizer_name_or_path == "recipes/samples"
    assert parse(preset, "output_dir: common\n").output_dir == "common"
    assert parse(preset, "model_name_or_path: google-t5/t5-3b\n").model_name_or_path == "google-t5/t5-3b"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_preset_without_config(has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Arguments.presets:
        (tmp_path / f"{name}.yaml").write_text(f"run_name: {name}\n")
    monkeypatch.setattr(arguments, "CONFIG_FOLDER", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    args = parse_args(Arguments, [])
    assert args.run_name == ("large" if has_gpu else "small")
    assert "no --config given" in args.preset_reason and ("has GPUs" if has_gpu else "no GPU") in args.preset_reason
    assert args.output_dir == f"runs/{args.run_name}"


def test_presets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yaml").write_text("run_name: tiny\n")
    monkeypatch.setattr(arguments, "CONFIG_FOLDER", tmp_path)
    for name in ("tiny", "tiny.yaml"):
        assert parse_args(Arguments, ["--config", name]).run_name == "tiny"
    with pytest.raises(UserError, match="--config tinny: no such file, and no preset of that name; presets: tiny"):
        parse_args(Arguments, ["--config", "tinny"])
    with pytest.raises(UserError, match="no such file"):
        parse_args(Arguments, ["--config", str(tmp_path)])


def test_a_runs_config_is_a_preset(preset: Path, tmp_path: Path) -> None:
    args = parse(preset, "eval_strategy: no\nrun_name: 'null'\nwarmup_steps: 1e-2\n", "--shuffle")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(args.to_dict(), sort_keys=False))
    assert parse_args(Arguments, ["--config", str(tmp_path / "config.yaml")]).to_dict() == args.to_dict()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_parses_with_its_recipe(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = max((r for r in RECIPES if path.stem.startswith(r.stem)), key=lambda r: len(r.stem))
    args = parse_args(recipe_arguments(recipe), ["--config", path.stem])
    assert args.model_name_or_path or args.model_config_path
    plan_batch(args, 1)
    if path.stem.endswith("_demo"):
        plan_batch(args, 2)
        assert args.model_config_path and Path(args.model_config_path).exists()
        assert args.tokenizer_name_or_path is None or Path(args.tokenizer_name_or_path).is_dir()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_presets_that_a_recipe_picks_exist(path: Path) -> None:
    cpu, gpu = recipe_arguments(path).presets
    assert cpu.endswith("_demo")
    assert all((CONFIGS / f"{name}.yaml").is_file() for name in (cpu, gpu))


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_help_is_grouped_and_shown_once(
    rank: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as stop:
        parse_args(Arguments, ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    if rank == "1":
        assert text == ""
        return
    flags = re.findall(r"^  (?:-h, )?(--[\w-]+)", text, flags=re.MULTILINE)
    names = [f"--{field.name}" for field in dataclasses.fields(Arguments)]
    assert sorted(flags) == sorted([*names, "--help", "--config"]), "each flag once"
    groups = re.findall(r"^(\w.*):$", text, flags=re.MULTILINE)
    assert groups[:3] == ["options", "recipe", "run"] and len(groups) == 9
    recipe = text.partition("\nrecipe:\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^  (--\w+)", recipe, flags=re.MULTILINE)) == {"--prefix", "--text_column", "--shuffle"}
    assert "(default: None)" not in text and "(default: 5e-05)" in text


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_flag_of_a_recipe_has_help_text(path: Path) -> None:
    parser: argparse.ArgumentParser = arguments._build_parser(recipe_arguments(path))
    assert all(action.help and action.help.endswith((".", ")")) for action in parser._actions if action.dest != "help")
    parser.format_help()  # a lone % in a text would fail


def batch_arguments(total: int | None, per_device: int | None, accumulation: int | None) -> BatchArguments:
    return BatchArguments(
        total_batch_size=total, per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation
    )


@pytest.mark.parametrize(
    ("total", "per_device", "accumulation", "num_processes", "expected"),
    [
        (64, 4, None, 2, BatchPlan(64, 4, 8, 2)),
        (64, None, None, 4, BatchPlan(64, 16, 1, 4)),
        (64, None, 2, 4, BatchPlan(64, 8, 2, 4)),
        (64, 4, 8, 2, BatchPlan(64, 4, 8, 2)),
        (None, 4, 3, 2, BatchPlan(24, 4, 3, 2)),
        (None, 4, None, 2, BatchPlan(8, 4, 1, 2)),
        (None, None, 3, 2, BatchPlan(48, 8, 3, 2)),
        (None, None, None, 2, BatchPlan(16, 8, 1, 2)),
        (256, 1, 64, 4, BatchPlan(256, 1, 64, 4)),
    ],
)
def test_batch_plans(
    total: int | None, per_device: int | None, accumulation: int | None, num_processes: int, expected: BatchPlan
) -> None:
    plan = plan_batch(batch_arguments(total, per_device, accumulation), num_processes)
    assert plan == expected
    assert plan.total == plan.per_device * plan.num_micro_batches * plan.num_processes
    assert str(plan.total) in str(plan) and f"{plan.num_processes} processes" in str(plan)


def test_batch_settings_that_disagree() -> None:
    with pytest.raises(UserError, match=r"--total_batch_size 60 disagrees with 2 .* 4 x .* 8 = 64"):
        plan_batch(batch_arguments(60, 4, 8), 2)


def test_every_suggested_batch_size_works_and_is_the_nearest() -> None:
    num_errors = 0
    grid = itertools.product(range(1, 41), [None, 1, 2, 3, 4, 6, 8], [None, 1, 2, 3], [1, 2, 3, 4, 8])
    for total, per_device, accumulation, num_processes in grid:
        if per_device and accumulation:
            continue  # no suggestion: one of the three is to be left out

        def works(total: int, per_device: int | None, a: int | None = accumulation, n: int = num_processes) -> bool:
            try:
                plan = plan_batch(batch_arguments(total, per_device, a), n)
            except UserError:
                return False
            assert plan.total == total == plan.per_device * plan.num_micro_batches * n
            assert per_device in (None, plan.per_device) and a in (None, plan.num_micro_batches)
            return True

        case = (total, per_device, accumulation, num_processes)
        unit = num_processes * (per_device or accumulation or 1)
        assert works(total, per_device) == (total % unit == 0), case
        if works(total, per_device):
            continue
        num_errors += 1
        with pytest.raises(UserError) as caught:
            plan_batch(batch_arguments(total, per_device, accumulation), num_processes)
        match = re.search(r"--total_batch_size ((?:\d+ or )?\d+)(?:, or --per_device_train_batch_size (\d+))?\.$",
                          str(caught.value))  # fmt: skip
        assert match, caught.value
        totals = [int(number) for number in match[1].split(" or ")]
        nearest = [t for t in (*range(total - 1, 0, -1),) if works(t, per_device)][:1]
        nearest += [next(t for t in itertools.count(total + 1) if works(t, per_device))]
        assert totals == nearest, case
        if match[2]:
            assert works(total, int(match[2])), case
            others = [d for d in range(1, total + 1) if works(total, d)]
            assert per_device is not None
            assert abs(int(match[2]) - per_device) == min(abs(d - per_device) for d in others), case
        elif per_device:
            assert total % num_processes, case
    assert num_errors > 500


@pytest.mark.parametrize(
    ("max_steps", "epochs", "num_examples", "total", "expected"),
    [
        (-1, 1.0, 100, 10, 10),
        (-1, 1.0, 101, 10, 11),
        (-1, 2.0, 99, 10, 20),
        (-1, 0.5, 100, 10, 5),
        (-1, 1.1, 10, 1, 11),  # 1.1 * 10 is 11.000000000000002
        (-1, 0.07, 100, 1, 7),  # 7.000000000000001
        (-1, 0.01, 3, 8, 1),
        (7, 3.0, 100, 10, 7),
        (0, 3.0, 100, 10, 0),
    ],
)
def test_number_of_steps(max_steps: int, epochs: float, num_examples: int, total: int, expected: int) -> None:
    args = RunArguments(max_steps=max_steps, num_train_epochs=epochs)
    assert num_training_steps(args, num_examples, total) == expected


def test_a_model_of_a_flag_takes_no_overrides_of_the_preset(preset: Path) -> None:
    text = "model_config_path: a\nconfig_overrides: n_layer=2\ntokenizer_name_or_path: t\n"
    args = parse(preset, text, "--model_name_or_path=b")
    assert (args.model_config_path, args.config_overrides, args.tokenizer_name_or_path) == (None, None, None)
    assert parse(preset, text, "--model_name_or_path=b", "--config_overrides=x=1").config_overrides == "x=1"
    assert parse(preset, text).config_overrides == "n_layer=2"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model_name_or_path="], "--model_name_or_path is empty"),
        (["--tokenizer_name_or_path="], "--tokenizer_name_or_path is empty"),
        (["--output_dir="], "--output_dir is empty"),
        (["--resume_from_checkpoint="], "--resume_from_checkpoint is empty"),
        (["--accelerate_config="], "--accelerate_config is empty"),
        (["--resume_from_checkpoint=latest", "--overwrite_output_dir"], "drop one of them"),
    ],
)
def test_flags_that_contradict_or_are_empty(flags: list[str], said: str, preset: Path) -> None:
    with pytest.raises(UserError, match=said):
        parse(preset, "", *flags)


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, True), ({"RANK": ""}, True), ({"RANK": "1"}, False), ({"PMI_RANK": "2"}, False)]
)
def test_the_first_process(environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert arguments.is_first_process() is expected


def test_the_home_folder_in_the_output_folder(preset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse(preset, "", "--output_dir=~/run").output_dir == "/home/me/run"
    args = parse(preset, "model_name_or_path: ~/model\n", "--resume_from_checkpoint=~/run")
    assert (args.model_name_or_path, args.resume_from_checkpoint) == ("/home/me/model", "/home/me/run")


def test_tracker_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracker_names("none") == []
    assert tracker_names("wandb, tensorboard,wandb") == ["wandb", "tensorboard"]
    with pytest.raises(UserError, match="unknown tracker 'wanbd'; choose none, wandb, tensorboard"):
        tracker_names("wanbd")
    with pytest.raises(UserError, match="unknown tracker ''"):
        tracker_names("")
    monkeypatch.setitem(arguments.TRACKERS, "tensorboard", ["no_such_package"])
    with pytest.raises(UserError, match="tensorboard: the package is not installed; pip install tensorboard"):
        tracker_names("tensorboard")


def test_a_mistake_in_the_trackers_is_seen_with_the_flags(preset: Path) -> None:
    with pytest.raises(UserError, match="unknown tracker 'wanbd'"):
        parse(preset, "", "--report_to=wanbd")
    with pytest.raises(UserError, match="add --report_to wandb"):
        parse(preset, "", "--wandb_log_model")


@pytest.mark.parametrize(
    ("flags", "expected"), [([], False), (["--debug"], True), (["--debug=true"], True), (["--debug", "false"], False)]
)
def test_debug_is_known_to_run(flags: list[str], expected: bool, preset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "show_tracebacks", not expected)
    parse(preset, "", *flags)
    assert arguments.show_tracebacks is expected
