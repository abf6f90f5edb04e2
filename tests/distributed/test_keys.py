"""Each key of an accelerate YAML, and each flag that refines it, in a run: what the edit changes on the objects.

tests/test_accelerate_config.py has the same for the plan in words. Here a small model is prepared under the shipped
YAML and under the edited one. Compared is what a step then does: gathers between the blocks' forward and backward
passes, what a process holds of a block, types of what is multiplied and summed, files of a checkpoint.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate.utils.launch
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from accelerate.state import AcceleratorState
from datasets import Dataset
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import launch, sharding
from common.accelerate_config import KEYS, _section
from common.arguments import BatchPlan, OptimizerArguments, RefinementArguments, TrainArguments, UserError
from common.checkpoint import Checkpoints
from common.launch import build_accelerator, claim_output_dir, run
from common.losses import token_loss
from common.models import load_config, load_model
from common.optim import build_optimizer
from common.sharding import base_model, describe_units, prepare_model
from tests.forked import CONFIGS, REPOSITORY, ForkedParent, free_port
from tests.test_sharding import make_model

NUM_BLOCKS = 3
DELETE = None
FSDP1, FSDP2, HYBRID, COMPILE, FP8 = (
    "fsdp1_full_shard", "fsdp_full_shard", "fsdp_hybrid_shard", "fsdp_full_shard_compile", "fsdp_fp8"
)  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """A change of a shipped YAML or of the flags, and what is seen before and after it."""

    base: str
    keys: dict[str, Any]
    """Value by key, each written into its section; DELETE takes the key out."""
    seen: str
    """A key of what `observe` returns; `refused`: the edit ends the run with these words."""
    before: Any
    after: Any
    flags: dict[str, Any] = field(default_factory=dict)
    num_processes: int = 2
    per_machine: int | None = None
    """Processes of a machine, where several are acted out."""

    def __str__(self) -> str:
        return "-".join([self.base, *(f"{name}={value}" for name, value in (self.keys | self.flags).items())])

    @property
    def names(self) -> set[str]:
        return {*self.keys, *self.flags}


# In the ranks. `main` observes one case after the other.

events: list[str] = []
"""g: a gather begins, r: a reduction; f, b: a block's forward, backward pass; h: inputs to host memory; |: the loss."""
seen: dict[str, Any] = {}


def recording(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        events.append(event)
        if event == "r":
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            seen["summed in"] = name_of(tensors[-1].dtype)
        return function(*args, **kwargs)

    return call


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def held(block: nn.Module) -> int:
    """Numbers of the block's parameters that this process holds."""
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in block.parameters())


def watch(module: Any, inputs: Any, output: torch.Tensor) -> None:
    events.append("f")
    seen["weights multiplied in"], seen["products"] = name_of(module.weight.dtype), name_of(output.dtype)
    if output.requires_grad:
        output.register_hook(lambda grad: events.append("b"))


def note_weights(module: nn.Module) -> None:
    """Whether FSDP gets a model with weights; called for the first unit."""
    seen.setdefault("loaded before sharding", not any(p.is_meta for p in module.parameters()))


def watch_fully_shard(modules: Any, function: Any = sharding.fully_shard, **settings: Any) -> Any:
    note_weights(modules[0] if isinstance(modules, list) else modules)
    seen["offload"] = type(settings["offload_policy"]).__name__
    return function(modules, **settings)


def watch_fsdp1(self: Any, module: nn.Module, *args: Any, init: Any = sharding.FSDP1.__init__, **settings: Any) -> None:
    note_weights(module)
    init(self, module, *args, **settings)


def watch_compile(function: Any, **options: Any) -> Any:
    seen.setdefault("compiled", options)  # the first block
    return function


def watch_cross_entropy(logits: torch.Tensor, *args: Any, function: Any = F.cross_entropy, **kwargs: Any) -> Any:
    seen["logits at a time"] = len(logits)
    return function(logits, *args, **kwargs)


@dataclass
class FakeFloat8LinearConfig:
    recipe: str
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    cast_config_grad_output: str = "the recipe's"
    cast_config_grad_output_for_grad_weight: str = "the recipe's"

    @classmethod
    def from_recipe_name(cls, name: str) -> "FakeFloat8LinearConfig":
        return cls(name)


def fake_torchao() -> ModuleType:
    """torchao.float8 that converts nothing."""

    def convert(model: nn.Module, config: FakeFloat8LinearConfig, module_filter_fn: Any) -> None:
        seen.update(fp8=dataclasses.asdict(config))

    package = ModuleType("torchao.float8")
    vars(package).update(
        Float8LinearConfig=FakeFloat8LinearConfig,
        convert_to_float8_training=convert,
        CastConfig=lambda target_dtype: str(target_dtype),
    )
    return package


class CausalArguments(TrainArguments):
    def no_slices(self) -> None:
        return None


def observe(args: TrainArguments, saves: bool) -> dict[str, Any]:
    accelerator, strategy = build_accelerator(args)
    source, weights = load_model(args, load_config(args), AutoModelForCausalLM, accelerator)
    size = held(source.model.layers[1])
    model = prepare_model(source, weights, args, accelerator, strategy)
    blocks = list(base_model(model).model.layers)
    seen.update(
        {
            "model": type(model).__name__,
            "units": describe_units(model).partition(": ")[2],
            "device": accelerator.device.type,
            "debug": accelerator.state.debug,
            "loss is scaled": accelerator.scaler is not None,
            "held at rest": held(blocks[1]) / size,
            "parameters": name_of(next(model.parameters()).dtype),
            "attention": base_model(model).config._attn_implementation,
            "limit_all_gathers": getattr(model, "limit_all_gathers", None),
        }
    )
    for block in blocks:
        block.self_attn.o_proj.register_forward_hook(watch)  # not the last layer, which is not recomputed
    tokens = torch.arange(12).view(2, 6)
    for _ in range(2 if strategy.kind == "fsdp1" else 1):  # FSDP1 prefetches in the order of the first step
        events.clear()
        loss = token_loss(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens})
        seen["held after forward"] = held(blocks[1]) / size
        events.append("|")
        loss.backward()
        seen["order"] = "".join(events)
    seen["buffers"] = name_of(base_model(model).model.rotary_emb.inv_freq.dtype)
    if saves:
        tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "recipes" / "samples" / "tokenizer")
        checkpoints = Checkpoints(args, accelerator, strategy, tokenizer)
        optimizer, plan = build_optimizer(model, OptimizerArguments()), BatchPlan(2, 1, 1, 2)
        rows = Dataset.from_dict({"input_ids": [[1]]})
        claim_output_dir(args, accelerator)
        checkpoints.start(model, optimizer, plan, rows, None, num_steps=1, num_saves=1)
        checkpoints.save(1, {}, best_step=None)
        files = checkpoints.folder / "step_00000001"
        seen["checkpoint"] = sorted(path.name for path in files.iterdir() if path.suffix in (".safetensors", ".distcp"))
    return seen


def main() -> None:
    folder = Path(sys.argv[1])
    is_new = hasattr(dist, "all_gather_single")  # torch 2.13's names
    gathers = ("all_gather", "all_gather_single" if is_new else "all_gather_into_tensor")
    reductions = ("all_reduce", "reduce_scatter_single" if is_new else "reduce_scatter_tensor")
    for name in (*gathers, *reductions):
        setattr(dist, name, recording("g" if name in gathers else "r", getattr(dist, name)))
    torch.autograd.graph.save_on_cpu = recording("h", torch.autograd.graph.save_on_cpu)  # type: ignore[misc,assignment]
    torch.compile = watch_compile  # type: ignore[assignment]
    F.cross_entropy = watch_cross_entropy  # type: ignore[assignment]
    vars(sharding)["fully_shard"] = watch_fully_shard
    sharding.FSDP1.__init__ = watch_fsdp1  # type: ignore[method-assign]
    # This machine computes in any precision, however slowly.
    vars(launch).update(_cpu_computes=lambda precision: True, _check_fp8=lambda *_: None)
    accelerate.utils.launch.is_fp8_available = lambda: True
    sys.modules["torchao"] = sys.modules["torchao.float8"] = fake_torchao()
    rank = os.environ["RANK"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        os.environ.clear()
        os.environ.update(environment | case["env"])
        torch.cuda.is_available = functools.partial(bool, case["has_gpu"])
        if case["has_gpu"]:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                del os.environ[name]
        settings: dict[str, Any] = {"model_name_or_path": str(folder / "model"), **case["flags"]}
        seen.clear()
        try:
            observe(CausalArguments(output_dir=str(folder / f"run_{number}"), **settings), case["saves"])
        except UserError as error:
            seen["refused"] = str(error)
        (folder / f"seen_{number}_{rank}.json").write_text(json.dumps(seen))
        AcceleratorState._reset_state(reset_partial_state=True)


# In the tests.

OWN_ORDER = "gggfgfgfg|grgbrgbrgbrrr"  # FSDP2's: root, embedding, three blocks, head; back to front, one gather ahead
FSDP1_ORDER = "ggfgfgf|ggbrgbrbrr"  # root and blocks; back to front, one gather ahead
UNITS = "1 x LlamaForCausalLM, 1 x Embedding, {}, 1 x Linear"
BLOCKS, ROOT = UNITS.format("3 x LlamaDecoderLayer"), "1 x LlamaForCausalLM"
SHARDED, FULL = ["__0_0.distcp", "__1_0.distcp"], ["state.safetensors"]
COMPILED = {"backend": "aot_eager", "mode": "default", "fullgraph": False, "dynamic": None}
FP8_OPTIONS = {
    "recipe": "tensorwise",
    "enable_fsdp_float8_all_gather": True,
    "pad_inner_dim": True,
    "cast_config_grad_output": "torch.float8_e4m3fn",
    "cast_config_grad_output_for_grad_weight": "torch.float8_e4m3fn",
}
RECOMPUTED = {"fsdp_activation_checkpointing": True}
BY_SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
FORWARD = {"fsdp_forward_prefetch": True}
BACKWARD = {"fsdp_backward_prefetch": "BACKWARD_PRE"}


def flag(base: str, name: str, value: Any, seen: str, before: Any, after: Any, keys: Any = None) -> Edit:
    return Edit(base, keys or {}, seen, before, after, flags={name: value})


def refused(base: str, key: str, value: Any, words: str, **more: Any) -> Edit:
    return Edit(base, {key: value, **more}, "refused", None, words)


EDITS = [
    Edit("ddp", {"distributed_type": "FSDP", "fsdp_version": 2}, "model", "DistributedDataParallel",
         "FSDPLlamaForCausalLM"),
    Edit("ddp", {"debug": True}, "debug", False, True),
    Edit("single_device", {"use_cpu": True}, "device", None, "cpu", num_processes=1),
    Edit("ddp", {"mixed_precision": "no"}, "products", "bfloat16", "float32"),
    Edit("ddp", {"mixed_precision": "fp16"}, "products", "bfloat16", "float16"),
    Edit(FSDP2, {"mixed_precision": "no"}, "weights multiplied in", "bfloat16", "float32"),
    Edit(FSDP2, {"mixed_precision": "fp16"}, "weights multiplied in", "bfloat16", "float16"),
    Edit(FSDP2, {"mixed_precision": "fp16"}, "loss is scaled", False, True),
    Edit(FSDP1, {"mixed_precision": "no"}, "weights multiplied in", "bfloat16", "float32"),
    # Sharding.
    Edit(FSDP1, {"fsdp_version": 2, "fsdp_sharding_strategy": DELETE, "fsdp_use_orig_params": DELETE,
                 "fsdp_sync_module_states": DELETE}, "model", "FullyShardedDataParallel", "FSDPLlamaForCausalLM"),
    Edit(FSDP1, {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "held after forward", 0.5, 1.0),
    Edit(FSDP1, {"fsdp_sharding_strategy": "NO_SHARD"}, "held at rest", 0.5, 1.0),
    Edit(FSDP1, {"fsdp_sharding_strategy": "HYBRID_SHARD"}, "held at rest", 0.25, 0.5, num_processes=4, per_machine=2),
    Edit(FSDP1, {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, "held at rest", 0.25, 0.5, num_processes=4,
         per_machine=2),
    Edit("fsdp1_hybrid_shard", {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, "held after forward", 0.5, 1.0,
         num_processes=4, per_machine=2),
    Edit(FSDP2, {"fsdp_reshard_after_forward": False}, "held after forward", 0.5, 1.0),
    Edit(HYBRID, {"fsdp_reshard_after_forward": False}, "held after forward", 0.5, 1.0, num_processes=4),
    Edit(HYBRID, {"parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 4}, "held at rest",
         0.5, 0.25, num_processes=4),
    Edit(FSDP2, {"parallelism_config_cp_size": 2}, "attention", "sdpa", "context_parallel"),
    # Units. A block has 688 parameters here, 480 of them in its MLP; outside of the blocks are 312.
    Edit(FSDP2, {"fsdp_auto_wrap_policy": "NO_WRAP"}, "units", BLOCKS, ROOT),
    Edit(FSDP1, {"fsdp_auto_wrap_policy": "NO_WRAP"}, "units", "1 x LlamaForCausalLM, 3 x LlamaDecoderLayer", ROOT),
    Edit(FSDP2, {**BY_SIZE, "fsdp_min_num_params": 600}, "units", BLOCKS, UNITS.format("3 x LlamaDecoderLayer")),
    Edit(FSDP2, {**BY_SIZE, "fsdp_min_num_params": 300}, "units", BLOCKS,
         "1 x LlamaForCausalLM, 1 x LlamaModel, 3 x LlamaMLP, 1 x Linear"),
    Edit(FSDP1, {**BY_SIZE, "fsdp_min_num_params": 300}, "units", "1 x LlamaForCausalLM, 3 x LlamaDecoderLayer",
         "1 x LlamaForCausalLM, 1 x LlamaModel, 3 x LlamaMLP"),
    Edit(FSDP2, {"fsdp_transformer_layer_cls_to_wrap": "LlamaMLP"}, "units", BLOCKS, UNITS.format("3 x LlamaMLP")),
    Edit(FSDP1, {"fsdp_transformer_layer_cls_to_wrap": ["LlamaAttention", "LlamaMLP"]}, "units",
         "1 x LlamaForCausalLM, 3 x LlamaDecoderLayer", "1 x LlamaForCausalLM, 3 x LlamaAttention, 3 x LlamaMLP"),
    flag(FSDP2, "blocks_per_unit", 2, "units", BLOCKS,
         UNITS.format("1 x LlamaDecoderLayer + LlamaDecoderLayer, 1 x LlamaDecoderLayer")),
    # Gathers ahead.
    Edit(FSDP2, {"fsdp_backward_prefetch": "NO_PREFETCH"}, "order", OWN_ORDER, "gggfgfgfg|rgbrgbrgbrgrr"),
    Edit(FSDP2, FORWARD, "order", OWN_ORDER, "ggggfgfgf|grgbrgbrgbrrr"),
    Edit(FSDP1, {"fsdp_backward_prefetch": "NO_PREFETCH"}, "order", FSDP1_ORDER, "ggfgfgf|gbrgbrgbrr"),
    Edit(FSDP1, {"fsdp_backward_prefetch": "BACKWARD_POST"}, "order", FSDP1_ORDER, "ggfgfgf|gbgrbgrbrr"),
    Edit(FSDP1, FORWARD, "order", FSDP1_ORDER, "gggfgff|ggbgbrbrrr"),
    flag(FSDP2, "prefetch_depth", 2, "order", OWN_ORDER, "gggfgfgfg|ggrgbrgbrbrrr", BACKWARD),
    flag(FSDP2, "prefetch_depth", 2, "order", OWN_ORDER, "gggggfgff|grgbrgbrgbrrr", FORWARD),
    flag(FSDP1, "limit_all_gathers", False, "limit_all_gathers", True, False),
    # Activations, host memory, loading, checkpoints.
    Edit(FSDP2, RECOMPUTED, "order", OWN_ORDER, "gggfgfgfg|grgfbrgfbrgfbrrr"),
    Edit(FSDP1, RECOMPUTED, "order", FSDP1_ORDER, "ggfgfgf|ggfbrgfbrfbrr"),
    Edit(FSDP2, {**RECOMPUTED, "fsdp_activation_checkpointing_offload": True}, "order", OWN_ORDER,
         "ggghfghfghfg|grgfbrgfbrgfbrrr"),
    flag("ddp", "gradient_checkpointing", True, "order", "fff|bbb", "fff|fbfbfb"),
    Edit(FSDP2, {"fsdp_offload_params": True}, "offload", "OffloadPolicy", "CPUOffloadPolicy"),
    Edit(FSDP1, {"fsdp_cpu_ram_efficient_loading": False}, "loaded before sharding", False, True),
    Edit(FSDP2, {"fsdp_cpu_ram_efficient_loading": False}, "loaded before sharding", False, True),
    Edit(FSDP1, {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, "checkpoint", FULL, SHARDED),
    Edit(FSDP2, {"fsdp_state_dict_type": "FULL_STATE_DICT"}, "checkpoint", SHARDED, FULL),
    # Types.
    flag(FSDP2, "param_dtype", "bfloat16", "parameters", "float32", "bfloat16"),
    flag("ddp", "param_dtype", "float64", "products", "bfloat16", "float64", {"mixed_precision": "no"}),
    flag(FSDP1, "reduce_dtype", "bfloat16", "summed in", "float32", "bfloat16"),
    flag(FSDP2, "reduce_dtype", "bfloat16", "summed in", "float32", "bfloat16"),
    flag(FSDP1, "buffer_dtype", "bfloat16", "buffers", "float32", "bfloat16"),
    flag(FSDP2, "loss_chunk_tokens", 4, "logits at a time", 12, 4),
    # What torch.compile and torchao are called with.
    Edit(COMPILE, {"dynamo_backend": "EAGER"}, "compiled", COMPILED, COMPILED | {"backend": "eager"}),
    Edit(COMPILE, {"dynamo_mode": "max-autotune"}, "compiled", COMPILED, COMPILED | {"mode": "max-autotune"}),
    Edit(COMPILE, {"dynamo_use_fullgraph": True}, "compiled", COMPILED, COMPILED | {"fullgraph": True}),
    Edit(COMPILE, {"dynamo_use_dynamic": True}, "compiled", COMPILED, COMPILED | {"dynamic": True}),
    Edit(FSDP2, {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}, "compiled", None, COMPILED),
    Edit(FP8, {"fp8_enable_fsdp_float8_all_gather": False}, "fp8", FP8_OPTIONS,
         FP8_OPTIONS | {"enable_fsdp_float8_all_gather": False}),
    Edit(FP8, {"fp8_pad_inner_dim": False}, "fp8", FP8_OPTIONS, FP8_OPTIONS | {"pad_inner_dim": False}),
    Edit(FSDP2, {"mixed_precision": "fp8", "fp8_backend": "AO"}, "fp8", None, FP8_OPTIONS),
    flag(FP8, "fp8_recipe", "rowwise", "fp8", FP8_OPTIONS,
         {"recipe": "rowwise", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": True,
          "cast_config_grad_output": "the recipe's", "cast_config_grad_output_for_grad_weight": "the recipe's"},
         {"fp8_enable_fsdp_float8_all_gather": False}),
    # Refused.
    refused("ddp", "compute_environment", "AMAZON_SAGEMAKER", "write LOCAL_MACHINE"),
    refused("ddp", "same_network", False, "same_network"),
    refused("ddp", "enable_cpu_affinity", True, "pass --enable_cpu_affinity to the launcher"),
    refused("ddp", "rdzv_backend", "c10d", "pass --rdzv_backend to the launcher"),
    refused(FSDP1, "fsdp_use_orig_params", False, "parameters by name"),
    refused(FSDP1, "fsdp_sync_module_states", False, "all processes start from the same weights"),
    refused(FSDP1, "fsdp_state_dict_type", "LOCAL_STATE_DICT", "write SHARDED_STATE_DICT"),
    refused(FSDP2, "fsdp_state_dict_type", "LOCAL_STATE_DICT", "write SHARDED_STATE_DICT"),
    refused(FSDP1, "fsdp_offload_params", True, "FSDP1 offloads from a GPU only"),
    refused(FSDP1, "fsdp_activation_checkpointing_offload", True, "needs fsdp_version: 2", **RECOMPUTED),
    refused(FSDP2, "fsdp_backward_prefetch", "BACKWARD_POST", "is for fsdp_version 1"),
    refused(FSDP2, "fsdp_transformer_layer_cls_to_wrap", "T5Block", "no module of class T5Block"),
    refused(FSDP2, "parallelism_config_tp_size", 2, "tensor parallelism"),
    refused(FSDP2, "parallelism_config_sp_size", 2, "sequence parallelism"),
    refused(COMPILE, "dynamo_use_regional_compilation", False, "more than a block at once"),
    *[
        Edit(base, {}, "refused", None, f"--{name} acts under", flags={name: value})
        for base in ("ddp", FSDP1, FSDP2)
        for name, value, acts_under in (
            ("buffer_dtype", "bfloat16", [FSDP1]),
            ("limit_all_gathers", False, [FSDP1]),
            ("prefetch_depth", 2, [FSDP2]),
            ("blocks_per_unit", 2, [FSDP2]),
            ("peer_copies", False, [FSDP2]),
            ("reduce_dtype", "bfloat16", [FSDP1, FSDP2]),
        )
        if base not in acts_under
    ],
    flag(FSDP2, "prefetch_depth", 2, "refused", None, "needs fsdp_forward_prefetch: true"),
    flag(FSDP2, "peer_copies", True, "refused", None, "needs several NVIDIA GPUs"),
    flag(FSDP1, "gradient_checkpointing", True, "refused", None, "fsdp_activation_checkpointing decides"),
    flag(FSDP2, "blocks_per_unit", 2, "refused", None, "groups blocks", {"fsdp_auto_wrap_policy": "NO_WRAP"}),
    flag(FSDP2, "fp8_recipe", "rowwise", "refused", None, "needs mixed_precision: fp8"),
    flag(FP8, "fp8_recipe", "rowwise", "refused", None, "fp8_enable_fsdp_float8_all_gather: false"),
    flag(FSDP2, "recompute_matmuls", 2, "refused", None, "needs fsdp_activation_checkpointing: true in the YAML"),
    flag(FSDP2, "param_dtype", "float64", "refused", None, ": mixed_precision: bf16 contradicts"),
    flag(FSDP2, "param_dtype", "bfloat16", "refused", None, "needs float32 parameters", {"mixed_precision": "fp16"}),
]  # fmt: skip


def covering() -> list[Edit]:
    """The first edit of each key and flag, for `make test`."""
    named: set[str] = set()
    edits = []
    for edit in EDITS:
        if not edit.names <= named:
            edits.append(edit)
            named |= edit.names
    return edits


QUICK = covering()


def write(folder: Path, base: str, keys: dict[str, Any]) -> Path:
    config = yaml.safe_load((CONFIGS / f"{base}.yaml").read_text())
    for key, value in keys.items():
        section = config.setdefault(_section(key), {}) if _section(key) else config
        if value is DELETE:
            del section[key]
        else:
            section[key] = value
    path = folder / "accelerate.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(config))
    return path


class Runs:
    """What all ranks saw, with and without an edit: one run for each number of processes."""

    def __init__(self, forked: ForkedParent, folder: Path) -> None:
        self.forked, self.folder = forked, folder
        self.seen: dict[str, list[dict[str, Any]]] = {}

    def observe(self, edit: Edit) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(before, after), by rank."""
        if self._key(edit, True) not in self.seen:
            is_quick = edit in QUICK
            self._run([e for e in EDITS if e.num_processes == edit.num_processes and (e in QUICK) == is_quick])
        return self.seen[self._key(edit, False)], self.seen[self._key(edit, True)]

    def _key(self, edit: Edit, is_edited: bool) -> str:
        """Equal for what is the same run: many edits share what is before them."""
        change = [edit.keys, edit.flags] if is_edited else []
        return json.dumps([edit.base, change, edit.num_processes, edit.per_machine, edit.seen == "checkpoint"])

    def _run(self, edits: list[Edit]) -> None:
        num_processes = edits[0].num_processes
        folder = self.folder / f"{len(self.seen)}"
        make_model("llama", 0.0, NUM_BLOCKS).save_pretrained(folder / "model")
        cases: dict[str, dict[str, Any]] = {}
        for edit, is_edited in itertools.product(edits, (False, True)):
            key = self._key(edit, is_edited)
            if key not in cases and key not in self.seen:
                env = {"LOCAL_WORLD_SIZE": str(edit.per_machine)} if edit.per_machine else {}
                config = write(folder / f"case_{len(cases)}", edit.base, edit.keys if is_edited else {})
                cases[key] = {
                    "env": env | {"ACCELERATE_CONFIG_FILE": str(config)},
                    "flags": edit.flags if is_edited else {},
                    "saves": edit.seen == "checkpoint",
                    "has_gpu": edit.base == "single_device",
                }
        (folder / "cases.json").write_text(json.dumps(list(cases.values())))
        result = self.forked.run(__file__, str(folder), num_processes=num_processes, timeout=250)
        assert result.exit_code == 0, result.output
        for number, key in enumerate(cases):
            files = [folder / f"seen_{number}_{rank}.json" for rank in range(num_processes)]
            self.seen[key] = [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def runs(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(forked, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    "edit", [pytest.param(edit, marks=() if edit in QUICK else pytest.mark.full, id=str(edit)) for edit in EDITS]
)
def test_an_edit_is_seen_in_the_run(edit: Edit, runs: Runs) -> None:
    for before, after in zip(*runs.observe(edit), strict=True):
        if edit.seen == "refused":
            assert "refused" not in before and edit.after in after["refused"], after
            assert "\n" not in after["refused"]
            if not edit.flags:
                assert re.search(rf"\.yaml:\d+: {next(iter(edit.keys))}: ", after["refused"]), after
        else:
            assert "refused" not in after, after
            assert (before.get(edit.seen), after.get(edit.seen)) == (edit.before, edit.after), (before, after)


# What the launcher alone acts on, through tools/launch.py.

LAUNCHED = {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids"}
WORKER = """
import json, os
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
print(json.dumps({name: os.environ.get(name) for name in names}) + "\\n", end="", flush=True)
"""


def launched(forked: ForkedParent, folder: Path, *edits: dict[str, Any]) -> list[dict[str, str | None]]:
    """What the ranks of ddp.yaml with these edits, one for each machine, find in their environment."""
    folder.mkdir()
    (folder / "worker.py").write_text(WORKER)
    handles = []
    for number, keys in enumerate(edits):
        config = write(folder / str(number), "ddp", keys)
        flags = ["--config_file", str(config), str(folder / "worker.py")]
        handles.append(forked.start(REPOSITORY / "tools" / "launch.py", *flags, config="single_device"))
    results = [handle.wait(60) for handle in handles]
    assert [result.exit_code for result in results] == [0] * len(edits), [result.output for result in results]
    lines = [line for result in results for line in result.output.splitlines()]
    ranks = [json.loads(line) for line in lines if line.startswith("{")]  # torch may warn of a machine that has left
    return sorted(ranks, key=lambda rank: int(rank["RANK"]))


def test_keys_of_one_machine(forked: ForkedParent, tmp_path: Path) -> None:
    port = free_port()
    before = launched(forked, tmp_path / "before", {"main_process_port": 0})
    after = launched(forked, tmp_path / "after", {"main_process_port": port, "num_processes": 3, "gpu_ids": "2,1,0"})
    assert [rank["WORLD_SIZE"] for rank in before] == ["2"] * 2 and [rank["WORLD_SIZE"] for rank in after] == ["3"] * 3
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in after} == {"2,1,0"}
    assert "2,1,0" not in {rank["CUDA_VISIBLE_DEVICES"] for rank in before}
    assert {rank["MASTER_PORT"] for rank in after} == {str(port)} != {rank["MASTER_PORT"] for rank in before}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux answers at every address that begins with 127")
def test_keys_of_several_machines(forked: ForkedParent, tmp_path: Path) -> None:
    port = free_port()
    keys = {"num_processes": 4, "num_machines": 2, "main_process_ip": "127.0.0.2", "main_process_port": port}
    ranks = launched(forked, tmp_path / "run", *({**keys, "machine_rank": rank} for rank in range(2)))
    expected = [{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}] * 4
    assert [{name: rank[name] for name in expected[0]} for rank in ranks] == expected
    assert [(rank["RANK"], rank["GROUP_RANK"]) for rank in ranks] == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]


def test_every_key_and_every_flag_is_tried() -> None:
    tried = LAUNCHED.union(*(edit.names for edit in QUICK))
    shipped: set[str] = set()
    for file in CONFIGS.glob("*.yaml"):
        for key, value in yaml.safe_load(file.read_text()).items():
            shipped |= set(value) if isinstance(value, dict) else {key}
    assert shipped <= KEYS.keys() <= tried
    assert {field.name for field in dataclasses.fields(RefinementArguments)} <= tried


if __name__ == "__main__":
    run(main)
