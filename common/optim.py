"""Optimizer with decay groups, and learning-rate schedules as a function of the optimizer step."""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode

from common.arguments import OptimizerArguments, UserError

LARGE = 2**20  # numbers of a parameter in one process: smaller ones are updated together, by one launch for many


def build_optimizer(model: nn.Module, args: OptimizerArguments) -> torch.optim.Optimizer:
    """Optimizer over the prepared model's trainable parameters; biases and norms get no weight decay.

    Groups follow from the owning module and the names, not from the parameter's shape: FSDP1 flattens parameters.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                # The owner's name too: T5's position biases are the weight of a `relative_attention_bias`.
                is_bias = "bias" in f"{path.rpartition('.')[2]}.{name}"
                (plain if is_norm or is_bias else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = _make_optimizer(model, groups, args)
    _scale_fp8_weights_together(model, optimizer)
    return optimizer


def _make_optimizer(model: nn.Module, groups: list[dict[str, Any]], args: OptimizerArguments) -> torch.optim.Optimizer:
    if args.optim == "adafactor":
        if any(isinstance(module, nn.Linear) and module.weight.dim() < 2 for module in model.modules()):
            raise UserError(
                "--optim adafactor works on rows and columns of matrices, which FSDP1 has flattened; "
                "choose a YAML with fsdp_version: 2, or --optim adamw."
            )
        return _Adafactor(groups, lr=args.learning_rate)
    if args.optim == "adadelta":
        # All at once, as torch does it on GPUs, each parameter would have two more numbers beside it for the moment.
        return torch.optim.Adadelta(groups, lr=args.learning_rate, foreach=False)
    return _AdamW(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        # One pass over the parameters instead of a dozen, also in host memory (offload). Its clipping divides by a
        # number of type float32.
        fused=groups[0]["params"][0].dtype != torch.float64,
    )


class _AdamW(torch.optim.AdamW):
    """torch's AdamW; on a GPU a kernel that reads and writes all numbers once updates the large parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As torch's, also in that gradients are divided by `grad_scale` where clipping has set it."""
        assert closure is None
        divisor = getattr(self, "grad_scale", None)
        for group in self.param_groups:
            columns: tuple[list[Any], ...] = ([], [], [], [], [], [])
            self._init_group(group, *columns)
            large, small = [], []
            for row in zip(*columns[:4], columns[5], strict=True):  # parameter, gradient, two averages, steps
                plain = tuple(_plain(tensor) for tensor in row)
                if _has_kernel(plain):
                    large.append(plain)
                else:
                    small.append(row)
            beta1, beta2 = group["betas"]
            if large:
                from common.triton_kernels import adamw as fast_adamw

                fast_adamw(large, divisor, group["lr"], (beta1, beta2), group["eps"], group["weight_decay"])
            if small:
                parameters, gradients, averages, squares, steps = (list(column) for column in zip(*small, strict=True))
                adamw(
                    parameters, gradients, averages, squares, [], steps,
                    fused=group["fused"], grad_scale=divisor, found_inf=getattr(self, "found_inf", None),
                    amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"],
                )  # fmt: skip


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """This process's numbers of a parameter, or of what goes with it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(local, "_tensor", local)  # torchao's weights that are gathered in fp8 wrap their numbers


def _has_kernel(row: tuple[torch.Tensor, ...]) -> bool:
    parameter = row[0]
    return (
        parameter.is_cuda
        and parameter.dtype in (torch.float32, torch.bfloat16)
        and parameter.numel() >= LARGE
        and all(type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_contiguous() for tensor in row)
        and importlib.util.find_spec("triton") is not None
    )


def _scale_fp8_weights_together(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Where weights are gathered in fp8: after an update the scales of all of them, by one reduction over processes.

    Without it torchao finds a weight's scale each time it is gathered, by a reduction of its own. It converts by three
    passes over float32, of which one is left here.
    """
    if not any(
        getattr(getattr(module, "config", None), "enable_fsdp_float8_all_gather", False) for module in model.modules()
    ):
        return
    from torchao.float8 import fsdp_utils, precompute_float8_dynamic_scale_for_fsdp

    fsdp_utils.hp_tensor_and_scale_to_float8 = _to_float8

    def scale(*_: Any) -> None:
        # A step of rate 0 makes the state that a checkpoint is loaded into: the weights are loaded after it.
        if any(group["lr"] for group in optimizer.param_groups):
            precompute_float8_dynamic_scale_for_fsdp(model)

    optimizer.register_step_post_hook(scale)


def _to_float8(tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *config: Any) -> Any:
    """In the place of torchao's `hp_tensor_and_scale_to_float8`, by one kernel where there is one."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, hp_tensor_and_scale_to_float8

    if dtype != torch.float8_e4m3fn or not _has_kernel((tensor,)):
        return hp_tensor_and_scale_to_float8(tensor, scale, dtype, *config)
    from common.triton_kernels import to_e4m3

    return Float8TrainingTensor(to_e4m3(tensor, scale), scale, tensor.dtype, *config)


class _Adafactor(torch.optim.Adafactor):
    """torch's Adafactor, also on the matrices that FSDP2 splits by rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with _SumOverProcesses():
            return super().step(closure)


class _SumOverProcesses(TorchFunctionMode):
    """Finishes norms over the split dimension at once: torch's Adafactor squares them in place, parts cannot be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, DTensor) and any(placement.is_partial() for placement in result.placements):
            replicated = [Replicate() if p.is_partial() else p for p in result.placements]
            return result.redistribute(placements=replicated)
        return result


def learning_rate(args: OptimizerArguments, step: int, num_steps: int, steps_per_epoch: float) -> float:
    """Learning rate of optimizer step `step` (from 0) of `num_steps`.

    Warm-up is linear and never 0; linear and cosine decay end at exactly min_learning_rate in the last step, if warm-up
    leaves them two.
    """
    warmup = _warmup_steps(args, num_steps)
    if step < warmup:
        return args.learning_rate * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, num_steps - 1 - warmup))
    if args.lr_scheduler_type == "linear":
        return args.learning_rate * (1.0 - progress) + args.min_learning_rate * progress
    if args.lr_scheduler_type == "cosine":
        height = 0.5 * (1.0 + math.cos(math.pi * progress))
        return args.learning_rate * height + args.min_learning_rate * (1.0 - height)
    if args.lr_scheduler_type == "step":
        # A full number of epochs behind the step, not a rounded count of steps: epochs need not divide evenly.
        epoch = math.floor(step / steps_per_epoch + 1e-9)
        return max(args.min_learning_rate, args.learning_rate * args.lr_gamma**epoch)
    return args.learning_rate


def _warmup_steps(args: OptimizerArguments, num_steps: int) -> int:
    return round(args.warmup_steps * num_steps) if args.warmup_steps < 1 else round(args.warmup_steps)


def describe_schedule(args: OptimizerArguments, num_steps: int) -> str:
    """The learning rate over the run, for the banner."""
    text = f"{args.lr_scheduler_type}, learning rate {args.learning_rate:g}"
    if args.lr_scheduler_type == "step":
        text += f", times {args.lr_gamma:g} each epoch, at least {args.min_learning_rate:g}"
    elif args.lr_scheduler_type != "constant":
        text += f" to {args.min_learning_rate:g}"
    if warmup := _warmup_steps(args, num_steps):
        text += f" after {warmup:,} steps of warm-up"
        if warmup >= num_steps:
            text += f"; WARNING: never reached in {num_steps:,} steps, lower --warmup_steps"
    return text


def build_scheduler(
    optimizer: torch.optim.Optimizer, args: OptimizerArguments, num_steps: int, steps_per_epoch: float
) -> LambdaLR:
    """Scheduler whose k-th step() sets the rate of optimizer step k; it must not be prepared by accelerate."""
    return LambdaLR(optimizer, lambda step: learning_rate(args, step, num_steps, steps_per_epoch) / args.learning_rate)


@dataclass
class LossScale:
    """Factor on the loss that keeps small fp16 gradients from vanishing; halved on overflow, doubled after a while.

    Not torch's GradScaler: it looks for overflow in this process's gradients alone, and under FSDP each process has
    other pieces. The gradient norm is the same everywhere, and not finite when any piece is not.
    """

    scale: float = 2.0**16
    num_good_steps: int = 0
    growth_interval: int = 2000

    def update(self, is_finite: bool) -> None:
        """Take note of a step whose gradient norm was finite or not."""
        if not is_finite:
            self.scale, self.num_good_steps = self.scale / 2, 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.scale, self.num_good_steps = self.scale * 2, 0
