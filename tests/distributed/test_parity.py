"""The same numbers under every strategy, process count and split of the batch: real recipe, real YAML files."""

import contextlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from tests.conftest import REPOSITORY
from tests.forked import ForkedParent

RECIPE = REPOSITORY / "recipes" / "t5_summarize.py"
# The demo preset, less what makes it long; no dropout, because its masks depend on how the batch is cut.
FLAGS = [
    "--config_overrides=dropout_rate=0.0",
    "--total_batch_size=8",
    "--max_source_length=64",
    "--max_target_length=32",
    "--rouge_samples=0",
    "--eval_strategy=no",
    "--save_strategy=no",
    "--logging_steps=1",
    "--learning_rate=1e-2",
]
TIED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")


UNITS = "5 FSDP units: 1 x T5ForConditionalGeneration, 4 x T5Block"


@dataclass(frozen=True)
class Layout:
    config: str
    num_processes: int
    per_device: int
    units: str = UNITS
    """What the banner must say about sharding: a dropped strategy would agree with the reference, too."""
    edits: tuple[tuple[str, Any], ...] = ()
    """Keys of fsdp_config that are changed in a copy of the YAML."""
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        changes = [f"{key}={value}" for key, value in self.edits] + list(self.flags)
        return "-".join([self.config, f"{self.num_processes}x{self.per_device}", *changes])

    def config_file(self, folder: Path) -> str:
        """The YAML to launch with: the shipped one, or a copy with the edits."""
        if not self.edits:
            return self.config
        content = yaml.safe_load((REPOSITORY / "accelerate_configs" / f"{self.config}.yaml").read_text())
        content["fsdp_config"] |= {key: value for key, value in self.edits if value is not None}
        for key, value in self.edits:
            if value is None:
                del content["fsdp_config"][key]
        folder.mkdir(exist_ok=True)
        (folder / "edited.yaml").write_text(yaml.safe_dump(content))
        return str(folder / "edited.yaml")


REFERENCE = Layout("single_device", 1, 8, "none")
ROOT_ONLY = "1 FSDP units: 1 x T5ForConditionalGeneration"
LAYOUTS = [
    Layout("single_device", 1, 2, "none"),
    Layout("ddp", 1, 4, "none"),
    Layout("ddp", 2, 2, "none"),
    Layout("ddp", 2, 1, "none"),
    Layout("fsdp_full_shard", 1, 4),
    Layout("fsdp_full_shard", 2, 4),
    Layout("fsdp_full_shard", 2, 1),
    Layout("fsdp_full_shard", 4, 1),
    Layout("fsdp_shard_grad_op", 2, 2),
    Layout("fsdp_hybrid_shard", 4, 2),
    Layout("fsdp_full_shard_offload", 2, 4),
    Layout("fsdp_full_shard_compile", 2, 4),
    Layout("fsdp1_full_shard", 1, 4),
    Layout("fsdp1_full_shard", 2, 2),
    Layout("fsdp1_shard_grad_op", 2, 4),
    Layout("fsdp1_no_shard", 2, 4),
    Layout("fsdp1_hybrid_shard", 4, 2),
    Layout("fsdp1_hybrid_shard_zero2", 4, 2),
    # Single edits of the YAML, and flags where the YAML has no key.
    Layout("fsdp_full_shard", 2, 4, edits=(("fsdp_activation_checkpointing", True),)),
    Layout(
        "fsdp_full_shard",
        2,
        4,
        edits=(("fsdp_activation_checkpointing", True), ("fsdp_activation_checkpointing_offload", True)),
    ),
    Layout("fsdp_full_shard", 2, 4, ROOT_ONLY, edits=(("fsdp_auto_wrap_policy", "NO_WRAP"),)),
    Layout("fsdp1_full_shard", 2, 4, ROOT_ONLY, edits=(("fsdp_auto_wrap_policy", "NO_WRAP"),)),
    Layout("fsdp_full_shard", 2, 4, edits=(("fsdp_backward_prefetch", "NO_PREFETCH"),)),
    Layout(
        "fsdp_full_shard",
        2,
        4,
        edits=(("fsdp_backward_prefetch", "BACKWARD_PRE"), ("fsdp_forward_prefetch", True)),
        flags=("--prefetch_depth=2",),
    ),
    Layout("fsdp1_full_shard", 2, 4, edits=(("fsdp_backward_prefetch", "BACKWARD_POST"),)),
    Layout("fsdp1_full_shard", 2, 4, edits=(("fsdp_forward_prefetch", True),), flags=("--limit_all_gathers=false",)),
    Layout("fsdp1_full_shard", 2, 4, edits=(("fsdp_activation_checkpointing", True),)),
    Layout("ddp", 2, 4, "none", flags=("--gradient_checkpointing",)),
    Layout(
        "fsdp_full_shard",
        2,
        4,
        "3 FSDP units: 1 x T5ForConditionalGeneration, 2 x T5Block + T5Block",
        flags=("--blocks_per_unit=2",),
    ),
]
# What `make test` runs of them: each YAML once with several processes, and edits that change what a step does most.
QUICK = [
    layout
    for layout in LAYOUTS
    if layout.num_processes > 1
    and layout.per_device != 1
    and (not layout.edits or layout.edits == (("fsdp_activation_checkpointing", True),))
]
FIRST_STEP = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp1_full_shard")


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
        *layout.flags,
        *flags,
        config=layout.config_file(output.parent / "yaml"),
        num_processes=layout.num_processes,
        launcher_flags=["--mixed_precision", "no"],
    )
    assert result.exit_code == 0, result.output
    assert f"sharding     {layout.units}" in result.output
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


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=() if x in QUICK else pytest.mark.full, id=str(x)) for x in LAYOUTS]
)
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
    """Series that agree because nothing happens would not count."""
    assert reference.loss[-5:].mean() < reference.loss[:5].mean() - 0.5
    assert reference.grad_norm.min() > 0


@pytest.mark.parametrize("layout", [Layout(config, 2, 4, "") for config in FIRST_STEP], ids=str)
def test_float32_first_step_agrees(
    layout: Layout, reference_float32: Series, forked: ForkedParent, tmp_path: Path
) -> None:
    series = train(forked, layout, tmp_path / "run", "--max_steps=1")
    torch.testing.assert_close(series.loss, reference_float32.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(series.grad_norm, reference_float32.grad_norm, rtol=1e-5, atol=0)


def test_every_yaml_is_compared() -> None:
    shipped = {file.stem for file in (REPOSITORY / "accelerate_configs").glob("*.yaml")}
    assert {layout.config for layout in QUICK} | {"single_device", "fsdp_fp8"} == shipped


def test_fp8_is_refused_with_the_reason(forked: ForkedParent, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError) if not importlib.util.find_spec("torchao") else contextlib.nullcontext():
        result = forked.run(RECIPE, f"--output_dir={tmp_path / 'run'}", config="fsdp_fp8")
        assert result.exit_code == 2 and "needs a GPU with fp8" in result.output
