"""Context parallelism: the processes of a group work on the same sequences, each on a slice of them.

Attention alone needs the other slices: keys and values are gathered from the group once a layer, as Llama 3 was trained
(arXiv:2407.21783, section 3.3.2); their gradients go back the same way and are summed. Everything else sees a batch of
shorter sequences, so counts, losses and gradients add up over all processes as they do without. torch's own
`context_parallel`, which accelerate's `maybe_context_parallel` calls, is ring attention of CUDA kernels: it has none
for a CPU or for float64, so that it could neither be rehearsed nor compared exactly.
"""

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator

# Private, seen in torch 2.11-2.13, where the public gathers with a gradient change their names.
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from transformers import AttentionInterface, PreTrainedModel

from common.arguments import UserError
from common.data import Batch, Collator, Row
from common.losses import IGNORE_INDEX

ATTENTION = "context_parallel"  # its name among transformers' attention functions


def context_size(accelerator: Accelerator) -> int:
    """Processes that share a sequence; 1 without context parallelism."""
    config = accelerator.parallelism_config
    return config.cp_size if config else 1


def data_parallel(accelerator: Accelerator) -> tuple[int, int]:
    """(index, number) of this process among those that have batches of their own: its group among the groups."""
    size = context_size(accelerator)
    return accelerator.process_index // size, accelerator.num_processes // size


def sliced(collate_fn: Collator, accelerator: Accelerator) -> Collator:
    """The collator, or with context parallelism one whose batches are this process's slices of its batches."""
    size = context_size(accelerator)
    return _SliceCollator(collate_fn, accelerator.process_index % size, size) if size > 1 else collate_fn


class _SliceCollator:
    """Cuts each batch of `input_ids` and `labels` (at their own position) along the sequence; adds `position_ids`.

    The sequence is cut into 2 x size chunks, and process i takes the i-th from the front and the i-th from the back:
    under causal attention all then have the same work. A length that cannot be cut so is padded at its end, where no
    token looks and no target is.
    """

    def __init__(self, collate_fn: Collator, rank: int, size: int) -> None:
        self._collate_fn, self._rank, self._size = collate_fn, rank, size

    def __call__(self, rows: list[Row]) -> Batch:
        batch = self._collate_fn(rows)
        assert batch.keys() == {"input_ids", "labels"}, f"cannot be sliced: {sorted(batch)}"
        num_rows, length = batch["labels"].shape
        chunk = math.ceil(length / (2 * self._size))
        padding = (0, 2 * self._size * chunk - length)
        starts = (chunk * index for index in _chunk_indices(self._rank, self._size))
        positions = torch.cat([torch.arange(start, start + chunk) for start in starts])
        return {
            "input_ids": F.pad(batch["input_ids"], padding)[:, positions],
            "labels": F.pad(batch["labels"], padding, value=IGNORE_INDEX)[:, positions],
            "position_ids": positions.clamp(max=length - 1).repeat(num_rows, 1),
        }


def _chunk_indices(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


def model_problem(model: PreTrainedModel) -> str | None:
    """Why the model cannot be trained on slices: its attention has to be plain causal and to take another function."""
    name, config = type(model).__name__, model.config
    problem = None
    if config.is_encoder_decoder:
        problem = "an encoder-decoder model"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        problem = "not told the positions of a slice"
    elif config._attn_implementation not in ("sdpa", None):
        problem = f"set to {config._attn_implementation} attention instead of sdpa (--attn_implementation)"
    else:
        # The older configs know a window and no types of layers.
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * bool(
            getattr(config, "sliding_window", None)
        )
        if others := sorted(set(types) - {"full_attention"}):
            problem = f"a model with {', '.join(others)}"
    if problem is None:
        return None
    return (
        f"context parallelism needs plain causal attention, and {name} is {problem}; take another YAML, such as "
        "fsdp_full_shard.yaml"
    )


def slice_attention(model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Make the model's attention take each process's sequences for its slices of them; collective."""
    size = context_size(accelerator)
    shape = (dist.get_world_size() // size, size)
    group = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("data", "context")).get_group("context")
    attention = functools.partial(_attention, group=group, rank=dist.get_rank(group), size=size)
    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)
    if model.config._attn_implementation != ATTENTION:
        raise UserError(
            f"parallelism_config_cp_size: the attention of {type(model).__name__} cannot be replaced; take another "
            "YAML, such as fsdp_full_shard.yaml."
        )


@contextmanager
def whole_sequences(model: PreTrainedModel) -> Iterator[None]:
    """The model's attention without the other processes, for generation, which is not sliced."""
    is_sliced = model.config._attn_implementation == ATTENTION
    if is_sliced:
        model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        if is_sliced:
            model.set_attn_implementation(ATTENTION)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    group: dist.ProcessGroup,
    rank: int,
    size: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of this process's queries to the keys and values of the whole group.

    query, key, value: (batch, heads, slice, width), as transformers' attention functions have them.
    Returns (batch, slice, heads, width).
    """
    assert attention_mask is None
    keys, values = _gather(torch.stack((key, value)), group, size)
    chunk = query.shape[-2] // 2
    outputs = []
    for part, index in zip(query.chunk(2, dim=-2), _chunk_indices(rank, size), strict=True):
        end = (index + 1) * chunk
        outputs.append(_attend_to_past(part, keys[:, :, :end], values[:, :, :end], dropout, scaling))
    return torch.cat(outputs, dim=-2).transpose(1, 2), None


def _gather(local: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
    """Slices (..., slice, width) of all processes as (..., sequence, width) in the order of the sequence.

    As an exchange of equal parts, whose gradient is one too: the processes' gradients are added up in a fixed order.
    """
    copies = local.expand(size, *local.shape).contiguous()
    slices = all_to_all_single_autograd(copies, [1] * size, [1] * size, group)
    front, back = slices.unflatten(-2, (2, -1)).unbind(-3)
    return torch.cat((front, back.flip(0))).movedim(0, -3).flatten(-3, -2)


def _attend_to_past(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scale: float | None
) -> torch.Tensor:
    """Causal attention of the last positions of a sequence to all of it: query i sees the keys up to its own."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    is_gqa = query.shape[1] != key.shape[1]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0:
        # Causal for this operator alone ends at the last key; torch's own `causal_lower_right` calls it in the same
        # way (seen in 2.11-2.13) and cannot be made inside a compiled region. Key heads may be fewer.
        output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, is_causal=True, scale=scale
        )[0]
        return output
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale, enable_gqa=is_gqa)
