"""Packed rows go through FlexAttention, everything else through SDPA, with the numbers of SDPA."""

import functools
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.attention import flex_attention as flex
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    masking_utils,
)
from transformers.integrations import flex_attention as flex_integration

from common import packed_attention
from common.arguments import TrainArguments
from common.losses import compute_logits, token_loss
from common.models import load_config, load_model
from common.packed_attention import NAME
from tests.test_models import T5_DEMO

LLAMA_DEMO = T5_DEMO.with_name("llama_demo")
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CUDA = torch.device("cuda")


def llama(**changed: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changed))


def packed_batch(length: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Two rows: of sequences of a third and two thirds of the length, and of one."""
    torch.manual_seed(1)
    ids = torch.randint(32, (2, length))
    positions = torch.arange(length).repeat(2, 1)
    positions[0, length // 3 :] -= length // 3
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": positions}
    return {name: tensor.to(device) for name, tensor in batch.items()}


@pytest.fixture
def flex_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of queries in each call of FlexAttention, which runs uncompiled: without gradients on a CPU as well."""
    calls: list[int] = []

    def uncompiled(query: torch.Tensor, *args: Any, training: bool = False, **kwargs: Any) -> Any:
        calls.append(query.shape[2])
        return flex.flex_attention(query, *args, **kwargs)

    monkeypatch.setattr(flex_integration, "compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(
        masking_utils, "create_block_mask", lambda *args, _compile, **kwargs: flex.create_block_mask(*args, **kwargs)
    )
    return calls


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_packed_rows_have_the_loss_of_sdpa(flex_calls: list[int]) -> None:
    model, batch = llama(), packed_batch(24)
    expected, logits = token_loss(model, batch), compute_logits(model, batch)
    assert not flex_calls
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(token_loss(model, batch), expected)
    assert flex_calls == [24, 24]
    torch.testing.assert_close(compute_logits(model.eval(), batch), logits)
    assert flex_calls == [24] * 4


@torch.no_grad()
def test_single_sequences_and_generation_need_no_flex_attention(flex_calls: list[int]) -> None:
    model = llama().eval()
    batch = {name: tensor for name, tensor in packed_batch(9).items() if name != "position_ids"}
    prompts = {
        "input_ids": batch["input_ids"],
        "attention_mask": torch.tensor([[1] * 9, [0] * 4 + [1] * 5]),
        "max_new_tokens": 4,
        "do_sample": False,
    }
    expected, texts = token_loss(model, batch), model.generate(**prompts)
    model.set_attn_implementation(NAME)
    torch.testing.assert_close(token_loss(model, batch), expected)
    assert torch.equal(model.generate(**prompts), texts)
    assert not flex_calls


@pytest.mark.parametrize(
    ("model", "device", "fits"),
    [
        (llama, "cuda", True),
        (llama, "cpu", False),
        (functools.partial(llama, num_attention_heads=8), "cuda", False),  # heads of 8
        (functools.partial(llama, head_dim=8), "cuda", False),
        (functools.partial(llama, attention_dropout=0.1), "cuda", False),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=4, attn_pdrop=0.0)), "cuda", False),
    ],
)
def test_where_it_fits(model: Any, device: str, fits: bool) -> None:
    assert packed_attention.fits(model(), torch.device(device)) == fits


def test_recipes_that_pack_get_it_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)

    def kernel(packs: bool, **flags: Any) -> str | None:
        args = TrainArguments(model_config_path=str(LLAMA_DEMO), **flags)
        model: PreTrainedModel = load_model(args, load_config(args), AutoModelForCausalLM, accelerator, packs)[0]
        return model.config._attn_implementation

    assert kernel(packs=True) == "sdpa", "there is no GPU"
    monkeypatch.setattr(packed_attention, "fits", lambda model, device: True)
    assert kernel(packs=True) == kernel(packs=True, init="device") == NAME
    assert kernel(packs=False) == kernel(packs=True, attn_implementation="sdpa") == "sdpa"
    assert kernel(packs=True, attn_implementation="eager") == "eager"


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_on_a_gpu(is_compiled: bool) -> None:
    """Loss and gradients of SDPA in float32; evaluation and generation work in between."""
    batch = packed_batch(384, "cuda")
    found = []
    for kernel in ("sdpa", NAME):
        model = llama().to(CUDA)
        model.set_attn_implementation(kernel)
        if is_compiled:
            for layer in model.model.layers:
                layer.forward = torch.compile(layer.forward)
        for _ in range(2):
            model.zero_grad()
            loss = token_loss(model, batch)
            loss.backward()
            texts = model.generate(batch["input_ids"][:, :5], max_new_tokens=5, do_sample=False)
        found.append([loss.detach(), texts, *(parameter.grad for parameter in model.parameters())])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3)
