"""How much device memory the state of a training run takes under each strategy, before it is paid for.

Parameters, their gradients and the optimizer's state follow from the model's shapes exactly; what is gathered for
computing follows from the units that are in use at the same time. Activations (common/activations.py counts them), the
allocator's slack (a few percent) and the CUDA context (about half a GiB) come on top and are in none of the numbers.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from common.accelerate_config import SHIPPED, read_config

GIB = 2**30
# Part of a device's memory that the state may take, so that activations have the rest.
FITTING_FRACTION = 0.8
# Part of it that no tensor gets: the allocator's slack, CUDA's context, the buffers of NCCL and of matrix products.
RESERVED_FRACTION = 0.1
# What an answer to running out of memory looks for, the fastest first; the other shipped YAMLs take what one of these
# does, or differ in the links between machines alone.
CANDIDATES = ("ddp", "fsdp_shard_grad_op", "fsdp_full_shard", "fsdp_full_shard_offload")
MAX_DEVICES = 1024  # that a larger number is looked for among


@dataclass(frozen=True)
class ModelSize:
    """The shapes of the trainable parameters, and the sizes of the units that they are gathered in."""

    shapes: tuple[tuple[int, ...], ...]
    largest_unit: int
    """Parameters of the largest unit: a block, or blocks that are gathered together."""
    rest: int
    """Parameters outside the blocks."""
    largest_table: int = 0
    """Of them, those of the largest unit: embedding or head, or all where these are tied."""

    @classmethod
    def of(cls, model: nn.Module, blocks: Iterable[nn.Module], blocks_per_unit: int = 1) -> "ModelSize":
        """Of a model that is not yet sharded (its parameters may be on the meta device), and its blocks."""
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
        units = [sum(sizes[start : start + blocks_per_unit]) for start in range(0, len(sizes), blocks_per_unit)]
        shapes = tuple(tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad)
        rest = max(sum(math.prod(shape) for shape in shapes) - sum(units), 0)
        tables = []
        if isinstance(model, PreTrainedModel):
            ends = model.get_input_embeddings(), model.get_output_embeddings()
            tables = [end.weight for end in ends if end is not None]
        is_untied = len({id(table) for table in tables}) == 2
        largest_table = max(table.numel() for table in tables) if is_untied else rest
        return cls(shapes, max(units, default=0), rest, largest_table)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def per_device(self, num_shards: int) -> int:
        """Parameters on the device that has most of them: FSDP2 splits each by rows, the first devices get more."""
        rows = ((shape[0], math.prod(shape[1:])) if shape else (1, 1) for shape in self.shapes)
        return sum(math.ceil(length / num_shards) * width for length, width in rows)


@dataclass(frozen=True)
class Layout:
    """How a strategy spreads a model's state over the devices."""

    num_shards: int
    """Devices that share one copy of the state; 1: each has a whole one."""
    gathered: Literal["none", "units", "all"]
    """What is there in the compute type besides: nothing but autocast's copies, the units in use, or all of them."""
    is_offloaded: bool = False
    """Parameters, gradients and optimizer are in host memory."""
    num_shared: float = 0.0
    """Buffers by which units communicate within a machine (common/peer_copies.py), in sizes of the largest unit."""

    @classmethod
    def of_yaml(cls, plan: Mapping[str, Any], num_processes: int, num_per_machine: int | None = None) -> "Layout":
        """Of an accelerate YAML as `accelerate_config.read_config` reads it, with so many processes."""
        per_machine = num_per_machine or num_processes
        plan = {**plan, **plan.get("fsdp_config", {}), **plan.get("parallelism_config", {})}
        if plan.get("distributed_type") != "FSDP":
            return cls(1, "none")
        is_offloaded = bool(plan.get("fsdp_offload_params"))
        if str(plan.get("fsdp_version", 1)) == "2":
            replicas = int(plan.get("parallelism_config_dp_replicate_size") or 1)
            gathered: Literal["units", "all"] = "units" if plan.get("fsdp_reshard_after_forward", True) else "all"
            num_shards = max(num_processes // replicas, 1)
            copies = num_shards > 1 and per_machine % num_shards == 0 and not is_offloaded
            copies = copies and plan.get("mixed_precision") in ("bf16", "fp16", "fp8")
            return cls(num_shards, gathered, is_offloaded, 2.0 if copies else 0.0)
        return cls.of_fsdp1(str(plan.get("fsdp_sharding_strategy")), num_processes, per_machine, is_offloaded)

    @classmethod
    def of_fsdp1(cls, sharding_strategy: str, num_processes: int, num_per_machine: int, is_offloaded: bool) -> "Layout":
        """Of FSDP1's names; its hybrids shard within a machine."""
        match sharding_strategy:
            case "NO_SHARD":
                return cls(1, "units", is_offloaded)
            case "SHARD_GRAD_OP":
                return cls(num_processes, "all", is_offloaded)
            case "HYBRID_SHARD":
                return cls(num_per_machine, "units", is_offloaded)
            case "HYBRID_SHARD_ZERO2" | "_HYBRID_SHARD_ZERO2":
                return cls(num_per_machine, "all", is_offloaded)
        return cls(num_processes, "units", is_offloaded)


@dataclass(frozen=True)
class Types:
    """Bytes of a number: of a parameter, in computing, in summing gradients; and the optimizer's name."""

    parameter: int = 4
    compute: int = 2
    reduce: int = 4
    optim: str = "adamw"


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device; `host`: in the memory of its process."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered


def estimate(size: ModelSize, layout: Layout, types: Types) -> Estimate:
    """State of a training run on the device that has most of it.

    AdamW and Adadelta keep two numbers of the parameters' type for each, Adafactor rows and columns (counted as none).
    Gathered, with FSDP: what is outside the blocks; two units, the one in use and the next; and the gradient of one
    before it is summed, in the compute type and in that of the sum. Where units communicate by copies, the buffers for
    them as well, which stay. Without FSDP: autocast's copy of every weight.
    """
    local = size.per_device(layout.num_shards)
    num_moments = {"adamw": 2, "adadelta": 2, "adafactor": 0}[types.optim]
    parameters = gradients = local * types.parameter
    optimizer = num_moments * parameters
    if layout.gathered == "none":
        gathered = size.num_parameters * types.compute if types.compute != types.parameter else 0
    else:
        units = size.rest + 2 * size.largest_unit if layout.gathered == "units" else size.num_parameters
        gathered = min(units, size.num_parameters) * types.compute
        gathered += size.largest_unit * (types.compute + types.reduce)
        gathered += round(layout.num_shared * max(size.largest_unit, size.largest_table)) * types.compute
    if layout.is_offloaded:
        return Estimate(0, 0, 0, gathered, host=parameters + gradients + optimizer)
    return Estimate(parameters, gradients, optimizer, gathered)


def fits(state: Estimate, device_bytes: int) -> bool:
    """Whether the state leaves a fifth of the device for activations."""
    return state.total <= FITTING_FRACTION * device_bytes


@dataclass(frozen=True)
class Activations:
    """Bytes that sequences take on a device besides the state.

    Up to `num_equal` sequences each takes `one`, beyond them all take `fixed` and each `more`: the logits of
    --loss_chunk_tokens positions are there once, however many sequences there are.
    """

    one: int
    more: int
    fixed: int = 0
    num_equal: int = 1

    @classmethod
    def count(cls, peak_bytes: Callable[[int], int], num_tokens: int, loss_chunk_tokens: int | None) -> "Activations":
        """peak_bytes: of so many sequences of `num_tokens` targets."""
        one = peak_bytes(1)
        if loss_chunk_tokens is None:
            return cls(one, one)
        number = math.ceil(loss_chunk_tokens / num_tokens)
        first = peak_bytes(number)
        more = (peak_bytes(2 * number) - first) // number
        return cls(one, more, first - number * more, number)

    def divided(self, number: int) -> "Activations":
        """Of sequences that so many devices share."""
        return replace(self, one=self.one // number, more=self.more // number, fixed=self.fixed // number)


def largest_batch(state: Estimate, activations: Activations, device_bytes: int) -> int:
    """Sequences that a device can take at a time beside the state; 0: none."""
    room = int((1 - RESERVED_FRACTION) * device_bytes) - state.total
    few = min(room // max(1, activations.one), activations.num_equal)
    return max(0, few, (room - activations.fixed) // max(1, activations.more))


@dataclass(frozen=True)
class Run:
    """The run of this process, as far as an answer to running out of memory needs it."""

    size: ModelSize
    layout: Layout
    types: Types
    strategy: str
    """In words."""
    num_processes: int
    per_device_batch_size: int | None
    recomputes: bool
    """Activation checkpointing is on."""


# Set once the model's shape and the strategy are known.
current_run: Run | None = None


def explain(error: torch.OutOfMemoryError) -> str:
    """One line on a device that ran out of memory: what was asked for, what there was, what fits."""
    asked = " ".join(str(error).split(" If reserved but")[0].split())
    device_bytes = torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else None
    if current_run is None or device_bytes is None:
        return f"out of device memory: {asked}"
    return f"out of device memory: {asked} {advise(current_run, device_bytes)}"


def advise(run: Run, device_bytes: int) -> str:
    """What the state of the run takes on a device of that size, and what to change."""
    state = estimate(run.size, run.layout, run.types)
    text = (
        f"The state alone of {run.size.num_parameters / 1e9:,.2f}B parameters takes {_gib(state.total)} of the "
        f"device's {_gib(device_bytes)} ({run.strategy}): parameters {_gib(state.parameters)}, gradients "
        f"{_gib(state.gradients)}, {run.types.optim} {_gib(state.optimizer)}, gathered {_gib(state.gathered)}; "
        "activations come on top. "
    )
    if fits(state, device_bytes):
        smaller = []
        if run.per_device_batch_size != 1:
            smaller.append("lower --per_device_train_batch_size (the total batch stays) or the sequence length")
        else:
            smaller.append("shorten the sequences")
        if not run.recomputes:
            smaller.append("switch on activation checkpointing (fsdp_activation_checkpointing in the YAML)")
        return text + f"That fits, activations do not: {', or '.join(smaller)}."
    fitting = [
        f"{name} ({_gib(needed.total)})"
        for name in CANDIDATES
        if fits(needed := _with_yaml(run, name, run.num_processes), device_bytes) and needed.total < state.total
    ]
    if fitting:
        return text + f"With {_devices(run.num_processes)} these fit: --config_file of {', '.join(fitting)}."
    number = run.num_processes
    while number <= MAX_DEVICES:
        number *= 2
        if fits(needed := _with_yaml(run, "fsdp_full_shard", number), device_bytes):
            return text + f"fsdp_full_shard fits with {_devices(number)} ({_gib(needed.total)})."
    return text + "No shipped YAML fits on such devices, however many: the units alone are too large."


def _with_yaml(run: Run, name: str, num_processes: int) -> Estimate:
    layout = Layout.of_yaml(read_config(SHIPPED / f"{name}.yaml"), num_processes)
    return estimate(run.size, layout, run.types)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"


def _devices(number: int) -> str:
    return f"{number} device{'s' if number > 1 else ''}"
