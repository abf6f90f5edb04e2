"""The kernels against plain products. On a GPU, or on a CPU by Triton's interpreter: TRITON_INTERPRET=1 pytest ..."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config

from common import bias_attention as fused
from common.bias_attention import bias_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not IS_INTERPRETED, reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1"
)
# Matrix products of float32 are rounded to TF32 on GPUs.
DTYPE, TOLERANCE = (torch.float32, 1e-5) if IS_INTERPRETED else (torch.bfloat16, 1e-2)
BATCH, HEADS = 2, 3
Tensors = list[torch.Tensor]


def make_inputs(num_queries: int, num_keys: int, size: int) -> Tensors:
    """q, k, v as a model's projections are in memory, a bias."""
    torch.manual_seed(0)
    shapes = [(BATCH, length, HEADS, size) for length in (num_queries, num_keys, num_keys)]
    inputs = [torch.randn(shape, device=DEVICE).transpose(1, 2) for shape in shapes]
    bias = torch.randn(1, HEADS, num_queries, num_keys, device=DEVICE)
    return [tensor.to(DTYPE) for tensor in (*inputs, bias)]


def products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention in plain operations; `seen` is False where a key is not seen."""
    scores = (scale * (q @ k.transpose(-1, -2)) + bias).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def run(attention: Callable[..., torch.Tensor], inputs: Tensors) -> Tensors:
    """Output, and gradients of all inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attention(*leaves)
    torch.manual_seed(1)
    upstream = torch.randn(output.shape, device=DEVICE).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


def assert_close(found: Tensors, expected: Tensors) -> None:
    for value, exact in zip(found, expected, strict=True):
        assert (value.double() - exact).abs().max() <= TOLERANCE * exact.abs().max()


def make_mask(kind: str | None, num_queries: int, num_keys: int) -> torch.Tensor | None:
    if kind is None:
        return None
    if kind == "padding":
        lengths = torch.tensor([num_keys, num_keys // 3], device=DEVICE)
        return (torch.arange(num_keys, device=DEVICE) < lengths[:, None])[:, None, None]
    mask = torch.rand(BATCH, 1, num_queries, num_keys, device=DEVICE) < 0.5
    mask[:, :, 1] = False  # a query that sees nothing
    return mask


CASES = [
    (64, 64, 64, None, False),
    (70, 70, 16, None, True),
    (33, 140, 32, "padding", False),
    (20, 64, 128, "padding", False),
    (50, 50, 16, "any", False),
]


@needs_kernels
@pytest.mark.parametrize(("num_queries", "num_keys", "size", "kind", "is_causal"), CASES)
def test_output_and_gradients(num_queries: int, num_keys: int, size: int, kind: str | None, is_causal: bool) -> None:
    inputs, scale = make_inputs(num_queries, num_keys, size), size**-0.5
    mask = make_mask(kind, num_queries, num_keys)
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=DEVICE)
    seen = seen.tril() if is_causal else seen if mask is None else mask
    plain = partial(products, seen=seen, scale=scale)
    kernels = partial(bias_attention, mask=mask, scale=scale, is_causal=is_causal)
    assert_close(run(kernels, inputs), run(plain, [tensor.double() for tensor in inputs]))
    zeros = [*inputs[:3], torch.zeros_like(inputs[3])]
    assert_close(run(kernels, inputs[:3]), run(plain, [tensor.double() for tensor in zeros])[:4])


@needs_kernels
def test_dropout_and_its_gradients() -> None:
    """Values that are a unit matrix make the output the weights themselves: the mask is read off them."""
    size, dropout = 128, 0.3
    inputs = make_inputs(200, size, size)
    q, k, v, bias = inputs
    unit = torch.eye(size, device=DEVICE, dtype=DTYPE).expand(BATCH, HEADS, size, size)

    def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return bias_attention(q, k, v, bias, None, dropout, 0.1)

    keep = dropped(q, k, unit, bias).transpose(1, 2) != 0
    assert float(keep.double().mean()) == pytest.approx(1 - dropout, abs=0.01)
    # No two rows, heads or batches drop the same keys: overlaps are those of independent draws.
    rows = keep.flatten(0, 2).double()
    overlaps = (rows @ rows.T / size)[~torch.eye(len(rows), dtype=torch.bool, device=DEVICE)]
    assert float(overlaps.mean()) == pytest.approx((1 - dropout) ** 2, abs=0.01)
    assert float(overlaps.max()) < 0.8
    columns = keep.double().mean((0, 1, 2))
    assert float((columns - (1 - dropout)).abs().max()) < 0.07

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        weights = (0.1 * (q @ k.transpose(-1, -2)) + bias).softmax(-1) * keep / (1 - dropout)
        return (weights @ v).transpose(1, 2)

    assert_close(run(dropped, inputs), run(plain, [tensor.double() for tensor in inputs]))
    assert not torch.equal(bias_attention(q, k, v, bias, None, dropout), bias_attention(q, k, v, bias, None, dropout))


@needs_kernels
def test_a_bias_of_another_type() -> None:
    """As under autocast, which leaves the learned table in float32."""
    *qkv, bias = make_inputs(40, 40, 16)
    inputs = [*qkv, bias.to(torch.float32 if DTYPE is torch.bfloat16 else torch.float64)]
    found = run(bias_attention, inputs)
    assert found[4].dtype == inputs[3].dtype
    seen = torch.ones(40, 40, dtype=torch.bool, device=DEVICE)
    assert_close(found, run(partial(products, seen=seen, scale=1.0), [tensor.double() for tensor in inputs]))


@needs_kernels
def test_the_operator_is_one_to_the_compiler() -> None:
    q, k, v, bias = (tensor.requires_grad_() for tensor in make_inputs(20, 24, 16))
    seeds = torch.randint(9, (BATCH, HEADS, 20), dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(fused._attend, (q, k, v, bias, None, seeds, 0.1, 1.0, False))


def test_what_the_kernels_do_not_take_is_given_to_sdpa() -> None:
    """Evaluation, and float32: bit-equal to SDPA, also where no kernel can run."""
    config = T5Config(d_model=16, d_kv=16, d_ff=16, num_layers=1, num_heads=1, vocab_size=9, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    ids = torch.tensor([[3, 4, 5, 1], [6, 1, 0, 0]])

    def logits(kernel: str) -> torch.Tensor:
        for part in (model, model.encoder, model.decoder):
            part.set_attn_implementation(kernel)
        torch.manual_seed(0)
        output: torch.Tensor = model(input_ids=ids, attention_mask=ids != 0, labels=ids).logits
        return output

    model.train()
    assert torch.equal(logits("sdpa"), logits(fused.NAME))
    model.to(torch.bfloat16).eval()
    assert torch.equal(logits("sdpa"), logits(fused.NAME))


@pytest.mark.gpu
def test_t5_trains_as_with_sdpa() -> None:
    """Both in bfloat16, against SDPA in float64: the kernels are no further from it."""
    config = T5Config(
        d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, vocab_size=50, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config).to("cuda", torch.bfloat16).train()
    ids, labels = (torch.randint(2, 50, (4, length), device="cuda") for length in (40, 20))
    mask = torch.arange(40, device="cuda") < torch.tensor([40, 30, 20, 10], device="cuda")[:, None]

    def gradients(kernel: str) -> torch.Tensor:
        for part in (model, model.encoder, model.decoder):
            part.set_attn_implementation(kernel)
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask, labels=labels).logits.double()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    found, plain = gradients(fused.NAME), gradients("sdpa")
    model.double()
    exact = gradients("sdpa")
    error, plain_error = ((value - exact).norm() / exact.norm() for value in (found, plain))
    assert 0 < error < 1.2 * plain_error < 0.1
