"""Runs that communicate by copies against the same runs through NCCL or gloo; here through files in shared memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common import peer_copies
from common.peer_copies import SharedBuffers
from tests import shared_memory, tiny
from tests.conftest import REPOSITORY
from tests.forked import ForkedParent, patched

PATCH = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from common import peer_copies
from tests import shared_memory
def empty(*args, **kwargs):
    global num_buffers
    num_buffers += 1
    return original(*args, **kwargs)

num_buffers, original, shared_memory.empty = 0, shared_memory.empty, empty
peer_copies.symmetric_memory = shared_memory

def replace(*args):
    replace_nccl(*args)
    print("before training:", num_buffers, flush=True)

replace_nccl, peer_copies.PeerCopies.replace_nccl = peer_copies.PeerCopies.replace_nccl, replace
import atexit
atexit.register(lambda: print("in the end:", num_buffers, flush=True))
peer_copies.are_reachable = lambda group, device: group.size() > 1
"""
EVALUATED = [
    "--eval_strategy=steps", "--eval_steps=2", "--rouge_samples=3", "--max_eval_samples=5", "--num_train_epochs=1",
    "--total_batch_size=12", "--max_train_samples=60", "--eval_on_start=true",
]  # fmt: skip


def train(
    forked: ForkedParent, output: Path, config: str, num_processes: int, *, copies: bool, flags: list[str]
) -> str:
    output.mkdir()
    recipe = patched(tiny.RECIPE, output, PATCH) if copies else tiny.RECIPE
    result = forked.run(
        recipe,
        *tiny.flags(output / "run", *EVALUATED, *flags, dropout=False),
        config=config,
        num_processes=num_processes,
        launcher_flags=("--mixed_precision", "bf16"),
    )
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("config", "num_processes", "flags"),
    [
        ("fsdp_full_shard", 2, ["--per_device_train_batch_size=3"]),  # two micro-batches a step
        ("fsdp_shard_grad_op", 2, ["--per_device_train_batch_size=6"]),
        ("fsdp_full_shard", 3, ["--per_device_train_batch_size=4", "--blocks_per_unit=2"]),
        ("fsdp_hybrid_shard", 4, ["--per_device_train_batch_size=3"]),
        ("fsdp_full_shard", 2, ["--per_device_train_batch_size=6", "--param_dtype=bfloat16"]),
    ],
    ids=["full_shard", "shard_grad_op", "three", "hybrid", "bf16_parameters"],
)
def test_losses_norms_and_evaluations_are_those_of_fsdp(
    config: str, num_processes: int, flags: list[str], forked: ForkedParent, tmp_path: Path
) -> None:
    train(forked, tmp_path / "plain", config, num_processes, copies=False, flags=flags)
    output = train(forked, tmp_path / "copies", config, num_processes, copies=True, flags=flags)
    assert "FSDP units: " in output and ", copied between devices" in output
    # Two for shards, two for gradients: none is made anew in a training step, an evaluation or while generating.
    for words in ("before training: 4\n", "in the end: 4\n"):
        assert output.count(words) == num_processes, output
    plain, copied = (tiny.lines(tmp_path / name / "run") for name in ("plain", "copies"))
    measured = ("loss", "grad_norm", "eval_loss", "eval_rougeL")
    assert len(plain) == len(copied) and {key for line in plain for key in line} >= set(measured)
    # The sum of two numbers has one order; of more, a ring has another one at each of its members.
    tolerance = 0.0 if num_processes // (2 if config == "fsdp_hybrid_shard" else 1) == 2 else 1e-3
    for expected, line in zip(plain, copied, strict=True):
        for key in set(measured) & set(expected):
            assert line[key] == pytest.approx(expected[key], rel=tolerance, abs=0.0), (key, line)


def test_a_device_without_peers_is_refused_by_name(forked: ForkedParent, tmp_path: Path) -> None:
    flags = tiny.flags(tmp_path / "run", "--peer_copies=true")
    result = forked.run(tiny.RECIPE, *flags, config="fsdp_full_shard", launcher_flags=("--mixed_precision", "bf16"))
    lines = [line for line in result.output.splitlines() if line.startswith("error")]
    assert result.exit_code == 2 and len(lines) == 1 and "--peer_copies" in lines[0], result.output


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peer_copies, "symmetric_memory", shared_memory)
    monkeypatch.setattr(SharedBuffers, "num_bytes", 0)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_buffers_are_used_in_turn_and_grow(group: dist.ProcessGroup) -> None:
    buffers = SharedBuffers(group, torch.device("cpu"), 1000)
    places = []
    for size in (10, 10, 10, 10, 30, 20, 20, 25):
        (own,) = buffers.take(size)
        buffers.wait_for_peers()
        assert own.dtype == torch.uint8 and own.numel() >= size
        places.append(own.data_ptr())
        del own
    assert places[0] == places[2] != places[1] == places[3]
    assert places[4] == places[6] != places[5]
    assert SharedBuffers.num_bytes == 30 + 25


EXCHANGE = """
import torch
import torch.distributed as dist
from common import peer_copies
from tests import shared_memory

dist.init_process_group("gloo")
peer_copies.symmetric_memory = shared_memory
rank, size = dist.get_rank(), dist.get_world_size()
buffers = peer_copies.SharedBuffers(dist.group.WORLD, torch.device("cpu"), 1000)
exchange = peer_copies._ExchangeAndSum(buffers, torch.bfloat16)
for step in range(4):
    random = torch.Generator().manual_seed(step)
    # Rows for all and for some, one row; matrices are not contiguous.
    shapes = [(7, 3), (2, 5), (6,), (1, 4, 2), (3 * size, 8)][: 3 + step]
    gradients = [[torch.randn(shape, generator=random).bfloat16() for shape in shapes] for _ in range(size)]
    rows = [-(-shape[0] // size) for shape in shapes]
    numel = sum(number * torch.Size(shape[1:]).numel() for number, shape in zip(rows, shapes))
    vector, total = (
        exchange.allocate((n,), dtype=torch.float32, device=torch.device("cpu")) for n in (size * numel, numel)
    )
    assert total.shape == (numel,) and total.dtype == torch.float32
    mine = [g.t().contiguous().t() if g.dim() == 2 else g for g in gradients[rank]]
    peer_copies._reduce_scatter_copy_in(mine, vector, size)
    exchange(total, vector, dist.group.WORLD, dist.ReduceOp.AVG if step % 2 else dist.ReduceOp.SUM)
    start = 0
    for index, number in enumerate(rows):
        expected = sum(gradients[r][index].float() for r in range(size)) * (1 / size if step % 2 else 1)
        expected = expected[rank * number : (rank + 1) * number].flatten()
        assert torch.equal(total[start : start + expected.numel()], expected), (step, index)
        start += number * torch.Size(shapes[index][1:]).numel()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_sums_of_gradients_with_any_number_of_rows(num_processes: int, forked: ForkedParent, tmp_path: Path) -> None:
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    result = forked.run(script, config="fsdp_full_shard", num_processes=num_processes)
    assert result.exit_code == 0, result.output


UNITS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.flop_counter import FlopCounterMode
from common import peer_copies
from tests import shared_memory

dist.init_process_group("gloo")
torch.accelerator.current_stream = torch.cpu.current_stream  # there is no accelerator
peer_copies.symmetric_memory = shared_memory
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
model[0].requires_grad_(False)
for layer in (*model, model):
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
for index in range(1, 4):  # the last one that has a backward pass gathers one that has none
    model[index].set_modules_to_backward_prefetch([model[index - 1]])
copies = peer_copies.PeerCopies(dist.group.WORLD, torch.device("cpu"), torch.bfloat16, 60)
copies.replace_nccl([*model, model])
for _ in range(2):
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(2, 8)).sum().backward()
    assert counter.get_total_flops()
    for layer in model:
        for parameter in layer._get_fsdp_state()._fsdp_param_group.fsdp_params:
            assert all(whole.untyped_storage().size() == 0 for whole in parameter.all_gather_outputs)
assert model[1].weight.grad is not None and model[0].weight.grad is None
dist.destroy_process_group()
"""


def test_units_without_a_backward_pass_leave_nothing_behind(forked: ForkedParent, tmp_path: Path) -> None:
    script = tmp_path / "units.py"
    script.write_text(UNITS)
    result = forked.run(script, config="fsdp_full_shard", num_processes=2)
    assert result.exit_code == 0, result.output


def test_offload_has_copies_when_asked(forked: ForkedParent, tmp_path: Path) -> None:
    flags = ["--per_device_train_batch_size=6"]
    plain = train(forked, tmp_path / "plain", "fsdp_full_shard_offload", 2, copies=True, flags=flags)
    asked = [*flags, "--peer_copies=true"]
    copied = train(forked, tmp_path / "copies", "fsdp_full_shard_offload", 2, copies=True, flags=asked)
    assert ", copied between devices" in copied and ", copied between devices" not in plain
    losses = [[line.get("loss") for line in tiny.lines(tmp_path / name / "run")] for name in ("plain", "copies")]
    assert losses[0] == losses[1]


def test_sums_are_in_float32_in_the_order_of_the_ranks() -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 50).bfloat16()
    expected = (((rows[0].float() + rows[1].float()) + rows[2].float()) + rows[3].float()) * 0.25
    for rank in range(4):
        output = torch.empty(50)
        others = torch.stack([rows[other] for other in range(4) if other != rank])
        peer_copies._sum(rows[rank], others, rank, 0.25, output)
        assert torch.equal(output, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("edit", ["bf16", "fp8", "offload"])
def test_on_gpus_the_numbers_are_those_through_nccl(edit: str, tmp_path: Path) -> None:
    if edit == "fp8":
        pytest.importorskip("torchao.float8")
    config = {"bf16": "fsdp_full_shard", "fp8": "fsdp_fp8", "offload": "fsdp_full_shard_offload"}[edit]
    losses = []
    for copies in ("false", "true"):
        output = tmp_path / copies
        command = [
            sys.executable, "tools/launch.py", "--config_file", f"accelerate_configs/{config}.yaml",
            "--num_processes", "2", "recipes/gpt_shakespeare.py", "--config=gpt_shakespeare_demo", "--max_steps=6",
            "--logging_steps=1", "--total_batch_size=8", "--per_device_train_batch_size=2", "--save_strategy=no",
            f"--peer_copies={copies}", f"--output_dir={output}",
        ]  # fmt: skip
        run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
        assert (", copied between devices" in run.stdout) == (copies == "true")
        losses.append([(line.get("loss"), line.get("grad_norm")) for line in tiny.lines(output)])
    assert losses[0] == losses[1] and len(losses[0]) >= 6
