"""FSDP2's communication within a machine by the GPUs' copy engines, with gradients summed in float32 on arrival.

NCCL's kernels take multiprocessors from the matrix products beside them. Here a process fetches its peers' parts of a
unit, and their gradients for its own shard, from memory that all of them map (torch's symmetric memory): copies that
need no multiprocessor, and one small kernel that waits for the peers. Gradients travel in the 16 bits in which they
were computed, half of what a reduce-scatter in float32 sends, and are summed in float32 in the order of the ranks.
"""

import importlib.util
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # no public name in torch 2.11-2.13
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # the same


def are_reachable(device: torch.device, num_shards: int, num_per_machine: int) -> bool:
    """Whether all processes that share a copy of the model can read each other's device memory. Collective."""
    if device.type != "cuda" or num_shards == 1 or importlib.util.find_spec("triton") is None:
        return False
    others = [other for other in range(num_per_machine) if other != device.index]
    reaches = (
        num_per_machine % num_shards == 0
        and torch.cuda.device_count() >= num_per_machine
        and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    )
    everywhere = torch.tensor(int(reaches), device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere.item())


class PeerCopies:
    """What the units of a sharded model communicate by.

    depth: units that are gathered ahead of the one that runs. dtype: 16-bit type of the gradients, if they are to be
    summed in float32; None leaves their reduction to NCCL. timeout: seconds that a process waits for its peers.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, depth: int, dtype: torch.dtype | None, timeout: int
    ) -> None:
        self._stream = torch.get_device_module(device).Stream()
        # One that peers may still be reading, and those ahead of it.
        self._gathered = SharedBuffers(group, device, 1 + depth, 1000 * timeout)
        self._gradients = SharedBuffers(group, device, 2, 1000 * timeout)
        self._dtype = dtype

    def replace_nccl(self, unit: Any) -> None:
        """Make a unit gather, and reduce, by copies. It is to be gathered ahead of use in the forward pass, too."""
        unit.set_custom_all_gather(_PeerAllGather(self._gathered, self._stream))
        # Private, seen in torch 2.11-2.13. Its shard is converted in the stream of the computation then: beside a
        # matrix product, which has all multiprocessors, that would take its time twice.
        unit._set_unshard_async_op(True)
        if self._dtype is not None:
            unit.set_custom_reduce_scatter(_ExchangeAndSum(self._gradients, self._dtype))


class SharedBuffers:
    """Buffers that all processes of a group map, used in turn.

    All processes ask for the same sizes in the same order, so that a buffer's number names the same one everywhere. A
    buffer may be written again when the peers have read what was in it. That is certain behind the barrier of the use
    after it: each peer has queued its reading before that barrier, in the same stream.
    """

    num_bytes = 0
    """Memory of all such buffers of this process, which torch's allocator does not count."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, number: int, timeout_ms: int) -> None:
        self._group, self._device, self._timeout_ms = group, device, timeout_ms
        self._streams = torch.get_device_module(device)
        self._slots = [_Slot() for _ in range(number)]
        self._num_uses = 0

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized vector, to be written in the current stream."""
        slot = self._slots[self._num_uses % len(self._slots)]
        needed = numel * dtype.itemsize
        if slot.size < needed or slot.user() is not None:
            # As large as the largest so far: units come in two or three sizes, and each meets each buffer.
            self._replace(slot, max(needed, *(other.size for other in self._slots)))
        after = self._slots[(self._num_uses + 1) % len(self._slots)]  # its last use was the one after this slot's
        if after.barrier is not None:
            self._streams.current_stream().wait_event(after.barrier)
        assert slot.buffer is not None
        vector = slot.buffer[:needed].view(dtype)
        slot.user = weakref.ref(vector)
        return vector

    def _replace(self, slot: "_Slot", size: int) -> None:
        self._streams.synchronize()  # this process's copies from and to the old one
        SharedBuffers.num_bytes += size - slot.size
        slot.buffer = slot.handle = None
        slot.buffer, slot.size = symmetric_memory.empty(size, dtype=torch.uint8, device=self._device), size
        slot.handle = symmetric_memory.rendezvous(slot.buffer, self._group.group_name)

    def exchange(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """What all processes have written to the vector that was allocated last, by rank; queued in the stream."""
        slot = self._slots[self._num_uses % len(self._slots)]
        assert slot.buffer is not None and vector.data_ptr() == slot.buffer.data_ptr(), "not the last one"
        slot.handle.barrier(channel=0, timeout_ms=self._timeout_ms)
        slot.barrier = self._streams.Event()
        slot.barrier.record(self._streams.current_stream())
        self._num_uses += 1
        return [
            vector if rank == slot.handle.rank else slot.handle.get_buffer(rank, (vector.numel(),), vector.dtype)
            for rank in range(slot.handle.world_size)
        ]


@dataclass
class _Slot:
    buffer: torch.Tensor | None = None
    size: int = 0
    """Bytes."""
    handle: Any = None
    """Of the peers' mappings."""
    user: Callable[[], torch.Tensor | None] = lambda: None
    """The vector that was last allocated in it, as long as somebody has it."""
    barrier: Any = None
    """Event behind the barrier of the last use."""


class _Arrival(dist.Work):
    """An all-gather under way in a stream of its own."""

    def __init__(self, streams: Any) -> None:
        super().__init__()
        self._streams, self._event = streams, streams.Event()
        self._event.record(streams.current_stream())

    def wait(self, timeout: Any = None) -> bool:
        self._streams.current_stream().wait_event(self._event)
        return True


class _PeerAllGather(AllGather):
    """All-gather of a unit: each process fetches the others' shards, in a stream of its own."""

    def __init__(self, buffers: SharedBuffers, stream: Any) -> None:
        self._buffers, self._stream = buffers, stream

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._buffers.allocate(int(size[0]), dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        rank, size = group.rank(), group.size()
        streams = torch.get_device_module(output_tensor.device)
        self._stream.wait_stream(streams.current_stream())
        with streams.stream(self._stream):
            peers = self._buffers.exchange(output_tensor)
            chunks = output_tensor.view(size, -1)
            for peer in ((rank + offset) % size for offset in range(1, size)):  # not all from the same one at once
                chunks[peer].copy_(peers[peer].view(size, -1)[peer])
            return _Arrival(streams)


class _ExchangeAndSum(ReduceScatter):
    """Reduce-scatter of 16-bit gradients into a float32 sum: each process fetches the others' for its shard."""

    def __init__(self, buffers: SharedBuffers, dtype: torch.dtype) -> None:
        self._buffers, self._dtype = buffers, dtype
        self._allocates_input = False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # FSDP2 asks for the input, fills it from the gradients, then for the output: both in the type of the sum.
        self._allocates_input = not self._allocates_input
        if self._allocates_input:
            return self._buffers.allocate(int(size[0]), self._dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM), op
        rank, size = group.rank(), group.size()
        peers = self._buffers.exchange(input_tensor)
        arrived = input_tensor.new_empty(size - 1, output_tensor.numel())
        for peer in ((rank + offset) % size for offset in range(1, size)):
            arrived[peer - (peer > rank)].copy_(peers[peer].view(size, -1)[rank])
        scale = 1.0 / size if op == dist.ReduceOp.AVG else 1.0
        _sum(input_tensor.view(size, -1)[rank], arrived, rank, scale, output_tensor)


def _sum(own: torch.Tensor, arrived: torch.Tensor, rank: int, scale: float, output: torch.Tensor) -> None:
    """output = scale * (own + the rows of arrived, of each rank but this one), in float32 in the order of the ranks."""
    if output.is_cuda:
        from common.triton_kernels import sum_rows

        sum_rows(own, arrived, rank, scale, output)
        return
    output.zero_()
    for row in (*arrived[:rank], own, *arrived[rank:]):
        output += row
    output *= scale
