import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from common.metrics import ModelFlops, Throughput, peak_flops_per_second, sequence_lengths, target_lengths
from common.peer_copies import SharedBuffers
from tests.forked import ForkedParent, patched
from tests.tiny import LAUNCHER_FLAGS, RECIPE, flags, lines, saving

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}


def forward_flops(model: PreTrainedModel, **inputs: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs, use_cache=False)
    # The angles of rotary embeddings are an outer product that the formula leaves out.
    counts = counter.get_flop_counts()
    return counter.get_total_flops() - sum(sum(v.values()) for k, v in counts.items() if k.endswith("rotary_emb"))


def vector_parameters(model: PreTrainedModel) -> int:
    """Norms: they are in N, as torchtitan has it, but in no matrix product."""
    return sum(p.numel() for p in model.parameters() if p.dim() == 1)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_llama(tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=tied))
    rows, length = 2, 24
    batch = {"input_ids": torch.ones(rows, length, dtype=torch.long)}
    counted = ModelFlops.of_model(model)
    assert counted is not None
    measured = 3 * forward_flops(model, **batch)
    assert counted.of_batch(batch) == measured + 6 * vector_parameters(model) * rows * length
    # The formula, with the head's 64 x 32 weights in N and the embedding's not.
    n = sum(p.numel() for p in model.parameters()) - (0 if tied else 64 * 32)
    assert counted.of_batch(batch) == rows * length * (6 * n + 12 * 3 * 4 * 8 * length)


def test_flops_of_gpt2_leave_out_the_position_table() -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, attn_implementation="eager")
    model = GPT2LMHeadModel(config).eval()
    batch = {"input_ids": torch.ones(1, 16, dtype=torch.long)}
    counted = ModelFlops.of_model(model)
    assert counted is not None
    measured = 3 * forward_flops(model, **batch)
    assert counted.of_batch(batch) == measured + 6 * vector_parameters(model) * 16


def test_no_flops_where_the_formula_does_not_hold() -> None:
    """Mixtures of experts, whose tokens pass a part of the parameters, and models without attention."""
    with torch.device("meta"):
        models = [
            AutoModelForCausalLM.from_config(config(num_hidden_layers=1, hidden_size=32, intermediate_size=32))
            for config in (MixtralConfig, MambaConfig)
        ]
    assert [ModelFlops.of_model(model) for model in models] == [None, None]


@pytest.mark.parametrize(("tied", "activation"), [(True, "relu"), (False, "gated-gelu")])
def test_flops_of_t5(tied: bool, activation: str) -> None:
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=96, num_layers=3, num_decoder_layers=2, num_heads=4,
        feed_forward_proj=activation, tie_word_embeddings=tied, decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    rows, s, t = 2, 20, 7
    source, target = torch.ones(rows, s, dtype=torch.long), torch.ones(rows, t, dtype=torch.long)
    counted = ModelFlops.of_model(model)
    assert counted is not None
    total = counted.of_batch({"input_ids": source, "decoder_input_ids": target, "labels": target})
    measured = 3 * forward_flops(model, input_ids=source, decoder_input_ids=target)
    norms = 6 * rows * (s * vector_parameters(model.encoder) + t * vector_parameters(model.decoder))
    assert total == measured + norms
    assert norms < 0.02 * total


def test_flops_do_not_count_padding() -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    counted = ModelFlops.of_model(model)
    assert counted is not None
    rows = [torch.ones(1, length, dtype=torch.long) for length in (5, 9)]
    padded = {"input_ids": torch.ones(2, 9, dtype=torch.long), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    padded["attention_mask"][0, 5:] = 0
    assert counted.of_batch(padded) == sum(counted.of_batch({"input_ids": row}) for row in rows)


def test_flops_are_the_same_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    assert ModelFlops.of_model(model) == ModelFlops.of_model(LlamaForCausalLM(LlamaConfig(**LLAMA)))


def test_flops_of_llama_3_8b() -> None:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        counted = ModelFlops.of_model(LlamaForCausalLM(config))
    assert counted is not None
    per_token = counted.of_batch({"input_ids": torch.ones(1, 8192, dtype=torch.long)}) / 8192
    # From the published number of parameters; 9,594 tokens/s on an H100 are 56.2 % of its 989 TFLOP/s.
    assert per_token == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 32 * 128 * 8192
    assert round(9594 * per_token / 989e12, 3) == 0.562


def test_unknown_encoder_decoder_has_no_flops() -> None:
    config = BartConfig(vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8,
                        decoder_ffn_dim=8, encoder_attention_heads=1, decoder_attention_heads=1)  # fmt: skip
    assert ModelFlops.of_model(BartForConditionalGeneration(config)) is None


def test_peak_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA L40S": 362e12, "NVIDIA L40": 181e12,
             "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None}  # fmt: skip
    for name, expected in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops_per_second(cuda, torch.bfloat16) == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert peak_flops_per_second(cuda, torch.float32) is None  # TF32 or not decides
    assert peak_flops_per_second(torch.device("cpu"), torch.bfloat16) is None


def test_lengths() -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    batch = {
        "input_ids": torch.zeros(2, 4, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "labels": labels,
    }
    assert sequence_lengths(batch).tolist() == [4, 2]
    assert target_lengths(batch).tolist() == [0, 0]
    assert target_lengths({**batch, "decoder_input_ids": labels}).tolist() == [2, 1]
    assert sequence_lengths({"input_ids": batch["input_ids"]}).tolist() == [4, 4]
    labels = torch.tensor([[-100, 5, 6, 7], [5, 6, -100, -100]])  # the first begins with context
    assert sequence_lengths({"input_ids": batch["input_ids"], "labels": labels}).tolist() == [4, 2]


def test_throughput_averages_over_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    flops = ModelFlops(source_parameters=10, source_attention=0)
    throughput = Throughput(torch.device("cpu"), flops, peak_flops=960.0)
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long)}
    throughput.add_step([batch], data_wait_seconds=9.0)
    now += 58.0  # loading
    throughput.start_window()
    throughput.add_step([batch, batch], data_wait_seconds=0.5)
    now += 1.0
    with throughput.paused():
        now += 50.0
    throughput.add_step([batch, batch], data_wait_seconds=0.1)
    now += 3.0
    # 32 tokens in 4 s; each costs 60 operations.
    assert throughput.report() == pytest.approx(
        {"tokens_per_second_per_device": 8.0, "step_seconds": 2.0, "data_wait_seconds": 0.3, "mfu": 0.5}
    )
    throughput.add_step([batch], data_wait_seconds=0.0)
    now += 2.0
    assert throughput.report()["tokens_per_second_per_device"] == pytest.approx(4.0)


# Loading, an evaluation and saving take a thousand seconds each by the clock of the throughput.
CLOCK = """
import time
from types import SimpleNamespace
from common import evaluation, metrics
from common.checkpoint import Checkpoints

def slow(function):
    def call(*args, **kwargs):
        global seconds
        seconds += 1000
        return function(*args, **kwargs)
    return call

seconds = 0
metrics.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + seconds)
evaluation.sum_over_dataset = slow(evaluation.sum_over_dataset)
Checkpoints.start, Checkpoints.save = slow(Checkpoints.start), slow(Checkpoints.save)
"""


def test_the_time_of_a_step_is_that_of_training_alone(forked: ForkedParent, tmp_path: Path) -> None:
    script = patched(RECIPE, tmp_path, CLOCK)
    options = flags(tmp_path / "run", *saving(1), "--eval_strategy=steps", "--eval_steps=1", "--max_steps=3")
    result = forked.run(script, *options, config="single_device", launcher_flags=LAUNCHER_FLAGS)
    assert result.exit_code == 0, result.output
    logged = [line["step_seconds"] for line in lines(tmp_path / "run") if "step_seconds" in line]
    assert len(logged) == 3 and max(logged) < 500


def test_throughput_without_a_known_peak_has_no_mfu() -> None:
    throughput = Throughput(torch.device("cpu"), None, peak_flops=None)
    throughput.add_step([{"input_ids": torch.zeros(1, 1, dtype=torch.long)}], data_wait_seconds=0.0)
    assert set(throughput.report()) == {"tokens_per_second_per_device", "step_seconds", "data_wait_seconds"}


def test_peaks_have_the_buffers_that_processes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(SharedBuffers, "num_bytes", 2**29)
    throughput = Throughput(torch.device("cuda"), None, None)
    throughput.add_step([{"input_ids": torch.zeros(1, 2, dtype=torch.long)}], data_wait_seconds=0.0)
    report = throughput.report()
    assert (report["peak_memory_gib"], report["peak_reserved_gib"]) == (2.5, 3.5)
