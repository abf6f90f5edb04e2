"""The same numbers under every strategy, process count and split of the batch: real recipe, real YAML files."""

import contextlib
import importlib.util
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.conftest import REPOSITORY
from tests.forked import ForkedParent


@dataclass(frozen=True)
class Recipe:
    """A recipe's demo preset, less what makes it long; no dropout, because its masks depend on how the batch is cut."""

    script: str
    flags: tuple[str, ...]
    model: str
    blocks: str
    """The blocks' units as the banner counts them."""
    pairs: str
    """The same with --blocks_per_unit 2."""
    by_size: str = ""
    """The same by SIZE_BASED_WRAP with 100,000 parameters; refused for encoder-decoder models."""

    def units(self, kind: str) -> str:
        """What the banner must say about sharding: a dropped strategy would agree with the reference, too."""
        if kind == "none":
            return kind
        extra = {"root": "", "blocks": f", {self.blocks}", "pairs": f", {self.pairs}", "by size": f", {self.by_size}"}[
            kind
        ]
        number = 1 + (int(extra.split()[1]) if extra else 0)
        return f"{number} FSDP units: 1 x {self.model}{extra}"


COMMON_FLAGS = ("--total_batch_size=8", "--eval_strategy=no", "--save_strategy=no", "--logging_steps=1")
T5 = Recipe(
    "t5_summarize",
    (
        *COMMON_FLAGS, "--config_overrides=dropout_rate=0.0", "--max_source_length=64", "--max_target_length=32",
        "--rouge_samples=0", "--learning_rate=1e-2",
    ),
    "T5ForConditionalGeneration",
    "4 x T5Block",
    "2 x T5Block + T5Block",
)  # fmt: skip
GPT = Recipe(
    "gpt_shakespeare",
    (*COMMON_FLAGS, "--max_seq_length=48", "--prompt=", "--learning_rate=1e-2"),
    "GPT2LMHeadModel",
    "2 x GPT2Block",
    "1 x GPT2Block + GPT2Block",
    "2 x GPT2MLP",
)
LLAMA = Recipe(
    "llama_pretrain",
    (
        *COMMON_FLAGS, "--config_overrides=num_hidden_layers=2,hidden_size=64,intermediate_size=128",
        "--max_seq_length=48", "--prompt=", "--learning_rate=1e-2", "--warmup_steps=0", "--eval_on_start=false",
        "--forgetting_dataset=",
    ),
    "LlamaForCausalLM",
    "2 x LlamaDecoderLayer",
    "1 x LlamaDecoderLayer + LlamaDecoderLayer",
)  # fmt: skip
TIED = {
    "llama_pretrain": ("model.embed_tokens.weight", "lm_head.weight"),
    "t5_summarize": ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    "gpt_shakespeare": ("transformer.wte.weight", "lm_head.weight"),
}


@dataclass(frozen=True)
class Layout:
    config: str
    num_processes: int
    per_device: int
    units: str = "blocks"
    """A key of `Recipe.units`."""
    edits: tuple[tuple[str, Any], ...] = ()
    """Keys of fsdp_config that are changed in a copy of the YAML."""
    flags: tuple[str, ...] = ()
    parallelism: tuple[tuple[str, int], ...] = ()
    """Sizes of parallelism_config, likewise."""

    def __str__(self) -> str:
        changes = [f"{key}={value}" for key, value in (*self.edits, *self.parallelism)] + list(self.flags)
        return "-".join([self.config, f"{self.num_processes}x{self.per_device}", *changes])

    def config_file(self, folder: Path) -> str:
        """The YAML to launch with: the shipped one, or a copy with the edits."""
        if not self.edits and not self.parallelism:
            return self.config
        content = yaml.safe_load((REPOSITORY / "accelerate_configs" / f"{self.config}.yaml").read_text())
        content["fsdp_config"] |= {key: value for key, value in self.edits if value is not None}
        for key, value in self.edits:
            if value is None:
                del content["fsdp_config"][key]
        for name, size in self.parallelism:
            content["parallelism_config"][f"parallelism_config_{name}"] = size
        folder.mkdir(exist_ok=True)
        (folder / "edited.yaml").write_text(yaml.safe_dump(content))
        return str(folder / "edited.yaml")


REFERENCE = Layout("single_device", 1, 8, "none")
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
    Layout("fsdp_full_shard_offload", 2, 2),
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
    Layout("fsdp_full_shard", 2, 4, "root", edits=(("fsdp_auto_wrap_policy", "NO_WRAP"),)),
    Layout("fsdp1_full_shard", 2, 4, "root", edits=(("fsdp_auto_wrap_policy", "NO_WRAP"),)),
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
        "pairs",
        flags=("--blocks_per_unit=2",),
    ),
]
BY_SIZE = (("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"), ("fsdp_min_num_params", 100_000))
# Wrapping by size and context parallelism are for causal models only.
CONTEXT_LAYOUTS = [
    Layout("fsdp_context_parallel", 2, 4),
    Layout("fsdp_context_parallel", 2, 4, edits=(("fsdp_activation_checkpointing_offload", True),)),
    Layout("fsdp_context_parallel", 4, 2, parallelism=(("cp_size", 4),)),
    Layout("fsdp_context_parallel", 4, 2, parallelism=(("dp_shard_size", 2),)),
    Layout("fsdp_context_parallel", 2, 2, flags=("--loss_chunk_tokens=16",)),
]
CAUSAL_LAYOUTS = [
    *LAYOUTS,
    *CONTEXT_LAYOUTS,
    Layout("fsdp_full_shard", 2, 2, "by size", edits=BY_SIZE),
    Layout("fsdp1_full_shard", 2, 2, "by size", edits=BY_SIZE),
    # Units within a block that is run again.
    Layout("fsdp_full_shard", 2, 2, "by size", edits=(*BY_SIZE, ("fsdp_activation_checkpointing", True))),
]
# Packed without masks between the documents, which slices do not have.
PLAIN_LLAMA = replace(LLAMA, flags=(*LLAMA.flags, "--document_masking=false", "--max_seq_length=46"))
# What `make test` runs of them: each YAML once with several processes, FSDP1 and FSDP2 by block with every recipe, and
# the edits that change what a step does most. The compiled one has the GPT, whose blocks are of one kind.
QUICK = {
    T5: [
        Layout("ddp", 2, 2, "none"),
        Layout("fsdp_full_shard", 2, 4),
        Layout("fsdp1_full_shard", 2, 2),
        Layout("fsdp_full_shard", 2, 4, edits=(("fsdp_activation_checkpointing", True),)),
    ],
    GPT: [
        Layout("fsdp_hybrid_shard", 4, 2),
        Layout("fsdp_full_shard_compile", 2, 4),
        CONTEXT_LAYOUTS[0],
        Layout("fsdp1_shard_grad_op", 2, 4),
        Layout("fsdp1_no_shard", 2, 4),
        Layout("fsdp1_hybrid_shard", 4, 2),
        Layout("fsdp_full_shard", 2, 2, "by size", edits=BY_SIZE),
    ],
    LLAMA: [
        Layout("fsdp_shard_grad_op", 2, 2),
        Layout("fsdp_full_shard_offload", 2, 2),
        Layout("fsdp1_hybrid_shard_zero2", 4, 2),
    ],
}
CASES = [
    *((T5, layout) for layout in LAYOUTS),
    *((GPT, layout) for layout in CAUSAL_LAYOUTS),
    *((LLAMA, layout) for layout in LAYOUTS),
    *((PLAIN_LLAMA, layout) for layout in CONTEXT_LAYOUTS),
]
FIRST_STEP = ("ddp", "fsdp_full_shard", "fsdp_shard_grad_op", "fsdp1_full_shard")
# In `make test` the GPT has one strategy: what is float32 in the others is the same code as with T5.
QUICK_FIRST_STEP = [*((T5, config) for config in FIRST_STEP), (GPT, "fsdp_full_shard")]


@dataclass
class Series:
    loss: torch.Tensor
    grad_norm: torch.Tensor
    weights: dict[str, torch.Tensor]


def train(forked: ForkedParent, recipe: Recipe, layout: Layout, output: Path, *flags: str) -> Series:
    result = forked.run(
        REPOSITORY / "recipes" / f"{recipe.script}.py",
        *recipe.flags,
        f"--per_device_train_batch_size={layout.per_device}",
        f"--output_dir={output}",
        *layout.flags,
        *flags,
        config=layout.config_file(output.parent / "yaml"),
        num_processes=layout.num_processes,
        launcher_flags=["--mixed_precision", "no"],
    )
    assert result.exit_code == 0, result.output
    return read_series(recipe, layout, output, result.output)


def read_series(recipe: Recipe, layout: Layout, output: Path, said: str) -> Series:
    """What a run left, once its banner has said that it was sharded as the layout has it."""
    assert f"  sharding     {recipe.units(layout.units)}\n" in said
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return Series(
        torch.tensor([line["loss"] for line in lines], dtype=torch.float64),
        torch.tensor([line["grad_norm"] for line in lines], dtype=torch.float64),
        load_file(output / "model" / "model.safetensors"),
    )


class References(dict[tuple[Recipe, int], Series]):
    """Series of one process without a launcher's strategy, by (recipe, steps): 20 in float64, 1 in float32."""

    def __init__(self, forked: ForkedParent, folder: Path) -> None:
        self.forked, self.folder = forked, folder
        self.numbers = itertools.count()  # a reference that fails leaves a folder behind

    def __missing__(self, key: tuple[Recipe, int]) -> Series:
        recipe, steps = key
        dtype = "float64" if steps > 1 else "float32"
        flags = [f"--max_steps={steps}", f"--param_dtype={dtype}"]
        self[key] = train(self.forked, recipe, REFERENCE, self.folder / str(next(self.numbers)), *flags)
        return self[key]


@pytest.fixture(scope="module")
def references(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(forked, tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(
            recipe,
            layout,
            marks=() if layout in QUICK.get(recipe, []) else pytest.mark.full,
            id=f"{recipe.script[:3]}-{layout}",
        )
        for recipe, layout in CASES
    ],
)
def test_float64_series_and_weights_agree(
    recipe: Recipe, layout: Layout, references: References, forked: ForkedParent, tmp_path: Path
) -> None:
    reference = references[recipe, 20]
    series = train(forked, recipe, layout, tmp_path / "run", "--max_steps=20", "--param_dtype=float64")
    assert len(series.loss) == 20
    torch.testing.assert_close(series.loss, reference.loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(series.grad_norm, reference.grad_norm, rtol=1e-9, atol=0)
    assert series.weights.keys() == reference.weights.keys()
    for name, weight in series.weights.items():
        torch.testing.assert_close(weight, reference.weights[name], rtol=1e-7, atol=1e-9, msg=name)
    model_class = AutoModelForSeq2SeqLM if recipe is T5 else AutoModelForCausalLM
    state = model_class.from_pretrained(tmp_path / "run" / "model").state_dict()
    first, *others = TIED[recipe.script]
    assert all(torch.equal(state[first], state[name]) for name in others)
    assert len({state[name].data_ptr() for name in TIED[recipe.script]}) == 1


@pytest.mark.parametrize("recipe", [T5, GPT, LLAMA], ids=lambda recipe: recipe.script)
def test_the_reference_learns(recipe: Recipe, references: References) -> None:
    """Series that agree because nothing happens would not count."""
    reference = references[recipe, 20]
    assert reference.loss[-5:].mean() < reference.loss[:5].mean() - 0.5
    assert reference.grad_norm.min() > 0


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        pytest.param(recipe, config, marks=() if (recipe, config) in QUICK_FIRST_STEP else pytest.mark.full)
        for recipe, config in itertools.product([T5, GPT], FIRST_STEP)
    ],
    ids=lambda value: value.script if isinstance(value, Recipe) else value,
)
def test_float32_first_step_agrees(
    recipe: Recipe, config: str, references: References, forked: ForkedParent, tmp_path: Path
) -> None:
    reference, layout = references[recipe, 1], Layout(config, 2, 4, "none" if config == "ddp" else "blocks")
    series = train(forked, recipe, layout, tmp_path / "run", "--max_steps=1")
    torch.testing.assert_close(series.loss, reference.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(series.grad_norm, reference.grad_norm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("config", ["fsdp_full_shard", "fsdp1_full_shard"])
def test_gradients_are_clipped_by_the_norm_of_all_shards(config: str, forked: ForkedParent, tmp_path: Path) -> None:
    """In float32, where AdamW clips while it updates; with an epsilon that makes the update depend on the scale."""
    flags = ["--max_steps=5", "--max_grad_norm=0.05", "--adam_epsilon=1e-2", "--weight_decay=0"]
    layouts = REFERENCE, Layout(config, 2, 4)
    found, expected = [train(forked, GPT, layout, tmp_path / layout.config, *flags) for layout in layouts]
    assert expected.grad_norm.min() > 0.5
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.full
@pytest.mark.launch
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        (GPT, REFERENCE),
        *((recipe, layout) for recipe, layouts in QUICK.items() for layout in layouts if not layout.edits),
    ],
    ids=lambda value: value.script if isinstance(value, Recipe) else str(value),
)
def test_accelerate_launch_gives_the_series_of_the_reference(
    recipe: Recipe, layout: Layout, references: References, tmp_path: Path
) -> None:
    output, name = tmp_path / "run", layout.config
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0", "--mixed_precision=no"]
    command += [f"--config_file=accelerate_configs/{name}.yaml"]
    if layout.num_processes > 1:
        command += [f"--num_processes={layout.num_processes}"]
    command += [f"recipes/{recipe.script}.py", *recipe.flags, *layout.flags, f"--output_dir={output}"]
    command += [f"--per_device_train_batch_size={layout.per_device}", "--max_steps=20", "--param_dtype=float64"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    series, reference = read_series(recipe, layout, output, result.stdout), references[recipe, 20]
    torch.testing.assert_close(series.loss, reference.loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(series.grad_norm, reference.grad_norm, rtol=1e-9, atol=0)


def test_every_yaml_is_compared() -> None:
    shipped = {file.stem for file in (REPOSITORY / "accelerate_configs").glob("*.yaml")}
    quick = [(recipe, layout) for recipe, layouts in QUICK.items() for layout in layouts]
    assert set(quick) <= set(CASES)
    compared = {layout.config for _, layout in quick if layout.num_processes > 1 and not layout.edits}
    assert compared | {"single_device", "fsdp_fp8"} == shipped


def test_fp8_is_refused_with_the_reason(forked: ForkedParent, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError) if not importlib.util.find_spec("torchao") else contextlib.nullcontext():
        result = forked.run(
            REPOSITORY / "recipes" / "t5_summarize.py", f"--output_dir={tmp_path / 'run'}", config="fsdp_fp8"
        )
        assert result.exit_code == 2 and "needs a GPU with fp8" in result.output
