"""The same numbers under every strategy, process count and split of the batch, through the real recipes and YAML files."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from tests.conftest import REPOSITORY
from tests.forked import ForkedParent

RECIPE = REPOSITORY / "recipes" / "t5_summarize.py"
# The demo preset, less what makes it long; no dropout, because its masks depend on how the batch is cut.
FLAGS = (
    "--config_overrides=dropout_rate=0.0 --total_batch_size=8 --max_source_length=64 --max_target_length=32 "
    "--rouge_samples=0 --eval_strategy=no --logging_steps=1 --learning_rate=1e-2"
).split()
TIED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Layout:
    config: str
    num_processes: int
    per_device: int
    units: str
    """What the banner must say about sharding: a dropped strategy would agree with the reference, too."""

    def __str__(self) -> str:
        return f"{self.config}-{self.num_processes}x{self.per_device}"


REFERENCE = Layout("single_device", 1, 8, "none")
UNITS = "5 FSDP units: 1 x T5ForConditionalGeneration, 4 x T5Block"
LAYOUTS = [
    Layout("single_device", 1, 2, "none"),
    Layout("ddp", 1, 4, "none"),
    Layout("ddp", 2, 1, "none"),
    Layout("fsdp_full_shard", 1, 4, UNITS),
    Layout("fsdp_full_shard", 2, 4, UNITS),
    Layout("fsdp_full_shard", 2, 1, UNITS),
    Layout("fsdp_shard_grad_op", 2, 2, UNITS),
    Layout("fsdp1_full_shard", 1, 4, UNITS),
    Layout("fsdp1_full_shard", 2, 2, UNITS),
]


@dataclass
class Series:
    loss: torch.Tensor
    grad_norm: torch.Tensor
    weights: dict[str, torch.Tensor]


def train(forked: ForkedParent, layout: Layout, output: Path, *flags: str) -> Series:
    result = forked.run(
        RECIPE,
        *FLAGS,
        f"--per_device_train_batch_size={layout.per_device}",
        f"--output_dir={output}",
        *flags,
        config=layout.config,
        num_processes=layout.num_processes,
        launcher_flags=["--mixed_precision", "no"],
    )
    assert result.exit_code == 0, result.output
    assert f"sharding     {layout.units}\n" in result.output
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return Series(
        torch.tensor([line["loss"] for line in lines], dtype=torch.float64),
        torch.tensor([line["grad_norm"] for line in lines], dtype=torch.float64),
        load_file(output / "model" / "model.safetensors"),
    )


@pytest.fixture(scope="module")
def reference(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> Series:
    folder = tmp_path_factory.mktemp("reference")
    return train(forked, REFERENCE, folder / "run", "--max_steps=20", "--param_dtype=float64")


@pytest.fixture(scope="module")
def reference_float32(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> Series:
    folder = tmp_path_factory.mktemp("reference_float32")
    return train(forked, REFERENCE, folder / "run", "--max_steps=1")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_float64_series_and_weights_agree(
    layout: Layout, reference: Series, forked: ForkedParent, tmp_path: Path
) -> None:
    series = train(forked, layout, tmp_path / "run", "--max_steps=20", "--param_dtype=float64")
    assert len(series.loss) == 20
    torch.testing.assert_close(series.loss, reference.loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(series.grad_norm, reference.grad_norm, rtol=1e-9, atol=0)
    assert series.weights.keys() == reference.weights.keys()
    for name, weight in series.weights.items():
        torch.testing.assert_close(weight, reference.weights[name], rtol=1e-7, atol=1e-9, msg=name)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model")
    state = model.state_dict()
    assert all(torch.equal(state["shared.weight"], state[name]) for name in TIED)
    assert len({state[name].data_ptr() for name in TIED}) == 1


def test_the_reference_learns(reference: Series) -> None:
    """Twenty steps move every weight and lower the loss: series that agree because nothing happens would not count."""
    assert reference.loss[-5:].mean() < reference.loss[:5].mean() - 0.5
    assert reference.grad_norm.min() > 0


@pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if layout.num_processes == 2 and layout.per_device != 4],
    ids=str,
)
def test_float32_first_step_agrees(
    layout: Layout, reference_float32: Series, forked: ForkedParent, tmp_path: Path
) -> None:
    series = train(forked, layout, tmp_path / "run", "--max_steps=1")
    torch.testing.assert_close(series.loss, reference_float32.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(series.grad_norm, reference_float32.grad_norm, rtol=1e-5, atol=0)
