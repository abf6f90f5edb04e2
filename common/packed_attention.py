"""Attention for rows that hold several sequences: FlexAttention, which leaves out pairs that do not see each other.

All that is not packed, evaluation of single sequences and generation above all, goes through SDPA: FlexAttention is
compiled for some ten seconds at a new shape, and has nothing to leave out there.
"""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.masks import are_packed

NAME = "packed_attention"
MIN_HEAD_SIZE = 16  # FlexAttention has no kernels for smaller ones
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # in transformers' configs


def fits(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether FlexAttention trains the model on the device; it has no dropout and no backward pass on a CPU.

    GPT-2 and others have attention of their own, which transformers does not replace by it.
    """
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    has_dropout = any(getattr(config, name, 0) for name in DROPOUTS)
    return device.type == "cuda" and model._supports_flex_attn and head_size >= MIN_HEAD_SIZE and not has_dropout


def attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attention of transformers' models; the kind of mask decides."""
    forward = flex_attention_forward if isinstance(attention_mask, BlockMask) else sdpa_attention_forward
    return forward(module, query, key, value, attention_mask, **kwargs)


def attention_mask(*args: Any, **kwargs: Any) -> BlockMask | torch.Tensor | None:
    """transformers' mask: of blocks where rows are known to be packed."""
    return (masking_utils.flex_attention_mask if are_packed() else masking_utils.sdpa_mask)(*args, **kwargs)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
