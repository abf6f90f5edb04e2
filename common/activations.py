"""Memory of a micro-batch's forward and backward pass, counted before there is a GPU.

The model's own code runs on the meta device, where tensors have shapes and no contents, and the bytes of those that
live at the same time are added up: what autograd keeps, what is recomputed, the logits of the loss. What the operators
of a GPU keep is put in the place of what the meta device would: attention's inputs, output and one number a row, and
masks of one byte for dropout.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from common.data import Batch
from common.losses import set_training_loss, token_loss

# What autocast computes in its type, of what the models call.
_MATMULS = {F.linear, torch.addmm, torch.matmul, torch.Tensor.matmul, torch.bmm, torch.baddbmm, torch.Tensor.baddbmm}


def meta_batch(config: Any, batch_size: int, source_length: int, target_length: int) -> Batch:
    """A micro-batch as the collators make it, on the meta device; causal models have one length, the source's."""
    with torch.device("meta"):
        source = torch.zeros(batch_size, source_length, dtype=torch.int64)
        target = torch.zeros(batch_size, target_length, dtype=torch.int64)
    if config.is_encoder_decoder:
        return {"input_ids": source, "attention_mask": source, "decoder_input_ids": target, "labels": target}
    return {"input_ids": source, "labels": source}


def peak_bytes(
    model: PreTrainedModel,
    batch: Batch,
    *,
    autocast: torch.dtype | None = None,
    recomputes: bool = False,
    loss_chunk_tokens: int | None = None,
) -> int:
    """Most bytes in use at one time in `token_loss` and its backward pass, besides the state of `memory.estimate`.

    model: on the meta device, its parameters in the type that FSDP gathers them in, or in their own with `autocast`;
    it is of no use afterwards. Blocks run as they are, not compiled, which would keep less.
    """
    model.train()
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    head = model.get_output_embeddings()
    assert head is not None
    # Blocks and head too: checkpointing runs them again outside the model's forward.
    for module in (model, *blocks, head):
        module.forward = _in_gpu_kernels(module.forward, autocast)
    if recomputes:
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    set_training_loss(model, head, loss_chunk_tokens, None)
    live = _LiveBytes(model, has_padding=model.config.is_encoder_decoder)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(live.drop_gradient)
    with live:
        token_loss(model, batch).backward()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Follows the storages that operators make, as long as they live.

    has_padding: the answer to questions about contents, which transformers asks of masks (are all of them true?).
    """

    def __init__(self, model: nn.Module, has_padding: bool) -> None:
        super().__init__()
        self._now = 0
        self._history: list[int] = []
        self._born: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._has_padding = has_padding
        self._weights = WeakIdKeyDictionary({parameter.untyped_storage(): None for parameter in model.parameters()})
        self._known = self._weights.copy()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return not self._has_padding
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor) and (storage := result.untyped_storage()) not in self._known:
                self._known[storage] = None
                if func is torch.ops.aten._to_copy.default and args[0].untyped_storage() in self._weights:
                    continue  # autocast's copy of a weight, counted with the state
                weakref.finalize(storage, self._free, storage.nbytes())
                self._born[storage] = len(self._history)
                self._now += storage.nbytes()
                self._history.append(self._now)
        return results

    def _free(self, num_bytes: int) -> None:
        self._now -= num_bytes

    @property
    def peak(self) -> int:
        return max(self._history)

    def drop_gradient(self, parameter: torch.Tensor) -> None:
        """Take a parameter's gradient out of the count, also of that until now: it belongs to the state."""
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        for moment in range(self._born[storage], len(self._history)):
            self._history[moment] -= storage.nbytes()
        parameter.grad = None


def _in_gpu_kernels(forward: Callable[..., Any], autocast: torch.dtype | None) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _GpuKernels(autocast):
            return forward(*args, **kwargs)

    return wrapped


class _GpuKernels(TorchFunctionMode):
    """Attention and dropout as a GPU's kernels keep them for the backward pass, and autocast's conversions."""

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self._autocast = autocast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key, value, mask = self._cast(*args[:3], kwargs.get("attn_mask"))
            return _FusedAttention.apply(query, key, value, mask)
        if func is F.dropout:
            probability, is_training = args[1] if len(args) > 1 else kwargs["p"], kwargs.get("training", True)
            return torch.native_dropout(args[0], probability, True)[0] if is_training and probability else args[0]
        if func in _MATMULS:
            args, kwargs = self._cast(*args), dict(zip(kwargs, self._cast(*kwargs.values()), strict=True))
        return func(*args, **kwargs)

    def _cast(self, *args: Any) -> tuple[Any, ...]:
        if self._autocast is None:
            return args
        return tuple(
            arg.to(self._autocast) if isinstance(arg, torch.Tensor) and arg.dtype == torch.float32 else arg
            for arg in args
        )


class _FusedAttention(torch.autograd.Function):
    """Shapes of scaled_dot_product_attention by a kernel that never holds the weights of all pairs."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, row_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = zip(ctx.saved_tensors[:4], ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needed else None for tensor, needed in inputs)
