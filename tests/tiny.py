"""The T5 recipe with a model and data so small that a run takes seconds, and what its runs leave."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.forked import ForkedParent, Result, patched

RECIPE = REPOSITORY / "recipes" / "t5_summarize.py"
# 22 examples in batches of 4: epochs end within batches. Dropout is the model's own, 0.1.
FLAGS = [
    "--config=t5_summarize_demo", "--total_batch_size=4", "--per_device_train_batch_size=1",
    "--max_train_samples=22", "--max_source_length=32", "--max_target_length=16",
    "--num_beams=1", "--max_new_tokens=8", "--rouge_samples=0", "--eval_strategy=no", "--save_strategy=no",
    "--logging_steps=1", "--learning_rate=1e-2", "--save_total_limit=99",
]  # fmt: skip
SIZE = "num_layers=1,num_decoder_layers=1,d_model=32,d_ff=64"
LAUNCHER_FLAGS = ("--mixed_precision", "no")
SERIES = ("loss", "grad_norm", "learning_rate", "num_tokens")


def flags(output: Path, *more: str, dropout: bool = True) -> list[str]:
    overrides = SIZE if dropout else f"{SIZE},dropout_rate=0.0"
    return [*FLAGS, f"--config_overrides={overrides}", f"--output_dir={output}", *more]


def with_loss_scale(folder: Path, scale: str) -> Path:
    """A script of the recipe with this loss scale, as fp16 has one, in the types of the launcher."""
    code = f"""
from common import launch
from common.optim import LossScale

def build_with_scale(*args):
    accelerator, strategy = build(*args)
    accelerator.scaler = {scale}
    return accelerator, strategy

build, launch.build_accelerator = launch.build_accelerator, build_with_scale
"""
    return patched(RECIPE, folder, code)


def saving(steps: int) -> list[str]:
    return ["--save_strategy=steps", f"--save_steps={steps}"]


def train(
    forked: ForkedParent,
    output: Path,
    *more: str,
    config: str | Path = "fsdp_full_shard",
    num_processes: int | None = None,
    dropout: bool = True,
    exit_code: int = 0,
) -> Result:
    """A run that ends with `exit_code`."""
    result = forked.run(
        RECIPE,
        *flags(output, *more, dropout=dropout),
        config=config,
        num_processes=num_processes,
        launcher_flags=LAUNCHER_FLAGS,
    )
    assert result.exit_code == exit_code, result.output
    return result


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def series(output: Path) -> dict[int, tuple[float, ...]]:
    """(loss, grad_norm, learning_rate, num_tokens) by step, each step once."""
    values = [(line["step"], tuple(line[key] for key in SERIES)) for line in lines(output) if "loss" in line]
    assert [step for step, _ in values] == sorted({step for step, _ in values}), "each step once, in order"
    return dict(values)


def checkpoint_names(output: Path) -> list[str]:
    folder = output / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory, as small as the options say; skips the test where mounting is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
