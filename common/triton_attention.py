"""Triton kernels of `common.bias_attention`: softmax(scale q k^T + bias) v with dropout, and its gradients.

Tiled and with an online softmax as in FlashAttention-2 (Dao 2023). Exponents are to the base of 2.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def is_kept(rows, columns, threshold):
    """Dropout's mask: 24 bits of a hash for each pair of a row's seed and a column, at least the threshold.

    The mixing function is lowbias32 (Wellons 2018). Philox for each pair would cost as much as the products.
    """
    x = rows + columns.to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> 8).to(tl.int32) >= threshold


@triton.jit
def finish_scores(
    products, bias, mask, rows, columns, bias_row, mask_row, num_queries, num_keys,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Exponents of the softmax's weights out of a tile of scaled products, with bias and mask of their batch and head.

    rows and columns are the tile's queries and keys, one along each of its sides.
    """
    is_seen = (rows < num_queries) & (columns < num_keys)
    is_pair = is_seen
    scores = products * LOG2_E
    if HAS_BIAS:
        scores += tl.load(bias + rows * bias_row + columns, mask=is_pair, other=0.0).to(tl.float32) * LOG2_E
    if HAS_MASK:
        is_seen &= tl.load(mask + rows * mask_row + columns, mask=is_pair, other=0) != 0
    if IS_CAUSAL:
        is_seen &= rows >= columns
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit
def attention_forward(
    q, k, v, bias, mask, seeds, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, bias_head, bias_row, mask_batch, mask_row,
    num_heads, num_queries, num_keys, scale, threshold, upscale,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows: output (batch, queries, heads, D) and logarithms of the softmax's sums (batch, heads, queries)."""
    pair = tl.program_id(1)
    batch, head = (pair // num_heads).to(tl.int64), pair % num_heads
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns, dims = tl.arange(0, BLOCK_N), tl.arange(0, D)
    is_row = rows < num_queries
    queries = tl.load(
        q + batch * q_batch + head * q_head + rows[:, None] * q_row + dims[None, :], mask=is_row[:, None], other=0.0
    )
    if HAS_DROPOUT:
        numbers = tl.load(seeds + pair * num_queries + rows, mask=is_row, other=0).to(tl.uint32)
    if HAS_BIAS:
        bias += head.to(tl.int64) * bias_head
    if HAS_MASK:
        mask += batch * mask_batch
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, D], tl.float32)
    end = num_keys
    if IS_CAUSAL:
        end = tl.minimum(num_keys, (tl.program_id(0) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        keys_at = start + columns
        is_key = keys_at < num_keys
        keys = tl.load(
            k + batch * k_batch + head * k_head + keys_at[None, :] * k_row + dims[:, None],
            mask=is_key[None, :], other=0.0,
        )  # fmt: skip
        scores = finish_scores(
            tl.dot(queries, keys) * scale, bias, mask, rows[:, None], keys_at[None, :], bias_row, mask_row,
            num_queries, num_keys, HAS_BIAS, HAS_MASK, IS_CAUSAL,
        )  # fmt: skip
        highest = tl.maximum(largest, tl.max(scores, 1))
        offset = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen nothing yet
        shrink = tl.exp2(largest - offset)
        weights = tl.exp2(scores - offset[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if HAS_DROPOUT:
            weights = tl.where(is_kept(numbers[:, None], keys_at[None, :], threshold), weights, 0.0)
        values = tl.load(
            v + batch * v_batch + head * v_head + keys_at[:, None] * v_row + dims[None, :],
            mask=is_key[:, None], other=0.0,
        )  # fmt: skip
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None])
        largest = highest
    is_empty = total == 0.0  # nothing to see: 0, and infinity makes all weights 0 in the backward pass
    sums = sums * (upscale / tl.where(is_empty, 1.0, total))[:, None]
    at = out + ((batch * num_queries + rows[:, None]) * num_heads + head) * D + dims[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_row[:, None])
    tl.store(lse + pair * num_queries + rows, tl.where(is_empty, float("inf"), largest + tl.log2(total)), mask=is_row)


@triton.jit
def attention_rows(out, grad, delta, num_heads, num_queries, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """(batch, heads, queries): products of each output row with its gradient, which is what the softmax subtracts."""
    pair = tl.program_id(1)
    batch, head = (pair // num_heads).to(tl.int64), pair % num_heads
    rows, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    at = ((batch * num_queries + rows[:, None]) * num_heads + head) * D + dims[None, :]
    is_row = (rows < num_queries)[:, None]
    products = tl.load(out + at, mask=is_row, other=0.0).to(tl.float32)
    products *= tl.load(grad + at, mask=is_row, other=0.0).to(tl.float32)
    tl.store(delta + pair * num_queries + rows, tl.sum(products, 1), mask=rows < num_queries)


@triton.jit
def attention_backward(
    q, k, v, bias, mask, seeds, grad, lse, delta, grad_scores, grad_k, grad_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, bias_head, bias_row, mask_batch, mask_row,
    num_heads, num_queries, num_keys, scale, threshold, upscale,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_N keys and values (batch, keys, heads, D) and of their scores (batch, heads, queries, keys).

    Tiles of scores have keys as rows: they are then in registers as the products with queries and gradients need them.
    """
    pair = tl.program_id(1)
    batch, head = (pair // num_heads).to(tl.int64), pair % num_heads
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, D)
    is_key = columns < num_keys
    keys = tl.load(
        k + batch * k_batch + head * k_head + columns[:, None] * k_row + dims[None, :], mask=is_key[:, None], other=0.0
    )
    values = tl.load(
        v + batch * v_batch + head * v_head + columns[:, None] * v_row + dims[None, :], mask=is_key[:, None], other=0.0
    )
    if HAS_BIAS:
        bias += head.to(tl.int64) * bias_head
    if HAS_MASK:
        mask += batch * mask_batch
    sum_k = tl.zeros([BLOCK_N, D], tl.float32)
    sum_v = tl.zeros([BLOCK_N, D], tl.float32)
    begin = 0
    if IS_CAUSAL:
        begin = (tl.program_id(0) * BLOCK_N) // BLOCK_M * BLOCK_M
    for start in range(begin, num_queries, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        is_row = rows < num_queries
        queries = tl.load(
            q + batch * q_batch + head * q_head + rows[:, None] * q_row + dims[None, :], mask=is_row[:, None], other=0.0
        )
        scores = finish_scores(
            tl.dot(keys, tl.trans(queries)) * scale, bias, mask, rows[None, :], columns[:, None], bias_row, mask_row,
            num_queries, num_keys, HAS_BIAS, HAS_MASK, IS_CAUSAL,
        )  # fmt: skip
        sums = tl.load(lse + pair * num_queries + rows, mask=is_row, other=float("inf"))
        weights = tl.exp2(scores - sums[None, :])
        at = grad + ((batch * num_queries + rows[:, None]) * num_heads + head) * D + dims[None, :]
        upstream = tl.load(at, mask=is_row[:, None], other=0.0)
        grad_weights = tl.dot(values, tl.trans(upstream))
        dropped = weights
        if HAS_DROPOUT:
            numbers = tl.load(seeds + pair * num_queries + rows, mask=is_row, other=0).to(tl.uint32)
            keep = is_kept(numbers[None, :], columns[:, None], threshold)
            dropped = tl.where(keep, weights * upscale, 0.0)
            grad_weights = tl.where(keep, grad_weights * upscale, 0.0)
        sum_v = tl.dot(dropped.to(upstream.dtype), upstream, sum_v)
        products = tl.load(delta + pair * num_queries + rows, mask=is_row, other=0.0)
        grads = (weights * (grad_weights - products[None, :])).to(queries.dtype)
        at = grad_scores + (pair.to(tl.int64) * num_queries + rows[None, :]) * num_keys + columns[:, None]
        tl.store(at, grads, mask=is_key[:, None] & is_row[None, :])
        sum_k = tl.dot(grads, queries, sum_k)
    at = ((batch * num_keys + columns[:, None]) * num_heads + head) * D + dims[None, :]
    tl.store(grad_k + at, (sum_k * scale).to(grad_k.dtype.element_ty), mask=is_key[:, None])
    tl.store(grad_v + at, sum_v.to(grad_v.dtype.element_ty), mask=is_key[:, None])


@triton.jit
def attention_query_gradients(
    grad_scores, k, grad_q, k_batch, k_head, k_row, num_heads, num_queries, num_keys, scale,
    IS_CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_M queries (batch, queries, heads, D): their scores' gradients times the keys."""
    pair = tl.program_id(1)
    batch, head = (pair // num_heads).to(tl.int64), pair % num_heads
    rows, dims = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    is_row = (rows < num_queries)[:, None]
    sums = tl.zeros([BLOCK_M, D], tl.float32)
    end = num_keys
    if IS_CAUSAL:
        end = tl.minimum(num_keys, (tl.program_id(0) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        is_key = columns < num_keys
        at = grad_scores + (pair.to(tl.int64) * num_queries + rows[:, None]) * num_keys + columns[None, :]
        grads = tl.load(at, mask=is_row & is_key[None, :], other=0.0)
        keys = tl.load(
            k + batch * k_batch + head * k_head + columns[:, None] * k_row + dims[None, :],
            mask=is_key[:, None], other=0.0,
        )  # fmt: skip
        sums = tl.dot(grads, keys, sums)
    at = grad_q + ((batch * num_queries + rows[:, None]) * num_heads + head) * D + dims[None, :]
    tl.store(at, (sums * scale).to(grad_q.dtype.element_ty), mask=is_row)
