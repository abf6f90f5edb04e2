"""Model under the YAML's strategy: checkpointing and compile inside each block, FSDP outside, weights last.

The one place that knows the FSDP versions. Settings come from accelerate's reading of the YAML; the sharding itself is
applied with torch's own functions, because the order matters: a block's `forward` is replaced by its checkpointed (and
compiled) form, so the block keeps its class, its state-dict keys stay clean, and FSDP's hooks, which sit on the module's
`__call__`, stay outside the recomputed and compiled region.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
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
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from common.arguments import TrainArguments, UserError
from common.launch import Strategy, compute_dtype, param_dtype, reduce_dtype
from common.models import WeightSource

# What each FSDP2 unit was sharded with: torch has a setter and no getter.
_RESHARD_AFTER_FORWARD: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def prepare_model(
    model: PreTrainedModel,
    weights: WeightSource | None,
    args: TrainArguments,
    accelerator: Accelerator,
    strategy: Strategy,
) -> nn.Module:
    """Shard (or replicate) the model as the YAML says and fill in its weights.

    model: on the meta device when `weights` is given, else with its values, equal on all processes.
    Returns the module to train; build the optimizer from it afterwards.
    Raises `UserError` when the YAML's wrap class is not in the model or a setting cannot act.
    """
    if args.gradient_checkpointing and strategy.is_fsdp:
        raise UserError(
            "--gradient_checkpointing: under FSDP the YAML's fsdp_activation_checkpointing decides; drop the flag."
        )
    prepared = _prepare(model, weights, args, accelerator, strategy)
    if args.print_model:
        accelerator.print(prepared)
    return prepared


def _prepare(
    model: PreTrainedModel,
    weights: WeightSource | None,
    args: TrainArguments,
    accelerator: Accelerator,
    strategy: Strategy,
) -> nn.Module:
    blocks = find_blocks(model, strategy)
    recompute = strategy.plugin.activation_checkpointing if strategy.plugin else args.gradient_checkpointing
    if args.param_dtype == "float64":
        for module in (model, *blocks):  # blocks too: checkpointing runs them again outside the model's forward
            module.forward = _StayInFloat64.within(module.forward)  # type: ignore[method-assign]
    for block in blocks:
        _replace_forward(block, bool(recompute), strategy.compile_backend)
    model.to(param_dtype(args))
    names = {parameter: name for name, parameter in model.named_parameters()}  # tied parameters: their first name
    fill = functools.partial(_fill_module, names=names, weights=weights, device=accelerator.device, filled={})
    if strategy.kind == "fsdp2":
        return _fully_shard(model, blocks, weights, args, accelerator, strategy)
    if strategy.kind == "fsdp1":
        return _wrap_fsdp1(model, blocks, fill if weights else None, args, accelerator, strategy)
    if weights:
        for module in model.modules():
            fill(module)
    model.to(accelerator.device)
    dtype = compute_dtype(args, strategy)
    if dtype != param_dtype(args):
        # No wrapper of accelerate: its conversion of all outputs to float32 would double the memory of the logits.
        model.forward = torch.autocast(accelerator.device.type, dtype)(model.forward)  # type: ignore[method-assign]
    if strategy.kind == "ddp":
        device_ids = [accelerator.device] if accelerator.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    return model


def find_blocks(model: PreTrainedModel, strategy: Strategy) -> list[nn.Module]:
    """Modules that are checkpointed, compiled and sharded as a unit: the YAML's classes, else the model's own blocks.

    Raises `UserError` when a class is not in the model, naming the candidates.
    """
    plugin = strategy.plugin
    named = list(plugin.transformer_cls_names_to_wrap or ()) if plugin else []
    wanted = [name.strip() for name in named if name.strip()] or sorted(model._no_split_modules or ())
    present = {type(module).__name__ for module in model.modules()}
    missing = [name for name in wanted if name not in present]
    if named and missing:
        candidates = ", ".join(sorted(model._no_split_modules or ())) or ", ".join(sorted(present))
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap: {type(model).__name__} has no module of class {', '.join(missing)}; "
            f"it has {candidates} (or leave the key out: the model's own block class is taken)."
        )
    blocks = [module for module in model.modules() if type(module).__name__ in wanted]
    if not blocks:
        raise UserError(
            f"{type(model).__name__} names no block class; set fsdp_transformer_layer_cls_to_wrap in the YAML."
        )
    return blocks


def _replace_forward(block: nn.Module, recompute: bool, compile_backend: str | None) -> None:
    """Give the block a forward that is checkpointed, then compiled, in training; the plain one elsewhere."""
    plain = block.forward
    fast = plain
    if recompute:
        # The RNG state is kept: without it dropout draws other masks in the recomputation and gradients are wrong.
        fast = functools.partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=True)
    if compile_backend:
        fast = torch.compile(fast, backend=compile_backend)
    if fast is plain:
        return

    @functools.wraps(plain)
    def forward(*inputs: Any, **kwargs: Any) -> Any:
        # generate() passes caches of growing length, which would recompile at each token.
        return (fast if block.training else plain)(*inputs, **kwargs)

    block.forward = forward  # type: ignore[method-assign]


class _StayInFloat64(TorchFunctionMode):
    """Skips the conversions to float32 that transformers' norms and softmax make whatever the model's type is.

    In float64 their rounding (6e-8) would hide the differences that a comparison of strategies is looking for.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
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
    weights: WeightSource | None,
    args: TrainArguments,
    accelerator: Accelerator,
    strategy: Strategy,
) -> nn.Module:
    plugin = strategy.plugin
    assert plugin is not None
    dtype = compute_dtype(args, strategy)
    settings: dict[str, Any] = {
        "mesh": shard_mesh(accelerator),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if dtype != param_dtype(args) else None, reduce_dtype=reduce_dtype(args, strategy)
        ),
        "offload_policy": OffloadPolicy(),
    }
    offload = isinstance(plugin.cpu_offload, CPUOffloadPolicy)  # accelerate has a policy object for both cases
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=accelerator.device.type == "cuda")
    reshard = bool(plugin.reshard_after_forward)
    # Non-persistent buffers (rotary frequencies) have their values already and are in no checkpoint.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if weights else {}

    def shard(module: nn.Module, reshard_after_forward: bool) -> None:
        fully_shard(module, reshard_after_forward=reshard_after_forward, **settings)
        _RESHARD_AFTER_FORWARD[module] = reshard_after_forward

    for block in blocks:
        shard(block, reshard)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = len({id(p) for p in model.parameters()}) < len(list(model.named_parameters(remove_duplicate=False)))
    if not tied and head is not None:
        # Large vocabularies: units of their own, so that the root does not hold both over the whole step. Tied tables
        # stay in the root, because a parameter can belong to one unit only.
        shard(embedding, reshard)
        shard(head, False)
    shard(model, False)
    if weights:
        model.to_empty(device="cpu" if offload else accelerator.device)
        model.tie_weights()  # to_empty gave every name of a tied parameter storage of its own
        for name, buffer in buffers.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.to(accelerator.device))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                local = parameter.to_local()
                start = _shard_start(parameter)
                local.copy_(weights.read(name)[start : start + local.shape[0]] if local.numel() else local)
    return model


def _shard_start(parameter: DTensor) -> int:
    """First row of the parameter that this process holds (FSDP2 shards rows in equal chunks, the last ones shorter)."""
    # Private, seen in torch 2.11-2.13: the only function that knows the offset also under hybrid meshes.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1][0]


def shard_mesh(accelerator: Accelerator) -> DeviceMesh:
    """One-dimensional mesh over all processes."""
    return init_device_mesh(accelerator.device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


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
            "fsdp_use_orig_params: false is refused: weight decay, exact resume and export need parameters by name; set it to true."
        )
    units = set(blocks)
    dtype = compute_dtype(args, strategy)
    return FSDP1(
        model,
        sharding_strategy=plugin.sharding_strategy,
        cpu_offload=plugin.cpu_offload,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in units),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=reduce_dtype(args, strategy), buffer_dtype=None),
        backward_prefetch=plugin.backward_prefetch,
        forward_prefetch=bool(plugin.forward_prefetch),
        use_orig_params=True,
        param_init_fn=fill,
        device_id=accelerator.device if accelerator.device.type == "cuda" else torch.device("cpu"),
    )


@torch.no_grad()
def _fill_module(
    module: nn.Module,
    names: dict[nn.Parameter, str],
    weights: WeightSource,
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


def clean_name(name: str) -> str:
    """Parameter name without the prefixes that wrappers add."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def base_model(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside DDP or FSDP1."""
    inner = model.module if isinstance(model, (DistributedDataParallel, FSDP1)) else model
    assert isinstance(inner, PreTrainedModel)
    return inner


def gradient_sync(model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[Any]:
    """Context of a micro-batch's backward pass.

    DDP sums gradients once a step. FSDP reduces them in every micro-batch: waiting would keep unsharded gradients, which
    is the memory that sharding is there to save.
    """
    if isinstance(model, DistributedDataParallel) and not is_last_micro_batch:
        return model.no_sync()
    return nullcontext()


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale gradients so that the norm over all parameters and processes is at most max_norm; 0 only measures it.

    Returns the norm before clipping, 0-dim, on the device, equal on all processes and under every strategy.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    if isinstance(model, FSDP1):
        norm = _fsdp1_grad_norm(model, parameters)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
    if max_norm > 0:
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
    fits = torch.tensor(int(2 * sum(p.numel() * p.element_size() for p in parameters) < free), device="cuda")
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)  # gathering is collective: all processes do the same
    return bool(fits.item())


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward pass of the model is a collective, so that all processes must make the same number of them."""
    return isinstance(model, (FSDP1, FSDPModule))


def describe_units(model: nn.Module) -> str:
    """Number and kind of the sharded units, as they really are."""
    kind = FSDP1 if isinstance(model, FSDP1) else FSDPModule if isinstance(model, FSDPModule) else None
    if kind is None:
        return "none"
    units = [m for m in model.modules() if isinstance(m, kind)]
    counts: dict[str, int] = {}
    for unit in units:
        name = type(unit.module).__name__ if isinstance(unit, FSDP1) else type(unit).__name__.removeprefix("FSDP")
        counts[name] = counts.get(name, 0) + 1
    return f"{len(units)} FSDP units: " + ", ".join(f"{n} x {name}" for name, n in counts.items())
