"""The chess recipe's numbers under several strategies, process counts and splits of the batch; see test_parity.py."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import REPOSITORY
from tests.forked import ForkedParent

RECIPE = REPOSITORY / "recipes" / "chess_finetune.py"
FLAGS = [
    "--config=chess_finetune_demo", "--config_overrides=hidden_size=32,intermediate_size=64,num_hidden_layers=2",
    "--max_games=60", "--max_seq_length=96", "--total_batch_size=8", "--max_steps=12", "--param_dtype=float64",
    "--learning_rate=1e-2", "--logging_steps=1", "--legal_move_samples=20", "--max_eval_samples=6",
    "--eval_on_start=false", "--validation_size=0.2", "--warmup_steps=0",
]  # fmt: skip
SERIES = ("loss", "grad_norm", "learning_rate", "num_tokens")
REFERENCE = ("single_device", 1, 8)
LAYOUTS = [
    ("single_device", 1, 2), ("ddp", 2, 4), ("fsdp_full_shard", 2, 2), ("fsdp_full_shard", 4, 1),
    ("fsdp_shard_grad_op", 2, 4), ("fsdp_hybrid_shard", 4, 2), ("fsdp1_full_shard", 2, 4),
]  # fmt: skip
QUICK = [("ddp", 2, 4), ("fsdp_full_shard", 2, 2), ("fsdp1_full_shard", 2, 4)]

Layout = tuple[str, int, int]


def train(forked: ForkedParent, layout: Layout, output: Path, *flags: str) -> Path:
    config, num_processes, per_device = layout
    result = forked.run(
        RECIPE, *FLAGS, f"--per_device_train_batch_size={per_device}", f"--output_dir={output}", *flags,
        config=config, num_processes=num_processes, launcher_flags=["--mixed_precision", "no"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return output


def compare(found: Path, reference: Path) -> None:
    lines, wanted = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (found, reference)
    )
    assert len(lines) == len(wanted) == 13
    for line, expected in zip(lines, wanted, strict=True):
        names = [name for name in expected if name in SERIES or name.startswith("eval_")]
        assert {name: line[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-9)
    weights, expected_weights = (load_file(folder / "model" / "model.safetensors") for folder in (found, reference))
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-7, atol=1e-9, msg=name)


@pytest.fixture(scope="module")
def reference(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(forked, REFERENCE, tmp_path_factory.mktemp("reference") / "run")


@pytest.fixture(scope="module")
def reference_packed(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(forked, REFERENCE, tmp_path_factory.mktemp("reference") / "run", "--packing")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.full, id="{}-{}x{}".format(*x)) for x in LAYOUTS],
)
def test_series_metrics_and_weights_agree(
    layout: Layout, reference: Path, forked: ForkedParent, tmp_path: Path
) -> None:
    compare(train(forked, layout, tmp_path / "run"), reference)


@pytest.mark.parametrize("layout", [("fsdp_full_shard", 2, 2)], ids=lambda x: x[0])
def test_packed_series_agree(layout: Layout, reference_packed: Path, forked: ForkedParent, tmp_path: Path) -> None:
    compare(train(forked, layout, tmp_path / "run", "--packing"), reference_packed)


def test_the_reference_learns(reference: Path, reference_packed: Path) -> None:
    losses = [json.loads(line).get("loss") for line in (reference / "metrics.jsonl").read_text().splitlines()][:12]
    packed = [json.loads(line).get("loss") for line in (reference_packed / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.1
    assert losses[0] != packed[0]
