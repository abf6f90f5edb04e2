"""The training loop: one turn is one optimizer step."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from common.arguments import BatchPlan, TrainArguments
from common.data import Batch, Collator, StepSampler, train_batches
from common.launch import RunFailed
from common.losses import IGNORE_INDEX, token_loss
from common.metrics import Throughput, sequence_lengths, target_lengths
from common.sharding import clip_grad_norm_, gradient_sync
from common.tracking import RunLog, format_metrics

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


@dataclass
class StepResult:
    """What one optimizer step gives, as device tensors: reading them is what costs a synchronisation."""

    loss: torch.Tensor
    """This process's part of the mean loss per target token; the parts of all processes add up."""
    grad_norm: torch.Tensor
    """Norm before clipping, equal on all processes."""
    num_tokens: torch.Tensor
    """Tokens of the global batch, padding excluded."""


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    *,
    max_grad_norm: float,
    loss_fn: LossFunction = token_loss,
) -> StepResult:
    """Forward and backward over this process's micro-batches, clip, update.

    The loss is the sum of token losses over the number of target tokens of the whole global batch, so how the batch is
    cut into processes and micro-batches does not change the gradient. Nothing here waits for the device.
    """
    counts = torch.tensor([sum(_count(batch)[i] for batch in micro_batches) for i in range(2)], dtype=torch.int64)
    counts = counts.to(accelerator.device, non_blocking=True)
    if accelerator.num_processes > 1:
        dist.all_reduce(counts)
    num_targets, num_tokens = counts.unbind()
    # FSDP and DDP average gradients over the processes; the factor turns the average back into the sum.
    scale = accelerator.num_processes / num_targets.clamp(min=1)
    loss_sum = torch.zeros((), device=accelerator.device)
    for index, batch in enumerate(micro_batches):
        batch = {key: value.to(accelerator.device, non_blocking=True) for key, value in batch.items()}
        with gradient_sync(model, is_last_micro_batch=index == len(micro_batches) - 1):
            loss = loss_fn(model, batch)
            accelerator.backward(loss * scale)
        loss_sum = loss_sum + loss.detach()
    grad_norm = clip_grad_norm_(model, max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss_sum / num_targets.clamp(min=1), grad_norm, num_tokens)


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
    sampler: StepSampler,
    collate_fn: Collator,
    log: RunLog,
    throughput: Throughput,
    *,
    num_steps: int,
    export: Callable[[Path], None],
    loss_fn: LossFunction = token_loss,
    evaluate: Evaluation | None = None,
) -> Progress:
    """Train until `num_steps`, logging, evaluating and keeping the best model as the arguments say.

    evaluate: collective, returns metrics by their names in metrics.jsonl. export: collective, writes the model to a folder.
    """
    progress = Progress()
    output = Path(str(args.output_dir))
    window = _Window(accelerator)
    previous: StepResult | None = None
    epoch = _EpochLine(plan.total, sampler.num_examples)
    batches = train_batches(
        dataset,
        sampler,
        collate_fn,
        start_step=progress.step,
        num_steps=num_steps - progress.step,
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
        per_device_batch_size=plan.per_device,
        num_workers=args.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
    )
    bar = tqdm(
        total=num_steps, initial=progress.step, desc="Training", unit="step", disable=not accelerator.is_main_process
    )

    def say(line: str) -> None:
        if accelerator.is_main_process:
            bar.write(line)

    def evaluate_now() -> None:
        if evaluate is None:
            return
        with throughput.paused():
            metrics = evaluate()
            is_best = _is_better(args.metric_for_best_model, metrics, progress)
            log.log(progress.step, metrics)
            say(f"step {progress.step}: {format_metrics(metrics)}" + (" | new best" if is_best else ""))
            if is_best and num_steps > 0:
                export(output / "best")
            epoch.validation = (metrics.get("eval_loss"), is_best)

    if args.eval_on_start or num_steps == 0:
        evaluate_now()
    model.train()
    while progress.step < num_steps:
        waiting_since = time.perf_counter()
        micro_batches = next(batches)
        throughput.add_step(micro_batches, data_wait_seconds=time.perf_counter() - waiting_since)
        seed_step(args.seed, progress.step, accelerator.process_index)
        result = train_step(
            accelerator, model, optimizer, micro_batches, max_grad_norm=args.max_grad_norm, loss_fn=loss_fn
        )
        learning_rate = scheduler.get_last_lr()[0]
        scheduler.step()
        progress.step += 1
        window.add(result)
        bar.update()
        # One step late, so that the device is never waited for with nothing left to do.
        if previous is not None:
            _check_finite(previous, progress.step - 1, sampler)
        previous = result
        is_last = progress.step == num_steps
        if progress.step % args.logging_steps == 0 or is_last:
            loss, num_tokens = window.read()
            progress.num_tokens += num_tokens
            epoch.add(loss, window.num_steps)
            metrics = {
                "loss": loss,
                "grad_norm": result.grad_norm.item(),
                "learning_rate": learning_rate,
                "num_tokens": progress.num_tokens,
                **throughput.report(),
            }
            window = _Window(accelerator)
            _check_finite(result, progress.step, sampler)
            log.log(progress.step, metrics)
            bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            if args.logging_steps > 1 or progress.step % 10 == 0 or is_last:
                say(f"step {progress.step}: {format_metrics(metrics)}")
        if is_due(args, progress.step, plan.total, sampler.num_examples) or (is_last and args.eval_strategy != "no"):
            evaluate_now()
            model.train()
        if epoch.ends(progress.step) or is_last:
            say(epoch.line(progress.step))
    bar.close()
    if num_steps > 0:
        export(output / "model")
        log.finish(output / "model" if args.wandb_log_model else None)
    else:
        log.finish()
    _say_where(accelerator, output, progress, args.metric_for_best_model)
    return progress


def _say_where(accelerator: Accelerator, output: Path, progress: Progress, metric: str) -> None:
    parts = [f"metrics {output / 'metrics.jsonl'}"]
    if progress.step:
        parts.insert(0, f"model {output / 'model'}")
    if progress.best_step:
        parts.insert(
            1, f"best model {output / 'best'} ({metric} {progress.best_metric:.4f} at step {progress.best_step})"
        )
    accelerator.print(f"Done after {progress.step} steps: " + ", ".join(parts))


def is_due(args: TrainArguments, step: int, total_batch_size: int, num_examples: int) -> bool:
    """Whether an evaluation follows optimizer step `step` (from 1)."""
    if args.eval_strategy == "steps":
        assert args.eval_steps is not None
        return step % args.eval_steps == 0
    if args.eval_strategy == "epoch":
        # A multiple of 1/evals_per_epoch of an epoch was passed in this step; in whole numbers, so without rounding.
        def passed(steps: int) -> int:
            return steps * total_batch_size * args.evals_per_epoch // num_examples

        return passed(step) > passed(step - 1)
    return False


def _is_better(name: str, metrics: dict[str, float], progress: Progress) -> bool:
    """Note the evaluation in `progress`; whether it is the best so far by metric `name`."""
    if name not in metrics:
        return False
    value, best = metrics[name], progress.best_metric
    lower_is_better = "loss" in name or "perplexity" in name or "bits_per_byte" in name
    is_better = not math.isnan(value) and (best is None or (value < best if lower_is_better else value > best))
    if is_better:
        progress.best_metric, progress.best_step = value, progress.step
    return is_better


def _check_finite(result: StepResult, step: int, sampler: StepSampler) -> None:
    norm = result.grad_norm.item()
    if not math.isfinite(norm):
        examples = ", ".join(map(str, sorted(sampler.indices(step - 1).tolist())[:16]))
        raise RunFailed(
            f"step {step}: the gradient norm is {norm}; its batch has training examples {examples}"
            f"{', ...' if sampler.batch_size > 16 else ''}. Lower --learning_rate, raise --warmup_steps or look at the data."
        )


class _Window:
    """Sums since the last log line, kept on the device until they are read."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.num_steps = 0
        self.loss = torch.zeros(
            (), device=accelerator.device, dtype=torch.float64 if _has_float64(accelerator) else None
        )
        self.num_tokens = torch.zeros((), device=accelerator.device, dtype=torch.int64)

    def add(self, result: StepResult) -> None:
        self.num_steps += 1
        self.loss += result.loss
        self.num_tokens += result.num_tokens

    def read(self) -> tuple[float, int]:
        """(mean loss per step, tokens); collective."""
        if self.accelerator.num_processes > 1:
            dist.all_reduce(self.loss)
        return self.loss.item() / self.num_steps, int(self.num_tokens.item())


def _has_float64(accelerator: Accelerator) -> bool:
    return accelerator.device.type != "mps"


class _EpochLine:
    """One line per epoch: train loss, validation loss, duration, new record."""

    def __init__(self, total_batch_size: int, num_examples: int) -> None:
        self.steps_per_epoch = num_examples / total_batch_size
        self.validation: tuple[float | None, bool] = (None, False)
        self._restart()

    def _restart(self) -> None:
        self.started, self.loss_sum, self.num_steps = time.perf_counter(), 0.0, 0

    def add(self, mean_loss: float, num_steps: int) -> None:
        self.loss_sum += mean_loss * num_steps
        self.num_steps += num_steps

    def ends(self, step: int) -> bool:
        return math.floor(step / self.steps_per_epoch + 1e-9) > math.floor((step - 1) / self.steps_per_epoch + 1e-9)

    def line(self, step: int) -> str:
        validation, is_best = self.validation
        line = f"epoch {step / self.steps_per_epoch:.2f}: "
        if self.num_steps:
            line += f"train loss {self.loss_sum / self.num_steps:.4f}, "
        if validation is not None:
            line += f"validation loss {validation:.4f}{' (new record)' if is_best else ''}, "
        line += f"{time.perf_counter() - self.started:.1f} s"
        self._restart()
        return line
