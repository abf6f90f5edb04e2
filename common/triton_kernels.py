"""Triton kernels that read and write each number once: sums of gradients, AdamW's update, weights in fp8."""

import torch
import triton
import triton.language as tl

BLOCK, NUM_WARPS = 1024, 4  # the fastest of six on an H200: AdamW at 4.15 TB/s, torch copies at 4.0


@triton.jit
def _sum_rows(own, arrived, output, scale, numel, stride, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += tl.load(own + index, is_inside, other=0.0).to(tl.float32)
        else:
            row = tl.full((), rank - 1 if rank > RANK else rank, tl.int64)
            total += tl.load(arrived + row * stride + index, is_inside, other=0.0).to(tl.float32)
    tl.store(output + index, total * scale, is_inside)


def sum_rows(own: torch.Tensor, arrived: torch.Tensor, rank: int, scale: float, output: torch.Tensor) -> None:
    """output = scale * (own + sum of the rows of arrived) in float32, added in the order of the ranks.

    own, output: (n,); arrived: (ranks - 1, n), the row of each rank but this one's, each contiguous.
    """
    numel, num_ranks = output.numel(), arrived.shape[0] + 1
    grid = (triton.cdiv(numel, BLOCK),)
    _sum_rows[grid](own, arrived, output, scale, numel, arrived.stride(0), rank, num_ranks, BLOCK, num_warps=NUM_WARPS)


@triton.jit
def _adamw(
    parameter, gradient, average, square, divisor, corrections, index, rate, decay, weight1, beta2, weight2, epsilon,
    numel, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offset < numel
    correction1 = tl.load(corrections + 2 * index)
    correction2 = tl.load(corrections + 2 * index + 1)
    g = tl.load(gradient + offset, is_inside).to(tl.float32) / tl.load(divisor)
    p = tl.load(parameter + offset, is_inside).to(tl.float32)
    m = tl.load(average + offset, is_inside).to(tl.float32)
    v = tl.load(square + offset, is_inside).to(tl.float32)
    p -= rate * decay * p
    m += weight1 * (g - m)
    v = beta2 * v + weight2 * g * g
    p -= rate / correction1 * m / (tl.sqrt(v) / correction2 + epsilon)
    tl.store(parameter + offset, p, is_inside)
    tl.store(average + offset, m, is_inside)
    tl.store(square + offset, v, is_inside)


def adamw(
    rows: list[tuple[torch.Tensor, ...]],
    divisor: torch.Tensor | None,
    rate: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019) with the gradients divided by `divisor` where there is one.

    rows: of each parameter itself, its gradient, the averages of gradient and square, contiguous and equal in shape,
    and the number of its steps before this one, 0-dim. torch's fused kernel writes the divided gradients back; this one
    leaves them.
    """
    steps = [row[4] for row in rows]
    torch._foreach_add_(steps, 1.0)
    counts = torch.stack(steps).double()
    corrections = torch.stack([1.0 - betas[0] ** counts, torch.sqrt(1.0 - betas[1] ** counts)], dim=1).float()
    if divisor is None:
        divisor = torch.ones((), device=counts.device)
    for index, (*tensors, _) in enumerate(rows):
        numel = tensors[0].numel()
        _adamw[(triton.cdiv(numel, BLOCK),)](
            *tensors, divisor, corrections, index, rate, weight_decay, 1 - betas[0], betas[1], 1 - betas[1], epsilon,
            numel, BLOCK,
            num_warps=NUM_WARPS,
        )  # fmt: skip


@triton.jit
def _to_e4m3(tensor, scale, output, numel, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < numel
    scaled = tl.load(tensor + index, is_inside, other=0.0).to(tl.float32) * tl.load(scale)
    scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)  # the type's range
    tl.store(output + index, scaled.to(tl.float8e4nv), is_inside)


def to_e4m3(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """tensor * scale in float8_e4m3fn, saturated; tensor: contiguous, scale: one number in float32."""
    output = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    grid = (triton.cdiv(tensor.numel(), BLOCK),)
    _to_e4m3[grid](tensor, scale, output, tensor.numel(), BLOCK, num_warps=NUM_WARPS)
    return output
