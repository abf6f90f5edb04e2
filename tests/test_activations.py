"""common/activations.py: what it counts against what an allocator has seen, on this machine and on GPUs."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from common.accelerate_config import SHIPPED, read_config
from common.activations import meta_batch, peak_bytes
from common.arguments import ModelArguments
from common.losses import set_training_loss, token_loss
from common.memory import GIB, Layout, ModelSize, Types, estimate
from common.models import load_config, meta_model
from tests.conftest import REPOSITORY

SIZE: dict[str, Any] = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            **SIZE,
        ),
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(n_embd=64, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SIZE),
    ),
    # Its attention has a learned bias, which no fused kernel of a CPU takes: the plain one, in both.
    "t5": (
        T5ForConditionalGeneration,
        T5Config(
            d_model=64, d_kv=16, d_ff=160, num_heads=4, num_layers=3, dropout_rate=0.0, decoder_start_token_id=0,
            attn_implementation="eager", vocab_size=512,
        ),
    ),
}  # fmt: skip


def allocated_bytes(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> int:
    """Most bytes that torch's allocator has given out in a forward and backward pass, beyond those before."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    token_loss(model, batch).backward()  # buffers that are made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        token_loss(model, batch).backward()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    now = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("recomputes", "chunk_tokens"), [(False, None), (True, None), (False, 64)], ids=["kept", "recomputed", "chunked"]
)
def test_the_count_is_what_the_allocator_gives_out(kind: str, recomputes: bool, chunk_tokens: int | None) -> None:
    model_class, config = MODELS[kind]
    model, planned_batch = model_class(config).train(), meta_batch(config, 4, 128, 48)
    if recomputes:
        for block in [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    head = model.get_output_embeddings()
    assert head is not None
    set_training_loss(model, head, chunk_tokens, None)
    expected = allocated_bytes(
        model, {key: torch.ones_like(value, device="cpu") for key, value in planned_batch.items()}
    )
    with torch.device("meta"):
        planned = model_class(config)
    counted = peak_bytes(planned, planned_batch, recomputes=recomputes, loss_chunk_tokens=chunk_tokens)
    # Gradients of T5's learned bias are summed in place by autograd, unless they are watched.
    assert counted == pytest.approx(expected, rel=0.06 if kind == "t5" and recomputes else 0.01)


ONE_BILLION = ModelArguments(model_config_path=str(REPOSITORY / "recipes" / "configs" / "models" / "gpt_1b"))
# benchmarks/RESULTS.md: GiB at the peak on 2 GPUs, through NCCL, 4 sequences of 1,024 tokens at a time.
MEASURED = {
    True: {"fsdp_full_shard": 17.27, "fsdp_shard_grad_op": 19.08, "fsdp1_full_shard": 17.27, "fsdp1_no_shard": 25.10},
    False: {"single_device": 28.37},
}


@pytest.mark.parametrize("is_fsdp", MEASURED, ids=["fsdp", "autocast"])
def test_the_estimate_is_what_was_measured_on_gpus(is_fsdp: bool) -> None:
    config = load_config(ONE_BILLION)
    model = meta_model(ONE_BILLION, config, AutoModelForCausalLM)
    size = ModelSize.of(model, [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"])
    if is_fsdp:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    sequence = peak_bytes(model, meta_batch(config, 1, 1024, 0), autocast=None if is_fsdp else torch.bfloat16)
    for name, measured in MEASURED[is_fsdp].items():
        layout = Layout.of_yaml(read_config(SHIPPED / f"{name}.yaml"), 2 if is_fsdp else 1)
        layout = replace(layout, num_shared=0)
        assert estimate(size, layout, Types()).total + 4 * sequence == pytest.approx(measured * GIB, rel=0.035), name


def test_dropout_keeps_a_byte_for_each_number() -> None:
    def count(**probabilities: float) -> int:
        config = GPT2Config(**(MODELS["gpt2"][1].to_diff_dict() | probabilities))
        with torch.device("meta"):
            model = GPT2LMHeadModel(config)
        return peak_bytes(model, meta_batch(config, 4, 128, 0))

    # After attention and after the MLP; what is dropped within attention is inside its kernel.
    assert count(resid_pdrop=0.1, attn_pdrop=0.1) - count() == 3 * 2 * 4 * 128 * 64
