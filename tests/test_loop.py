"""The loop's parts that need no launch: cadence, the logging window, steps that are left out."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from common import loop
from common.arguments import TrainArguments
from common.loop import HostValue, StepResult, _EpochLine, _Window, count_saves, is_due, is_save_due, train_step
from common.optim import LossScale
from tests import tiny
from tests.forked import ForkedParent, patched


class Arguments(TrainArguments):
    presets: ClassVar[tuple[str, str]] = ("", "")


def due(function: Any, num_steps: int, *more: Any, **settings: Any) -> list[int]:
    args = Arguments(**settings)
    return [step for step in range(1, num_steps + 1) if function(args, step, *more, 4, 22)]


def test_saves_are_due_by_steps_by_epochs_and_at_the_end() -> None:
    assert due(is_save_due, 10, 10, save_strategy="steps", save_steps=4) == [4, 8, 10]
    # 22 examples in batches of 4: epochs end within the steps 6 and 11.
    assert due(is_save_due, 13, 13, save_strategy="epoch", evals_per_epoch=2) == [6, 11, 13]
    assert due(is_save_due, 13, 13, save_strategy="no") == []


@pytest.mark.parametrize("settings", [{"save_strategy": "steps", "save_steps": n} for n in (1, 4, 5, 50)] + [
    {"save_strategy": "epoch"}, {"save_strategy": "no"}
])  # fmt: skip
def test_saves_are_counted(settings: dict[str, Any]) -> None:
    args = Arguments(**settings)
    for total, examples in ((4, 22), (30, 22), (22, 22)):
        for num_steps in range(0, 25):
            steps = range(1, num_steps + 1)
            due = [step for step in steps if is_save_due(args, step, num_steps, total, examples)]
            assert count_saves(args, num_steps, total, examples) == len(due), (total, num_steps)


def test_evaluations_are_due_by_steps_and_by_parts_of_epochs() -> None:
    assert due(is_due, 10, eval_strategy="steps", eval_steps=5) == [5, 10]
    assert due(is_due, 11, eval_strategy="epoch", evals_per_epoch=2) == [3, 6, 9, 11]
    assert due(is_due, 11, eval_strategy="no") == []


@pytest.mark.parametrize(
    ("name", "better", "worse"),
    [
        ("eval_loss", 1.0, 2.0),
        ("eval_glossary_token_accuracy", 0.9, 0.1),
        ("eval_accuracy_notes_loss", 1.0, 2.0),
        ("eval_rouge_notes_bits_per_byte", 1.0, 2.0),
        ("eval_loss_per_move_opening", 1.0, 2.0),
        ("eval_lossless_forgetting", -1.0, 2.0),
        ("eval_rougeLsum", 0.9, 0.1),
        ("eval_illegal_move_rate", 0.1, 0.9),
        ("eval_sampled_unparsable_move_rate_opening", 0.1, 0.9),
        ("eval_legal_move_rate", 0.9, 0.1),
        ("eval_engine_illegal_games", 1.0, 2.0),
        ("eval_engine_score", 0.9, 0.1),
        ("eval_illegal_games_token_accuracy", 0.9, 0.1),
    ],
)
def test_which_way_is_better(name: str, better: float, worse: float) -> None:
    for first, second in ((better, worse), (worse, better)):
        progress = loop.Progress(step=1)
        assert loop._is_better(name, {name: first}, progress)
        assert loop._is_better(name, {name: second}, progress) == (second == better)


def test_an_epoch_line_has_the_evaluation_of_its_own_epoch() -> None:
    epoch = _EpochLine(total_batch_size=4, num_examples=22)
    assert [step for step in range(1, 12) if epoch.ends(step)] == [6, 11]
    epoch.add(2.0, 4)
    epoch.validation = (1.5, True)
    resumed = _EpochLine(total_batch_size=4, num_examples=22)
    resumed.restore(json.loads(json.dumps(epoch.state())))
    for line in (epoch, resumed):
        line.add(5.0, 2)
        assert line.line(6).startswith(
            "epoch 1.09: train loss 3.0000 (of 6 logged steps), validation loss 1.5000 (new record), "
        )
    epoch.add(1.0, 5)
    assert "train loss 1.0000 (of 5 logged steps), " in (second := epoch.line(11)) and "validation" not in second


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    assert isinstance(model, Linear)
    return (model.weight * batch["input_ids"].to(torch.float32)).sum() * batch["factor"][0]


def batch(factor: float) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[1, 2, 3]])
    return {"input_ids": ids, "labels": ids, "factor": torch.tensor([factor])}


def step(model: Linear, optimizer: torch.optim.Optimizer, factor: float, **options: Any) -> StepResult:
    return train_step(
        Accelerator(cpu=True), model, optimizer, [batch(factor)], max_grad_norm=1.0, loss_fn=loss_of, **options
    )


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_step_that_is_left_out_changes_nothing(factor: float) -> None:
    model, other = Linear(), Linear()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other)]
    for m, optimizer in zip((model, other), optimizers, strict=True):
        assert not step(m, optimizer, 1.0, skip_non_finite=True).is_skipped
    result = step(model, optimizers[0], factor, skip_non_finite=True)
    assert result.is_skipped and not result.grad_norm.isfinite()
    for m, optimizer in zip((model, other), optimizers, strict=True):
        step(m, optimizer, 2.0, skip_non_finite=True)
    assert torch.equal(model.weight, other.weight)
    step(model, optimizers[0], factor)
    assert model.weight.isnan().all(), "without the option the step is taken, and the loop ends the run"


def test_the_scale_of_a_step_that_is_left_out_does_not_wait_for_the_next() -> None:
    """A checkpoint may take it: torch makes the state of a new optimizer by a step of rate 0."""
    model = Linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    assert step(model, optimizer, float("nan"), skip_non_finite=True).is_skipped
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state and torch.equal(model.weight, torch.ones(3))


def test_an_overflow_in_fp16_is_left_out_and_halves_the_scale() -> None:
    model, other = Linear(), Linear()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other)]
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = LossScale(scale=4.0, growth_interval=2)

    def scaled_step(factor: float) -> StepResult:
        return train_step(accelerator, model, optimizers[0], [batch(factor)], max_grad_norm=1.0, loss_fn=loss_of)

    assert scaled_step(float("inf")).is_skipped and accelerator.scaler.scale == 2.0
    assert torch.equal(model.weight, other.weight)
    for number, factor in enumerate((1.0, 2.0), start=1):  # the scale is in no number that is seen
        expected, result = step(other, optimizers[1], factor), scaled_step(factor)
        assert not result.is_skipped and torch.equal(model.weight, other.weight)
        assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
        assert accelerator.scaler.scale == (2.0, 4.0)[number - 1], "it grows after two good steps"


def test_votes_to_stop_travel_with_the_counts() -> None:
    model = Linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert step(model, optimizer, 1.0).num_stop_votes.get() == 0
    result = step(model, optimizer, 1.0, stop_vote=True)
    assert result.num_stop_votes.get() == 1
    assert result.num_tokens == 3


def result(loss: float, num_tokens: int, is_skipped: bool = False) -> StepResult:
    votes = HostValue(torch.tensor(0))
    return StepResult(torch.tensor(loss), torch.tensor(1.0), torch.tensor(num_tokens), votes, is_skipped)


def window(num_processes: int = 1, process_index: int = 0) -> _Window:
    accelerator: Any = SimpleNamespace(
        device=torch.device("cpu"), num_processes=num_processes, process_index=process_index
    )
    return _Window(accelerator)


def test_a_window_that_goes_on_equals_one_that_was_not_interrupted() -> None:
    losses = [0.1, 1e-9, 3.7, 2e5, 0.3]
    whole, first, second = window(), window(), window()
    for loss in losses:
        whole.add(result(loss, 7))
    for loss in losses[:2]:
        first.add(result(loss, 7))
    second.restore(first.state())
    for loss in losses[2:]:
        second.add(result(loss, 7))
    assert second.read() == whole.read()
    assert whole.read()[1] == 35


def test_a_window_of_other_processes_keeps_its_sum() -> None:
    state = {"num_steps": 2, "losses": [1.5, 2.5], "num_tokens": 9}
    same = [window(2, index) for index in range(2)]
    more = [window(3, index) for index in range(3)]
    for part in (*same, *more):
        part.restore(state)
    assert [part.loss.item() for part in same] == [1.5, 2.5]
    assert [part.loss.item() for part in more] == [4.0, 0.0, 0.0]


def test_a_step_that_is_left_out_counts_for_tokens_only() -> None:
    one = window()
    one.add(result(float("nan"), 5, is_skipped=True))
    assert one.read()[0] != one.read()[0] and one.read()[1] == 5, "no loss at all"
    one.add(result(2.0, 5))
    assert one.read() == (2.0, 10)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_the_gradient_is_in_float64_what_it_should_be(num_processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 x 3 targets of each process: a factor of 3 / 45 that was rounded to float32 would show."""
    monkeypatch.setattr(dist, "all_reduce", lambda counts: counts.mul_(num_processes))
    accelerator: Any = SimpleNamespace(num_processes=num_processes, device=torch.device("cpu"), scaler=None)
    model = Linear().double()
    optimizer = torch.optim.AdamW(model.parameters())
    result = train_step(accelerator, model, optimizer, [batch(1.0)] * 5, max_grad_norm=1e9, loss_fn=loss_of)
    of_this_process = 5 * math.sqrt(1 + 4 + 9) / 15  # the average over the processes comes after it
    assert result.grad_norm.item() == pytest.approx(of_this_process, rel=1e-14)


def test_ddp_accumulates_into_its_buckets(tmp_path: Path) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}")
    try:
        model = DistributedDataParallel(nn.Linear(3, 1, bias=False), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        other = nn.Linear(3, 1, bias=False)
        other.load_state_dict(model.module.state_dict())
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)

        def loss_of_line(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            line: torch.Tensor = model(batch["input_ids"].to(torch.float32)).sum() * batch["factor"][0]
            return line

        addresses = []
        for _ in range(4):
            for m, o in ((model, optimizer), (other, other_optimizer)):
                batches = [batch(1.0), batch(-3.0)]
                train_step(Accelerator(cpu=True), m, o, batches, max_grad_norm=1.0, loss_fn=loss_of_line)
            assert torch.equal(model.module.weight, other.weight)
            gradient = model.module.weight.grad
            assert gradient is not None and not gradient.any()
            addresses.append(gradient.data_ptr())
        assert len(set(addresses[1:])) == 1, "DDP makes its buckets anew once, after the first step"
    finally:
        dist.destroy_process_group()


def test_what_lives_after_the_first_steps_is_no_more_looked_through(forked: ForkedParent, tmp_path: Path) -> None:
    """By the garbage collector, which would stop each process at a step of its own."""
    code = (
        "import atexit, gc\n"
        "gc.unfreeze()  # what the parent of the ranks has frozen\n"
        "atexit.register(lambda: print('frozen:', gc.get_freeze_count(), flush=True))"
    )
    script = patched(tiny.RECIPE, tmp_path, code)
    counts = []
    for num_steps in (2, 3):
        flags = tiny.flags(tmp_path / str(num_steps), f"--max_steps={num_steps}")
        result = forked.run(script, *flags, config="single_device", launcher_flags=tiny.LAUNCHER_FLAGS)
        assert result.exit_code == 0, result.output
        counts.append(int(result.output.split("frozen: ")[1].split()[0]))
    assert counts[0] == 0 and counts[1] > 10_000, counts
