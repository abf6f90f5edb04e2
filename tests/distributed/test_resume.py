"""A run that goes on from a checkpoint: bit for bit in the same layout, within rounding in any other."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from common.checkpoint import read_checkpoint, step_folders
from tests.conftest import REPOSITORY
from tests.forked import CONFIGS, ForkedParent, patched
from tests.tiny import (
    LAUNCHER_FLAGS,
    RECIPE,
    checkpoint_names,
    flags,
    lines,
    saving,
    series,
    train,
    with_loss_scale,
)

Layout = tuple[str, int]
"""A YAML of accelerate_configs/, after a space another state-dict type than its own, and the number of processes."""

KINDS = ["ddp", "fsdp1_full_shard", "fsdp_full_shard", "fsdp_shard_grad_op"]
LAYOUTS: list[Layout] = [*itertools.product(KINDS, [1, 2, 4]), ("fsdp_hybrid_shard", 4)]
SEGMENT = 6  # steps between two changes of the layout: an epoch ends in each


def yaml_of(config: str, folder: Path) -> str | Path:
    """What to launch with: the YAML's name, or the path of a changed copy in the folder."""
    name, _, change = config.partition(" ")
    if not change:
        return name
    settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    recomputing = {"fsdp_activation_checkpointing": True}
    changed = recomputing if change == "recomputing" else {"fsdp_state_dict_type": change}
    assert not changed.items() <= settings["fsdp_config"].items()
    settings["fsdp_config"] |= changed
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


# Bit for bit


@pytest.mark.parametrize(
    ("config", "num_processes", "more"),
    [
        ("single_device", 1, ["--async_save"]),
        ("ddp", 2, ["--dataloader_num_workers=1"]),
        ("fsdp_full_shard", 2, []),
        ("fsdp_full_shard", 2, ["--async_save"]),
        ("fsdp1_full_shard recomputing", 2, []),
        ("fsdp1_full_shard SHARDED_STATE_DICT", 2, ["--async_save"]),
        pytest.param("fsdp_full_shard FULL_STATE_DICT", 2, [], marks=pytest.mark.full),
        pytest.param("fsdp1_full_shard SHARDED_STATE_DICT", 2, [], marks=pytest.mark.full),
        pytest.param("fsdp_hybrid_shard", 4, ["--async_save"], marks=pytest.mark.full),
        pytest.param("fsdp_full_shard_offload", 2, ["--async_save"], marks=pytest.mark.full),
        pytest.param("fsdp1_no_shard", 2, [], marks=pytest.mark.full),
        pytest.param("fsdp1_hybrid_shard", 4, [], marks=pytest.mark.full),
        pytest.param("fsdp1_hybrid_shard SHARDED_STATE_DICT", 4, ["--async_save"], marks=pytest.mark.full),
        pytest.param("fsdp1_hybrid_shard_zero2", 4, [], marks=pytest.mark.full),
        pytest.param("fsdp_shard_grad_op", 4, [], marks=pytest.mark.full),
    ],
)
def test_same_layout_is_bit_exact(
    config: str, num_processes: int, more: list[str], forked: ForkedParent, tmp_path: Path
) -> None:
    """Dropout included, from a step within a logging window and within an epoch."""
    yaml_file = yaml_of(config, tmp_path)

    def run(*flags: str) -> list[str]:
        result = train(
            forked, output, *saving(3), "--logging_steps=2", "--max_steps=7", *more, *flags,
            config=yaml_file, num_processes=num_processes,
        )  # fmt: skip
        return re.findall(r"^epoch \S+: train loss \S+ \(of \d logged steps\), ", result.output, re.MULTILINE)

    output = tmp_path / "run"
    epochs = run()
    assert [line.partition(":")[0] for line in epochs] == ["epoch 1.09", "epoch 1.27"]
    assert checkpoint_names(output) == ["step_00000003", "step_00000006", "step_00000007"]
    expected = series(output)
    assert list(expected) == [2, 4, 6, 7]
    weights = load_file(output / "model" / "model.safetensors")
    assert run(f"--resume_from_checkpoint={output}/checkpoints/step_00000003") == epochs
    assert series(output) == expected
    # Names go on from the step; what the first course had under them is set aside.
    assert {"step_00000003", "step_00000006", "step_00000007"} < set(checkpoint_names(output))
    resumed = load_file(output / "model" / "model.safetensors")
    assert all(torch.equal(resumed[key], weights[key]) for key in weights)


# Prints a number of the generator's state at the start of each step, and the time limit of collectives.
WATCHED = """
import os
import torch, torch.distributed as dist, xxhash
from common import loop

def seed_step(seed, step, process_index):
    original(seed, step, process_index)
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    state = xxhash.xxh3_64_hexdigest(bytes(torch.get_rng_state().tolist()))
    print(f"rank {os.environ['RANK']} step {step} state {state} limit {limit:.0f}", flush=True)

original, loop.seed_step = loop.seed_step, seed_step
"""


def test_random_numbers_are_of_the_step_and_the_process(forked: ForkedParent, tmp_path: Path) -> None:
    """Ranks must not share their dropout, nor a resumed run repeat that of its first steps."""
    script = patched(RECIPE, tmp_path, WATCHED)

    def states(*more: str) -> dict[tuple[str, str], str]:
        result = forked.run(
            script, *flags(tmp_path / "run", *saving(2), "--max_steps=4", *more),
            "--ddp_timeout=77", config="ddp", num_processes=2, launcher_flags=LAUNCHER_FLAGS,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        found = re.findall(r"rank (\d) step (\d) state (\w+) limit 77\n", result.output)
        return {(rank, step): state for rank, step, state in found}

    whole = states()
    assert len(whole) == 2 * 4 and len(set(whole.values())) == 2 * 4
    resumed = states(f"--resume_from_checkpoint={tmp_path}/run/checkpoints/step_00000002")
    assert resumed == {key: state for key, state in whole.items() if key[1] in "23"}


def test_the_loss_scale_of_fp16_goes_on(forked: ForkedParent, tmp_path: Path) -> None:
    script = with_loss_scale(tmp_path, "LossScale(4.0, growth_interval=2)")  # grows every second step
    for more in ([], [f"--resume_from_checkpoint={tmp_path}/run/checkpoints/step_00000003"]):
        options = flags(tmp_path / "run", *saving(3), "--max_steps=6", *more)
        result = forked.run(script, *options, config="single_device", launcher_flags=LAUNCHER_FLAGS)
        assert result.exit_code == 0, result.output
        assert [line["loss_scale"] for line in lines(tmp_path / "run")] == [4.0, 8.0, 8.0, 16.0, 16.0, 32.0]


# Any other layout


def continue_run(
    forked: ForkedParent, layout: Layout, output: Path, step: int, source: Path | None, *more: str
) -> None:
    """Train to `step` in float64, from the latest checkpoint of `source` where there is one."""
    config, num_processes = layout
    if source is not None:
        shutil.copytree(source / "checkpoints", output / "checkpoints")
        shutil.copy(source / "metrics.jsonl", output)
    # The step schedule depends on the epoch alone, so that a run can be given more steps with the same rates.
    train(
        forked, output, *saving(1000), f"--max_steps={step}", "--param_dtype=float64", "--lr_scheduler_type=step",
        "--warmup_steps=0", f"--per_device_train_batch_size={4 // num_processes}",
        *(["--resume_from_checkpoint=latest"] if source else []), *more,
        config=yaml_of(config, output.parent), num_processes=num_processes, dropout=False,
    )  # fmt: skip


def assert_agrees(output: Path, reference: dict[int, tuple[float, ...]], step: int, what: str) -> None:
    found = series(output)
    assert list(found) == list(range(1, step + 1)), what
    expected = torch.tensor([reference[step] for step in found], dtype=torch.float64)
    actual = torch.tensor(list(found.values()), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0, msg=lambda text: f"{what}: {text}")


# Each layout is left and entered once, each kind and each number of processes by another one.
CHAIN: list[Layout] = [
    ("ddp", 1), ("fsdp_full_shard", 2), ("fsdp1_full_shard", 4), ("ddp", 2), ("fsdp_hybrid_shard", 4),
    ("fsdp_shard_grad_op", 2), ("fsdp1_full_shard", 1), ("fsdp_full_shard", 4), ("ddp", 4), ("fsdp1_full_shard", 2),
    ("fsdp_shard_grad_op", 1), ("fsdp_full_shard", 1), ("fsdp_shard_grad_op", 4), ("ddp", 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def reference(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, ...]]:
    """An uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("reference")
    continue_run(forked, ("single_device", 1), folder / "run", SEGMENT * len(CHAIN), None)
    return series(folder / "run")


def test_the_chain_covers_every_layout() -> None:
    assert set(CHAIN[1:]) == set(LAYOUTS) == set(CHAIN[:-1])


def test_every_layout_resumes_into_another(
    reference: dict[int, tuple[float, ...]], forked: ForkedParent, tmp_path: Path
) -> None:
    """One run that changes its layout every six steps, through full and sharded checkpoints."""
    follow(CHAIN, reference, forked, tmp_path)


def follow(
    chain: list[Layout], reference: dict[int, tuple[float, ...]], forked: ForkedParent, folder: Path, *more: str
) -> None:
    source = None
    for number, layout in enumerate(chain, start=1):
        output = folder / f"{number}"
        output.mkdir()
        continue_run(forked, layout, output, SEGMENT * number, source, *more)
        assert_agrees(output, reference, SEGMENT * number, f"link {number}, {layout}")
        if source is not None:
            shutil.rmtree(source)
        source = output


# FSDP1 writes one file and FSDP2 sharded ones by their YAMLs above; here the other way round, and with offload.
OTHER_FORMS: list[Layout] = [
    ("fsdp1_full_shard SHARDED_STATE_DICT", 2), ("fsdp_full_shard FULL_STATE_DICT", 4), ("fsdp_full_shard_offload", 2),
    ("fsdp1_full_shard SHARDED_STATE_DICT", 4), ("fsdp1_hybrid_shard", 4), ("fsdp_full_shard_offload", 1),
    ("fsdp1_hybrid_shard SHARDED_STATE_DICT", 4), ("fsdp1_no_shard", 2), ("fsdp_hybrid_shard FULL_STATE_DICT", 4),
    ("fsdp1_full_shard SHARDED_STATE_DICT", 1), ("ddp", 2),
]  # fmt: skip


@pytest.mark.full
def test_the_other_state_dict_types_and_offload_resume_too(
    reference: dict[int, tuple[float, ...]], forked: ForkedParent, tmp_path: Path
) -> None:
    follow(OTHER_FORMS, reference, forked, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("optim", ["adafactor", "adadelta"])
def test_state_of_the_other_optimizers_moves_to_another_layout(
    optim: str, forked: ForkedParent, tmp_path: Path
) -> None:
    """Adafactor keeps sums over rows and columns, which have other shapes than the parameters."""
    chain: list[Layout] = [("fsdp_full_shard", 2), ("fsdp_full_shard", 4), ("ddp", 1), ("fsdp_shard_grad_op", 2)]
    (tmp_path / "whole").mkdir()
    continue_run(
        forked, ("single_device", 1), tmp_path / "whole", SEGMENT * len(chain), None, f"--optim={optim}"
    )  # fmt: skip
    follow(chain, series(tmp_path / "whole"), forked, tmp_path, f"--optim={optim}")


@pytest.fixture(scope="module")
def sources(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    """A run of so many steps in each layout."""
    folder = tmp_path_factory.mktemp("sources")
    for layout in LAYOUTS:
        continue_run(forked, layout, folder / f"{layout[0]}_{layout[1]}", SEGMENT, None)
    return {layout: folder / f"{layout[0]}_{layout[1]}" for layout in LAYOUTS}


@pytest.mark.full
@pytest.mark.parametrize(
    ("one", "other"),
    list(itertools.combinations_with_replacement(LAYOUTS, 2)),
    ids=lambda layout: f"{layout[0]}-{layout[1]}",
)
def test_every_pair_there_and_back(
    one: Layout,
    other: Layout,
    reference: dict[int, tuple[float, ...]],
    sources: dict[Layout, Path],
    forked: ForkedParent,
    tmp_path: Path,
) -> None:
    source = sources[one]
    for number, layout in enumerate((other, one), start=2):
        output = tmp_path / f"{number}"
        output.mkdir()
        continue_run(forked, layout, output, SEGMENT * number, source)
        assert_agrees(output, reference, SEGMENT * number, f"{one} -> {other}, run {number}")
        source = output


# What a run remembers and refuses


def test_the_best_checkpoint_survives_and_its_metric_is_remembered(forked: ForkedParent, tmp_path: Path) -> None:
    """The learning rate explodes after step 2, so that evaluation gets worse from there."""
    output = tmp_path / "run"
    options = [*saving(1), "--save_total_limit=1", "--eval_strategy=steps", "--eval_steps=1", "--max_grad_norm=0"]
    result = train(forked, output, *options, "--max_steps=2", config="single_device")
    assert re.search(r"^epoch 0.36: train loss .*, validation loss \S+ \(new record\), ", result.output, re.MULTILINE)
    more = [*options, "--resume_from_checkpoint=latest", "--learning_rate=10", "--allow_changed=learning_rate"]
    result = train(forked, output, *more, "--max_steps=4", config="single_device")
    assert re.search(r"^epoch 0.73: train loss .*, validation loss [^ (]+, ", result.output, re.MULTILINE)
    losses = {line["step"]: line["eval_loss"] for line in lines(output) if "eval_loss" in line}
    assert list(losses) == [1, 2, 3, 4]
    assert losses[2] == min(losses.values()), "the premise of this test"
    assert checkpoint_names(output) == ["step_00000002", "step_00000004"]
    assert re.search(rf"best model .*\(eval_loss {losses[2]:.4f} at step 2\)", result.output)
    assert "changed since the checkpoint, as allowed: learning_rate: 0.01 -> 10.0" in result.output
    # A checkpoint can be evaluated without training, too.
    best = f"--resume_from_checkpoint={output}/checkpoints/step_00000002"
    train(forked, tmp_path / "evaluation", best, "--max_steps=0", config="single_device")
    assert [(line["step"], line["eval_loss"]) for line in lines(tmp_path / "evaluation")] == [(2, losses[2])]
    # What stands in a folder is of one run.
    other = f"--resume_from_checkpoint={output}/checkpoints/step_00000004"
    train(forked, tmp_path / "evaluation", other, "--max_steps=0", config="single_device")
    assert [line["step"] for line in lines(tmp_path / "evaluation")] == [2]


def test_the_best_model_of_another_metric_or_folder(forked: ForkedParent, tmp_path: Path) -> None:
    options = [*saving(1), "--eval_strategy=steps", "--eval_steps=1"]
    train(forked, tmp_path / "run", *options, "--max_steps=1", config="single_device")
    accuracy = "--metric_for_best_model=eval_token_accuracy"
    checkpoint = f"--resume_from_checkpoint={tmp_path}/run/checkpoints/step_00000001"
    for folder, more, why in (
        ("other", [], f"is not in {tmp_path}/other"),
        ("run", [accuracy], "was chosen by eval_loss"),
    ):
        result = train(forked, tmp_path / folder, *options, checkpoint, *more, "--max_steps=2", config="single_device")
        assert f"the best model so far, of step 1, {why}: choosing begins anew" in result.output
        assert re.search(r"step 2: eval_loss .* \| new best", result.output), result.output
    assert [(tmp_path / folder / "best.superseded").is_dir() for folder in ("run", "other")] == [1, 0]
    lines_before = lines(tmp_path / "run")
    train(forked, tmp_path / "run", "--resume_from_checkpoint=latest", "--max_steps=0", config="single_device")
    assert lines(tmp_path / "run") == lines_before


def test_no_checkpoint_has_the_optimizer_where_only_the_model_is_saved(forked: ForkedParent, tmp_path: Path) -> None:
    train(forked, tmp_path / "run", *saving(1), "--max_steps=2", "--save_only_model", config="single_device")
    folders = step_folders(tmp_path / "run" / "checkpoints")
    assert [read_checkpoint(folder).manifest["has_optimizer"] for folder in folders] == [False, False]


def test_a_checkpoint_does_not_go_on_in_the_folder_of_another_run(forked: ForkedParent, tmp_path: Path) -> None:
    for folder in ("run", "another"):
        train(forked, tmp_path / folder, *saving(1), "--max_steps=2", config="single_device")
    before = {path: path.read_bytes() for path in (tmp_path / "another").rglob("*") if path.is_file()}
    checkpoint = f"--resume_from_checkpoint={tmp_path}/run/checkpoints/step_00000001"
    for length in ("--max_steps=3", "--num_train_epochs=1"):
        result = train(
            forked, tmp_path / "another", *saving(1), length, checkpoint, config="single_device", exit_code=2
        )
        assert (
            f"another holds another run (config.yaml, metrics.jsonl, checkpoints, model, report.html) than {tmp_path}"
            in result.output
        )
    assert {path: path.read_bytes() for path in (tmp_path / "another").rglob("*") if path.is_file()} == before
    for _ in range(2):  # a command that was interrupted may be given again
        train(forked, tmp_path / "new", *saving(1), "--max_steps=3", checkpoint, config="single_device")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--text_file={}/other.txt", r"error: the data of process 1 is not that of process 0 .* need the same files\."),
        ("--output_dir={}/elsewhere", r"error: --output_dir .*run: process 1 does not see what process 0 has written"),
    ],
)
def test_machines_with_files_of_their_own(flag: str, message: str, forked: ForkedParent, tmp_path: Path) -> None:
    code = f"""
import os, sys
from common import checkpoint
checkpoint.SHARED_SECONDS = 1.0
if os.environ["RANK"] == "1":
    sys.argv.append({flag.format(tmp_path)!r})
"""
    script = patched(REPOSITORY / "recipes" / "gpt_shakespeare.py", tmp_path, code)
    for name, word in (("text", "rice"), ("other", "ricer")):
        (tmp_path / f"{name}.txt").write_text(f"Stir the {word} and the broth. " * 200)
    result = forked.run(
        script, "--config=gpt_shakespeare_demo", f"--text_file={tmp_path}/text.txt", "--max_steps=2", "--prompt=",
        f"--output_dir={tmp_path}/run", *saving(1), config="ddp", num_processes=2, launcher_flags=LAUNCHER_FLAGS,
    )  # fmt: skip
    assert result.exit_code == 2, result.output
    (error,) = [line for line in result.output.splitlines() if line.startswith("error")]
    assert re.match(message, error), error


def test_metrics_of_a_course_that_was_given_up_are_cut(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    train(forked, output, *saving(2), "--max_steps=4", config="single_device")
    with (output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 1.0}) + '\n{"step": 6, "lo')  # a later step, and a line cut by a kill
    first = lines_until(output, 2)
    train(forked, output, *saving(2), "--max_steps=3", f"--resume_from_checkpoint={output}/checkpoints/step_00000002",
          "--lr_scheduler_type=constant", "--allow_changed=lr_scheduler_type", config="single_device")  # fmt: skip
    assert [line["step"] for line in lines(output)] == [1, 2, 3]
    assert lines(output)[:2] == first


def test_metrics_of_a_run_without_a_checkpoint_are_cut(forked: ForkedParent, tmp_path: Path) -> None:
    """Killed after the evaluation before training: all of it comes again."""
    output = tmp_path / "run"
    output.mkdir()
    (output / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 1.0}\n{"step": 1, "loss": 1.0}\n')
    more = ["--resume_from_checkpoint=latest", "--max_steps=1"]
    train(forked, output, *more, config="single_device")
    (line,) = lines(output)
    assert line["step"] == 1 and line["loss"] > 1.0


def test_the_best_model_of_another_course_is_set_aside(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    evaluating = ["--eval_strategy=steps", "--eval_steps=2", "--max_steps=4"]
    train(forked, output, *saving(2), *evaluating)
    held = json.loads((output / "best" / "best_step.json").read_text())["step"]
    assert held == 4, "the loss falls"
    ruin = ["--learning_rate=5", "--allow_changed=learning_rate"]
    checkpoint = f"--resume_from_checkpoint={output}/checkpoints/step_00000002"
    result = train(forked, output, *saving(2), *evaluating, *ruin, checkpoint)
    assert "set aside as" in result.output and (output / "best.superseded" / "model.safetensors").is_file()
    (said,) = re.findall(r"best model \S+ \(eval_loss (\S+) at step (\d+)\)", result.output)
    losses = {line["step"]: line["eval_loss"] for line in lines(output) if "eval_loss" in line}
    held = json.loads((output / "best" / "best_step.json").read_text())["step"]
    assert held == int(said[1]) == 4 and said[0] == f"{losses[held]:.4f}"


def lines_until(output: Path, step: int) -> list[dict[str, float]]:
    complete = [line for line in (output / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return [line for line in map(json.loads, complete) if line["step"] <= step]


def test_a_different_run_is_refused_in_one_line(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    train(forked, output, *saving(1), "--max_steps=1", config="ddp")
    before = (output / "config.yaml").read_text(), (output / "metrics.jsonl").read_text()
    result = train(
        forked, output, *saving(1), "--max_steps=2", "--resume_from_checkpoint=latest", "--learning_rate=1",
        config="ddp", exit_code=2,
    )  # fmt: skip
    errors = [line for line in result.output.splitlines() if "error" in line]
    assert len(errors) == 1 and "learning_rate: 0.01 -> 1.0" in errors[0], result.output
    assert "Traceback" not in result.output
    assert before == ((output / "config.yaml").read_text(), (output / "metrics.jsonl").read_text())


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("t5_summarize", []),
        pytest.param("t5_summarize", ["--metric_for_best_model=eval_rougeLsum"], marks=pytest.mark.full),
        ("gpt_shakespeare", ["--prompt="]),
        ("chess_finetune", ["--legal_move_samples=2"]),
        pytest.param("llama_pretrain", ["--prompt="], marks=pytest.mark.full),
    ],
)
def test_the_best_model_is_judged_by_the_same_examples(
    recipe: str, more: list[str], forked: ForkedParent, tmp_path: Path
) -> None:
    if recipe == "chess_finetune":
        pytest.importorskip("chess")
    by_rouge = any("rouge" in flag for flag in more)
    flags = [
        f"--config={recipe}_demo", "--save_strategy=steps", "--save_steps=1", "--eval_strategy=steps", "--eval_steps=1",
        f"--output_dir={tmp_path}", "--total_batch_size=4", "--per_device_eval_batch_size=2", *more,
    ]  # fmt: skip
    if recipe == "t5_summarize":
        flags += [f"--rouge_samples={2 if by_rouge else 0}", "--max_new_tokens=2"][: 1 + by_rouge]
    first = forked.run(f"recipes/{recipe}.py", *flags, "--max_steps=1", config="single_device", num_processes=1)
    assert first.exit_code == 0, first.output
    resume = [*flags, "--max_steps=2", "--resume_from_checkpoint=latest"]
    other = "--num_beams=1" if by_rouge else "--max_eval_batches=1"
    refused = forked.run(f"recipes/{recipe}.py", *resume, other, config="single_device", num_processes=1)
    assert refused.exit_code == 2, refused.output
    assert re.search(rf"evaluation_data: eval_(rouge)?\* .* \({other.replace('=', ' .* -> ')}\)", refused.output)
    allowed = [*resume, other, "--allow_changed=evaluation_data"]
    done = forked.run(f"recipes/{recipe}.py", *allowed, config="single_device", num_processes=1)
    assert done.exit_code == 0, done.output
    said = r"the best model so far, of step \d, was chosen on other examples: choosing begins anew"
    assert re.search(said, done.output), done.output


def test_tensorboard_in_a_fresh_an_overwritten_and_a_resumed_run(forked: ForkedParent, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    output = tmp_path / "run"
    for more in ([], ["--overwrite_output_dir"], ["--resume_from_checkpoint=latest", "--max_steps=3"]):
        result = train(forked, output, *saving(1), "--max_steps=2", "--report_to=tensorboard", *more)
        assert "warning" not in result.output
        events = EventAccumulator(str(output / "tensorboard"))
        events.Reload()
        losses = [(event.step, event.value) for event in events.Scalars("loss")]
        assert losses == [(step, pytest.approx(values[0])) for step, values in series(output).items()]
    assert len(losses) == 3


@pytest.mark.full
def test_wandb_goes_on_with_the_same_run(forked: ForkedParent, tmp_path: Path) -> None:
    output = tmp_path / "run"
    for more in ([], ["--resume_from_checkpoint=latest"]):
        train(
            forked, output, *saving(1), f"--max_steps={1 + len(more)}", "--report_to=wandb", *more,
            "--lr_scheduler_type=constant", config="single_device",
        )  # fmt: skip
    folders = sorted(path.name for path in (output / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert len({name.rpartition("-")[2] for name in folders}) == 1, folders
