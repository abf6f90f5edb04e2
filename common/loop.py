"""The training loop: one turn is one optimizer step."""

import contextlib
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from common.arguments import BatchPlan, TrainArguments
from common.checkpoint import Checkpoints, set_aside
from common.context_parallel import data_parallel, sliced
from common.data import Batch, Collator, Sampler, train_batches
from common.evaluation import bar_is_disabled, has_float64, polling
from common.files import write_text
from common.guards import SpikeGuard
from common.launch import RunFailed, Stopped, claim_output_dir
from common.losses import IGNORE_INDEX, token_loss
from common.metrics import Throughput, sequence_lengths, target_lengths
from common.optim import LossScale
from common.sharding import clip_grad_norm_, gradient_sync
from common.stopping import StopRequest
from common.tracking import RunLog, format_metrics

LOWER_IS_BETTER = (
    "loss", "perplexity", "bits_per_byte", "forgetting", "illegal_move_rate", "unparsable_move_rate", "illegal_games",
)  # fmt: skip
HIGHER_IS_BETTER = ("accuracy", "rate", "rouge", "score")
NUM_IDLE_STEPS = 5
"""So many steps with a gradient of exactly 0 end a run: nothing is learned."""
NUM_STEPS_TO_FREEZE = 3
"""After so many steps of a process all that is compiled for training is there."""
BEST_FILE = "best_step.json"  # in best/: the step that it is of, and the metric's value there

LossFunction = Callable[[nn.Module, Batch], torch.Tensor]
Evaluation = Callable[[], dict[str, float]]


@dataclass
class Progress:
    """Where the run is; with the arguments it determines everything that comes next."""

    step: int = 0
    """Optimizer steps done."""
    num_tokens: int = 0
    """Tokens seen, padding excluded: inputs and, for encoder-decoder models, targets; as of the last log line."""
    best_metric: float | None = None
    best_step: int | None = None
    num_skipped_steps: int = 0
    is_evaluation_due: bool = False
    """The run was stopped before or in an evaluation at this step."""


class HostValue:
    """A 0-dim device tensor on its way to the host: reading it waits for the copy, not for what was queued after it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=tensor.is_cuda)
        self._event = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

    def get(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.item()


@dataclass
class StepResult:
    """What one optimizer step gives, as device tensors: reading them is what costs a synchronisation."""

    loss: torch.Tensor
    """This process's part of the mean loss per target token; the parts of all processes add up."""
    grad_norm: torch.Tensor
    """Norm before clipping, equal on all processes."""
    num_tokens: torch.Tensor
    """Tokens of the global batch, padding excluded."""
    num_stop_votes: HostValue
    """Processes that had been asked to stop when the step began."""
    is_skipped: bool = False
    """The parameters were left as they were, because the gradient was not finite."""


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    *,
    max_grad_norm: float,
    loss_fn: LossFunction = token_loss,
    stop_vote: bool = False,
    skip_non_finite: bool = False,
) -> StepResult:
    """Forward and backward over this process's micro-batches, clip, update.

    The loss is the sum of token losses over the number of target tokens of the whole global batch, so how the batch is
    cut into processes and micro-batches does not change the gradient. Nothing here waits for the device, except with
    skip_non_finite and in fp16, which leave out the update when the gradient is not finite. stop_vote: this process has
    been asked to stop; the votes travel with the counts.
    """
    sums = [sum(_count(batch)[i] for batch in micro_batches) for i in range(2)]
    counts = torch.tensor([*sums, int(stop_vote)], dtype=torch.int64)
    counts = counts.to(accelerator.device, non_blocking=True)
    if accelerator.num_processes > 1:
        dist.all_reduce(counts)
    num_targets, num_tokens, num_stop_votes = counts.unbind()
    votes_on_host = HostValue(num_stop_votes)  # before the step's own work is queued
    # FSDP and DDP average gradients over the processes; the factor turns the average back into the sum.
    loss_scale: LossScale | None = accelerator.scaler
    factor = accelerator.num_processes * (loss_scale.scale if loss_scale else 1.0)
    loss_sum = torch.zeros((), device=accelerator.device)
    for index, batch in enumerate(micro_batches):
        batch = {key: value.to(accelerator.device, non_blocking=True) for key, value in batch.items()}
        with gradient_sync(model, is_last_micro_batch=index == len(micro_batches) - 1):
            loss = loss_fn(model, batch)
            # In the loss's type: a whole number on its own would make a float32 of the quotient, also in float64.
            (loss * (factor / num_targets.clamp(min=1).to(loss.dtype))).backward()
        loss_sum = loss_sum + loss.detach()
    grad_norm = clip_grad_norm_(model, max_grad_norm, loss_scale.scale if loss_scale else 1.0, optimizer)
    is_skipped = (skip_non_finite or loss_scale is not None) and not math.isfinite(grad_norm.item())
    if loss_scale is not None:
        loss_scale.update(not is_skipped)
    if not is_skipped:
        optimizer.step()
    for name in ("grad_scale", "found_inf"):  # of this step: the next one may be the checkpoint's, of rate 0
        vars(optimizer).pop(name, None)
    # DDP's gradients are views of its buckets: without them the next micro-batch would get others, beside the buckets.
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
    return StepResult(loss_sum / num_targets.clamp(min=1), grad_norm, num_tokens, votes_on_host, is_skipped)


def _count(batch: Batch) -> tuple[int, int]:
    """(target tokens, tokens that pass through the model), padding excluded; on the CPU, before the batch moves."""
    num_tokens = sequence_lengths(batch).sum() + target_lengths(batch).sum()
    return int((batch["labels"] != IGNORE_INDEX).sum()), int(num_tokens)


def seed_step(seed: int, step: int, process_index: int) -> None:
    """Seed dropout as a function of (seed, step, process): nothing has to be saved or restored for it."""
    torch.manual_seed((seed * 1_000_003 + step) * 4_099 + process_index)


def train(
    args: TrainArguments,
    plan: BatchPlan,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    dataset: Dataset,
    sampler: Sampler,
    collate_fn: Collator,
    log: RunLog,
    throughput: Throughput,
    checkpoints: Checkpoints,
    *,
    num_steps: int,
    export: Callable[[Path], None],
    loss_fn: LossFunction = token_loss,
    evaluate: Evaluation | None = None,
) -> Progress:
    """Train until `num_steps`, logging, evaluating, saving and keeping the best model as the arguments say.

    evaluate: collective, returns metrics by their names in metrics.jsonl. export: collective, writes the model to a
    folder. Goes on from the checkpoint that `checkpoints` has found. Raises `Stopped`, after saving, when a signal or
    the time limit asked for it, and `RunFailed` when training cannot go on.
    """
    output = Path(str(args.output_dir))
    progress, window, epoch = Progress(), _Window(accelerator), _EpochLine(plan.total, sampler.num_examples)
    claim_output_dir(args, accelerator)
    saved = checkpoints.start(
        model,
        optimizer,
        plan,
        dataset,
        sampler.lengths,
        num_steps=num_steps,
        num_saves=count_saves(args, num_steps, plan.total, sampler.num_examples),
    )
    if saved is not None:
        progress = Progress(**saved["progress"])
    if num_steps == 0:
        if checkpoints.last_saved_step is None and not log.file.path.exists():
            log.start()
            _evaluate_only(accelerator, log, evaluate, progress.step)
            log.finish()
        else:  # what a run has logged stays as it is
            _evaluate_only(accelerator, None, evaluate, progress.step)
        return progress
    log.start(progress.step if saved else None)
    if saved is not None:
        why = checkpoints.other_choice(args.metric_for_best_model)
        if not _holds_best(output / "best", None if why else progress, accelerator):
            why = why or f"is not in {output}"
        if why and progress.best_step is not None:
            accelerator.print(f"the best model so far, of step {progress.best_step}, {why}: choosing begins anew")
        if why:
            progress.best_metric = progress.best_step = None
        window.restore(saved["window"])
        sampler.restore(saved.get("data"))
        epoch.restore(saved["epoch"])
        if accelerator.scaler is not None and saved["loss_scale"] is not None:
            accelerator.scaler = LossScale(**saved["loss_scale"])
        scheduler.last_epoch = progress.step - 1  # the rate is a function of the step, which the next call sets
        scheduler.step()
    if args.resume_from_checkpoint:
        log.file.truncate_after(progress.step if saved else -1)
    data_index, data_number = data_parallel(accelerator)
    batches = train_batches(
        dataset,
        sampler,
        sliced(collate_fn, accelerator),
        start_step=progress.step,
        num_steps=max(0, num_steps - progress.step),
        process_index=data_index,
        num_processes=data_number,
        per_device_batch_size=plan.per_device,
        num_workers=args.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
    )
    bar = tqdm(
        total=num_steps, initial=progress.step, desc="Training", unit="step", disable=bar_is_disabled(accelerator)
    )
    unchecked: HostValue | None = None  # the last step's gradient norm
    unchecked_loss: HostValue | None = None
    guard = SpikeGuard(args.spike_factor) if args.spike_factor else None

    def say(line: str) -> None:
        if accelerator.is_main_process:
            bar.write(line)

    def fail(reason: str) -> NoReturn:
        """On all processes, which see the same numbers; what is being written is kept, a checkpoint and the curves."""
        checkpoints.finish()
        log.finish(has_failed=True)
        accelerator.wait_for_everyone()  # the first to leave ends the others
        raise RunFailed(f"{reason} {checkpoints.last_complete().capitalize()}.")

    def check_finite(value: float, step: int) -> None:
        if not math.isfinite(value):
            fail(_not_finite(value, step, sampler))

    num_idle_steps = 0

    def check_step(norm: float, step: int) -> None:
        nonlocal num_idle_steps
        check_finite(norm, step)
        num_idle_steps = num_idle_steps + 1 if norm == 0 else 0
        if num_idle_steps == NUM_IDLE_STEPS:
            fail(_no_gradient(step, sampler))
        if guard is None or unchecked_loss is None or (spike := guard.check(unchecked_loss.get(), norm)) is None:
            return
        message = f"step {step}: {spike}; its batch has {', '.join(sampler.names(step - 1))}"
        if args.spike_action == "stop":
            fail(f"{message}.")
        say(f"warning: {message}")

    def evaluate_or_stop(stop: StopRequest) -> None:
        progress.is_evaluation_due = evaluate is not None
        if evaluate is None:
            return

        def poll() -> None:
            if checkpoints.any_process(stop.is_requested):
                raise _Interrupted

        with throughput.paused():
            try:
                with polling(poll):
                    metrics = evaluate()
            except _Interrupted:
                save_and_stop(stop)
            is_best = _is_better(args.metric_for_best_model, metrics, progress)
            if args.metric_for_best_model not in metrics:
                known = ", ".join(metrics)
                say(f"warning: --metric_for_best_model {args.metric_for_best_model}: no best model, there is {known}")
            log.log(progress.step, metrics)
            say(f"step {progress.step}: {format_metrics(metrics)}" + (" | new best" if is_best else ""))
            if is_best:
                export(output / "best")
                if accelerator.is_main_process:
                    best = {"step": progress.step, "value": progress.best_metric}
                    write_text(output / "best" / BEST_FILE, json.dumps(best))
            if progress.step > 0:  # the model before training belongs to no epoch
                epoch.validation = (metrics.get("eval_loss"), is_best)
        progress.is_evaluation_due = False
        model.train()

    def save(only_model: bool) -> None:
        if unchecked is not None:
            check_finite(unchecked.get(), progress.step)
        state = {
            "progress": asdict(progress),
            "window": window.state(),
            "data": sampler.state(progress.step),
            "epoch": epoch.state(),
            "loss_scale": asdict(accelerator.scaler) if accelerator.scaler else None,
        }
        with throughput.paused():
            done = checkpoints.save(
                progress.step, state, best_step=progress.best_step, tracker_run_id=log.run_id, only_model=only_model
            )
        say(f"step {progress.step}: {done}")

    def save_and_stop(stop: StopRequest) -> NoReturn:
        if checkpoints.last_saved_step != progress.step:
            save(only_model=False)
        checkpoints.finish()
        bar.close()
        log.finish()
        accelerator.wait_for_everyone()  # the first to leave ends the others
        raise Stopped(
            f"stopped by {stop.reason} at step {progress.step}: {checkpoints.last_complete()}; "
            "go on with --resume_from_checkpoint latest"
        )

    throughput.start_window()  # what was loaded until here is no training
    with StopRequest(args.max_run_seconds) as stop:
        if progress.is_evaluation_due or (args.eval_on_start and saved is None):
            evaluate_or_stop(stop)
        model.train()
        freezing_step = progress.step + NUM_STEPS_TO_FREEZE
        while progress.step < num_steps:
            waiting_since = time.perf_counter()
            micro_batches = next(batches)
            throughput.add_step(micro_batches, data_wait_seconds=time.perf_counter() - waiting_since)
            seed_step(args.seed, progress.step, accelerator.process_index)
            result = train_step(
                accelerator,
                model,
                optimizer,
                micro_batches,
                max_grad_norm=args.max_grad_norm,
                loss_fn=loss_fn,
                stop_vote=stop.is_requested,
                skip_non_finite=args.max_skipped_steps > 0,
            )
            learning_rate = float(scheduler.get_last_lr()[0])
            scheduler.step()
            progress.step += 1
            if progress.step == freezing_step:
                _freeze_objects()
            window.add(result)
            bar.update()
            # One step late, so that the device is never waited for with nothing left to do.
            if unchecked is not None:
                check_step(unchecked.get(), progress.step - 1)
            unchecked = HostValue(result.grad_norm)
            if guard is not None:
                unchecked_loss = HostValue(_sum_over_processes(accelerator, result.loss))
            if result.is_skipped:
                progress.num_skipped_steps += 1
                # An fp16 overflow is no fault until the loss is scaled no more.
                scale = accelerator.scaler.scale if accelerator.scaler else 0.0
                if scale < 1.0:
                    if progress.num_skipped_steps > args.max_skipped_steps:
                        check_finite(unchecked.get(), progress.step)
                    say(f"skipped: {_not_finite(unchecked.get(), progress.step, sampler)}")
                else:
                    say(f"skipped: {_overflow(unchecked.get(), progress.step, scale)}")
                unchecked = None
            is_last = progress.step == num_steps
            if progress.step % args.logging_steps == 0 or is_last:
                loss, num_tokens = window.read()
                progress.num_tokens += num_tokens
                metrics: dict[str, float] = {
                    "loss": loss,
                    "grad_norm": float(result.grad_norm.item()),
                    "learning_rate": learning_rate,
                    "num_tokens": progress.num_tokens,
                    **throughput.report(),
                    **sampler.report(progress.step),
                }
                metrics["seconds_left"] = metrics["step_seconds"] * (num_steps - progress.step)
                if progress.num_skipped_steps:
                    metrics["num_skipped_steps"] = progress.num_skipped_steps
                if accelerator.scaler is not None:
                    metrics["loss_scale"] = accelerator.scaler.scale
                if window.num_steps:
                    epoch.add(loss, window.num_steps)
                    check_finite(loss if result.is_skipped else loss + metrics["grad_norm"], progress.step)
                window = _Window(accelerator)
                log.log(progress.step, metrics)
                bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
                if args.logging_steps > 1 or progress.step % 10 == 0 or is_last:
                    say(f"step {progress.step}: {format_metrics(metrics)}")
            is_stopping = result.num_stop_votes.get() > 0
            if is_due(args, progress.step, plan.total, sampler.num_examples) or (
                is_last and args.eval_strategy != "no"
            ):
                if is_stopping:
                    progress.is_evaluation_due = True
                else:
                    evaluate_or_stop(stop)
            if epoch.ends(progress.step) or is_last:
                say(epoch.line(progress.step))
            if is_stopping:
                save_and_stop(stop)
            if is_save_due(args, progress.step, num_steps, plan.total, sampler.num_examples):
                save(args.save_only_model)
        if unchecked is not None:
            check_step(unchecked.get(), progress.step)
        bar.close()
        export(output / "model")
        checkpoints.finish()
        log.finish(output / "model" if args.wandb_log_model else None)
    _say_where(accelerator, output, progress, args.metric_for_best_model)
    return progress


def _holds_best(folder: Path, progress: Progress | None, accelerator: Accelerator) -> bool:
    """Whether best/ is the best model of this course of the run (None: of another choice); another is set aside.

    Collective.
    """
    held: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    if progress is not None and progress.best_step is not None:
        best = {"step": progress.best_step, "value": progress.best_metric}
    if accelerator.is_main_process and folder.is_dir():
        with contextlib.suppress(OSError, ValueError):  # killed before it was written
            held = json.loads((folder / BEST_FILE).read_text())
        if best is None or held != best:
            aside = set_aside(folder)
            reason = "it is of another choice" if progress is None else "it is not of a step that the run goes on from"
            accelerator.print(f"set aside as {aside}: {reason}")
    return broadcast_object_list([held])[0] == best


def _freeze_objects() -> None:
    """Take what lives by now, a million objects after a compilation, out of what the garbage collector looks through.

    Otherwise each process stops for some tenths of a second now and then, each at another step, and all wait for it.
    """
    gc.collect()
    gc.freeze()


class _Interrupted(Exception):
    """Leaves an evaluation that is asked to stop."""


def _evaluate_only(accelerator: Accelerator, log: RunLog | None, evaluate: Evaluation | None, step: int) -> None:
    if evaluate is not None:
        metrics = evaluate()
        if log is not None:
            log.log(step, metrics)
        accelerator.print(f"step {step}: {format_metrics(metrics)}")


def _say_where(accelerator: Accelerator, output: Path, progress: Progress, metric: str) -> None:
    parts = [f"metrics {output / 'metrics.jsonl'}"]
    if (output / "report.html").is_file():
        parts.append(f"curves {output / 'report.html'}")
    if progress.step:
        parts.insert(0, f"model {output / 'model'}")
    if progress.best_step is not None:
        parts.insert(
            1, f"best model {output / 'best'} ({metric} {progress.best_metric:.4f} at step {progress.best_step})"
        )
    accelerator.print(f"Done after {progress.step} steps: " + ", ".join(parts))


def is_due(args: TrainArguments, step: int, total_batch_size: int, num_examples: int) -> bool:
    """Whether an evaluation follows optimizer step `step` (from 1)."""
    return _is_due(args.eval_strategy, args.eval_steps, args.evals_per_epoch, step, total_batch_size, num_examples)


def is_save_due(args: TrainArguments, step: int, num_steps: int, total_batch_size: int, num_examples: int) -> bool:
    """Whether a checkpoint follows optimizer step `step` (from 1); the last step's is always written."""
    if step == num_steps:
        return args.save_strategy != "no"
    return _is_due(args.save_strategy, args.save_steps, 1, step, total_batch_size, num_examples)


def count_saves(args: TrainArguments, num_steps: int, total_batch_size: int, num_examples: int) -> int:
    """Checkpoints of a whole run."""
    if args.save_strategy == "no" or num_steps == 0:
        return 0
    before_last = num_steps - 1
    if args.save_strategy == "steps":
        assert args.save_steps is not None
        return before_last // args.save_steps + 1
    return min(before_last, before_last * total_batch_size // num_examples) + 1


def _is_due(
    strategy: str, every: int | None, times_per_epoch: int, step: int, total_batch_size: int, num_examples: int
) -> bool:
    if strategy == "steps":
        assert every is not None
        return step % every == 0
    if strategy == "epoch":
        # A multiple of 1/times_per_epoch of an epoch was passed in this step; in whole numbers, so without rounding.
        def passed(steps: int) -> int:
            return steps * total_batch_size * times_per_epoch // num_examples

        return passed(step) > passed(step - 1)
    return False


def _is_better(name: str, metrics: dict[str, float], progress: Progress) -> bool:
    """Note the evaluation in `progress`; whether it is the best so far by metric `name`."""
    if name not in metrics:
        return False
    value, best = metrics[name], progress.best_metric
    # The last word that is known, the longest there: before it stands the name of a set, which may be any.
    known = [word for word in (*LOWER_IS_BETTER, *HIGHER_IS_BETTER) if word in name]
    last = max(known, key=lambda word: (name.rfind(word) + len(word), len(word)), default=None)
    lower_is_better = last in LOWER_IS_BETTER
    is_better = not math.isnan(value) and (best is None or (value < best if lower_is_better else value > best))
    if is_better:
        progress.best_metric, progress.best_step = value, progress.step
    return is_better


def _not_finite(value: float, step: int, sampler: Sampler) -> str:
    return (
        f"step {step}: the gradient norm or loss is {value}; its batch has training examples "
        f"{', '.join(sampler.names(step - 1))}. Lower --learning_rate, raise --warmup_steps or mend the data."
    )


def _no_gradient(step: int, sampler: Sampler) -> str:
    return (
        f"step {step}: the gradient has been 0 for {NUM_IDLE_STEPS} steps, so nothing is learned; its batch has "
        f"{', '.join(sampler.names(step - 1))}. Do its labels have any token that is not {IGNORE_INDEX}? In fp16 "
        "gradients may vanish: use bf16."
    )


def _overflow(value: float, step: int, scale: float) -> str:
    return (
        f"step {step}: the gradient norm is {value}, an overflow in fp16; the weights stay as they were, and the loss "
        f"scale goes from {2 * scale:,.15g} to {scale:,.15g}"
    )


class _Window:
    """Sums since the last log line, kept on the device until they are read."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.num_steps = 0
        self.loss = torch.zeros(
            (), device=accelerator.device, dtype=torch.float64 if has_float64(accelerator.device) else None
        )
        self.num_tokens = torch.zeros((), device=accelerator.device, dtype=torch.int64)

    def add(self, result: StepResult) -> None:
        self.num_tokens += result.num_tokens
        if not result.is_skipped:
            self.num_steps += 1
            self.loss += result.loss

    def read(self) -> tuple[float, int]:
        """(mean loss per step, NaN without any; tokens); collective."""
        if self.accelerator.num_processes > 1:
            dist.all_reduce(self.loss)
        loss = self.loss.item() / self.num_steps if self.num_steps else math.nan
        return loss, int(self.num_tokens.item())

    def state(self) -> dict[str, Any]:
        """For a checkpoint: each process's own sum, so that what is added later rounds as without it; collective."""
        losses = [self.loss]
        if self.accelerator.num_processes > 1:
            losses = [torch.empty_like(self.loss) for _ in range(self.accelerator.num_processes)]
            dist.all_gather(losses, self.loss)
        return {
            "num_steps": self.num_steps,
            "losses": [loss.item() for loss in losses],
            "num_tokens": int(self.num_tokens.item()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        losses = state["losses"]
        if len(losses) != self.accelerator.num_processes:
            losses = [sum(losses)] + [0.0] * (self.accelerator.num_processes - 1)
        self.num_steps = state["num_steps"]
        self.loss.fill_(losses[self.accelerator.process_index])
        self.num_tokens.fill_(state["num_tokens"])


def _sum_over_processes(accelerator: Accelerator, value: torch.Tensor) -> torch.Tensor:
    total = value.clone()
    if accelerator.num_processes > 1:
        dist.all_reduce(total)
    return total


class _EpochLine:
    """One line per epoch: train loss, validation loss, duration, new record."""

    def __init__(self, total_batch_size: int, num_examples: int) -> None:
        self.steps_per_epoch = num_examples / total_batch_size
        self.validation: tuple[float | None, bool]
        self._restart()

    def _restart(self) -> None:
        self.started, self.loss_sum, self.num_steps = time.perf_counter(), 0.0, 0
        self.validation = (None, False)

    def state(self) -> list[float | bool | None]:
        """JSON values that `restore` takes."""
        return [self.loss_sum, self.num_steps, *self.validation]

    def restore(self, state: list[Any]) -> None:
        self.loss_sum, self.num_steps, *validation = state
        if validation:  # else of a checkpoint that did not keep it
            self.validation = (validation[0], validation[1])

    def add(self, mean_loss: float, num_steps: int) -> None:
        self.loss_sum += mean_loss * num_steps
        self.num_steps += num_steps

    def ends(self, step: int) -> bool:
        return math.floor(step / self.steps_per_epoch + 1e-9) > math.floor((step - 1) / self.steps_per_epoch + 1e-9)

    def line(self, step: int) -> str:
        validation, is_best = self.validation
        line = f"epoch {step / self.steps_per_epoch:.2f}: "
        if self.num_steps:
            line += f"train loss {self.loss_sum / self.num_steps:.4f} (of {self.num_steps} logged steps), "
        if validation is not None:
            line += f"validation loss {validation:.4f}{' (new record)' if is_best else ''}, "
        line += f"{time.perf_counter() - self.started:.1f} s"
        self._restart()
        return line
