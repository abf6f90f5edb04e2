"""Summed cross-entropy against loops in float64 and against the models' own losses."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from common.losses import IGNORE_INDEX, cross_entropy_sum, token_loss

VOCABULARY = 11


def logits_and_labels(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 5, VOCABULARY, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (3, 5), generator=generator)
    labels[0, 3:] = IGNORE_INDEX
    labels[2] = IGNORE_INDEX
    labels[1, 2] = 0  # a target like any other, also where 0 pads
    return logits.to(dtype), labels


def loop(logits: torch.Tensor, labels: torch.Tensor) -> float:
    total = 0.0
    for scores, label in zip(logits.double().reshape(-1, VOCABULARY).tolist(), labels.flatten().tolist(), strict=True):
        if label >= 0:
            highest = max(scores)
            total += highest + math.log(sum(math.exp(score - highest) for score in scores)) - scores[label]
    return total


def test_sum_in_float64() -> None:
    logits, labels = logits_and_labels()
    loss = cross_entropy_sum(logits, labels)
    assert loss.shape == () and loss.dtype == torch.float64
    assert loss.item() == pytest.approx(loop(logits, labels), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels(dtype)
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    # The rounding of the logits themselves is not the loss's: `loop` starts from the rounded ones.
    assert loss.item() == pytest.approx(loop(logits, labels), rel=1e-6)


def test_many_tokens_do_not_lose_small_ones() -> None:
    """A sum in bf16 would stop growing at 256 times its terms."""
    logits = torch.zeros(4096, VOCABULARY, dtype=torch.bfloat16)
    loss = cross_entropy_sum(logits, torch.zeros(4096, dtype=torch.long))
    assert loss.item() == pytest.approx(4096 * math.log(VOCABULARY), rel=1e-5)


def test_gradient_is_probability_less_target() -> None:
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    cross_entropy_sum(logits, labels).backward()
    expected = logits.detach().softmax(-1)
    for index in torch.cartesian_prod(torch.arange(3), torch.arange(5)).tolist():
        label = int(labels[tuple(index)])
        if label == IGNORE_INDEX:
            expected[tuple(index)] = 0
        else:
            expected[(*index, label)] -= 1
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-15)


def test_without_targets_the_loss_and_its_gradient_are_zero() -> None:
    logits = torch.randn(2, 3, VOCABULARY, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()


def test_sums_do_not_depend_on_how_a_batch_is_cut() -> None:
    logits, labels = logits_and_labels()
    parts = sum(cross_entropy_sum(logits[i : i + 1], labels[i : i + 1]) for i in range(3))
    assert torch.as_tensor(parts).item() == pytest.approx(cross_entropy_sum(logits, labels).item(), rel=1e-14)


def test_token_loss_of_an_encoder_decoder_is_the_models_own() -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    labels = torch.tensor([[3, 4, 1, -100], [5, 1, -100, -100]])
    batch = {
        "input_ids": torch.tensor([[2, 3, 4, 1, 0], [5, 6, 7, 8, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        "labels": labels,
    }
    own = model(**batch).loss * 5
    batch["decoder_input_ids"] = torch.tensor([[0, 3, 4, 1], [0, 5, 1, 0]])
    assert token_loss(model, batch).item() == pytest.approx(own.item(), rel=1e-6)
    assert batch["labels"] is labels


def test_token_loss_of_a_causal_model_takes_shifted_labels() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.tensor([[2, 3, 4, 5, 6], [7, 8, 9, 1, 0]])
    mask = (tokens != 0).long()
    targets = tokens.masked_fill(mask == 0, IGNORE_INDEX)
    # transformers shifts what it is given; this repository's collators have shifted already.
    own = model(input_ids=tokens, attention_mask=mask, labels=targets).loss * 7
    shifted = torch.cat([targets[:, 1:], torch.full((2, 1), IGNORE_INDEX)], dim=1)
    loss = token_loss(model, {"input_ids": tokens, "attention_mask": mask, "labels": shifted})
    assert loss.item() == pytest.approx(own.item(), rel=1e-6)
