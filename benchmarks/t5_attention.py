"""Ways to compute T5's attention, both passes, with its learned bias and dropout: milliseconds, memory, errors.

    python benchmarks/t5_attention.py                       # the encoder of T5-3B, 16 sequences of 512 tokens
    python benchmarks/t5_attention.py --device cpu --batch 2 --heads 2 --queries 32 --keys 32   # rehearsal

Errors are of the output and of the bias's gradient, without dropout, against float64 products (relative to the largest
value). FlexAttention has no dropout, so its time is without.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common.bias_attention import bias_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, dropout: float) -> torch.Tensor:
    weights = F.dropout(torch.softmax(q @ k.transpose(-1, -2) + bias, dim=-1), dropout)
    return weights @ v


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, dropout: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=1.0)


def only(backend: SDPBackend, attention: Attention) -> Attention:
    def wrapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, dropout: float) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attention(q, k, v, bias, dropout)

    return wrapped


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, dropout: float) -> torch.Tensor:
    def add_bias(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return score + bias[0, head, query, key]

    output = flex_attention(q, k, v, score_mod=add_bias, scale=1.0)
    assert isinstance(output, torch.Tensor)
    return output


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, dropout: float) -> torch.Tensor:
    return bias_attention(q, k, v, bias, dropout=dropout).transpose(1, 2)


def ways() -> dict[str, Attention]:
    return {
        "products": products,
        "products, compiled": torch.compile(products),
        "products, compiled for all lengths": torch.compile(products, dynamic=True),
        "memory-efficient": only(SDPBackend.EFFICIENT_ATTENTION, fused),
        "cuDNN": only(SDPBackend.CUDNN_ATTENTION, fused),
        "FlexAttention, compiled, no dropout": torch.compile(flex),
        "ours": ours,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--keys", type=int, default=512)
    parser.add_argument("--head_size", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    known = ways()
    parser.add_argument("--ways", nargs="+", choices=list(known), default=list(known))
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = [args.queries, args.keys, args.keys, args.queries]
    *inputs, upstream = [
        torch.randn(args.batch, args.heads, size, args.head_size, device=device, dtype=dtype) for size in sizes
    ]
    inputs[0] *= args.head_size**-0.5  # T5 does not scale its scores
    inputs.append(torch.randn(1, args.heads, args.queries, args.keys, device=device, dtype=dtype))
    expected = run(products, [tensor.double() for tensor in inputs], upstream.double(), 0.0)
    print(
        f"{'attention':<38} {'forward ms':>10} {'both ms':>8} {'TFLOP/s':>8} {'kept MiB':>9} {'output':>8} {'bias':>8}"
    )
    for name in args.ways:
        try:
            line = measure(known[name], inputs, upstream, expected, args.dropout, args.repeats)
        except Exception as error:  # a kernel that refuses is a row, too
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
        print(f"{name:<38} {line}", flush=True)


def run(
    attention: Attention, inputs: list[torch.Tensor], upstream: torch.Tensor, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, gradient of the bias)."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    q, k, v, bias = leaves
    output = attention(q, k, v, bias, dropout)
    output.backward(upstream)
    assert bias.grad is not None
    return output.detach(), bias.grad


def measure(
    attention: Attention,
    inputs: list[torch.Tensor],
    upstream: torch.Tensor,
    expected: tuple[torch.Tensor, torch.Tensor],
    dropout: float,
    repeats: int,
) -> str:
    is_cuda = upstream.is_cuda
    found = run(attention, inputs, upstream, 0.0)
    errors = [
        float((value.double() - exact).abs().max() / exact.abs().max())
        for value, exact in zip(found, expected, strict=True)
    ]
    del found
    synchronize = torch.cuda.synchronize if is_cuda else (lambda: None)
    q, k, v, bias = (tensor.detach().requires_grad_() for tensor in inputs)
    before = torch.cuda.memory_allocated() if is_cuda else 0
    output = attention(q, k, v, bias, dropout)
    kept = torch.cuda.memory_allocated() - before if is_cuda else 0
    del output
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        synchronize()
        started = time.perf_counter()
        output = attention(q, k, v, bias, dropout)
        synchronize()
        times[0].append(time.perf_counter() - started)
        output.backward(upstream)
        synchronize()
        times[1].append(time.perf_counter() - started)
        del output
    forward, both = (statistics.median(values[len(values) // 2 :]) for values in times)
    # Two products of queries x keys x head size forward, four backward.
    flops = 6 * 2 * functools.reduce(lambda a, b: a * b, q.shape) * k.shape[2]
    return (
        f"{1e3 * forward:>10.2f} {1e3 * both:>8.2f} {flops / both / 1e12:>8.1f} {kept / 2**20:>9.0f} "
        f"{errors[0]:>8.1e} {errors[1]:>8.1e}"
    )


if __name__ == "__main__":
    main()
