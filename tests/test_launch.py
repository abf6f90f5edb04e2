"""The entry of a run: exit codes, one error on one process, and asked-for == got before anything is touched."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.utils.data import DataLoader, Dataset

from common import arguments, launch
from common.arguments import TrainArguments, UserError
from common.launch import (
    EXIT_ERROR,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    RunFailed,
    Stopped,
    Strategy,
    banner,
    build_accelerator,
    compute_dtype,
    param_dtype,
    reduce_dtype,
    run,
)
from tests.forked import ForkedParent, Result

NO = ("--mixed_precision", "no")


def start(forked: ForkedParent, what: str, out: Path, *flags: str, **options: Any) -> Result:
    defaults: dict[str, Any] = {"config": "ddp", "num_processes": 2, "launcher_flags": NO, "timeout": 60}
    return forked.run(__file__, what, str(out), *flags, **(defaults | options))


@pytest.mark.parametrize(
    ("name", "said"), [("file/run", "is a file"), ("link", "does not exist"), ("n" * 300, "File name too long")]
)
def test_folders_that_cannot_be(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(UserError, match=f"^--output_dir .*{said}"):
        launch._check_output_dir(TrainArguments(output_dir=str(tmp_path / name)))


def test_what_is_overwritten_is_not_needed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    args = TrainArguments(output_dir=str(run), overwrite_output_dir=True, model_name_or_path=str(run / "model"))
    with pytest.raises(UserError, match="would remove .*run/model, which --model_name_or_path"):
        launch._check_output_dir(args)
    launch._check_output_dir(TrainArguments(output_dir=str(run), overwrite_output_dir=True))


def test_a_finished_run_without_checkpoints_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    args = TrainArguments(output_dir=str(tmp_path), resume_from_checkpoint="latest")
    launch._check_output_dir(args)  # killed before its first checkpoint: from the start
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="a finished run without checkpoints"):
        launch._check_output_dir(args)


def test_a_run_that_has_ended_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    args = TrainArguments(output_dir=str(tmp_path / "run"))
    launch._check_output_dir(args)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    accelerator: Any = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
    with pytest.raises(UserError, match=r"holds another run \(metrics.jsonl\)"):
        launch.claim_output_dir(args, accelerator)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}"


def test_all_of_an_earlier_run_is_overwritten(tmp_path: Path) -> None:
    for name in ("checkpoints", "model", "best", "best.superseded", "tensorboard", "wandb"):
        (tmp_path / name / "inside").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "report.html", "notes.txt"):
        (tmp_path / name).touch()
    args = TrainArguments(output_dir=str(tmp_path), overwrite_output_dir=True)
    accelerator: Any = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
    launch.claim_output_dir(args, accelerator)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "notes.txt"]
    assert (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_half_an_environment(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match=f"the environment has {name} but not all"):
        build_accelerator(TrainArguments(output_dir=str(tmp_path / "run")))


# `run`.


class DeadlyDataset(Dataset[int]):
    """As the kernel ends a worker that takes too much memory."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def main() -> None:
    what, out, *flags = sys.argv[1:]
    arguments.show_tracebacks = "--debug" in flags  # which parse_args does in a recipe
    rank = int(os.environ.get("RANK", "0"))
    if what == "early":  # before the process group exists: every process has the same mistake
        raise UserError("--flag is wrong")
    settings: dict[str, Any] = dict(flag[2:].split("=") for flag in flags if "=" in flag)
    args = TrainArguments(output_dir=out, **settings)
    accelerator, strategy = build_accelerator(args)
    match what:
        case "accelerator":
            backend = dist.get_backend() if dist.is_initialized() else None
            print(f"rank {rank}: {strategy.kind} {strategy.mixed_precision} {accelerator.num_processes} {backend}")
        case "banner":
            banner(args, accelerator, strategy, model="a model", empty="")
        case "user error":
            raise UserError("articles.csv has no rows")
        case "failed":
            raise RunFailed("step 7: the gradient norm is nan")
        case "stopped":
            raise Stopped("saved at step 7")
        case "interrupted":
            raise KeyboardInterrupt
        case "bug":
            raise ValueError("a library's error")
        case "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but")
        case "other out of memory":
            if rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        case "crash":
            if rank == 1:
                ctypes.string_at(0)
        case "data worker":
            if rank == 1:
                next(iter(DataLoader(DeadlyDataset(), num_workers=1)))
        case "other process":
            if rank == 1:
                raise UserError("row 3 of this process's file")
        case "main process":
            if rank == 0:
                raise RuntimeError("a library's error")
    accelerator.wait_for_everyone()  # where a process that had no error would wait for ever


OUT_OF_MEMORY = "error: out of device memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


@pytest.mark.parametrize(
    ("what", "exit_code", "text", "has_traceback"),
    [
        ("done", 0, "", False),
        ("early", EXIT_USER_ERROR, "error: --flag is wrong\n", False),
        ("user error", EXIT_USER_ERROR, "error: articles.csv has no rows\n", False),
        ("failed", EXIT_ERROR, "error: step 7: the gradient norm is nan\n", False),
        ("stopped", EXIT_STOPPED, "saved at step 7\n", False),
        ("interrupted", EXIT_ERROR, "interrupted\n", False),
        (
            "out of memory",
            EXIT_ERROR,
            OUT_OF_MEMORY,
            False,
        ),
        (
            "other out of memory",
            EXIT_ERROR,
            OUT_OF_MEMORY,
            False,
        ),
        ("bug", EXIT_ERROR, "ValueError: a library's error\n", True),
        ("other process", EXIT_USER_ERROR, "error: row 3 of this process's file\n", False),
        ("main process", EXIT_ERROR, "RuntimeError: a library's error\n", True),
    ],
)
def test_exit_codes_and_messages(
    what: str, exit_code: int, text: str, has_traceback: bool, forked: ForkedParent, tmp_path: Path
) -> None:
    result = start(forked, what, tmp_path / "run")
    assert not result.timed_out and result.seconds < 30
    assert result.exit_code == exit_code, result.output
    if has_traceback:
        assert result.output.endswith(text) and result.output.count("Traceback") == 1, result.output
    else:
        # Where one process fails before the other has met it, gloo says so beside the error.
        lines = [line for line in result.output.splitlines(keepends=True) if "ProcessGroupGloo.cpp" not in line]
        assert "".join(lines) == text


def test_a_data_worker_that_is_killed_is_one_line(forked: ForkedParent, tmp_path: Path) -> None:
    result = start(forked, "data worker", tmp_path / "run")
    assert result.exit_code == EXIT_ERROR
    (line,) = result.output.splitlines()
    assert line.startswith("error: DataLoader worker (pid") and "Fewer --dataloader_num_workers" in line


def test_a_crash_in_a_library_shows_where_it_was(forked: ForkedParent, tmp_path: Path) -> None:
    result = start(forked, "crash", tmp_path / "run")
    assert result.exit_codes == [-signal.SIGTERM, -signal.SIGSEGV] and result.exit_code == 128 + signal.SIGSEGV
    assert result.output.startswith("Fatal Python error: Segmentation fault\n"), result.output
    assert 'test_launch.py", line' in result.output and " in main\n" in result.output


def test_exit_codes_are_the_documented_ones() -> None:
    assert (EXIT_ERROR, EXIT_USER_ERROR, EXIT_STOPPED) == (1, 2, 75)


@pytest.mark.parametrize("what", ["early", "failed"])
def test_debug_shows_tracebacks(what: str, forked: ForkedParent, tmp_path: Path) -> None:
    result = start(forked, what, tmp_path / "run", "--debug")
    assert result.output.count("Traceback") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has gone")
def test_a_run_whose_launcher_has_gone_does_not_begin(forked: ForkedParent, tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for launcher, codes in ((gone.pid, [-signal.SIGTERM] * 2), (os.getpid(), [0, 0])):
        assert start(forked, "done", tmp_path / "run", env={"LAUNCHER_PID": str(launcher)}).exit_codes == codes


# `build_accelerator`.


@pytest.mark.parametrize(
    ("config", "num_processes", "expected"),
    [
        ("single_device", 1, "single no 1 None"),
        ("ddp", 2, "ddp no 2 gloo"),
        ("fsdp_full_shard", 1, "fsdp2 no 1 gloo"),
        ("fsdp_full_shard", 2, "fsdp2 no 2 gloo"),
        ("fsdp1_full_shard", 2, "fsdp1 no 2 gloo"),
    ],
)
def test_what_is_asked_for_runs(
    config: str, num_processes: int, expected: str, forked: ForkedParent, tmp_path: Path
) -> None:
    result = start(forked, "accelerator", tmp_path / "run", config=config, num_processes=num_processes)
    assert result.exit_code == 0, result.output
    assert sorted(result.output.splitlines()) == [f"rank {rank}: {expected}" for rank in range(num_processes)]


@pytest.mark.parametrize(
    ("env", "config"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "single_device"),  # no RANK, no WORLD_SIZE
        ({"ACCELERATE_USE_FSDP": "True"}, "single_device"),
        ({"WORLD_SIZE": "2"}, "single_device"),
    ],
    ids=["FSDP2 without processes", "FSDP1 without processes", "processes without a group"],
)
def test_asked_for_is_not_got(env: dict[str, str], config: str, forked: ForkedParent, tmp_path: Path) -> None:
    result = start(forked, "accelerator", tmp_path / "run", config=config, num_processes=1, env=env)
    assert result.exit_code == EXIT_USER_ERROR, result.output
    assert result.output.startswith("error: ") and len(result.output.strip().splitlines()) <= 2, result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("launched", "seen"), [(2, 1), (1, 2)])
def test_accelerate_sees_other_processes(launched: int, seen: int) -> None:
    accelerator: Any = SimpleNamespace(num_processes=seen)
    with pytest.raises(UserError, match=f"there are {launched} processes, .* accelerate {seen}; launch with"):
        launch._check_effective(accelerator, launched)


def test_fsdp1_offload_must_not_accumulate() -> None:
    args = TrainArguments(total_batch_size=16, per_device_train_batch_size=2)
    with pytest.raises(UserError, match=r"last micro-batch only, .* has 4; .*--per_device_train_batch_size 8\."):
        launch._check_fsdp1_offload("fsdp_offload_params", args, num_processes=2, on_cpu=False)
    with pytest.raises(UserError, match=r"last micro-batch only, .* has 2; .*--per_device_train_batch_size 4\."):
        launch._check_fsdp1_offload("fsdp_offload_params", args, num_processes=4, on_cpu=False)
    launch._check_fsdp1_offload("fsdp_offload_params", args, num_processes=8, on_cpu=False)
    with pytest.raises(UserError, match="cannot be rehearsed on the CPU"):
        launch._check_fsdp1_offload("fsdp_offload_params", args, num_processes=8, on_cpu=True)


def test_float64_with_mixed_precision(forked: ForkedParent, tmp_path: Path) -> None:
    flags = ("--mixed_precision", "bf16")
    result = start(forked, "accelerator", tmp_path / "run", "--param_dtype=float64", launcher_flags=flags)
    assert result.exit_code == EXIT_USER_ERROR
    assert "ddp.yaml:8: mixed_precision: bf16 contradicts --param_dtype float64" in result.output
    assert "--mixed_precision no" in result.output and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("num_gpus", "num_processes"), [(1, 2), (4, 8)])
def test_fewer_gpus_than_processes(num_gpus: int, num_processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
    with pytest.raises(UserError, match=f"{num_processes} processes .*{num_gpus} GPUs; .*--num_processes {num_gpus}"):
        launch._check_devices(on_cpu=False)
    launch._check_devices(on_cpu=True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_gpus))
    launch._check_devices(on_cpu=False)


def test_bf16_must_be_native(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainArguments()

    def device(has_bf16: bool, nccl: tuple[int, int, int]) -> None:
        def is_bf16_supported(including_emulation: bool = True) -> bool:
            return has_bf16 or including_emulation

        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)

    device(has_bf16=False, nccl=(2, 27, 3))
    for asked, precision in ((args, "bf16"), (TrainArguments(param_dtype="bf16"), "no")):
        with pytest.raises(UserError, match=r"Tesla T4 \(compute capability 7\.5\) has no native bf16; .*precision no"):
            launch._check_precision(asked, "mixed_precision", precision, on_cpu=False)
    launch._check_precision(args, "mixed_precision", "no", on_cpu=False)
    launch._check_precision(args, "mixed_precision", "bf16", on_cpu=True)
    device(has_bf16=True, nccl=(2, 9, 8))
    with pytest.raises(UserError, match="NCCL"):
        launch._check_precision(args, "mixed_precision", "bf16", on_cpu=False)
    device(has_bf16=True, nccl=(2, 10, 3))
    launch._check_precision(args, "mixed_precision", "bf16", on_cpu=False)


@pytest.mark.parametrize(
    ("is_offloaded", "device", "threads"), [(True, "cuda", 3), (True, "cpu", 1), (False, "cuda", 1)]
)
def test_the_update_in_host_memory_uses_all_cores(
    is_offloaded: bool, device: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plugin: Any = SimpleNamespace(cpu_offload=CPUOffloadPolicy() if is_offloaded else OffloadPolicy())
    accelerator: Any = SimpleNamespace(is_local_main_process=True, device=torch.device(device))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        launch._set_up_process(TrainArguments(), accelerator, Strategy("fsdp2", "bf16", plugin=plugin))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_deterministic_runs_do_not_fill_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    accelerator: Any = SimpleNamespace(is_local_main_process=True, device=torch.device("cpu"))
    try:
        launch._set_up_process(TrainArguments(deterministic=True), accelerator, Strategy("fsdp2", "bf16"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.empty(1000).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("config", "after_forward"),
    [("fsdp_full_shard", "resharded after forward"), ("fsdp_shard_grad_op", "kept after forward")],
)
def test_the_banner_is_shown_once_and_names_what_is_in_effect(
    config: str, after_forward: str, forked: ForkedParent, tmp_path: Path
) -> None:
    result = start(forked, "banner", tmp_path / "run", config=config, launcher_flags=())
    assert result.exit_code == 0, result.output
    assert result.output.count("== test_launch ") == 1
    rows = dict(line.split(maxsplit=1) for line in result.output.splitlines()[1:])
    assert rows["strategy"] == f"FSDP2, parameters, gradients and optimizer sharded, {after_forward}"
    assert rows["processes"] == "2 on cpu" and rows["accelerate"].endswith(f"accelerate_configs/{config}.yaml")
    assert "over gloo" in rows["substituted"] and rows["model"] == "a model" and "empty" not in rows
    assert f"torch {torch.__version__}" in rows["libraries"]
    if launch._cpu_computes("bf16"):
        assert "compute bfloat16" in rows["precision"]
    else:
        assert "compute float32" in rows["precision"] and "bf16 computed in float32" in rows["substituted"]


def test_arguments_in_effect_are_written(forked: ForkedParent, tmp_path: Path) -> None:
    """By whichever step claims the folder; a run that got as far as its first metrics has it."""
    result = start(forked, "done", tmp_path / "run", "--param_dtype=bf16")
    assert result.exit_code == 0, result.output
    if (tmp_path / "run").exists():
        written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert written == TrainArguments(output_dir=str(tmp_path / "run"), param_dtype="bfloat16").to_dict()


@pytest.mark.parametrize(
    ("precision", "settings", "compute", "reduce"),
    [
        ("no", {}, torch.float32, torch.float32),
        ("bf16", {}, torch.bfloat16, torch.float32),
        ("fp16", {}, torch.float16, torch.float32),
        ("fp8", {}, torch.bfloat16, torch.float32),
        ("no", {"param_dtype": "float64"}, torch.float64, torch.float64),
        ("no", {"param_dtype": "bf16"}, torch.bfloat16, torch.float32),
        ("bf16", {"reduce_dtype": "bf16"}, torch.bfloat16, torch.bfloat16),
    ],
)
def test_types(precision: str, settings: dict[str, Any], compute: torch.dtype, reduce: torch.dtype) -> None:
    args, strategy = TrainArguments(**settings), Strategy("fsdp2", precision)
    assert compute_dtype(args, strategy) == compute
    assert reduce_dtype(args, strategy) == reduce
    assert param_dtype(args) == getattr(torch, args.param_dtype)


if __name__ == "__main__":
    run(main)
