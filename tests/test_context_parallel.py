"""Slices of sequences and attention across them, against the same computation of one process."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)

from common import context_parallel
from common.arguments import BatchArguments, BatchPlan, UserError, plan_batch
from common.context_parallel import _attend_to_past, _SliceCollator, model_problem
from common.data import collate_windows
from common.metrics import ModelFlops
from tests.conftest import REPOSITORY
from tests.distributed.test_parity import GPT
from tests.forked import ForkedParent


def rows(*lengths: int) -> list[dict[str, np.ndarray]]:
    """Tokens from 1 on, so that a token's number tells its place."""
    return [{"input_ids": np.arange(1, n + 1), "labels": np.arange(2, n + 2)} for n in lengths]


@pytest.mark.parametrize(("size", "lengths"), [(2, (16, 16)), (2, (13, 9)), (3, (12,)), (4, (3, 5))])
def test_slices_make_up_the_batch(size: int, lengths: tuple[int, ...]) -> None:
    whole = collate_windows(rows(*lengths))
    slices = [_SliceCollator(collate_windows, rank, size)(rows(*lengths)) for rank in range(size)]
    assert len({part["labels"].shape for part in slices}) == 1
    chunk = slices[0]["labels"].shape[1] // 2
    assert 2 * size * chunk - max(lengths) < 2 * size
    for index in range(len(lengths)):
        targets = {}
        for part in slices:
            for token, label, position in zip(*(part[key][index].tolist() for key in part), strict=True):
                if label != -100:
                    assert position not in targets
                    targets[position] = (token, label)
        assert targets == {place: (place + 1, place + 2) for place in range(lengths[index])}
    assert sum(int((part["labels"] != -100).sum()) for part in slices) == int((whole["labels"] != -100).sum())


def test_slices_are_of_equal_work() -> None:
    """A token at place p attends to p + 1 tokens."""
    for size in (2, 3, 8):
        length = 4 * size
        work = [
            int((_SliceCollator(collate_windows, rank, size)(rows(length))["position_ids"] + 1).sum())
            for rank in range(size)
        ]
        assert len(set(work)) == 1 and sum(work) == length * (length + 1) // 2


def test_padding_has_positions_that_the_model_has() -> None:
    parts = [_SliceCollator(collate_windows, rank, 2)(rows(9)) for rank in range(2)]
    assert max(int(part["position_ids"].max()) for part in parts) == 8


def test_operations_of_all_slices_are_those_of_the_sequence() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    whole, of_slices = ModelFlops.of_model(model), ModelFlops.of_model(model, 3)
    assert whole and of_slices
    slices = [_SliceCollator(collate_windows, rank, 3)(rows(12, 12)) for rank in range(3)]
    assert sum(map(of_slices.of_batch, slices)) == whole.of_batch(collate_windows(rows(12, 12)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("num_key_heads", [4, 2])
def test_attention_of_all_slices_is_that_of_the_sequence(
    size: int, num_key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients in float64; the exchange between processes is acted out in this one."""
    length, width = 6 * size, 8
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(2, heads, length, width, generator=generator, dtype=torch.float64, requires_grad=True)

    query, key, value = draw(4), draw(num_key_heads), draw(num_key_heads)
    places = [
        _SliceCollator(collate_windows, rank, size)(rows(length))["position_ids"][0].tolist() for rank in range(size)
    ]

    def exchange(copies: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.stack([torch.stack((key[:, :, place], value[:, :, place])) for place in places])

    monkeypatch.setattr(context_parallel, "all_to_all_single_autograd", exchange)
    group: Any = None
    outputs = torch.zeros(2, length, 4, width, dtype=torch.float64)
    for rank, place in enumerate(places):
        part, _ = context_parallel._attention(
            torch.nn.Identity(), query[:, :, place], key[:, :, place], value[:, :, place], None, scaling=0.3,
            group=group, rank=rank, size=size,
        )  # fmt: skip
        outputs = outputs.index_copy(1, torch.tensor(place), part)
    repeated = [tensor.repeat_interleave(4 // num_key_heads, dim=1) for tensor in (key, value)]
    scores = (query @ repeated[0].mT * 0.3).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ repeated[1]).transpose(1, 2)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    found = torch.autograd.grad((outputs * weights).sum(), (query, key, value))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu  # the flash kernel
@pytest.mark.parametrize("num_key_heads", [4, 2])
def test_the_kernel_sees_the_same_past(num_key_heads: int) -> None:
    query = torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 1, num_key_heads, 192, 64, device="cuda", dtype=torch.bfloat16)
    fast = _attend_to_past(query, key, value, 0.0, None)
    exact = _attend_to_past(query.float(), key.float(), value.float(), 0.0, None)
    torch.testing.assert_close(fast.float(), exact, rtol=0.02, atol=0.02)


SIZES: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LlamaConfig(**SIZES), None),
        (Qwen2Config(**SIZES), None),
        (MistralConfig(**SIZES, sliding_window=4), "a model with sliding_attention"),
        (Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1), "a model with sliding_attention"),
        (BloomConfig(vocab_size=16, hidden_size=8, n_layer=1, n_head=2), "not told the positions"),
        (LlamaConfig(**SIZES, attn_implementation="eager"), "set to eager attention"),
        (T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2), "an encoder-decoder model"),
    ],
)
def test_models_that_cannot_be_sliced_are_refused(config: Any, said: str | None) -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config) if said == "an encoder-decoder model" else (
            AutoModelForCausalLM.from_config(config)
        )  # fmt: skip
    problem = model_problem(model)
    if said is None:
        assert problem is None
    else:
        assert f"needs plain causal attention, and {type(model).__name__} is {said}" in str(problem)


def test_a_group_is_one_process_of_the_batch_plan() -> None:
    args = BatchArguments(total_batch_size=12, per_device_train_batch_size=3)
    plan = plan_batch(args, 8, 4)
    assert plan == BatchPlan(total=12, per_device=3, num_micro_batches=2, num_processes=2, context_size=4)
    assert str(plan) == "12 sequences a step = 3 per group x 2 micro-batches x 2 groups of 4 processes"
    with pytest.raises(UserError, match="multiple of 8 groups of 2 processes x 3 sequences per device = 24"):
        plan_batch(args, 16, 2)


def evaluate(forked: ForkedParent, output: Path, config: str, num_processes: int) -> tuple[dict[str, float], str]:
    """The evaluation of a run that is not trained, and what it generates."""
    result = forked.run(
        REPOSITORY / "recipes" / "gpt_shakespeare.py",
        *GPT.flags, "--max_seq_length=46", "--prompt=To keep ", "--temperature=0", "--max_new_tokens=20",
        "--param_dtype=float64", "--max_steps=1", "--eval_strategy=steps", "--eval_steps=1", "--max_eval_batches=3",
        "--per_device_train_batch_size=2", "--per_device_eval_batch_size=2", f"--output_dir={output}",
        config=config, num_processes=num_processes, launcher_flags=["--mixed_precision", "no"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert "context_parallel" not in (output / "model" / "config.json").read_text()
    return lines[-1] | {"num_tokens": lines[0]["num_tokens"]}, result.output.split("-- answer\n")[1].strip()


def test_evaluation_and_generation_are_those_of_one_process(forked: ForkedParent, tmp_path: Path) -> None:
    """Three batches of evaluation, and sequences whose length is no multiple of four."""
    expected, text = evaluate(forked, tmp_path / "one", "single_device", 1)
    found, answer = evaluate(forked, tmp_path / "context", "fsdp_context_parallel", 2)
    assert found.keys() == expected.keys() and found["num_tokens"] == 8 * 46 and found["eval_examples"] == 6
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
    assert answer == text


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("t5_summarize", ".yaml:11: parallelism_config_cp_size: this recipe does not train on slices"),
        ("llama_pretrain", ".yaml:11: parallelism_config_cp_size: context parallelism has plain causal attention only"),
    ],
)
def test_recipes_whose_batches_cannot_be_sliced_refuse(
    recipe: str, said: str, forked: ForkedParent, tmp_path: Path
) -> None:
    script = REPOSITORY / "recipes" / f"{recipe}.py"
    result = forked.run(script, f"--output_dir={tmp_path / 'run'}", config="fsdp_context_parallel")
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_run_goes_on_with_and_without_slices(forked: ForkedParent, tmp_path: Path) -> None:
    """From step 3 of 6, within a logging window; in the same layout bit-exactly."""

    def train(config: str, output: Path, *flags: str) -> dict[int, tuple[float, float, int]]:
        result = forked.run(
            REPOSITORY / "recipes" / "gpt_shakespeare.py",
            *GPT.flags, "--save_strategy=steps", "--save_steps=3", "--logging_steps=2", "--max_steps=6",
            "--max_seq_length=46", "--per_device_train_batch_size=2", "--param_dtype=float64",
            f"--output_dir={output}", *flags, config=config, launcher_flags=["--mixed_precision", "no"],
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: (line["loss"], line["grad_norm"], line["num_tokens"]) for line in lines}

    configs = ("fsdp_context_parallel", "fsdp_full_shard")
    series = {config: train(config, tmp_path / config) for config in configs}
    for before, after in itertools.product(configs, configs):
        checkpoint = tmp_path / before / "checkpoints" / "step_00000003"
        output = tmp_path / f"{before}_{after}"
        shutil.copytree(checkpoint, output / "checkpoints" / "step_00000003")
        shutil.copy(tmp_path / before / "metrics.jsonl", output)
        resumed = train(after, output, "--resume_from_checkpoint=latest")
        assert list(resumed) == [2, 4, 6]
        for step, values in series[before].items():
            assert resumed[step] == (values if before == after else pytest.approx(values, rel=1e-9))
