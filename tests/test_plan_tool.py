"""tools/plan.py: the table's numbers by hand, what fits, and mistakes."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.conftest import REPOSITORY
from tools import plan

SEVEN = ["--model_config_path", str(REPOSITORY / "recipes" / "configs" / "models" / "chess_7b")]
TWO_BLOCKS = [*SEVEN, "--config_overrides", "num_hidden_layers=2"]
# CodeLlama-7B: parameters of a block, and those outside the blocks; of all with two blocks.
BLOCK, REST = 202_383_360, 262_279_168
NUM = 2 * BLOCK + REST


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Activations of 1 GiB a sequence, 1/4 with checkpointing, and what was asked of their count."""
    calls: list[dict[str, Any]] = []

    def peak_bytes(model: PreTrainedModel, batch: dict[str, torch.Tensor], **options: Any) -> int:
        calls.append({"dtype": model.dtype, "shape": tuple(batch["input_ids"].shape), **options})
        return 2**28 if options["recomputes"] else 2**30

    monkeypatch.setattr(plan, "peak_bytes", peak_bytes)
    return calls


def table(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, list[str]]:
    assert plan.main([*TWO_BLOCKS, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.endswith("one sequence"))
    rows = [re.split(" {2,}", line) for line in lines[head + 1 :]]
    return {words[0]: words[1:] for words in rows}


def test_numbers_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(capsys, "--num_processes", "1", "4", "16", "--num_gpus", "8", "--device_memory_gib", "12")
    gathered = 2 * (REST + 2 * BLOCK) + 6 * BLOCK
    copied = gathered + 2 * 2 * BLOCK  # within a machine of 8

    def cells(*values: float) -> list[str]:
        rooms = [max(0, 0.9 * 12 - value / 2**30) for value in values]
        texts = zip([f"{value / 2**30:,.1f}" for value in values], rooms, strict=True)
        return [f"{text} ({math.floor(room)}, {math.floor(4 * room)})" for text, room in texts]

    ends = ["1.0, 0.25"]
    assert rows["ddp"] == cells(18 * NUM, 18 * NUM, 18 * NUM) + ends == ["11.2 (0, 0)"] * 3 + ends
    assert rows["single_device"] == [*cells(18 * NUM), "-", "-", *ends]
    assert rows["fsdp_full_shard"] == cells(16 * NUM + gathered, 4 * NUM + copied, NUM + gathered) + ends
    assert rows["fsdp_shard_grad_op"][1:] == cells(6 * NUM + 10 * BLOCK, 3 * NUM + 6 * BLOCK) + ends
    assert rows["fsdp_hybrid_shard"] == ["-", *cells(8 * NUM + copied, 2 * NUM + copied), *ends]
    halves = ["0.50, 0.12"]  # of a sequence on each process
    assert [row.split()[0] for row in rows["fsdp_context_parallel"]][1:3] == [
        row.split()[0] for row in rows["fsdp_full_shard"][1:3]
    ]
    assert rows["fsdp_context_parallel"][0] == "-" and rows["fsdp_context_parallel"][3:] == halves
    assert rows["fsdp1_hybrid_shard"][2] == cells(2 * NUM + gathered)[0]  # within machines of 8
    assert rows["fsdp_full_shard_offload"] == cells(gathered, gathered, gathered) + ends


def test_activations_are_counted_as_the_run_would_compute(
    counted: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    table(capsys, "--max_seq_length", "96", "--loss_chunk_tokens", "200")
    assert counted == [
        {
            "dtype": dtype,
            "autocast": autocast,
            "recomputes": recomputes,
            "shape": (number, 96),
            "loss_chunk_tokens": 200,
        }
        for dtype, autocast in ((torch.float32, torch.bfloat16), (torch.bfloat16, None))
        for recomputes in (False, True)
        for number in (1, 3, 6)  # three sequences fill a chunk
    ]


def test_a_loss_in_chunks_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Under autocast and without, recomputed and not: the head runs again in the backward pass."""
    monkeypatch.undo()  # the real count
    flags = ["--config", "llama_pretrain_demo", "--config_overrides", "vocab_size=64000", "--num_processes", "2"]
    batches = []
    for more in ([], ["--loss_chunk_tokens", "512"]):
        assert plan.main([*flags, "--device_memory_gib", "4", *more]) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if re.match("ddp |fsdp_full_shard ", line)]
        batches.append([[int(n.replace(",", "")) for n in re.findall(r"[\d,]+(?=[,)])", row)][:2] for row in rows])
    for plain, chunked in zip(*batches, strict=True):
        assert all(after > 3 * before for before, after in zip(plain, chunked, strict=True)), batches


def test_blocks_that_are_gathered_together(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    preset = tmp_path_factory.mktemp("preset") / "own.yaml"
    preset.write_text("blocks_per_unit: 2\n")
    rows = table(capsys, "--config", str(preset), "--num_processes", "4")
    one_unit = 2 * (REST + 2 * BLOCK) + (6 + 2 * 2) * 2 * BLOCK  # both blocks; there is no next unit
    assert rows["fsdp_full_shard"][0] == f"{(4 * NUM + one_unit) / 2**30:,.1f}"


def test_the_optimizer_and_the_type_of_the_preset(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    preset = tmp_path_factory.mktemp("preset") / "own.yaml"
    preset.write_text("model_name_or_path: a/b\noptim: adafactor\nparam_dtype: bf16\n")
    rows = table(capsys, "--config", str(preset), "--num_processes", "1")
    assert rows["ddp"][0] == f"{4 * NUM / 2**30:,.1f}"  # 2 bytes of parameters, 2 of gradients; no copy for computing
    rows = table(capsys, "--config", str(preset), "--num_processes", "1", "--optim", "adamw")
    assert rows["ddp"][0] == f"{8 * NUM / 2**30:,.1f}"


def test_small_models_are_told_in_mib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()  # the real count
    assert plan.main(["--config", "gpt_shakespeare_demo", "--num_processes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Estimates in MiB" in lines[0] and "sequence of 64 tokens" in lines[1]
    numbers = [float(number) for line in lines[3:] for number in re.findall(r"\d+\.\d+", line)]
    assert len(numbers) == 3 * 14 - 1 and min(numbers) > 0
    kept, recomputed = map(float, lines[3].rpartition("  ")[2].split(", "))
    assert kept > recomputed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*SEVEN, "--device_memory_gib", "nan"], "--device_memory_gib nan: expected GiB, such as 80"),
        (
            ["--config", "gpt_shakespeare_demo", "--max_seq_length", "10000"],
            "--max_seq_length 10000: the model has 64 positions; lower it",
        ),
        (["--config", "none"], "--config none: no such preset; there are chess_finetune_100m"),
        (["--model_config_path", "none"], "--model_config_path none: no such file or folder"),
        ([], "give --model_name_or_path"),
        (
            [*SEVEN, "--num_processes", "0"],
            "--num_processes, --num_gpus, lengths and --loss_chunk_tokens: expected numbers of 1 or more",
        ),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert plan.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_presets_are_read_as_the_recipes_read_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # paths in presets are the repository's
    few = ["--num_processes", "1"]
    assert plan.main(["--config", "t5_summarize_demo", *few]) == 0
    assert plan.main(["--config", "gpt_shakespeare_demo", *TWO_BLOCKS, *few]) == 0, "overrides are of its own model"
    (tmp_path / "own.yaml").write_text(f"model_config_path: {SEVEN[1]}\nparam_dtype: fp32\n")
    assert plan.main(["--config", "own.yaml", "--config_overrides", "num_hidden_layers=2", *few]) == 0
    (tmp_path / "own.yaml").write_text("model_config_path: [\n")
    assert plan.main(["--config", "own.yaml", *few]) == 2
    assert "error: --config own.yaml: not a readable YAML file" in capsys.readouterr().err
