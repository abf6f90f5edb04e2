import itertools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from common.data import EvalBatch, EvalBatches
from common.evaluation import (
    continue_text,
    decode_texts,
    generate_texts,
    loss_and_accuracy,
    perplexity,
    sum_over_dataset,
    token_statistics,
    token_sums,
)
from common.losses import cross_entropy_sum
from tests.forked import ForkedParent

KINDS = ("t5", "llama")
SIZES_AND_BATCH_SIZES = ((1, 2), (7, 1), (7, 3), (11, 4))
SHARDED = (
    ("t5", "ddp"),
    ("t5", "fsdp1"),
    ("t5", "fsdp2"),
    ("t5", "fsdp2_kept"),
    ("llama", "fsdp1"),
    ("llama", "fsdp2"),
)
SHARDED_BF16 = (("llama", "fsdp1_bf16"), ("llama", "fsdp2_bf16"))
VOCABULARY = 40


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "</s>", "<s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights under which generated texts differ and stop at different lengths."""
    model: PreTrainedModel
    if kind == "t5":
        torch.manual_seed(4)
        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
                decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, tie_word_embeddings=False,
            )
        )  # fmt: skip
        with torch.no_grad():
            for block in (*model.encoder.block, *model.decoder.block):
                for matrix in (p for p in block.parameters() if p.dim() > 1):
                    matrix *= 2
        # FSDP2 wants one owner of the table; training does the same before it shards T5.
        model.encoder.set_input_embeddings(model.shared)
        model.decoder.set_input_embeddings(model.shared)
    else:
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, initializer_range=0.5, pad_token_id=0, eos_token_id=1, bos_token_id=2,
            )
        )  # fmt: skip
    return model.to(dtype)


def make_dataset(size: int) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    lengths = [(2 + 3 * i % 5, 1 + 2 * i % 4) for i in range(size)]
    draw = [[torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    return Dataset.from_list([{"input_ids": source, "labels": target + [1]} for source, target in draw])


def collate(kind: str, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def pad(key: str, value: int, left: bool = False) -> torch.Tensor:
        longest = max(len(row[key]) for row in rows)
        fill = [[value] * (longest - len(row[key])) for row in rows]
        return torch.tensor([f + row[key] if left else row[key] + f for f, row in zip(fill, rows, strict=True)])

    input_ids = pad("input_ids", 0, left=kind == "llama")
    batch = {"input_ids": input_ids, "attention_mask": (input_ids != 0).long(), "labels": pad("labels", -100)}
    if kind == "t5":
        start = torch.zeros(len(rows), 1, dtype=torch.long)
        batch["decoder_input_ids"] = torch.cat([start, batch["labels"][:, :-1].clamp(min=0)], dim=1)
    return batch


def make_batches(kind: str, size: int, batch_size: int, accelerator: Accelerator | None = None) -> EvalBatches:
    dataset = make_dataset(size)
    return EvalBatches(
        dataset,
        lambda rows: collate(kind, rows),
        process_index=accelerator.process_index if accelerator else 0,
        num_processes=accelerator.num_processes if accelerator else 1,
        per_device_batch_size=batch_size,
        lengths=np.array([len(row["input_ids"]) for row in dataset]),
    )


def expected_sums(size: int) -> dict[str, float]:
    """Example by example and token by token, without padding."""
    model = make_model("t5", torch.float64).eval()
    sums = {"nll": 0.0, "tokens": 0.0, "correct": 0.0, "examples": float(size)}
    for row in make_dataset(size):
        target: list[int] = row["labels"]
        source = torch.tensor([row["input_ids"]])
        logits = model(input_ids=source, decoder_input_ids=torch.tensor([[0, *target[:-1]]])).logits[0]
        for scores, token in zip(logits, target, strict=True):
            sums["nll"] -= (scores[token] - scores.exp().sum().log()).item()
            sums["tokens"] += 1
            sums["correct"] += scores.argmax().item() == token
    return sums


def expected_texts(kind: str, size: int, max_new_tokens: int, num_beams: int = 1) -> list[str]:
    """Example by example, without padding."""
    model = make_model(kind).eval()
    texts = []
    for row in make_dataset(size):
        source = torch.tensor([row["input_ids"]])
        output = model.generate(
            input_ids=source, attention_mask=torch.ones_like(source), max_new_tokens=max_new_tokens, num_beams=num_beams
        )
        new = output[0, 0 if kind == "t5" else source.shape[1] :]
        texts.append(" ".join(f"w{token}" for token in new.tolist() if token > 2))
    return texts


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def test_token_sums_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[1, 2, -100, -100], [0, 4, 3, 3], [-100, -100, -100, -100]])
    labels[0, 1] = logits[0, 1].argmax()
    nll, correct = 0.0, 0
    for row, column in itertools.product(range(3), range(4)):
        label = int(labels[row, column])
        if label >= 0:
            nll -= logits[row, column].log_softmax(0)[label].item()
            correct += int(logits[row, column].argmax()) == label
    sums = token_sums(logits, labels)
    assert sums["nll"].item() == pytest.approx(nll, rel=1e-14)
    assert (int(sums["tokens"]), int(sums["correct"])) == (6, correct)


@pytest.mark.parametrize("kind", KINDS)
def test_token_statistics_computes_the_models_own_loss(kind: str) -> None:
    model = make_model(kind).eval()
    batch = collate(kind, list(make_dataset(4)))
    if kind == "llama":
        batch["labels"] = batch["input_ids"]
    sums = token_statistics(model, batch)
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    assert sums["nll"].item() == pytest.approx(cross_entropy_sum(logits, batch["labels"]).item(), rel=1e-6)


def test_padding_batches_run_and_are_not_counted(accelerator: Accelerator) -> None:
    calls: list[tuple[bool, bool]] = []

    def statistics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        calls.append((model.training, torch.is_grad_enabled()))
        return {"total": batch["x"].sum()}

    batches = [
        EvalBatch([0, 1], {"x": torch.tensor([1.0, 2.0])}, False),
        EvalBatch([1], {"x": torch.tensor([float("nan")])}, True),
        EvalBatch([2], {"x": torch.tensor([4.0])}, False),
    ]
    model = nn.Linear(1, 1)
    assert sum_over_dataset(accelerator, model, batches, statistics) == {"total": 7.0, "examples": 3.0}
    assert calls == [(False, False)] * 3
    assert model.training and torch.is_grad_enabled()


def test_mode_comes_back_after_an_error(accelerator: Accelerator) -> None:
    def fail(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise RuntimeError("out of memory")

    for training in (True, False):
        model = nn.Linear(1, 1).train(training)
        with pytest.raises(RuntimeError, match="out of memory"):
            sum_over_dataset(accelerator, model, [EvalBatch([0], {}, False)], fail)
        assert model.training is training and torch.is_grad_enabled()


def test_sums_keep_small_values_next_to_large_ones(accelerator: Accelerator) -> None:
    # In float32 the ones would vanish next to 2**24.
    batches = [EvalBatch([i], {"x": torch.tensor(x)}, False) for i, x in enumerate([2.0**24, 1.0, 1.0, 1.0])]
    sums = sum_over_dataset(accelerator, nn.Linear(1, 1), batches, lambda model, batch: {"x": batch["x"]})
    assert sums["x"] == 2**24 + 3


def test_loss_and_accuracy_are_weighted_by_tokens() -> None:
    metrics = loss_and_accuracy({"nll": 6.0, "tokens": 4.0, "correct": 1.0, "examples": 2.0})
    assert metrics == {"eval_loss": 1.5, "eval_token_accuracy": 0.25, "eval_examples": 2}
    assert isinstance(metrics["eval_examples"], int)


def test_decode_without_special_tokens_and_label_padding() -> None:
    tokenizer = make_tokenizer()
    assert decode_texts(tokenizer, torch.tensor([[0, 5, 6, 1, -100], [-100, 1, 0, 0, 0]])) == ["w5 w6", ""]
    assert decode_texts(tokenizer, [[7, 1], [8, -100]]) == ["w7", "w8"]


def test_perplexity_of_a_loss_that_is_too_large() -> None:
    assert perplexity(math.log(50)) == pytest.approx(50) and perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


@pytest.mark.parametrize(("kind", "num_beams"), [("t5", 1), ("t5", 3), ("llama", 1)])
def test_generation_equals_one_by_one(accelerator: Accelerator, kind: str, num_beams: int) -> None:
    model = make_model(kind)
    model.generation_config.max_length = 4  # a checkpoint's own limit
    max_new_tokens = 25  # transformers' default is 20
    batches = make_batches(kind, 7, 3)
    texts = generate_texts(
        accelerator, model, make_tokenizer(), batches, max_new_tokens=max_new_tokens, num_beams=num_beams
    )
    assert texts == expected_texts(kind, 7, max_new_tokens, num_beams)
    lengths = {len(text.split()) for text in texts}
    assert max(lengths) > 20 and len(lengths) > 2, "the case is too easy"
    assert model.training
    assert model.generation_config.max_length == 4 and model.generation_config.max_new_tokens is None


def test_a_text_is_the_likeliest_and_ends_with_any_end_token(accelerator: Accelerator) -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    torch.manual_seed(8)
    for parameter in model.parameters():
        parameter.data.normal_()
    tokens = tokenizer("w5")["input_ids"]
    for _ in range(20):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert not {tokenizer.pad_token_id, tokenizer.eos_token_id} & set(tokens) and len(set(tokens)) in range(5, 20)

    def text() -> str:
        return continue_text(accelerator, model, tokenizer, "w5", max_new_tokens=20, context_length=64)

    model.generation_config.update(repetition_penalty=5.0, no_repeat_ngram_size=1, min_new_tokens=19)
    assert text() == tokenizer.decode(tokens)
    end = tokens[7]
    assert tokens.index(end) > 1
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    assert text() == tokenizer.decode(tokens[: tokens.index(end) + 1])
    assert model.generation_config.repetition_penalty == 5.0


def test_generation_settings(accelerator: Accelerator) -> None:
    model, tokenizer, batches = make_model("t5"), make_tokenizer(), make_batches("t5", 3, 3)
    texts = generate_texts(
        accelerator, model, tokenizer, batches, max_new_tokens=22, begin_suppress_tokens=[*range(20)]
    )
    assert texts is not None and all(int(text.split()[0][1:]) >= 20 for text in texts)
    with pytest.raises(AssertionError, match="temprature"):
        generate_texts(accelerator, model, tokenizer, batches, max_new_tokens=9, temprature=2.0)


def test_generation_refuses_what_would_give_wrong_texts(accelerator: Accelerator) -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    batch = collate("t5", list(make_dataset(2)))
    assert not batch["attention_mask"][:, -1].all()
    with pytest.raises(AssertionError, match="padded on the left"):
        generate_texts(accelerator, model, tokenizer, [EvalBatch([0, 1], batch, False)], max_new_tokens=2)
    batch = collate("llama", list(make_dataset(2)))
    with pytest.raises(AssertionError, match="exactly once"):
        generate_texts(accelerator, model, tokenizer, [EvalBatch([0, 0], batch, False)], max_new_tokens=2)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4])
def test_every_example_counts_once_for_any_number_of_processes(
    tmp_path: Path, forked: ForkedParent, num_processes: int
) -> None:
    out = tmp_path / "out"
    result = forked.run(__file__, "counts", str(out), config="ddp", num_processes=num_processes, timeout=60)
    assert result.exit_code == 0, result.output
    outputs = json.loads(out.read_text())
    for (size, batch_size), output in zip(SIZES_AND_BATCH_SIZES, outputs, strict=True):
        assert output["sums"] == pytest.approx(expected_sums(size), rel=1e-12), (size, batch_size)
        assert output["texts"] == expected_texts("t5", size, max_new_tokens=3), (size, batch_size)


def counts(accelerator: Accelerator) -> list[dict[str, Any]]:
    outputs = []
    exact, model, tokenizer = make_model("t5", torch.float64), make_model("t5"), make_tokenizer()
    for size, batch_size in SIZES_AND_BATCH_SIZES:
        batches = make_batches("t5", size, batch_size, accelerator)
        sums = sum_over_dataset(accelerator, exact, batches, token_statistics)
        texts = generate_texts(accelerator, model, tokenizer, batches, max_new_tokens=3)
        assert (texts is not None) == accelerator.is_main_process
        outputs.append({"sums": sums, "texts": texts})
    return outputs


def test_generation_and_training_under_sharding(tmp_path: Path, forked: ForkedParent) -> None:
    result = forked.run(__file__, "sharded", str(tmp_path / "out"), config="ddp", num_processes=2, timeout=100)
    assert result.exit_code == 0, result.output
    expected = {kind: generate_and_train(Accelerator(cpu=True), kind, "plain") for kind in KINDS}
    outputs = json.loads((tmp_path / "out").read_text())
    for (kind, strategy), output in zip(SHARDED, outputs[: len(SHARDED)], strict=True):
        assert output["texts"] == expected[kind]["texts"], (kind, strategy)
        assert output["losses"] == pytest.approx(expected[kind]["losses"], rel=1e-4), (kind, strategy)
        assert output["sums"] == pytest.approx(expected[kind]["sums"], rel=1e-4), (kind, strategy)
    fsdp1_bf16, fsdp2_bf16 = outputs[len(SHARDED) :]
    assert fsdp1_bf16["texts"] == fsdp2_bf16["texts"]
    assert fsdp1_bf16["losses"] == pytest.approx(expected["llama"]["losses"], rel=0.1)


def sharded(accelerator: Accelerator) -> list[dict[str, Any]]:
    return [generate_and_train(accelerator, *case) for case in SHARDED + SHARDED_BF16]


def generate_and_train(accelerator: Accelerator, kind: str, strategy: str) -> dict[str, Any]:
    """Generates before any forward pass, between training steps, and after an evaluation."""
    model = shard(make_model(kind), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokenizer = make_tokenizer()
    batches = make_batches(kind, 3, 2, accelerator)  # the two processes' texts need different numbers of steps
    texts: list[list[str] | None] = []
    losses: list[float] = []

    def generate(num_beams: int) -> None:
        texts.append(generate_texts(accelerator, model, tokenizer, batches, max_new_tokens=10, num_beams=num_beams))

    def train() -> None:
        batch = collate(kind, list(make_dataset(4)))
        labels = batch.pop("labels") if kind == "t5" else batch["input_ids"]
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        loss = cross_entropy_sum(model(**inputs, use_cache=False).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    def statistics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return token_statistics(model, batch if kind == "t5" else batch | {"labels": batch["input_ids"]})

    generate(num_beams=1)
    train()
    generate(num_beams=3)
    train()
    sums = sum_over_dataset(accelerator, model, batches, statistics)
    generate(num_beams=1)
    train()
    return {"texts": texts, "losses": losses, "sums": sums}


def shard(model: PreTrainedModel, strategy: str) -> nn.Module:
    blocks = [module for module in model.modules() if type(module).__name__ in ("T5Block", "LlamaDecoderLayer")]
    if strategy == "plain":
        return model
    if strategy == "ddp":
        return DistributedDataParallel(model)
    dtype = torch.bfloat16 if strategy.endswith("_bf16") else None
    if strategy.startswith("fsdp1"):
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),
            mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, reshard_after_forward=strategy != "fsdp2_kept", mp_policy=policy)
    return fully_shard(model, reshard_after_forward=False, mp_policy=policy)


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    main_accelerator = Accelerator(cpu=True)
    result = {"counts": counts, "sharded": sharded}[sys.argv[1]](main_accelerator)
    if main_accelerator.is_main_process:
        Path(sys.argv[2]).write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
