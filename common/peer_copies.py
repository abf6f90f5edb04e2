"""FSDP2's communication within a machine by the GPUs' copy engines, with gradients summed in float32 on arrival.

NCCL's kernels take multiprocessors from the matrix products beside them. Here a process fetches its peers' parts of a
unit, and their gradients for its own shard, from memory that all of them map (torch's symmetric memory): copies that
need no multiprocessor, and one small kernel that waits for the peers. Gradients travel in the 16 bits in which they
were computed, half of what a reduce-scatter in float32 sends, and are summed in float32 in the order of the ranks.
"""

import importlib.util
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # no public name in torch 2.11-2.13
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # the same


def is_available(device: torch.device, num_shards: int, local_world_size: int) -> bool:
    """Whether the processes of each shard group reach each other's memory; all processes answer the same."""
    can = (
        device.type == "cuda"
        and importlib.util.find_spec("triton") is not None
        and num_shards > 1
        and local_world_size % num_shards == 0
        and torch.cuda.device_count() >= local_world_size
        and all(
            torch.cuda.can_device_access_peer(device, other)
            for other in range(local_world_size)
            if other != device.index
        )
    )
    if device.type != "cuda":
        return can
    everywhere = torch.tensor(int(can), device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere.item())


class SharedBuffers:
    """Buffers that all processes of a group map, used in turn.

    All processes ask for the same sizes in the same order, so that a buffer's number names the same one everywhere. A
    buffer may be written again when the peers have read what was in it: that is certain behind the barrier of the next
    use, in whose stream each of them has queued its reading before.
    """

    num_bytes = 0
    """Memory of all such buffers of this process, which torch's allocator does not count."""

    def __init__(self, group: dist.ProcessGroup, number: int, timeout_ms: int) -> None:
        self._group, self._timeout_ms = group, timeout_ms
        self._slots: list[tuple[torch.Tensor, Any] | None] = [None] * number
        self._users: list[Any] = [lambda: None] * number
        self._next = 0
        self._barriers: list[torch.cuda.Event | None] = [None] * number

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialized vector, to be written in the current stream."""
        index = self._next % len(self._slots)
        needed, slot = numel * dtype.itemsize, self._slots[index]
        if slot is None or slot[0].numel() < needed or self._users[index]() is not None:
            if slot is not None:
                SharedBuffers.num_bytes -= slot[0].numel()
            # As large as the largest so far: units come in two or three sizes, and each meets each buffer.
            size = max([needed, *(other[0].numel() for other in self._slots if other)])
            self._slots[index] = slot = None
            buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
            self._slots[index] = slot = (buffer, symmetric_memory.rendezvous(buffer, self._group.group_name))
            SharedBuffers.num_bytes += size
        following = self._barriers[(self._next + 1) % len(self._slots)]
        if following is not None:
            torch.cuda.current_stream().wait_event(following)
        vector = slot[0][:needed].view(dtype)
        self._users[index] = weakref.ref(vector)
        return vector

    def exchange(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """The vectors of all processes that were allocated last, when all of them are written; queued in the stream."""
        index = self._next % len(self._slots)
        slot = self._slots[index]
        assert slot is not None
        buffer, handle = slot
        assert vector.data_ptr() == buffer.data_ptr(), "buffers are used in the order in which they were allocated"
        handle.barrier(channel=0, timeout_ms=self._timeout_ms)
        event = torch.cuda.Event()
        event.record()
        self._barriers[index] = event
        self._next += 1
        return [
            vector if rank == handle.rank else handle.get_buffer(rank, (vector.numel(),), vector.dtype)
            for rank in range(handle.world_size)
        ]


class PeerAllGather(AllGather):
    """All-gather of a unit: each process fetches the others' shards."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self._buffers = buffers

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._buffers.allocate(int(size[0]), dtype, device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        rank, size = group.rank(), group.size()
        peers = self._buffers.exchange(output_tensor)
        chunks = output_tensor.view(size, -1)
        for peer in ((rank + offset) % size for offset in range(1, size)):  # not all from the same one at once
            chunks[peer].copy_(peers[peer].view(size, -1)[peer])


class ExchangeAndSum(ReduceScatter):
    """Reduce-scatter of 16-bit gradients into a float32 sum: each process fetches the others' for its shard."""

    def __init__(self, buffers: SharedBuffers, dtype: torch.dtype) -> None:
        self._buffers, self._dtype = buffers, dtype
        self._allocates_input = False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # FSDP2 asks for the input, fills it from the gradients, then for the output: both in the type of the sum.
        self._allocates_input = not self._allocates_input
        if self._allocates_input:
            return self._buffers.allocate(int(size[0]), self._dtype, device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        from common.triton_kernels import sum_chunks

        assert op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM), op
        rank, size = group.rank(), group.size()
        peers = self._buffers.exchange(input_tensor)
        arrived = input_tensor.new_empty(size - 1, output_tensor.numel())
        for offset in range(1, size):
            peer = (rank + offset) % size
            arrived[peer - (peer > rank)].copy_(peers[peer].view(size, -1)[rank])
        scale = 1.0 / size if op == dist.ReduceOp.AVG else 1.0
        sum_chunks(input_tensor.view(size, -1)[rank], arrived, rank, scale, output_tensor)
