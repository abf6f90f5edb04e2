"""Summed cross-entropy; the loop divides it by the number of target tokens in the whole global batch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.arguments import UserError
from common.masks import packed_sequences

CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

IGNORE_INDEX = -100  # label of positions that are no targets: padding, prompts


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of token losses, 0-dim, in float32 or better.

    logits: (..., vocabulary); labels: (...), the target of the same position, -100 where there is none.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


class HeadLoss:
    """Stands in for a head's forward: while `labels` are set it gives the summed loss in place of logits.

    The logits of `chunk_tokens` positions exist at a time; the backward pass computes them again, at the price of one
    more product with the head's weight. Inside the head, because a sharded head's weight is gathered only there.
    """

    def __init__(self, forward: Callable[..., Any], cross_entropy: CrossEntropy, chunk_tokens: int) -> None:
        self.labels: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self._forward = forward
        self._cross_entropy = cross_entropy
        self._chunk_tokens = chunk_tokens

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (batch, sequence, width)."""
        if self.labels is None:
            logits: torch.Tensor = self._forward(hidden)
            return logits
        assert hidden.shape[:-1] == self.labels.shape, f"{tuple(hidden.shape)} for labels {tuple(self.labels.shape)}"
        num_chunks = math.ceil(self.labels.numel() / self._chunk_tokens)
        chunks = zip(
            hidden.flatten(0, -2).tensor_split(num_chunks), self.labels.flatten().tensor_split(num_chunks), strict=True
        )
        losses = [
            checkpoint(self._chunk_loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
        ]
        self.loss = torch.stack(losses).sum()
        return self.loss

    def _chunk_loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._cross_entropy(self._forward(hidden), labels)


@dataclass
class _Loss:
    cross_entropy: CrossEntropy = cross_entropy_sum
    head: HeadLoss | None = None


_PLAIN = _Loss()
_LOSSES: WeakKeyDictionary[nn.Module, _Loss] = WeakKeyDictionary()


def set_training_loss(
    model: nn.Module, head: nn.Module, chunk_tokens: int | None, compile_options: Mapping[str, Any] | None
) -> None:
    """How `token_loss` computes the loss in training; equal to the plain one up to rounding.

    compile_options: cross-entropy compiled, so that logits are never converted to float32 in memory. chunk_tokens: at
    most the logits of so many positions at a time.
    """
    loss = _Loss()
    if compile_options:
        loss.cross_entropy = torch.compile(cross_entropy_sum, **compile_options)
    if chunk_tokens:
        loss.head = HeadLoss(head.forward, loss.cross_entropy, chunk_tokens)
        head.forward = loss.head
    _LOSSES[model] = loss


def compute_logits(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits of a micro-batch, whose `labels` stay outside: the model would compute a mean of its own."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with packed_sequences("position_ids" in batch):
        logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Summed loss of a micro-batch for causal and encoder-decoder models, whose labels stand at their own position."""
    loss = _LOSSES.get(model, _PLAIN) if model.training else _PLAIN
    if loss.head is not None:
        loss.head.labels = batch["labels"]
    try:
        result = compute_logits(model, batch)
    finally:
        if loss.head is not None:
            loss.head.labels = None
    if loss.head is None:
        return loss.cross_entropy(result, batch["labels"])
    if result is not loss.head.loss:
        raise UserError(
            "--loss_chunk_tokens takes the loss in the model's head, and this model changes the head's output (a scale "
            "or a soft cap of the logits); drop the flag."
        )
    return result
