"""common/memory.py: the estimate against the bytes that real runs hold, published sizes, and what fits where."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from common import memory
from common.accelerate_config import read_config
from common.arguments import ModelArguments, TrainArguments
from common.launch import build_accelerator
from common.memory import GIB, Activations, Layout, ModelSize, Types, estimate
from common.models import load_config, load_model
from common.optim import build_optimizer
from common.sharding import prepare_model
from tests.forked import REPOSITORY, ForkedParent

MODELS = REPOSITORY / "recipes" / "configs" / "models"
SIZE = "hidden_size=48,intermediate_size=112,num_hidden_layers=3,vocab_size=131,num_attention_heads=4"


def main() -> None:
    """Take a step and write the bytes of this process's parameters, gradients and optimizer state."""
    folder, optim = sys.argv[1:]
    args = TrainArguments(output_dir=folder, optim=optim)  # type: ignore[arg-type]
    args.model_config_path, args.config_overrides = str(MODELS / "chess_demo"), SIZE
    accelerator, strategy = build_accelerator(args)
    model, weights = load_model(args, load_config(args), AutoModelForCausalLM, accelerator)
    model = prepare_model(model, weights, args, accelerator, strategy)
    optimizer = build_optimizer(model, args)
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    gradients = sum(local_bytes(p.grad) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if value.dim() > 0]
    held = [sum(map(local_bytes, model.parameters())), gradients, sum(map(local_bytes, state))]
    assert memory.current_run is not None
    run = memory.current_run
    expected = estimate(run.size, run.layout, run.types)
    estimated = [expected.parameters, expected.gradients, expected.optimizer]
    Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps([held, estimated, expected.host]))


def local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    return local.numel() * local.element_size()


@pytest.mark.parametrize(
    ("config", "num_processes", "optim", "tolerance"),
    [
        ("ddp", 2, "adamw", 0),
        ("fsdp_full_shard", 3, "adamw", 0),
        ("fsdp_hybrid_shard", 4, "adadelta", 0),
        ("fsdp1_full_shard", 2, "adamw", 0.01),  # a unit is one flat parameter, split in equal parts
    ],
)
def test_the_estimate_is_what_a_run_holds(
    forked: ForkedParent, tmp_path: Path, config: str, num_processes: int, optim: str, tolerance: float
) -> None:
    flags = ["--mixed_precision", "no"]
    result = forked.run(
        __file__, str(tmp_path), optim, config=config, num_processes=num_processes, launcher_flags=flags
    )
    assert result.exit_code == 0, result.output
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_processes)]
    most = [max(held[part] for held, _, _ in ranks) for part in range(3)]
    assert most == pytest.approx(ranks[0][1], rel=tolerance, abs=0)
    assert all(estimated == ranks[0][1] and host == 0 for _, estimated, host in ranks)
    # The YAML alone, which a plan reads before there is a run, gives the same.
    layout = shipped(config, num_processes)
    config_object = load_config(ModelArguments(model_config_path=str(MODELS / "chess_demo"), config_overrides=SIZE))
    planned = estimate(size_of(config_object), layout, Types(compute=4, optim=optim))
    assert [planned.parameters, planned.gradients, planned.optimizer] == ranks[0][1]


def size_of(config: object) -> ModelSize:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return ModelSize.of(model, model.model.layers)


@pytest.fixture(scope="module")
def codellama() -> ModelSize:
    """6,738,546,688 parameters; a block has 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096 = 202,383,360."""
    size = size_of(AutoConfig.from_pretrained(MODELS / "chess_7b"))
    assert (size.num_parameters, size.largest_unit) == (6_738_546_688, 202_383_360)
    assert size.rest == 2 * 32016 * 4096 + 4096
    return size


def shipped(name: str, num_processes: int, num_per_machine: int | None = None) -> Layout:
    return Layout.of_yaml(
        read_config(REPOSITORY / "accelerate_configs" / f"{name}.yaml"), num_processes, num_per_machine
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("single_device", Layout(1, "none")), ("ddp", Layout(1, "none")), ("fsdp_full_shard", Layout(8, "units")),
        ("fsdp_context_parallel", Layout(8, "units")),
        ("fsdp_full_shard_compile", Layout(8, "units")), ("fsdp_shard_grad_op", Layout(8, "all")),
        ("fsdp_hybrid_shard", Layout(4, "units", False, 2.0)), ("fsdp_full_shard_offload", Layout(8, "units", True)),
        ("fsdp1_full_shard", Layout(8, "units")), ("fsdp1_shard_grad_op", Layout(8, "all")),
        ("fsdp1_no_shard", Layout(1, "units")), ("fsdp1_hybrid_shard", Layout(4, "units")),
        ("fsdp1_hybrid_shard_zero2", Layout(4, "all")), ("fsdp_fp8", Layout(8, "units")),
    ],
)  # fmt: skip
def test_layouts_of_the_shipped_files(name: str, layout: Layout) -> None:
    """8 processes on two machines."""
    assert shipped(name, 8, 4) == layout


@pytest.mark.parametrize(
    ("name", "num_processes", "num_per_machine", "copies"),
    [
        ("fsdp_full_shard", 4, 4, True), ("fsdp_shard_grad_op", 2, None, True), ("fsdp_full_shard", 1, 1, False),
        ("fsdp_full_shard", 4, 2, False), ("fsdp_full_shard_offload", 4, 4, False), ("fsdp_fp8", 4, 4, True),
        ("fsdp1_full_shard", 4, 4, False), ("fsdp_hybrid_shard", 4, 4, True), ("fsdp_hybrid_shard", 2, 2, False),
    ],
)  # fmt: skip
def test_what_communicates_by_copies(name: str, num_processes: int, num_per_machine: int | None, copies: bool) -> None:
    assert shipped(name, num_processes, num_per_machine).num_shared == (2.0 if copies else 0.0)


def test_sixteen_bytes_a_parameter(codellama: ModelSize) -> None:
    n, block, rest = codellama.num_parameters, codellama.largest_unit, codellama.rest
    alone = estimate(codellama, shipped("single_device", 1), Types())
    assert alone.total == 18 * n and (alone.parameters, alone.gradients, alone.optimizer) == (4 * n, 4 * n, 8 * n)
    sharded = estimate(codellama, shipped("fsdp_full_shard", 4), Types())
    units = 2 * (rest + 2 * block) + 6 * block
    assert sharded.total == 4 * n + units + 2 * 2 * block  # a block is larger than a table
    kept = estimate(codellama, shipped("fsdp_shard_grad_op", 4), Types())
    assert kept.total == 4 * n + 2 * n + 6 * block + 2 * 2 * block
    host = estimate(codellama, shipped("fsdp_full_shard_offload", 4), Types())
    assert host.total == host.gathered == units and host.host == 4 * n
    assert estimate(codellama, shipped("ddp", 4), Types(optim="adafactor")).optimizer == 0
    assert estimate(codellama, shipped("ddp", 4), Types(parameter=2)).total == 8 * n  # pure bf16


def run_of(size: ModelSize, name: str, num_processes: int, batch_size: int = 8) -> memory.Run:
    return memory.Run(size, shipped(name, num_processes), Types(), name, num_processes, batch_size, False)


@pytest.mark.parametrize(
    ("name", "num_processes", "device_gib", "expected"),
    [
        # 16 + 2 bytes for each of 6.74e9 parameters are 113 GiB; four devices hold 6.28 GiB of each of the 4 parts.
        ("ddp", 4, 80, "takes 113.0 GiB of the device's 80.0 GiB (ddp): parameters 25.1 GiB, gradients 25.1 GiB, adamw "
         "50.2 GiB, gathered 12.6 GiB; activations come on top. With 4 devices these fit: --config_file of "
         "fsdp_shard_grad_op (39.5 GiB), fsdp_full_shard (28.2 GiB), fsdp_full_shard_offload (2.4 GiB)."),
        ("single_device", 1, 40, "With 1 device these fit: --config_file of fsdp_full_shard_offload (2.4 GiB)."),
        ("fsdp_full_shard", 4, 80, "That fits, activations do not: lower --per_device_train_batch_size (the total "
         "batch stays) or the sequence length, or switch on activation checkpointing"),
        ("fsdp_full_shard_offload", 4, 2, "No shipped YAML fits on such devices, however many"),
    ],
)  # fmt: skip
def test_advice(codellama: ModelSize, name: str, num_processes: int, device_gib: int, expected: str) -> None:
    advice = memory.advise(run_of(codellama, name, num_processes), device_gib * GIB)
    assert advice.startswith("The state alone of 6.74B parameters takes ") and expected in advice, advice


def test_a_size_that_needs_more_devices(codellama: ModelSize) -> None:
    """Offloaded, 2.4 GiB fit a device of 3 GiB; one of 2.9 GiB would need 0.8 x 2.9 = 2.3."""
    advice = memory.advise(run_of(codellama, "fsdp_full_shard", 2), 30 * GIB)
    assert "With 2 devices these fit: --config_file of fsdp_full_shard_offload (2.4 GiB)." in advice
    wide = ModelSize(((10**6, 1000),), 10**8, 10**8)  # 16 GB to share; 0.6 + 0.6 GB of units on each
    advice = memory.advise(run_of(wide, "fsdp_full_shard_offload", 2), int(1.4 * GIB))
    # 2 devices: offloaded it takes 1.2 GB of the 1.2 GB that are left to it. Without: 16 GB / n + 1.2 GB never fits.
    assert "That fits, activations do not" in advice
    advice = memory.advise(run_of(wide, "ddp", 4), int(1.2 * GIB))
    assert "No shipped YAML fits" in advice


if __name__ == "__main__":
    from common.launch import run

    run(main)


def test_a_batch_beside_a_loss_in_chunks() -> None:
    """Peaks as they are: the logits of two sequences at most, and what each sequence keeps."""
    asked = []

    def peak_bytes(number: int) -> int:
        asked.append(number)
        return 10 * number + 300 * min(number, 2)

    state, bytes_free = estimate(ModelSize(((1,),), 0, 0), Layout(1, "none"), Types()), 0.9
    assert state.total == 18
    for device_bytes in (100, 500, 800, 1000, 1100, 5000):
        found = memory.largest_batch(state, Activations.count(peak_bytes, 100, 200), device_bytes)
        fitting = [n for n in range(1, 1000) if peak_bytes(n) <= int(bytes_free * device_bytes) - state.total]
        assert found == max(fitting, default=0), device_bytes
    assert memory.largest_batch(state, Activations(0, 0), 100) == 72, "a device's share of next to nothing"
    asked.clear()
    assert Activations.count(peak_bytes, 100, None) == Activations(310, 310) and asked == [1]
    assert Activations(310, 10, 600, 2).divided(2) == Activations(155, 5, 300, 2)


def test_units_of_several_blocks() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(number, 1, bias=False) for number in (1, 2, 3, 4, 5))
    assert [ModelSize.of(model, model[:4], size).largest_unit for size in (1, 2, 3, 9)] == [4, 7, 6, 10]


@pytest.mark.parametrize(("name", "largest"), [("gpt_8b", 128256 * 4096), ("t5_3b", 32128 * 1024 + 2 * 1024)])
def test_the_largest_table_is_a_unit_of_its_own_or_all_outside_the_blocks(name: str, largest: int) -> None:
    config = AutoConfig.from_pretrained(MODELS / name)
    with torch.device("meta"):
        auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = auto_class.from_config(config)
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    size = ModelSize.of(model, blocks)
    assert size.largest_table == largest
    copied, through_nccl = (estimate(size, Layout(2, "units", num_shared=number), Types()) for number in (2.0, 0.0))
    assert copied.gathered - through_nccl.gathered == 2 * 2 * max(size.largest_unit, largest)
