"""Fused attention with a learned bias and dropout, which T5 is slow without.

Of torch's kernels only the memory-efficient one learns a bias, and its backward pass takes three times as long as the
one below (measured: benchmarks/t5_attention.py); cuDNN's refuses such a bias, FlexAttention has no dropout. The scores'
gradients are written out (batch x heads x queries x keys) while a layer's backward pass runs, and summed over the
batch: in a fixed order, so that runs are repeatable.
"""

import importlib.util
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.masks import padding_mask

NAME = "bias_attention"
OPERATOR = "recipes::bias_attention"
HEAD_SIZES = (16, 32, 64, 128)
# The fastest of a dozen sizes for T5-3B's three attentions on an H200.
FORWARD = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
BACKWARD = {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
QUERIES = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


def is_available(device: torch.device) -> bool:
    """Whether the kernels can run: on NVIDIA's GPUs, with Triton, which torch brings there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def bias_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scale: float = 1.0,
    is_causal: bool = False,
) -> torch.Tensor:
    """softmax(scale q k^T + bias) v, (batch, queries, heads, head size), with dropout of the softmax's weights.

    q, k, v: (batch, heads, queries or keys, head size). bias: (1, heads, queries, keys). mask: boolean, (batch, 1,
    queries or 1, keys), True where a key is seen. A query that sees no key gets zeros.
    """
    seeds = torch.randint(2**31 - 1, q.shape[:3], device=q.device, dtype=torch.int32) if dropout else None
    output: torch.Tensor = _attend(q, k, v, bias, mask, seeds, dropout, scale, is_causal)[0]
    return output


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' models: in training by the kernels, where they do not fit by torch's."""
    if not (
        module.training
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] in HEAD_SIZES
        and query.shape[:2] == key.shape[:2]
        and (position_bias is None or position_bias.shape[0] == 1)
        and (attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1))
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **kwargs
        )
    is_causal = attention_mask is None and bool(getattr(module, "is_causal", False))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return bias_attention(query, key, value, position_bias, attention_mask, dropout, scale, is_causal), None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, padding_mask)


@torch.library.custom_op(OPERATOR, mutates_args=())
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seeds: torch.Tensor | None,
    dropout: float,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from common import triton_attention as kernels

    q, k, v, bias, mask = _rows_in_memory(q, k, v, bias, mask)
    batch, heads, num_queries, size = q.shape
    output = q.new_empty(batch, num_queries, heads, size)
    sums = q.new_empty(batch, heads, num_queries, dtype=torch.float32)
    kernels.attention_forward[-(-num_queries // FORWARD["BLOCK_M"]), batch * heads](
        q, k, v, bias, mask, seeds, output, sums, *_numbers(q, k, v, bias, mask, dropout, scale, is_causal),
        D=size, **FORWARD,
    )  # fmt: skip
    return output, sums


@_attend.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, mask: Any, seeds: Any, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, num_queries, size = q.shape
    return q.new_empty(batch, num_queries, heads, size), q.new_empty(batch, heads, num_queries, dtype=torch.float32)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _gradients(
    grad: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seeds: torch.Tensor | None,
    dropout: float,
    scale: float,
    is_causal: bool,
    learns_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from common import triton_attention as kernels

    grad = grad.contiguous()
    q, k, v, bias, mask = _rows_in_memory(q, k, v, bias, mask)
    (batch, heads, num_queries, size), num_keys = q.shape, k.shape[2]
    delta = torch.empty_like(sums)
    kernels.attention_rows[-(-num_queries // 64), batch * heads](
        output, grad, delta, heads, num_queries, D=size, BLOCK_M=64
    )
    # Blocks of scores that causal attention never sees are not visited.
    new = q.new_zeros if is_causal else q.new_empty
    grad_scores = new(batch, heads, num_queries, num_keys)
    grad_q, grad_k, grad_v = (q.new_empty(batch, tensor.shape[2], heads, size) for tensor in (q, k, v))
    kernels.attention_backward[-(-num_keys // BACKWARD["BLOCK_N"]), batch * heads](
        q, k, v, bias, mask, seeds, grad, sums, delta, grad_scores, grad_k, grad_v,
        *_numbers(q, k, v, bias, mask, dropout, scale, is_causal),
        D=size, **BACKWARD,
    )  # fmt: skip
    kernels.attention_query_gradients[-(-num_queries // QUERIES["BLOCK_M"]), batch * heads](
        grad_scores, k, grad_q, *k.stride()[:3], heads, num_queries, num_keys, scale, is_causal, D=size, **QUERIES
    )
    grad_bias = q.new_empty(0)
    if bias is not None and learns_bias:
        grad_bias = grad_scores.sum(0, keepdim=True, dtype=bias.dtype)  # float32 under autocast
    return grad_q.transpose(1, 2), grad_k.transpose(1, 2), grad_v.transpose(1, 2), grad_bias


@_gradients.register_fake
def _(
    grad: Any, output: Any, sums: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, mask: Any,
    seeds: Any, dropout: float, scale: float, is_causal: bool, learns_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, heads, num_queries, size = q.shape
    grad_q, grad_k, grad_v = (q.new_empty(batch, x.shape[2], heads, size).transpose(1, 2) for x in (q, k, k))
    grad_bias = bias.new_empty(1, heads, num_queries, k.shape[2]) if learns_bias else q.new_empty(0)
    return grad_q, grad_k, grad_v, grad_bias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.dropout, ctx.scale, ctx.is_causal = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    learns_bias = ctx.needs_input_grad[3]
    grads = _gradients(grad, *ctx.saved_tensors, ctx.dropout, ctx.scale, ctx.is_causal, learns_bias)
    return *grads[:3], grads[3] if learns_bias else None, *(None,) * 5


_attend.register_autograd(_backward, setup_context=_setup_context)


def _rows_in_memory(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors with the values of a row next to each other, as the kernels read them."""
    return [tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def _numbers(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float,
    is_causal: bool,
) -> tuple[Any, ...]:
    """The kernels' arguments that both passes have: strides, sizes, rates and which parts there are."""
    strides = [stride for tensor in (q, k, v) for stride in tensor.stride()[:3]]
    strides += bias.stride()[1:3] if bias is not None else (0, 0)
    strides += (mask.stride(0), mask.stride(2) if mask.shape[2] > 1 else 0) if mask is not None else (0, 0)
    threshold = round(dropout * 2**24)
    return (
        *strides, q.shape[1], q.shape[2], k.shape[2], scale, threshold, 1 / (1 - threshold / 2**24),
        bias is not None, mask is not None, is_causal, threshold > 0,
    )  # fmt: skip
