"""Model under the YAML's strategy: checkpointing and compile inside each block, FSDP outside, weights last.

The one place that knows the FSDP versions. Settings come from accelerate's reading of the YAML; the sharding itself is
applied with torch's own functions, because the order matters: a block's `forward` is replaced by its checkpointed (and
compiled) form, so the block keeps its class, its state-dict keys stay clean, and FSDP's hooks, which sit on the
module's `__call__`, stay outside the recomputed and compiled region.
"""

import functools
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch._inductor.config
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from common import context_parallel, memory, peer_copies
from common.accelerate_config import check_model
from common.arguments import ModelArguments, TrainArguments, UserError
from common.bias_attention import OPERATOR
from common.launch import Strategy, compute_dtype, param_dtype, reduce_dtype
from common.losses import set_training_loss
from common.models import Weights, meta_model, with_position_biases

RECOMPILE_LIMIT = 32
# FSDP2 models whose units communicate by copies instead of NCCL.
_COPIED: WeakSet[nn.Module] = WeakSet()

# What each FSDP2 unit was sharded with: torch has a setter and no getter.
_RESHARD_AFTER_FORWARD: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def prepare_model(
    model: PreTrainedModel,
    weights: Weights | None,
    args: TrainArguments,
    accelerator: Accelerator,
    strategy: Strategy,
) -> nn.Module:
    """Shard (or replicate) the model as the YAML says and fill in its weights.

    model: on the meta device when `weights` is given, else with its values, equal on all processes.
    Returns the module to train; build the optimizer from it afterwards.
    Raises `UserError` when the YAML's wrap class is not in the model or a setting cannot act.
    """
    _check_refinements(args, strategy)
    _check_model(model, strategy)
    if strategy.context_size > 1:
        context_parallel.slice_attention(model, accelerator)
    plugin = strategy.plugin
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    blocks = find_blocks(model, strategy)
    recompute = bool(plugin.activation_checkpointing if plugin else args.gradient_checkpointing)
    if args.recompute_matmuls is not None and not recompute:
        switch = "fsdp_activation_checkpointing: true in the YAML" if plugin else "--gradient_checkpointing"
        raise UserError(f"--recompute_matmuls needs {switch}: without it nothing is recomputed.")
    if recompute and not blocks:
        raise UserError(
            f"--gradient_checkpointing: {type(model).__name__} names no blocks to recompute; drop the flag."
        )
    offload_activations = bool(plugin and plugin.activation_checkpointing_offload)
    memory.current_run = _describe_run(model, blocks, args, accelerator, strategy, recompute)
    if strategy.mixed_precision == "fp8":
        convert_to_fp8(model, blocks, args.fp8_recipe or "tensorwise_e4m3", strategy.fp8_options)
    if args.param_dtype == "float64":
        for module in (model, *blocks):  # blocks too: checkpointing runs them again outside the model's forward
            module.forward = _StayInFloat64.within(module.forward)
    compile_options = strategy.compile_options
    if compile_options and model.config.is_encoder_decoder:
        # Batches of documents are ragged. Each form of a block (encoder or decoder, with padding in the batch or
        # without) takes up to ten seconds to compile: not for one length alone, to be thrown away at the next. Beyond
        # its limit of 8 forms dynamo would run them uncompiled, with a warning.
        compile_options = {**compile_options, "dynamic": True}
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    if compile_options and strategy.mixed_precision == "fp8":
        # One kernel that sums rows and columns would also write transposed fp8, byte by byte.
        torch._inductor.config.triton.mix_order_reduction = False
    for block in blocks:
        _replace_forward(block, recompute, args.recompute_matmuls, offload_activations, compile_options)
    _cast(model, param_dtype(args))
    names = {parameter: name for name, parameter in model.named_parameters()}  # tied parameters: their first name
    fill = None
    if weights:
        fill = functools.partial(_fill_module, names=names, weights=weights, device=accelerator.device, filled={})
    if weights and fill and strategy.is_fsdp and not strategy.ram_efficient_loading:
        for module in model.modules():
            fill(module, device=torch.device("cpu"))
        weights.close()
        weights = None
    prepared: nn.Module = model
    if strategy.kind == "fsdp2":
        _fully_shard(model, blocks, weights, args, accelerator, strategy)
    elif strategy.kind == "fsdp1":
        prepared = _wrap_fsdp1(model, blocks, fill if weights else None, args, accelerator, strategy)
    else:
        prepared = _replicate(model, fill, args, accelerator, strategy)
    if weights:
        weights.close()
    head = model.get_output_embeddings()
    assert head is not None, "the recipes' model classes have a head"
    set_training_loss(prepared, head, args.loss_chunk_tokens, compile_options)
    wrong = {p.dtype for p in prepared.parameters() if p.requires_grad} - {param_dtype(args)}
    assert not wrong, f"trainable parameters of {wrong} instead of {args.param_dtype}"
    if strategy.kind != "fsdp1":  # whose parameters are pieces now
        assert sum(parameter.numel() for parameter in prepared.parameters()) == num_parameters, "a tie was lost"
    if args.print_model:
        accelerator.print(prepared)
    return prepared


def _describe_run(
    model: nn.Module,
    blocks: list[nn.Module],
    args: TrainArguments,
    accelerator: Accelerator,
    strategy: Strategy,
    recomputes: bool,
) -> memory.Run:
    """What an answer to running out of memory needs to know of this run."""
    plugin, num_processes = strategy.plugin, accelerator.num_processes
    layout = memory.Layout(1, "none")  # `num_shared` is found out when units are sharded
    if strategy.kind == "fsdp2":
        assert plugin is not None
        gathered: Literal["units", "all"] = "units" if plugin.reshard_after_forward else "all"
        layout = memory.Layout(num_processes // strategy.replicas, gathered, strategy.is_offloaded)
    elif strategy.kind == "fsdp1":
        assert plugin is not None and plugin.sharding_strategy is not None
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
        layout = memory.Layout.of_fsdp1(
            plugin.sharding_strategy.name, num_processes, per_machine, strategy.is_offloaded
        )
    types = memory.Types(
        param_dtype(args).itemsize, compute_dtype(args, strategy).itemsize, reduce_dtype(args, strategy).itemsize,
        args.optim,
    )  # fmt: skip
    size = memory.ModelSize.of(model, blocks, args.blocks_per_unit or 1)
    batch_size = args.per_device_train_batch_size
    return memory.Run(size, layout, types, strategy.describe(), num_processes, batch_size, recomputes)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters the type; buffers follow into float64 only, for rotary frequencies lose too much in bf16."""
    if dtype == torch.float64:
        model.to(dtype)
        return
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _check_refinements(args: TrainArguments, strategy: Strategy) -> None:
    """Refuse flags that cannot act under the strategy."""
    acts_under = {
        "buffer_dtype": ("fsdp1",),
        "limit_all_gathers": ("fsdp1",),
        "peer_copies": ("fsdp2",),
        "prefetch_depth": ("fsdp2",),
        "blocks_per_unit": ("fsdp2",),
        "reduce_dtype": ("fsdp1", "fsdp2"),
    }
    for name, kinds in acts_under.items():
        if getattr(args, name) is not None and strategy.kind not in kinds:
            versions = " and ".join(kind.upper() for kind in kinds)
            raise UserError(
                f"--{name} acts under {versions} only, and this run is {strategy.describe()}; drop the flag."
            )
    if args.gradient_checkpointing and strategy.is_fsdp:
        raise UserError(
            "--gradient_checkpointing: under FSDP the YAML's fsdp_activation_checkpointing decides; drop the flag."
        )
    if args.prefetch_depth is not None and not (strategy.forward_prefetch or strategy.backward_prefetch):
        raise UserError(
            "--prefetch_depth needs fsdp_forward_prefetch: true or fsdp_backward_prefetch: BACKWARD_PRE in the YAML."
        )
    if args.fp8_recipe is not None and strategy.mixed_precision != "fp8":
        raise UserError("--fp8_recipe needs mixed_precision: fp8 in the YAML; drop the flag.")
    is_by_row = (args.fp8_recipe or "").startswith("rowwise")
    if is_by_row and strategy.fp8_options["enable_fsdp_float8_all_gather"]:
        raise UserError(
            f"--fp8_recipe {args.fp8_recipe}: weights are gathered in fp8 with one scale a tensor only; write "
            "fp8_enable_fsdp_float8_all_gather: false in the YAML."
        )


def convert_to_fp8(model: nn.Module, blocks: list[nn.Module], recipe: str, options: Mapping[str, bool]) -> None:
    """Make the linear layers of the blocks multiply in fp8 through torchao, scaled as its recipe of this name does.

    tensorwise_e4m3: torchao's tensorwise with gradients in e4m3, as its rowwise recipe has them; with e5m2 the loss was
    above that of bf16 after 200 steps (benchmarks/RESULTS.md). The head and the embeddings stay in bf16, and so do
    layers whose sizes fp8 matrix products do not take.
    """
    from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

    inside = {id(module) for block in blocks for module in block.modules()}

    def is_converted(module: nn.Module, name: str) -> bool:
        return (
            isinstance(module, nn.Linear)
            and id(module) in inside
            and module.in_features % 16 == 0
            and module.out_features % 16 == 0
        )

    config = replace(Float8LinearConfig.from_recipe_name(recipe.removesuffix("_e4m3")), **options)
    if recipe.endswith("_e4m3"):
        e4m3 = CastConfig(target_dtype=torch.float8_e4m3fn)
        config = replace(config, cast_config_grad_output=e4m3, cast_config_grad_output_for_grad_weight=e4m3)
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)


def _replicate(
    model: PreTrainedModel,
    fill: Callable[[nn.Module], None] | None,
    args: TrainArguments,
    accelerator: Accelerator,
    strategy: Strategy,
) -> nn.Module:
    """The whole model on each device, inside DDP where there are several."""
    if fill is not None:
        for module in model.modules():
            fill(module)
    model.to(accelerator.device)
    dtype = compute_dtype(args, strategy)
    if dtype != param_dtype(args):
        # No wrapper of accelerate: its conversion of all outputs to float32 would double the memory of the logits.
        model.forward = torch.autocast(accelerator.device.type, dtype)(model.forward)
    if strategy.kind == "single":
        return model
    device_ids = [accelerator.device] if accelerator.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def check_wrapping(
    args: ModelArguments, config: Any, auto_class: type[_BaseAutoModelClass], strategy: Strategy
) -> None:
    """Raise what `prepare_model` would about blocks and units: the config is enough, before anything is loaded."""
    model = meta_model(args, config, auto_class)
    _check_model(model, strategy)
    find_blocks(model, strategy)


def _check_model(model: PreTrainedModel, strategy: Strategy) -> None:
    if problems := check_model(strategy.launch, model):
        raise UserError("\n".join(problems))


def find_blocks(model: PreTrainedModel, strategy: Strategy) -> list[nn.Module]:
    """Modules that are checkpointed, compiled and sharded as a unit: the YAML's classes, else the model's blocks.

    Empty where nothing names them and nothing needs them. Raises `UserError` for a model without layers, or whose
    blocks are needed.
    """
    own = sorted(model._no_split_modules or ())
    wanted = list(strategy.wrap_classes) or own
    present = {type(module).__name__ for module in model.modules()}
    if own and present.isdisjoint(own):
        key = model.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        raise UserError(
            f"{type(model).__name__} has no layers ({key} is {getattr(model.config, key)}): give it some, "
            f"--config_overrides {key}=N."
        )
    blocks = [module for module in model.modules() if type(module).__name__ in wanted]
    if not blocks and strategy.is_fsdp:
        raise UserError(
            f"{type(model).__name__} names no block class; set fsdp_transformer_layer_cls_to_wrap in the YAML."
        )
    if not blocks and (strategy.compile_options or strategy.mixed_precision == "fp8"):
        raise UserError(
            f"{type(model).__name__} names no block class, and compile and fp8 work on blocks: take an FSDP YAML and "
            "set fsdp_transformer_layer_cls_to_wrap in it."
        )
    return blocks


def find_units(model: PreTrainedModel, blocks: list[nn.Module], strategy: Strategy) -> list[nn.Module]:
    """Modules that are gathered on their own besides the root, in the order in which they run.

    The blocks (transformer-based wrapping), none (no wrapping), or by size, as torch's size_based_auto_wrap_policy
    does: modules with at least fsdp_min_num_params parameters that are in no smaller unit.
    """
    assert strategy.plugin is not None
    policy = strategy.plugin.auto_wrap_policy
    if policy is None:
        return []
    if policy is not size_based_auto_wrap_policy:
        return blocks
    minimum = strategy.plugin.min_num_params
    tied = _tied_parameters(model)
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Number of the module's parameters that are in units now."""
        own = sum(p.numel() for p in module.parameters())
        if own < minimum:
            return 0
        inside = sum(visit(child) for child in module.children())
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        has_tied = any(p in tied for p in module.parameters())  # a parameter can belong to one unit only: the root
        if own - inside < minimum or is_container or has_tied or module is model:
            return inside
        units.append(module)
        return own

    visit(model)
    return units


def _tied_parameters(model: nn.Module) -> set[nn.Parameter]:
    counts = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in counts.items() if count > 1}


# Operators by the name of all their overloads, compiled or not, on CPU and GPU.
_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"}
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable", "flex_attention", OPERATOR,
}  # fmt: skip


def _draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the attention draws a dropout mask: if it did not run again, the draws after it would be others."""
    names = [argument.name for argument in operator._schema.arguments] if hasattr(operator, "_schema") else []
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"))


def _selective_contexts(recompute_every: int) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpointed region's forward pass and recomputation.

    Kept are the outputs of attention and of matrix products but every `recompute_every`-th (0: all): the rest is cheap
    to compute and large.
    """
    num_matmuls = {False: 0, True: 0}

    def policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().partition(".")[0]
        if name in _ATTENTION:
            return CheckpointPolicy.PREFER_RECOMPUTE if _draws(operator, args, kwargs) else CheckpointPolicy.MUST_SAVE
        if name not in _MATMULS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        num_matmuls[context.is_recompute] += 1
        is_recomputed = recompute_every and num_matmuls[context.is_recompute] % recompute_every == 0
        return CheckpointPolicy.PREFER_RECOMPUTE if is_recomputed else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def _replace_forward(
    block: nn.Module,
    recompute: bool,
    recompute_matmuls: int | None,
    offload_activations: bool,
    compile_options: Mapping[str, Any] | None,
) -> None:
    """Give the block a forward that is checkpointed, then compiled, in training; the plain one elsewhere."""
    plain = block.forward
    fast = plain
    if recompute:
        # The RNG state is kept: without it dropout draws other masks in the recomputation and gradients are wrong.
        fast = functools.partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=True)
        if recompute_matmuls is not None:
            fast = functools.partial(fast, context_fn=functools.partial(_selective_contexts, recompute_matmuls))
    if compile_options:
        fast = with_position_biases(block, torch.compile(fast, **compile_options))
    if offload_activations:
        fast = _OffloadInputs(fast)
    if fast is plain:
        return

    @functools.wraps(plain)
    def forward(*inputs: Any, **kwargs: Any) -> Any:
        # generate() passes caches of growing length, which would recompile at each token.
        return (fast if block.training else plain)(*inputs, **kwargs)

    block.forward = forward


class _OffloadInputs:
    """Keeps what the block saves for the backward pass, its checkpoint's inputs, in host memory until then."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return self._function(*args, **kwargs)


class _StayInFloat64(TorchFunctionMode):
    """Skips the conversions to float32 that transformers' norms and softmax make whatever the model's type is.

    In float64 their rounding (6e-8) would hide the differences that a comparison of strategies is looking for.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float and not args[0].is_floating_point():
            return args[0].double()  # positions, which some versions of transformers multiply frequencies by
        is_float64 = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if is_float64 and (func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args)):
            return args[0]
        if is_float64 and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)

    @classmethod
    def within(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with cls():
                return function(*args, **kwargs)

        return wrapped


def _fully_shard(
    model: PreTrainedModel,
    blocks: list[nn.Module],
    weights: Weights | None,
    args: TrainArguments,
    accelerator: Accelerator,
    strategy: Strategy,
) -> None:
    plugin = strategy.plugin
    assert plugin is not None
    dtype = compute_dtype(args, strategy)
    # A block's output may be a view of its last sum; transformers adds to it out of place, as torch asks.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = shard_mesh(accelerator, strategy.replicas)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if dtype != param_dtype(args) else None, reduce_dtype=reduce_dtype(args, strategy)
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=accelerator.device.type == "cuda")
        if strategy.is_offloaded
        else OffloadPolicy(),
    }
    reshard_after_forward = bool(plugin.reshard_after_forward)
    copies = _peer_copies(mesh.get_group(mesh.ndim - 1), dtype, args, accelerator, strategy)
    # Non-persistent buffers (rotary frequencies) have their values already and are in no checkpoint.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if weights else {}

    def shard(modules: list[nn.Module], reshard: bool) -> list[nn.Module]:
        fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=reshard, **settings)
        _RESHARD_AFTER_FORWARD.update(dict.fromkeys(modules, reshard))
        return modules

    modules = find_units(model, blocks, strategy)
    size = args.blocks_per_unit or 1
    if size > 1 and modules != blocks:
        raise UserError("--blocks_per_unit groups blocks: it needs fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP.")
    # A unit runs as one, so blocks of an encoder and of a decoder are never in the same.
    stacks = [list(group) for _, group in itertools.groupby(modules, key=functools.partial(_parent, model))]
    units = [
        shard(stack[start : start + size], reshard_after_forward)
        for stack in stacks
        for start in range(0, len(stack), size)
    ]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if modules and not _tied_parameters(model) and head is not None:
        # Large vocabularies: units of their own, so that the root does not hold both over the whole step. Tied tables
        # stay in the root, because a parameter can belong to one unit only; so do tables that are in one by size.
        if not isinstance(embedding.weight, DTensor):
            units.insert(0, shard([embedding], reshard_after_forward))
        if not isinstance(head.weight, DTensor):
            units.append(shard([head], False))
    shard([model], False)
    if copies is not None:
        copies.replace_nccl([unit[0] for unit in units] + [model])
        _COPIED.add(model)
    forward_prefetch = strategy.forward_prefetch or copies is not None
    _set_prefetch([unit[0] for unit in units], args.prefetch_depth or 1, forward_prefetch, strategy.backward_prefetch)
    if weights:
        model.to_empty(device="cpu" if strategy.is_offloaded else accelerator.device)
        model.tie_weights()  # to_empty gave every name of a tied parameter storage of its own
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.to(accelerator.device))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                local = parameter.to_local()
                start = _shard_start(parameter)
                if local.numel():
                    local.copy_(weights.read(name)[start : start + local.shape[0]])


def _peer_copies(
    group: dist.ProcessGroup, dtype: torch.dtype, args: TrainArguments, accelerator: Accelerator, strategy: Strategy
) -> peer_copies.PeerCopies | None:
    """What units communicate by instead of NCCL, if anything. Collective."""
    is_default = dtype.itemsize == 2 and not strategy.is_offloaded  # with offload its gain is not measured
    if args.peer_copies is False or (args.peer_copies is None and not is_default):
        return None
    if not peer_copies.are_reachable(group, accelerator.device):
        if args.peer_copies:
            raise UserError(
                f"--peer_copies: needs several NVIDIA GPUs that reach each other's memory, the {group.size()} of a "
                "sharded model in one machine; drop the flag."
            )
        return None
    sums_in_float32 = dtype.itemsize == 2 and reduce_dtype(args, strategy) == torch.float32
    copies = peer_copies.PeerCopies(group, accelerator.device, dtype if sums_in_float32 else None, args.ddp_timeout)
    assert memory.current_run is not None
    layout = replace(memory.current_run.layout, num_shared=copies.num_units)
    memory.current_run = replace(memory.current_run, layout=layout)
    return copies


def _parent(model: nn.Module, module: nn.Module) -> str:
    name = next(name for name, other in model.named_modules() if other is module)
    return name.rpartition(".")[0]


def _set_prefetch(units: list[Any], depth: int, forward_prefetch: bool, backward_prefetch: str | None) -> None:
    """Which units are gathered while one runs: FSDP2's own choice without keys in the YAML, else `depth` ahead."""
    if forward_prefetch:
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + depth])
    if backward_prefetch == "BACKWARD_PRE":
        for index, unit in enumerate(units):
            unit.set_modules_to_backward_prefetch(units[max(0, index - depth) : index][::-1])
    elif backward_prefetch == "NO_PREFETCH":
        for unit in units:
            unit.set_modules_to_backward_prefetch([unit])  # gathered already: in place of FSDP2's own choice, nothing


def _shard_start(parameter: DTensor) -> int:
    """First row of the parameter that this process holds (FSDP2 shards rows in equal chunks, the last ones shorter)."""
    # Private, seen in torch 2.11-2.13: the only function that knows the offset also under hybrid meshes.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1][0]


def shard_mesh(accelerator: Accelerator, replicas: int) -> DeviceMesh:
    """Mesh of all processes for FSDP2: one dimension, or two where there are replicas of the sharded model."""
    if replicas > 1:
        return hybrid_mesh(accelerator, replicas)
    return init_device_mesh(accelerator.device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def hybrid_mesh(accelerator: Accelerator, replicas: int) -> DeviceMesh:
    """Mesh of all processes, (replicas, shards); neighbouring ranks share a replica."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def _wrap_fsdp1(
    model: PreTrainedModel,
    blocks: list[nn.Module],
    fill: Callable[[nn.Module], None] | None,
    args: TrainArguments,
    accelerator: Accelerator,
    strategy: Strategy,
) -> nn.Module:
    plugin = strategy.plugin
    assert plugin is not None
    if not plugin.use_orig_params:
        raise UserError(
            "fsdp_use_orig_params: false is refused: weight decay, exact resume and export need parameters by name; "
            "set it to true."
        )
    units = set(find_units(model, blocks, strategy))
    dtype = compute_dtype(args, strategy)
    is_hybrid = plugin.sharding_strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return FSDP1(
        model,
        # Shards within a machine and copies over machines, said as a mesh: FSDP1's own choice counts the GPUs.
        device_mesh=hybrid_mesh(accelerator, dist.get_world_size() // per_machine) if is_hybrid else None,
        sharding_strategy=plugin.sharding_strategy,
        cpu_offload=plugin.cpu_offload,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in units),
        mixed_precision=MixedPrecision(
            param_dtype=dtype,
            reduce_dtype=reduce_dtype(args, strategy),
            buffer_dtype=getattr(torch, args.buffer_dtype) if args.buffer_dtype else None,
        ),
        backward_prefetch=plugin.backward_prefetch,
        forward_prefetch=bool(plugin.forward_prefetch),
        limit_all_gathers=args.limit_all_gathers is not False,
        use_orig_params=True,
        param_init_fn=fill,
        device_id=accelerator.device if accelerator.device.type == "cuda" else torch.device("cpu"),
    )


@torch.no_grad()
def _fill_module(
    module: nn.Module,
    names: dict[nn.Parameter, str],
    weights: Weights,
    device: torch.device,
    filled: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Replace the module's own meta parameters by their values; a tied parameter is read once and stays one object."""
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta:
            if parameter not in filled:
                value = torch.empty_like(parameter, device=device)
                value.copy_(weights.read(names[parameter])[:])
                filled[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module.register_parameter(key, filled[parameter])


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside DDP or FSDP1."""
    inner = model.module if isinstance(model, (DistributedDataParallel, FSDP1)) else model
    assert isinstance(inner, PreTrainedModel)
    return inner


def gradient_sync(model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[Any]:
    """Context of a micro-batch's backward pass.

    DDP sums gradients once a step. FSDP reduces them in every micro-batch: waiting would keep unsharded gradients,
    which is the memory that sharding is there to save.
    """
    if isinstance(model, DistributedDataParallel) and not is_last_micro_batch:
        return model.no_sync()
    return nullcontext()


def clip_grad_norm_(
    model: nn.Module, max_norm: float, loss_scale: float = 1.0, optimizer: torch.optim.Optimizer | None = None
) -> torch.Tensor:
    """Scale gradients so that the norm over all parameters and processes is at most max_norm; 0 only measures it.

    loss_scale: factor on the loss (fp16) that is taken out of the gradients first. optimizer: if it is fused, its next
    step scales the gradients while it reads them, which saves a pass over all of them.

    Returns the norm before clipping, 0-dim, on the device, equal on all processes and under every strategy.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    if loss_scale != 1.0:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 / loss_scale)
    if isinstance(model, FSDP1):
        norm = _fsdp1_grad_norm(model, parameters)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
    if max_norm > 0:
        if optimizer is not None and optimizer.defaults.get("fused"):
            # What torch's own GradScaler sets: fused optimizers divide by it. The same factor as in the other branch.
            divisor = ((norm.float() + 1e-6) / max_norm).clamp(min=1.0)
            vars(optimizer).update(grad_scale=divisor, found_inf=torch.zeros_like(divisor))
        else:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


def _fsdp1_grad_norm(model: FSDP1, parameters: list[nn.Parameter]) -> torch.Tensor:
    # FSDP1's own clip_grad_norm_ computes in float32 and refuses float64 gradients. With use_orig_params each process
    # sees its piece of every parameter, so the squares add up over the processes that share the pieces.
    device = next(model.parameters()).device
    dtype = torch.promote_types(parameters[0].grad.dtype, torch.float32) if parameters else torch.float32  # type: ignore[union-attr]
    squares = torch.zeros((), dtype=dtype, device=device)
    for parameter in parameters:
        assert parameter.grad is not None
        squares += torch.linalg.vector_norm(parameter.grad, dtype=dtype) ** 2
    if model.sharding_strategy != ShardingStrategy.NO_SHARD:
        dist.all_reduce(squares, group=model.process_group)
    return squares.sqrt()


@contextmanager
def generation_model(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Hugging Face model whose `generate` may be called under the strategy; all processes call it equally often.

    Sharded, the whole of `generate` runs as a forward pass of the root unit, because encoder-decoder models call their
    encoder directly, past the root's hooks: its parameters (embeddings, final norms) must be gathered by then, in the
    type that the units compute in, and the units must know their root before the first of them runs. Under FSDP2 all
    units stay gathered where they fit: a token then costs no communication.
    """
    inner = base_model(model)
    if not is_sharded(model):
        yield inner
        return
    if isinstance(model, FSDP1):
        inner.generate = functools.partial(_generate_as_forward, model, inner)
    else:
        assert isinstance(model, FSDPModule)
        register_fsdp_forward_method(model, "generate")
        if _fits_gathered(model):
            model.set_reshard_after_forward(False, recurse=True)
    try:
        with context_parallel.whole_sequences(inner):
            yield inner
    finally:
        del inner.generate  # the instance's attribute; the class's method is there again
        for unit, reshard_after_forward in _RESHARD_AFTER_FORWARD.items():
            assert isinstance(unit, FSDPModule)
            unit.set_reshard_after_forward(reshard_after_forward, recurse=False)
        reshard(model)


def _generate_as_forward(root: FSDP1, inner: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    # FSDP1 has no register_fsdp_forward_method, and summon_full_params gathers the root in the parameters' type while
    # the other units compute in bf16. So generate takes the place of the wrapped forward for this one call of the root.
    forward = inner.forward

    def generate(*args: Any, **kwargs: Any) -> Any:
        inner.forward = forward  # for the forward passes of generate itself
        return type(inner).generate(inner, *args, **kwargs)

    inner.forward = generate
    try:
        return root(*args, **kwargs)
    finally:
        inner.forward = forward


def reshard(model: nn.Module) -> None:
    """Free gathered parameters that a forward pass without a backward pass has left (FSDP2 keeps at least the root's).

    Until then `model.parameters()` are not the sharded ones that the optimizer has, and its state cannot be saved.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _fits_gathered(model: nn.Module) -> bool:
    """Whether every process has room for all parameters at once, with as much again for generation's caches."""
    parameters = list(model.parameters())
    if parameters[0].device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    fits = 2 * sum(p.numel() * p.element_size() for p in parameters) < free
    return peer_copies.holds_everywhere(fits, parameters[0].device)  # gathering is collective: all do the same


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward pass of the model is a collective, so that all processes must make the same number of them."""
    return isinstance(model, (FSDP1, FSDPModule))


def describe_units(model: nn.Module) -> str:
    """Number and kind of the sharded units, as they really are."""
    if isinstance(model, FSDP1):
        names = [type(unit.module).__name__ for unit in FSDP1.fsdp_modules(model)]
    elif isinstance(model, FSDPModule):
        # Modules that were sharded together share one state: they are one unit.
        members: dict[int, list[str]] = {}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state = id(module._get_fsdp_state())
                members.setdefault(state, []).append(type(module).__name__.removeprefix("FSDP"))
        names = [" + ".join(unit) for unit in members.values()]
    else:
        return "none"
    text = f"{len(names)} FSDP units: " + ", ".join(f"{n} x {name}" for name, n in Counter(names).items())
    return text + (", copied between devices" if model in _COPIED else "")
