"""Speed, memory and losses of a recipe's real loop under one or several accelerate YAMLs, in one table.

    python benchmarks/throughput.py gpt_shakespeare --configs ddp fsdp_full_shard --num_processes 4 --output FOLDER \
        -- --config=gpt_shakespeare_1b --tokenizer_name_or_path=recipes/samples/tokenizer --total_batch_size=32

What follows `--` are flags of the recipe. All runs see the same batches. A run is ended as soon as its last step is
logged: nothing is evaluated, saved or exported. Speed is the median of the second half of the steps. A YAML that does
not run has the last line of its error in the table, and FOLDER/NAME.log.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "accelerate_configs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name in recipes/")
    parser.add_argument("--configs", nargs="+", default=sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    parser.add_argument("--num_processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--share_gpu", action="store_true", help="all processes on one GPU, for losses and memory")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    args.output.mkdir(parents=True, exist_ok=True)
    print(HEADER, flush=True)
    for name in args.configs:
        path = CONFIGS / f"{name}.yaml" if (CONFIGS / f"{name}.yaml").exists() else Path(name)
        lines = run_recipe(
            args.recipe, path, args.num_processes, args.steps, args.output, flags, args.timeout, args.share_gpu
        )
        print(row(path.stem, lines), flush=True)


HEADER = (
    f"{'setup':<34} {'loss 1':>8} {'loss last':>9} {'grad 1':>7} {'tok/s/GPU':>9} {'MFU %':>6} {'s/step':>7} "
    f"{'peak GiB':>9} {'resv GiB':>9} {'wait ms':>7} {'start s':>7}"
)


def row(name: str, lines: "list[dict[str, float]] | str") -> str:
    """The table's row out of a run's lines of metrics.jsonl, or out of its error."""
    if isinstance(lines, str):
        return f"{name:<34} {lines[:200]}"
    steady = lines[len(lines) // 2 :]

    def median(key: str, default: float = float("nan")) -> float:
        return statistics.median(line.get(key, default) for line in steady)

    def peak(key: str) -> float:
        return max(line.get(key, 0.0) for line in lines)

    return (
        f"{name:<34} {lines[0]['loss']:>8.4f} {lines[-1]['loss']:>9.4f} {lines[0]['grad_norm']:>7.4f} "
        f"{median('tokens_per_second_per_device'):>9,.0f} {100 * median('mfu'):>6.1f} {median('step_seconds'):>7.3f} "
        f"{peak('peak_memory_gib'):>9.2f} {peak('peak_reserved_gib'):>9.2f} {1000 * median('data_wait_seconds'):>7.1f} "
        f"{lines[0]['seconds_to_first_line']:>7.1f}"
    )


def run_recipe(
    recipe: str,
    config: Path,
    num_processes: int,
    steps: int,
    output: Path,
    flags: Sequence[str],
    timeout: float = 600.0,
    share_gpu: bool = False,
) -> "list[dict[str, float]] | str":
    """Lines of metrics.jsonl of the first `steps` steps, or the last line of the error."""
    folder = output / config.stem
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "tools/launch.py", "--config_file", str(config)]
    if yaml.safe_load(config.read_text())["distributed_type"] != "NO":
        command += ["--num_processes", str(num_processes)]
    own = {
        "output_dir": folder, "max_steps": 10**6, "logging_steps": 1, "eval_strategy": "no", "save_strategy": "no",
        "max_eval_samples": 1,
    }  # fmt: skip
    command += [f"recipes/{recipe}.py", *(f"--{name}={value}" for name, value in own.items()), *flags]
    env = {}
    if share_gpu and num_processes > 1:
        command, env = as_machines(command, num_processes), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return run_until(command, folder / "metrics.jsonl", steps, output / f"{config.stem}.log", timeout, env)


def as_machines(command: Sequence[str], num_processes: int) -> list[str]:
    """The launcher's command as one command of so many launchers, each for one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    together = f"--num_machines {num_processes} --main_process_ip 127.0.0.1 --main_process_port {port}".split()
    launchers = [
        shlex.join([*command[:2], *together, "--machine_rank", str(rank), *command[2:]]) + " &"
        for rank in range(num_processes)
    ]
    return ["bash", "-c", "\n".join([*launchers, "wait"])]


def run_until(
    command: Sequence[str], metrics: Path, steps: int, log: Path, timeout: float, env: Mapping[str, str] | None = None
) -> "list[dict[str, Any]] | str":
    """Start the command and kill it when `metrics` has the line of step `steps`: all lines, or the error's last one.

    The first line gets `seconds_to_first_line`, counted from the start of the command.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by timeout(1): not without the command
    started, first = time.perf_counter(), 0.0
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
    lines: list[dict[str, Any]] = []
    try:
        while True:
            is_over = process.poll() is not None
            text = metrics.read_text() if metrics.exists() else ""
            lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            lines = [line for line in lines if "loss" in line]
            if lines and not first:
                first = time.perf_counter() - started
            if lines and lines[-1]["step"] >= steps:
                lines[0]["seconds_to_first_line"] = first
                return lines[:steps]
            if is_over or time.perf_counter() - started > timeout:
                said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
                return f"exit {process.returncode}: {said[-1]}" if is_over else f"after {timeout:.0f} s: {said[-1]}"
            time.sleep(0.1)
    finally:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """The command and all that it started, which may be in sessions of their own; returns when they are gone."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=60)
    process.wait()


if __name__ == "__main__":
    main()
