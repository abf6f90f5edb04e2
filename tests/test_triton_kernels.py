"""The kernels against torch. On a GPU, or on a CPU by Triton's interpreter: TRITON_INTERPRET=1 pytest ..."""

import os
from typing import Any

import pytest
import torch
from torch import nn

from common import optim
from common.peer_copies import _sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not IS_INTERPRETED, reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_summed_as_torch_sums_them(num_ranks: int, dtype: torch.dtype) -> None:
    from common.triton_kernels import sum_rows

    torch.manual_seed(0)
    rows = torch.randn(num_ranks, 3001, device=DEVICE).to(dtype)
    for rank in range(num_ranks):
        others = torch.stack([rows[other] for other in range(num_ranks) if other != rank])
        output, expected = torch.empty(3001, device=DEVICE), torch.empty(3001)
        sum_rows(rows[rank], others, rank, 1 / num_ranks, output)
        _sum(rows[rank].cpu(), others.cpu(), rank, 1 / num_ranks, expected)
        assert torch.equal(output.cpu(), expected)


# The interpreter does not round to bfloat16 as GPUs do.
@pytest.mark.parametrize("dtype", [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divided", [True, False])
def test_updates_are_those_of_torchs_adamw(dtype: torch.dtype, divided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of a large and a small parameter, of two groups, one of them with its gradients divided."""
    monkeypatch.setattr(optim, "_has_kernel", lambda row: row[0].numel() > 2000)
    torch.manual_seed(0)
    values = [torch.randn(70, 41, device=DEVICE).to(dtype), torch.randn(30, device=DEVICE).to(dtype)]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "fused": True}
    optimizers = [optim._AdamW(ours, **settings), torch.optim.AdamW(theirs, **settings)]
    for step in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            if divided:
                divisor = torch.tensor(1.5 + step, device=DEVICE)
                vars(optimizer).update(grad_scale=divisor, found_inf=torch.zeros_like(divisor))
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        states = optimizers[0].state[a], optimizers[1].state[b]
        assert states[0]["step"].item() == states[1]["step"].item() == 3
        for x, y in ((a, b), *((states[0][key], states[1][key]) for key in ("exp_avg", "exp_avg_sq"))):
            rtol, atol = 1e-6, 1e-7
            if dtype == torch.bfloat16:  # a bit of the largest number: terms that cancel were rounded in an average
                rtol, atol = 0.0, 2**-8 * y.abs().max().item()
            torch.testing.assert_close(x.detach(), y.detach(), rtol=rtol, atol=atol)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter knows neither NaN nor subnormal numbers in fp8")
def test_fp8_weights_are_those_of_torch() -> None:
    from common.triton_kernels import to_e4m3

    torch.manual_seed(0)
    values = torch.randn(37, 143, device=DEVICE) * torch.logspace(-6, 3, 143, device=DEVICE)  # subnormal to saturated
    values[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    scale = torch.tensor(3.7, device=DEVICE)
    expected = (values * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(to_e4m3(values, scale).view(torch.uint8), expected.view(torch.uint8))
