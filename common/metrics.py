"""Speed of training: tokens per second, model FLOPs utilisation (MFU), memory, waiting for data."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from common.losses import IGNORE_INDEX
from common.peer_copies import SharedBuffers

# Matrix products in bf16 or fp16 with fp32 accumulation, without sparsity: data sheets, which often print twice as much
# for 2:4 sparsity. Exact names of `torch.cuda.get_device_name`, because variants differ (SXM and PCIe, L40 and L40S,
# slices of a card); a card that is missing has no MFU.
PEAK_FLOPS_PER_SECOND = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A10": 125e12,
    "NVIDIA RTX 6000 Ada Generation": 364e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
}

_T5_FAMILY = ("t5", "mt5", "umt5")


def peak_flops_per_second(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak dense FLOP/s of the device for matrix products in dtype; None where the data sheet's number is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return PEAK_FLOPS_PER_SECOND.get(torch.cuda.get_device_name(device))


def sequence_lengths(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Input tokens of each row without padding, (batch,) int64.

    Without an attention_mask a causal model's rows end at their last target, and others nowhere before the batch does.
    """
    if "attention_mask" in batch:
        return batch["attention_mask"].sum(-1, dtype=torch.int64)
    rows, length = batch["input_ids"].shape
    if "labels" in batch and "decoder_input_ids" not in batch:
        return ((batch["labels"] != IGNORE_INDEX) * torch.arange(1, length + 1)).amax(-1)
    return torch.full((rows,), length)


def target_lengths(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decoder tokens of each row without padding, (batch,) int64; zeros for a causal model, which has no decoder."""
    if "decoder_input_ids" not in batch:
        return torch.zeros(batch["input_ids"].shape[0], dtype=torch.int64)
    return (batch["labels"] != IGNORE_INDEX).sum(-1)


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of one forward and backward pass, by formula.

    A causal model needs, for each token of a sequence of length s,

        6 * N + 12 * layers * heads * head_dim * s

    where N is the number of parameters without embedding tables (a table that is also the output head counts once):
    2 operations a parameter forward and 4 backward; attention's two products likewise, without a discount for the
    causal mask. This is torchtitan's convention. Nor is there one for documents in a row that do not see each other:
    where many short ones share a row (document masking, packing) and FlexAttention leaves their pairs out, MFU is above
    what the device does. Recomputed activations and padding are not counted: MFU says how much
    of the device goes into the model.

    An encoder-decoder model with s source and t target tokens needs, with A = layers * heads * head_dim of each side,

        6 * (N_encoder + N_cross) * s + 12 * A_encoder * s * s
      + 6 * (N_decoder - N_cross) * t + 12 * A_decoder * (t * t + s * t)

    where N_decoder includes the head, and N_cross, the key and value projections of cross attention, belong to the
    decoder but are applied to source tokens. Only T5's family is known (`of_model`).
    """

    source_parameters: int
    source_attention: int
    target_parameters: int = 0
    target_attention: int = 0

    @classmethod
    def of_model(cls, model: PreTrainedModel, context_size: int = 1) -> "ModelFlops | None":
        """Counts before the model is sharded (meta device will do); None for a model that the formula is not of.

        These are encoder-decoders of another kind, mixtures of experts, and models without attention heads.

        context_size: a causal model's batches are slices of sequences so many times as long, which they attend to.
        """
        config = model.config
        head = model.get_output_embeddings()
        if not config.is_encoder_decoder:
            if hasattr(config, "num_experts_per_tok") or not hasattr(config, "num_attention_heads"):
                return None
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            attention = config.num_hidden_layers * config.num_attention_heads * head_dim
            return cls(_parameters_without_embeddings(model, head), attention * context_size)
        if config.model_type not in _T5_FAMILY:
            return None
        inner = config.num_heads * config.d_kv
        cross = config.num_decoder_layers * 2 * config.d_model * inner
        return cls(
            source_parameters=_parameters_without_embeddings(model.get_encoder(), None) + cross,
            source_attention=config.num_layers * inner,
            target_parameters=_parameters_without_embeddings(model.get_decoder(), head) - cross,
            target_attention=config.num_decoder_layers * inner,
        )

    def of_batch(self, batch: Mapping[str, torch.Tensor]) -> int:
        """FLOPs of a micro-batch of CPU tensors."""
        s, t = sequence_lengths(batch), target_lengths(batch)
        products = self.source_parameters * s + self.target_parameters * t
        attention = self.source_attention * s * s + self.target_attention * (t * t + s * t)
        return int((6 * products + 12 * attention).sum())


def _parameters_without_embeddings(module: nn.Module, head: nn.Module | None) -> int:
    tables = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    parameters = {p for p in module.parameters() if p not in tables}
    if head is not None:
        parameters.add(head.weight)  # type: ignore[arg-type]  # also where it is the embedding table
    return sum(p.numel() for p in parameters)


class Throughput:
    """Averages over the optimizer steps since the last report.

    Costs nothing on the device between reports: times are taken on the host, and only `report` and `paused` wait for
    the device. The clock starts when the object is made, and again with `start_window`.
    """

    def __init__(self, device: torch.device, flops: ModelFlops | None, peak_flops: float | None) -> None:
        self.device = device
        self.flops = flops
        self.peak_flops = peak_flops
        self.start_window()

    def add_step(self, micro_batches: Sequence[Mapping[str, torch.Tensor]], data_wait_seconds: float) -> None:
        """Count an optimizer step: this process's micro-batches, on the CPU, and how long the loop waited for them."""
        self._num_steps += 1
        self._data_wait_seconds += data_wait_seconds
        for batch in micro_batches:
            self._num_tokens += int(sequence_lengths(batch).sum() + target_lengths(batch).sum())
            if self.flops is not None:
                self._num_flops += self.flops.of_batch(batch)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out time and memory of what is not training: evaluation, saving."""
        self._stop_clock()
        try:
            yield
        finally:
            self._start_clock()

    def report(self) -> dict[str, float]:
        """Metrics of the steps since the last report, equal on all processes; collective, and starts the next window.

        step_seconds and data_wait_seconds are means per step of the slowest process; tokens_per_second_per_device
        (encoder and decoder tokens without padding) is the mean of the processes; peak_memory_gib and
        peak_reserved_gib are those of the fullest device, absent on a CPU; mfu is a fraction of 1, absent where the
        device's peak or the model's FLOPs are unknown.
        """
        assert self._num_steps > 0
        self._stop_clock()
        own = torch.tensor(
            [self._num_tokens, self._num_flops, self._seconds, self._data_wait_seconds, *self._peak_bytes],
            dtype=torch.float64,
        )
        parts = [own]
        if dist.is_initialized():
            own = own.to(self.device)
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, own)
        everyone = torch.stack(parts)
        tokens, flops = everyone.mean(0).tolist()[:2]
        seconds, data_wait, *peak_bytes = everyone.max(0).values.tolist()[2:]
        metrics = {
            "tokens_per_second_per_device": tokens / seconds,
            "step_seconds": seconds / self._num_steps,
            "data_wait_seconds": data_wait / self._num_steps,
        }
        if self.flops is not None and self.peak_flops is not None:
            metrics["mfu"] = flops / seconds / self.peak_flops
        if self.device.type == "cuda":
            metrics["peak_memory_gib"], metrics["peak_reserved_gib"] = (n / 2**30 for n in peak_bytes)
        self.start_window()
        return metrics

    def start_window(self) -> None:
        """Forget what was counted since the last report, and begin now."""
        self._num_steps = self._num_tokens = self._num_flops = 0
        self._seconds = self._data_wait_seconds = 0.0
        self._peak_bytes = [0, 0]
        self._start_clock()

    def _start_clock(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._started = time.perf_counter()

    def _stop_clock(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            shared = SharedBuffers.num_bytes  # kept through all steps, outside torch's allocator
            allocated, reserved = (
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.max_memory_reserved(self.device),
            )
            peaks = allocated + shared, reserved + shared
            self._peak_bytes = [max(pair) for pair in zip(self._peak_bytes, peaks, strict=True)]
        self._seconds += time.perf_counter() - self._started
