"""FSDP2's communication within a machine by the GPUs' copy engines, with gradients summed in float32 on arrival.

NCCL's kernels take multiprocessors from the matrix products beside them. Here processes exchange through memory that
all of them map (torch's symmetric memory): copies that need no multiprocessor, and one small kernel that waits for the
peers. A process writes its shard of a unit there in the type of the computation, and the others fetch it straight into
their whole parameters. Gradients are sent from where autograd left them, in the 16 bits in which they were computed,
half of what a reduce-scatter in float32 sends, and are summed in float32 in the order of the ranks.

FSDP2 lets others communicate a unit as one vector, into which and out of which it copies all parameters. Three of its
functions are replaced for units that do without that.
"""

import importlib.util
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory  # no public name in torch 2.11-2.13
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group  # the same
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

ALIGNMENT = 16  # bytes


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
            _SharedBuffer(1, group, device)
        except RuntimeError:
            reaches = False
    return holds_everywhere(reaches, device)


def holds_everywhere(value: bool, device: torch.device) -> bool:
    """Whether the value is true in all processes. Collective."""
    everywhere = torch.tensor(int(value), device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere.item())


class PeerCopies:
    """What the units of a sharded model communicate by.

    dtype: 16-bit type of the gradients, if they are to be summed in float32; None leaves their reduction to NCCL.
    timeout: seconds that a process waits for its peers.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype | None, timeout: int) -> None:
        self._num_peers = group.size() - 1
        self._gather = _PeerAllGather(SharedBuffers(group, device, 1000 * timeout))
        self._reduce = None if dtype is None else _ExchangeAndSum(SharedBuffers(group, device, 1000 * timeout), dtype)
        self.num_units = 2.0 / group.size() if dtype is None else 2.0
        """Memory that it takes, in sizes of the largest unit: two shards of it, and the peers' gradients for one."""

    def replace_nccl(self, units: Sequence[Any]) -> None:
        """Make the units gather, and reduce, by copies. They are to be gathered ahead in the forward pass, too.

        Their buffers are there afterwards: later the activations would be in their way.
        """
        _fsdp_param_group.foreach_all_gather = _all_gather
        _fsdp_param_group.foreach_all_gather_copy_out = _all_gather_copy_out
        _fsdp_collectives.foreach_reduce_scatter_copy_in = _reduce_scatter_copy_in
        shard_size = gradients_size = 0
        for unit in units:
            unit.set_custom_all_gather(self._gather)
            if self._reduce is not None:
                unit.set_custom_reduce_scatter(self._reduce)
            if (group := unit._get_fsdp_state()._fsdp_param_group) is None:
                continue
            assert all(parameter.fsdp_placement.dim == 0 for parameter in group.fsdp_params), "not sharded by rows"
            numels = [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]
            types = [group.mp_policy.param_dtype or parameter.sharded_param.dtype for parameter in group.fsdp_params]
            sizes = (_aligned(numel * dtype.itemsize) for numel, dtype in zip(numels, types, strict=True))
            shard_size = max(shard_size, sum(sizes))
            gradients_size = max(gradients_size, 2 * sum(numels) * self._num_peers)
        self._gather.buffers.reserve(shard_size)
        if self._reduce is not None:
            self._reduce.buffers.reserve(gradients_size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _SharedBuffer:
    """Device memory of each process of a group that all of them map. Making one is collective.

    of_rank: the buffer of each process, bytes.
    """

    def __init__(self, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        streams = torch.get_device_module(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the buffer does not come from torch's allocator
        try:
            own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(f"{error} ({size:,} bytes that processes share)") from error
            raise
        # Its signals are zeroed, and the peers' addresses written, in a stream that no other one waits for.
        streams.synchronize()
        self._handle = symmetric_memory.rendezvous(own, group.group_name)
        streams.synchronize()
        self.size = size
        self.of_rank = [
            own if rank == self._handle.rank else self._handle.get_buffer(rank, (size,), torch.uint8)
            for rank in range(self._handle.world_size)
        ]

    def wait_for_peers(self, timeout_ms: int) -> None:
        """Barrier in the current stream, behind which the copies that all processes queued before theirs are done."""
        self._handle.barrier(channel=0, timeout_ms=timeout_ms)


class SharedBuffers:
    """Two buffers that are used in turn, all in the same stream.

    All processes ask for the same sizes in the same order, so that a buffer is the same one everywhere. Whoever gets it
    may write to it, and to the peers': between its last use and this one lies the barrier of the other buffer's, which
    each process entered when it had read what was in this one.
    """

    num_bytes = 0
    """Memory of all such buffers of this process, which torch's allocator does not count."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_ms: int) -> None:
        self._group, self._device, self._timeout_ms = group, device, timeout_ms
        self._buffers: list[_SharedBuffer | None] = [None, None]

    def reserve(self, size: int) -> None:
        """Make both at least so many bytes large. Collective."""
        for _ in self._buffers:
            self.take(size)

    def take(self, size: int) -> list[torch.Tensor]:
        """The next buffer of each process, by rank: at least so many bytes. Collective where it has to grow."""
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer is None or buffer.size < size:
            torch.get_device_module(self._device).synchronize()  # copies from and to the old one
            SharedBuffers.num_bytes += size - (buffer.size if buffer else 0)
            buffer = self._buffers[0] = None  # before there is another
            buffer = self._buffers[0] = _SharedBuffer(size, self._group, self._device)
        return buffer.of_rank

    def wait_for_peers(self) -> None:
        """What all processes have written to the buffer that was taken last is there; queued in the stream."""
        assert self._buffers[0] is not None
        self._buffers[0].wait_for_peers(self._timeout_ms)


def _peers_from(rank: int, size: int) -> list[int]:
    """The other ranks, the next one first: not all processes copy from or to the same one at once."""
    return [(rank + offset) % size for offset in range(1, size)]


class _Arrival(dist.Work):
    """An all-gather under way in a stream of its own."""

    def __init__(self, streams: Any, parameters: Sequence[FSDPParam]) -> None:
        super().__init__()
        self._parameters = parameters
        self._streams, self._event = streams, streams.Event()
        self._event.record(streams.current_stream())

    def arrive(self) -> None:
        """Let the current stream wait for the parameters."""
        self._streams.current_stream().wait_event(self._event)

    def wait(self, timeout: Any = None) -> bool:
        """FSDP2's way to throw away what was gathered ahead in vain: before a unit that has no backward pass."""
        self.arrive()
        for parameter in self._parameters:
            parameter.free_unsharded_param()
        return True


class _PeerAllGather(AllGather):
    """All-gather of a unit into its parameters: each process fetches the others' shards, in a stream of its own."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self.buffers = buffers
        self._stream: Any = None

    def gather(self, parameters: Sequence[FSDPParam], group: dist.ProcessGroup, device: torch.device) -> _Arrival:
        rank, size = group.rank(), group.size()
        streams = torch.get_device_module(device)
        self._stream = self._stream or streams.Stream()
        # The optimizer has written the shards there, and their whole parameters get memory that was freed there.
        self._stream.wait_stream(streams.current_stream())
        with streams.stream(self._stream):
            inputs = [_inputs(parameter) for parameter in parameters]
        shards, wholes, starts, end = [], [], [], 0
        for parameter, (tensors, types) in zip(parameters, inputs, strict=True):
            parameter.init_all_gather_outputs([shard.numel() for shard in tensors], types, size, device)
            parameter.alloc_all_gather_outputs()
            for shard, whole in zip(tensors, parameter.all_gather_outputs, strict=True):
                shards.append(shard)
                wholes.append(whole.data.view(size, -1))  # .data: autograd may keep the parameter of the last gathering
                starts.append(end)
                end += _aligned(shard.numel() * whole.itemsize)
        with streams.stream(self._stream):
            buffers = self.buffers.take(end)

            def part(peer: int, whole: torch.Tensor, start: int) -> torch.Tensor:
                return buffers[peer][start : start + whole[peer].nbytes].view(whole.dtype)

            own = [part(rank, whole, start) for whole, start in zip(wholes, starts, strict=True)]
            torch._foreach_copy_(own, shards)
            self.buffers.wait_for_peers()
            for peer in _peers_from(rank, size):
                for whole, start in zip(wholes, starts, strict=True):
                    whole[peer].copy_(part(peer, whole, start))
            torch._foreach_copy_([whole[rank] for whole in wholes], own)
            return _Arrival(streams, parameters)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        raise NotImplementedError("units are gathered by _all_gather")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("units are gathered by _all_gather")


def _inputs(parameter: FSDPParam) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """What a process has of a parameter, flat, and the types in which it is gathered."""
    dtype = parameter.param_dtype
    is_extended = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
    if dtype is None or is_extended or parameter.offload_to_cpu or parameter.sharded_state != ShardedState.SHARDED:
        tensors = parameter.all_gather_inputs
        return tensors, [tensor.dtype for tensor in tensors]
    return [parameter._sharded_param_data], [dtype]  # converted as it is copied


def _all_gather(
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    async_op: bool,
    all_gather_copy_in_stream: torch.Stream,
    all_gather_stream: torch.Stream,
    device: torch.device,
    all_gather_comm: AllGather,
) -> _fsdp_collectives.AllGatherResult | None:
    """In the place of FSDP2's `foreach_all_gather`."""
    if not isinstance(all_gather_comm, _PeerAllGather):
        return _fsdp_collectives.foreach_all_gather(
            fsdp_params, group, async_op, all_gather_copy_in_stream, all_gather_stream, device, all_gather_comm
        )
    with torch.no_grad():
        arrival = all_gather_comm.gather(fsdp_params, group, device)
    return _fsdp_collectives.AllGatherResult(torch.empty(0), None, arrival, [], [], [])


def _all_gather_copy_out(
    all_gather_result: _fsdp_collectives.AllGatherResult, fsdp_params: list[FSDPParam], group: dist.ProcessGroup
) -> None:
    """In the place of FSDP2's `foreach_all_gather_copy_out`: what was gathered by copies is where it belongs."""
    if isinstance(all_gather_result.all_gather_work, _Arrival):
        all_gather_result.all_gather_work.arrive()
    else:
        _fsdp_collectives.foreach_all_gather_copy_out(all_gather_result, fsdp_params, group)


class _ExchangeAndSum(ReduceScatter):
    """Reduce-scatter of 16-bit gradients into a float32 sum: each process sends the others those of their shards.

    FSDP2 asks for its input, has `_reduce_scatter_copy_in` fill it, asks for its output, calls it, and keeps the input
    until the stream of the computation has waited for the sum. The same parameters have gradients in all processes, as
    for a reduce-scatter; other sizes are not noticed here.
    """

    def __init__(self, buffers: SharedBuffers, dtype: torch.dtype) -> None:
        self.buffers, self._dtype = buffers, dtype
        self._is_input = True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._is_input, is_input = not self._is_input, self._is_input
        return torch.empty(0).as_subclass(_Gradients) if is_input else torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM), op
        assert isinstance(input_tensor, _Gradients)
        rank, size, numel = group.rank(), group.size(), output_tensor.numel()
        # Of each gradient a process has as many rows as its first, the last ones fewer.
        parts, end = [], 0
        for gradient in input_tensor.gradients:
            assert gradient.dtype == self._dtype, f"{gradient.dtype}: summed before, it would be rounded now"
            length = -(-gradient.shape[0] // size) * gradient[:1].numel()
            parts.append((gradient.contiguous().view(-1).split(length), end))
            end += length
        assert end == numel, (end, numel)
        num_bytes = (size - 1) * numel * self._dtype.itemsize
        buffers = [
            buffer[:num_bytes].view(self._dtype).view(size - 1, numel) for buffer in self.buffers.take(num_bytes)
        ]
        for peer in _peers_from(rank, size):
            arrived = buffers[peer][rank - (rank > peer)]
            for chunks, start in parts:
                if peer < len(chunks):
                    arrived[start : start + chunks[peer].numel()].copy_(chunks[peer])
        self.buffers.wait_for_peers()
        scale = 1.0 / size if op == dist.ReduceOp.AVG else 1.0
        for chunks, start in parts:
            if rank < len(chunks):
                place = slice(start, start + chunks[rank].numel())
                _sum(chunks[rank], buffers[rank][:, place], rank, scale, output_tensor[place])


class _Gradients(torch.Tensor):
    """Keeps a unit's gradients, in the place of the vector that FSDP2 copies them into; itself it is empty."""

    gradients: list[torch.Tensor]


def _reduce_scatter_copy_in(
    unsharded_grads: list[torch.Tensor], reduce_scatter_input: torch.Tensor, world_size: int
) -> None:
    """In the place of FSDP2's `foreach_reduce_scatter_copy_in`."""
    if isinstance(reduce_scatter_input, _Gradients):
        reduce_scatter_input.gradients = list(unsharded_grads)
    else:
        _copy_in(unsharded_grads, reduce_scatter_input, world_size)


_copy_in = _fsdp_collectives.foreach_reduce_scatter_copy_in


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
