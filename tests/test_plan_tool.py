"""tools/plan.py: the table's numbers by hand, what is marked, and mistakes."""

import pytest

from tests.conftest import REPOSITORY
from tools import plan

SEVEN = ["--model_config_path", str(REPOSITORY / "recipes" / "configs" / "models" / "chess_7b")]
# CodeLlama-7B: parameters, those of a block, and those outside the blocks.
NUM, BLOCK, REST = 6_738_546_688, 202_383_360, 262_279_168


def table(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, list[str]]:
    assert plan.main([*SEVEN, *flags]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {words[0]: words[1:] for words in lines[2:]}


def test_numbers_and_marks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(capsys, "--num_processes", "1", "4", "16", "--num_gpus", "8", "--device_memory_gib", "40")
    gathered = 2 * (REST + 2 * BLOCK) + 6 * BLOCK

    def cells(*values: float) -> list[str]:
        return [f"{value / 2**30:,.1f}" + "*" * (value <= 0.8 * 40 * 2**30) for value in values]

    assert rows["ddp"] == cells(18 * NUM, 18 * NUM, 18 * NUM)
    assert rows["single_device"] == [*cells(18 * NUM), "-", "-"]
    assert rows["fsdp_full_shard"] == cells(16 * NUM + gathered, 4 * NUM + gathered, NUM + gathered)
    assert rows["fsdp_full_shard"][1].endswith("*") and not rows["fsdp_full_shard"][0].endswith("*")
    assert rows["fsdp_shard_grad_op"][1:] == cells(6 * NUM + 6 * BLOCK, 3 * NUM + 6 * BLOCK)
    assert rows["fsdp_hybrid_shard"] == ["-", *cells(8 * NUM + gathered, 2 * NUM + gathered)]
    assert rows["fsdp1_hybrid_shard"][2] == cells(2 * NUM + gathered)[0]  # within machines of 8
    assert rows["fsdp_full_shard_offload"] == cells(gathered, gathered, gathered)


def test_the_optimizer_and_the_type_of_the_preset(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    preset = tmp_path_factory.mktemp("preset") / "own.yaml"
    preset.write_text("model_name_or_path: a/b\noptim: adafactor\nparam_dtype: bf16\n")
    rows = table(capsys, "--config", str(preset), "--num_processes", "1")
    assert rows["ddp"] == [f"{4 * NUM / 2**30:,.1f}"]  # 2 bytes of parameters, 2 of gradients; no copy for computing
    rows = table(capsys, "--config", str(preset), "--num_processes", "1", "--optim", "adamw")
    assert rows["ddp"] == [f"{8 * NUM / 2**30:,.1f}"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config", "none"], "--config none: no such preset; there are chess_finetune_100m"),
        (["--model_config_path", "none"], "--model_config_path none: no such file or folder"),
        ([], "give --model_name_or_path"),
        ([*SEVEN, "--num_processes", "0"], "--num_processes and --num_gpus: expected numbers of devices"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert plan.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
