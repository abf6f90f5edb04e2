"""Masks are those of transformers, and nobody looks at a tensor's value for them."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    OPTConfig,
    T5Config,
    XGLMConfig,
)

from common.bias_attention import NAME
from common.losses import token_loss
from common.masks import keeps_sequences_apart, packed_sequences

SIZES: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8)),
}
IDS = torch.tensor([[3, 4, 5, 1, 2, 7, 6, 1], [6, 2, 1, 8, 9, 1, 4, 1]])


def without_looking(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls it; a tensor's truth, for which the host would wait for the GPU, fails the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__bool__", lambda tensor: pytest.fail("a tensor's value was asked for"))
        return function(*args, **kwargs)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_losses_are_those_of_transformers(kind: str, is_packed: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    batch = {"input_ids": IDS, "labels": IDS.roll(-1, 1)}
    if is_packed:
        # With a sequence of one token, whose position the next one begins at, too.
        batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 2, 0, 1, 2, 0]])
    loss = without_looking(token_loss, model, batch)

    def logits(**changed: torch.Tensor) -> torch.Tensor:
        inputs = {name: value for name, value in (batch | changed).items() if name != "labels"}
        output: torch.Tensor = model(**inputs, use_cache=False).logits
        return output

    expected = torch.nn.functional.cross_entropy(logits().flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    other = IDS.clone()
    other[0, 0] = 9  # in the first sequence of a packed row
    is_seen = not torch.equal(logits()[0, 4:], logits(input_ids=other)[0, 4:])
    assert is_seen != is_packed, "packed sequences do not see each other"


SMALL = {**SIZES, "num_key_value_heads": 2}
CONFIGS: dict[str, tuple[Any, bool]] = {
    "llama": (LlamaConfig(**SIZES), True),
    "gpt2": (GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8), True),
    "mistral": (MistralConfig(**SMALL, sliding_window=4), True),
    "gemma2": (Gemma2Config(**SMALL, head_dim=4, sliding_window=4), True),
    "gptj": (GPTJConfig(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8, rotary_dim=4), True),
    "opt": (OPTConfig(vocab_size=16, hidden_size=8, ffn_dim=8, num_hidden_layers=2, num_attention_heads=2,
                      max_position_embeddings=8, word_embed_proj_dim=8), False),
    "xglm": (XGLMConfig(vocab_size=16, d_model=8, ffn_dim=8, num_layers=2, attention_heads=2), False),
    "lfm2": (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), False),
    "jamba": (JambaConfig(**SMALL, attn_layer_period=2, attn_layer_offset=1, num_experts=1, use_mamba_kernels=False,
                          mamba_d_state=4), False),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_models_that_keep_packed_sequences_apart_are_told(kind: str) -> None:
    """By what the logits of the second sequence make of another first one."""
    config, is_apart = CONFIGS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    ids = torch.tensor([[3, 4, 5, 11, 2, 7, 6, 1], [9, 8, 7, 6, 2, 7, 6, 1]])
    with torch.no_grad(), packed_sequences(True):
        one, other = (model(input_ids=row[None], position_ids=positions, use_cache=False).logits[0, 4:] for row in ids)
    assert ((one - other).abs().max().item() < 1e-6) == is_apart
    assert keeps_sequences_apart(model.to("meta")) == is_apart


def test_a_t5s_padding() -> None:
    config = T5Config(d_model=16, d_kv=16, d_ff=16, num_layers=1, num_heads=1, vocab_size=16, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    masks = torch.ones_like(IDS), torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    expected = [model(input_ids=IDS, attention_mask=mask, labels=IDS).logits for mask in masks]
    for part in (model, model.encoder, model.decoder):
        part.set_attn_implementation(NAME)
    for mask, logits in zip(masks, expected, strict=True):
        found = without_looking(model, input_ids=IDS, attention_mask=mask, labels=IDS).logits
        torch.testing.assert_close(found, logits)
