"""Summed cross-entropy; the loop divides it by the number of target tokens in the whole global batch."""

import torch
import torch.nn.functional as F
from torch import nn

IGNORE_INDEX = -100  # label of positions that are no targets: padding, prompts


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of token losses, 0-dim, in float32 or better.

    logits: (..., vocabulary); labels: (...), the target of the same position, -100 where there is none.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Summed loss of a micro-batch for causal and encoder-decoder models, whose labels stand at their own position."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    # The model gets no labels: it would compute a second loss, as a mean over this micro-batch.
    return cross_entropy_sum(model(**inputs, use_cache=False).logits, batch["labels"])
