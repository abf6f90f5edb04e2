"""Masks are those of transformers, and nobody looks at a tensor's value for them."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config

from common.bias_attention import NAME
from common.losses import token_loss

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
        batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 0, 1]])
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
