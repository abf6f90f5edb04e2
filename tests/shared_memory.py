"""Stands for torch's symmetric memory on a CPU: files that all processes of a machine map."""

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

_paths: dict[int, str] = {}


def _mapped(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    assert dtype == torch.uint8 and device.type == "cpu"
    file, path = tempfile.mkstemp()
    os.ftruncate(file, size)
    os.close(file)
    buffer = _mapped(path, size).fill_(255)  # NaN in each type: nobody reads what nobody wrote
    _paths[buffer.data_ptr()] = path
    return buffer


class _Handle:
    def __init__(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size, self._group = group.rank(), group.size(), group
        paths: list[Any] = [None] * self.world_size
        dist.all_gather_object(paths, (_paths[buffer.data_ptr()], buffer.numel()), group=group)
        assert len({size for _, size in paths}) == 1
        self._peers = [_mapped(*path) for path in paths]
        dist.barrier(group)
        os.unlink(paths[self.rank][0])

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert channel == 0 and timeout_ms > 0
        dist.barrier(self._group)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._peers[rank].view(dtype)[: sizes[0]]


def rendezvous(buffer: torch.Tensor, group_name: Any) -> _Handle:
    return _Handle(buffer, _resolve_process_group(group_name))
