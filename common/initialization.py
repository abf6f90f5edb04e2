"""Random initial weights of a model on the meta device, drawn in parts by the architecture's own scheme."""

import functools
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, initialization

from common.arguments import UserError
from common.launch import cores_per_process

BLOCK_SIZE = 2**20  # elements that are drawn at once, in whole rows; another number is another initial model
DRAWS = ("normal_", "uniform_", "trunc_normal_")
FILLS = ("constant_", "ones_", "zeros_")


@dataclass(frozen=True)
class InitCall:
    """One call of an initialiser of `torch.nn.init` on a parameter on the meta device, or on a view of one."""

    tensor: torch.Tensor
    function: str
    settings: dict[str, Any]


@contextmanager
def recorded_init() -> Iterator[list[InitCall]]:
    """What transformers' initialisation of models built inside would do to parameters on the meta device, in order.

    The scheme stays the architecture's own and nothing is drawn. Buffers that are on a real device get their values.
    """
    calls: list[InitCall] = []

    def record(name: str, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        if not tensor.is_meta:
            return function(tensor, *args, **settings)
        settings.pop("generator", None)
        # All arguments come by keyword from transformers, except what `copy_` copies, which cannot be drawn anyhow.
        calls.append(InitCall(tensor, name, settings))
        return tensor

    # Seen in transformers 5.17-5.24: models call the functions of `initialization`, and while a model is initialised
    # `torch.nn.init` is replaced by them; they end in the functions of this table, or in `copy_`.
    table, copy = initialization.TORCH_INIT_FUNCTIONS, initialization.copy_
    originals = dict(table)
    table |= {name: functools.partial(record, name, function) for name, function in originals.items()}
    initialization.copy_ = functools.partial(record, "copy_", copy)
    try:
        yield calls
    finally:
        table |= originals
        initialization.copy_ = copy


class InitSource:
    """Random weights by the model's parameter names, drawn piece by piece where a `WeightSource` would read them.

    A parameter is made of blocks of rows, and a block's values depend on the seed, the parameter's name and the block's
    number alone: they are the same for every number of processes, strategy and device, because they are drawn on the
    CPU. `calls` are those of `recorded_init` around the model's construction.
    Raises `UserError` for a parameter that cannot be drawn so.
    """

    def __init__(self, model: PreTrainedModel, calls: list[InitCall], seed: int) -> None:
        by_storage: dict[int, list[InitCall]] = {}
        for call in calls:
            by_storage.setdefault(_storage_id(call.tensor), []).append(call)
        self._rows: dict[str, _DrawnRows] = {}
        for name, parameter in model.named_parameters():
            num_rows = _num_rows(parameter.shape)
            steps: list[_Step] = []
            for call in by_storage.get(_storage_id(parameter), []):
                rows = _rows_of(call.tensor, parameter)
                if call.function not in DRAWS + FILLS or rows is None:
                    raise UserError(
                        f"--init meta: {type(model).__name__} initialises {name} by {call.function.rstrip('_')}, which "
                        "cannot be drawn in parts; use --init device."
                    )
                if len(rows) == num_rows:
                    steps.clear()
                steps.append(_Step(call.function, call.settings, rows))
            if not steps or len(steps[0].rows) < num_rows:
                raise UserError(
                    f"--init meta: {type(model).__name__} does not say how {name} is initialised; use --init device."
                )
            self._rows[name] = _DrawnRows(parameter.shape, steps, f"{seed} {name}")

    def read(self, name: str) -> Any:
        """Parameter `name`, to be sliced (`[:]` for the whole)."""
        return self._rows[name]

    def close(self) -> None:
        """Nothing was opened."""


@dataclass(frozen=True)
class _Step:
    function: str
    settings: dict[str, Any]
    rows: range
    """Of the parameter; all of them, except for a row that is overwritten (the embedding of padding)."""


@dataclass(frozen=True)
class _DrawnRows:
    shape: torch.Size
    steps: list[_Step]
    key: str

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """float32, on the CPU."""
        row_shape = self.shape[1:]
        start, stop, _ = rows.indices(_num_rows(self.shape))
        values = torch.empty(stop - start, *row_shape)
        size = max(1, BLOCK_SIZE // max(1, row_shape.numel()))

        def fill(block: int) -> None:
            first, last = block * size, min(block * size + size, _num_rows(self.shape))
            low, high = max(first, start), min(last, stop)
            wanted = values[low - start : high - start]
            drawn = wanted if high - low == last - first else torch.empty(last - first, *row_shape)
            self._draw(drawn, block, first)
            if drawn is not wanted:  # a block is always drawn whole
                wanted.copy_(drawn[low - first : high - first])

        # torch draws on one thread.
        with ThreadPoolExecutor(cores_per_process()) as pool:
            list(pool.map(fill, range(start // size, -(-stop // size))))
        return values if self.shape else values[0]

    @torch.no_grad()
    def _draw(self, values: torch.Tensor, block: int, first: int) -> None:
        digest = hashlib.blake2b(f"{self.key} {block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        for step in self.steps:
            low, high = max(first, step.rows.start), min(first + len(values), step.rows.stop)
            if low < high:
                settings = step.settings | ({"generator": generator} if step.function in DRAWS else {})
                initialization.TORCH_INIT_FUNCTIONS[step.function](values[low - first : high - first], **settings)


def _num_rows(shape: torch.Size) -> int:
    return shape[0] if shape else 1


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # tensors on the meta device have no addresses


def _rows_of(view: torch.Tensor, parameter: torch.Tensor) -> range | None:
    """Rows of the parameter that the view consists of; None unless they are whole."""
    row_size = max(1, parameter.shape[1:].numel())
    first, rest = divmod(int(view.storage_offset()), row_size)
    num_rows, rest_of_rows = divmod(view.numel(), row_size)
    if rest or rest_of_rows or not view.is_contiguous():
        return None
    return range(first, first + num_rows)
