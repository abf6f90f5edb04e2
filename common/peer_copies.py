"""FSDP2's communication within a machine by the GPUs' copy engines, with gradients summed in float32 on arrival.

NCCL's kernels take multiprocessors from the matrix products beside them. Here a process fetches its peers' parts of a
unit, and their gradients for its own shard, from memory that all of them map (torch's symmetric memory): copies that
need no multiprocessor, and one small kernel that waits for the peers. Gradients travel in the 16 bits in which they
were computed, half of what a reduce-scatter in float32 sends, and are summed in float32 in the order of the ranks.
"""

import importlib.util
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # no public name in torch 2.11-2.13
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # the same


def are_reachable(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the processes of each group that shares a model can map each other's device memory. Collective."""
    if device.type != "cuda" or group.size() == 1:
        return False
    # Its multicast objects are for reductions in the switch, which nothing here uses.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=group)
    hosts, indices = zip(*places, strict=True)
    reaches = (
        importlib.util.find_spec("triton") is not None
        and len(set(hosts)) == 1
        and len(set(indices)) == group.size()
        and max(indices) < torch.cuda.device_count()
        and all(torch.cuda.can_device_access_peer(device, index) for index in indices if index != device.index)
    )
    if reaches := holds_everywhere(reaches, device):
        # What the driver says is not all: a container may forbid to hand memory on.
        try:
            SharedBuffers(group, device, 1, 60_000).reserve(1)
        except RuntimeError:
            reaches = False
        SharedBuffers.num_bytes = 0
    return holds_everywhere(reaches, device)


def holds_everywhere(value: bool, device: torch.device) -> bool:
    """Whether the value is true in all processes. Collective."""
    everywhere = torch.tensor(int(value), device=device)
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
        self._gradients = SharedBuffers(group, device, 2, 1000 * timeout) if dtype is not None else None
        self._dtype = dtype
        self.num_buffers = 1 + depth + (2 if dtype is not None else 0)

    def replace_nccl(self, units: Sequence[Any]) -> None:
        """Make the units gather, and reduce, by copies. They are to be gathered ahead in the forward pass, too.

        Their buffers are there afterwards: later the activations would be in their way.
        """
        largest = 0
        for unit in units:
            unit.set_custom_all_gather(_PeerAllGather(self._gathered, self._stream))
            # Private, seen in torch 2.11-2.13. Otherwise FSDP2 holds a buffer until the next unit has left its own.
            unit._set_unshard_async_op(True)
            if self._gradients is not None and self._dtype is not None:
                unit.set_custom_reduce_scatter(_ExchangeAndSum(self._gradients, self._dtype))
            largest = max(largest, _gathered_bytes(unit))
        self._gathered.reserve(largest)
        if self._gradients is not None:
            self._gradients.reserve(largest)


def _gathered_bytes(unit: Any) -> int:
    """Size of all that the unit gathers, padded to equal shards."""
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return 0
    sizes = (
        parameter.padded_sharded_param_size.numel()
        * (group.mp_policy.param_dtype or parameter.sharded_param.dtype).itemsize
        for parameter in group.fsdp_params
    )
    return group.mesh_info.shard_mesh_size * sum(sizes)


class SharedBuffers:
    """Buffers that all processes of a group map, used in turn.

    All processes ask for the same sizes in the same order, so that a buffer's place names the same one everywhere. A
    buffer may be written again when the peers have read what was in it. That is certain behind the barrier of the use
    after it: each peer has queued its reading before that barrier, in the same stream.
    """

    num_bytes = 0
    """Memory of all such buffers of this process, which torch's allocator does not count."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, number: int, timeout_ms: int) -> None:
        self._group, self._device, self._timeout_ms = group, device, timeout_ms
        self._streams = torch.get_device_module(device)
        self._slots = [_Slot() for _ in range(number)]  # in the order of their last uses
        self._current: _Slot | None = None

    def reserve(self, size: int) -> None:
        """Make each of the buffers at least so many bytes large. Collective."""
        for slot in self._slots:
            if slot.size < size:
                self._grow(slot, size)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized vector, to be written in the current stream."""
        free = (index for index, slot in enumerate(self._slots[:-1]) if slot.user() is None)
        if (index := next(free, None)) is None:  # units are gathered in another order than planned
            self._slots.insert(0, _Slot())
            index = 0
        slot, after = self._slots[index : index + 2]
        needed = numel * dtype.itemsize
        if slot.size < needed:
            self._grow(slot, max(needed, *(other.size for other in self._slots)))
        if after.barrier is not None:
            self._streams.current_stream().wait_event(after.barrier)
        assert slot.buffer is not None
        vector = slot.buffer[:needed].view(dtype)
        slot.user, self._current = weakref.ref(vector), slot
        return vector

    def _grow(self, slot: "_Slot", size: int) -> None:
        self._streams.synchronize()  # this process's copies from and to the old one
        SharedBuffers.num_bytes += size - slot.size
        slot.buffer = slot.handle = None
        slot.size = size
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the new one does not come from torch's allocator
        try:
            slot.buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(f"{error} ({size:,} bytes that processes share)") from error
            raise
        # Its signals are zeroed, and the peers' addresses written, in a stream that no other one waits for.
        self._streams.synchronize()
        slot.handle = symmetric_memory.rendezvous(slot.buffer, self._group.group_name)
        self._streams.synchronize()

    def exchange(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """What all processes have written to the vector that was allocated last, by rank; queued in the stream."""
        slot = self._current
        assert slot is not None and slot.buffer is not None
        assert vector.data_ptr() == slot.buffer.data_ptr(), "not the last one"
        slot.handle.barrier(channel=0, timeout_ms=self._timeout_ms)
        slot.barrier = self._streams.Event()
        slot.barrier.record(self._streams.current_stream())
        self._slots.remove(slot)
        self._slots.append(slot)
        return [
            vector if rank == slot.handle.rank else slot.handle.get_buffer(rank, (vector.numel(),), vector.dtype)
            for rank in range(slot.handle.world_size)
        ]


@dataclass(eq=False)
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


def _peers_from(rank: int, size: int) -> list[int]:
    """The other ranks, the next one first: not all processes fetch from the same one at once."""
    return [(rank + offset) % size for offset in range(1, size)]


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
            for peer in _peers_from(rank, size):
                chunks[peer].copy_(peers[peer].view(size, -1)[peer])
            return _Arrival(streams)


class _ExchangeAndSum(ReduceScatter):
    """Reduce-scatter of 16-bit gradients into a float32 sum: each process fetches the others' for its shard."""

    def __init__(self, buffers: SharedBuffers, dtype: torch.dtype) -> None:
        self._buffers, self._dtype = buffers, dtype
        self._input: torch.Tensor | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # FSDP2 asks for the input, fills it from the gradients, then for the output: both in the type of the sum.
        if self._input is None:
            self._input = self._buffers.allocate(int(size[0]), self._dtype)
            return self._input
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
        self._input = None
        rank, size = group.rank(), group.size()
        peers = self._buffers.exchange(input_tensor)
        arrived = input_tensor.new_empty(size - 1, output_tensor.numel())
        for peer in _peers_from(rank, size):
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
