"""Attention masks without waiting for the device.

transformers looks at the values of positions and padding in each forward pass, to leave out masks that hide nothing. On
a GPU the host then waits for all that was queued before, and the GPU afterwards for the host. Here it is known from the
batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils

_find_by_values = masking_utils.find_packed_sequence_indices
_is_packed: bool | None = None  # None: not known, transformers looks
_was_asked = False  # whether a model's mask was made of positions, within `packed_sequences(True)`
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}  # of the configs' layer_types


def _find_packed_sequences(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Number of the sequence that each position is of, (batch, length); None: one sequence a row."""
    if _is_packed is None:
        found: torch.Tensor | None = _find_by_values(position_ids)
        return found
    if not _is_packed:
        return None
    global _was_asked
    _was_asked = True
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


masking_utils.find_packed_sequence_indices = _find_packed_sequences


def are_packed() -> bool:
    """Whether rows are known to hold several sequences: within `packed_sequences(True)`."""
    return _is_packed is True


@contextmanager
def packed_sequences(is_packed: bool) -> Iterator[None]:
    """Within, rows of models' inputs hold several sequences, which positions that begin anew tell apart, or one."""
    global _is_packed
    before, _is_packed = _is_packed, is_packed
    try:
        yield
    finally:
        _is_packed = before


def keeps_sequences_apart(model: PreTrainedModel) -> bool:
    """Whether the sequences of a packed row do not see each other; the model is on the meta device.

    They do where the mask does not come from the positions that the model is given (OPT, Bloom), and in layers that are
    no attention: convolutions and recurrences.
    """
    global _was_asked
    if set(getattr(model.config, "layer_types", None) or ()) - _ATTENTION_LAYERS:
        return False
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return False
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    _was_asked = False
    # Masks come first; what a layer cannot do without contents comes too late to matter.
    with packed_sequences(True), torch.no_grad(), suppress(Exception):
        model(input_ids=ids, position_ids=ids, use_cache=False)
    return _was_asked


def padding_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask for SDPA, also where there is no padding; for kernels that are as fast with a mask."""
    if attention_mask is not None:
        kwargs["allow_is_bidirectional_skip"] = False
    mask: torch.Tensor | None = masking_utils.sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    return mask
