"""Time per step and memory against the per-device batch size, with and without activation checkpointing.

    python benchmarks/batch_size.py --output FOLDER [--num_processes 4] [--sizes 1 2 4 8] [--total_batch_size 64]

CodeLlama-7B's shape from random weights through the real chess recipe, packed sequences of one length, the same total
batch in every run: a size n per device means total / n / processes micro-batches a step. Runs are added to
FOLDER/runs.jsonl and those that are there are not run again, so that a table can be made in several goes. Last come
FOLDER/batch_size.md and, where matplotlib is installed (no dependency of this repository), FOLDER/batch_size.svg.
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from throughput import run_until  # type: ignore[import-not-found]

WARMUP_STEPS = 3
MAX_SECONDS = 600  # for one run, loading included


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--num_processes", type=int, default=4)
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="sequences at a time on a device"
    )
    parser.add_argument("--checkpointing", nargs="+", choices=("false", "true"), default=["false", "true"])
    parser.add_argument("--total_batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8, help=f"the first {WARMUP_STEPS} are not counted")
    parser.add_argument("--max_seq_length", type=int, default=1024)
    parser.add_argument("--model", default="recipes/configs/models/chess_7b")
    parser.add_argument("--config", default="fsdp_full_shard", help="of accelerate_configs/")
    parser.add_argument("flags", nargs="*", help="after --: further flags of the recipe")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = args.output / "runs.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for checkpointing in args.checkpointing:
        for size in args.sizes:
            done = [row for row in rows if row["checkpointing"] == checkpointing]
            if any(row["size"] == size or (row["size"] < size and "error" in row) for row in done):
                continue  # measured, or a smaller one did not fit
            row = {"checkpointing": checkpointing, "size": size} | measure(args, size, checkpointing)
            print(json.dumps(row), flush=True)
            rows.append(row)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows.sort(key=lambda row: (row["checkpointing"], row["size"]))
    table = markdown(rows)
    (args.output / "batch_size.md").write_text(table)
    print(table)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
    else:
        plot(rows, args.output / "batch_size.svg")


def measure(args: argparse.Namespace, size: int, checkpointing: str) -> dict[str, Any]:
    """Medians of one run, ended after its steps (it would export the model some day); or its last line of error."""
    output = args.output / f"run_{size}_{checkpointing}"
    flags = {
        "config": "chess_finetune_7b", "model_config_path": args.model,
        "train_file": "recipes/samples/chess_games.jsonl",
        "tokenizer_name_or_path": "recipes/samples/tokenizer", "packing": True, "max_seq_length": args.max_seq_length,
        "output_dir": output, "total_batch_size": args.total_batch_size, "per_device_train_batch_size": size,
        "max_steps": args.steps + 1000, "warmup_steps": 0, "logging_steps": 1, "eval_on_start": False,
        "eval_strategy": "no", "save_strategy": "no", "legal_move_samples": 0, "overwrite_output_dir": True,
    }  # fmt: skip
    command = [
        sys.executable, "tools/launch.py", "--config_file", f"accelerate_configs/{args.config}.yaml",
        "--num_processes", str(args.num_processes), "--fsdp_activation_checkpointing", checkpointing,
        "recipes/chess_finetune.py", *(f"--{name}={value}" for name, value in flags.items()), *args.flags,
    ]  # fmt: skip
    log = args.output / f"run_{size}_{checkpointing}.log"
    metrics = output / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    lines = run_until(command, metrics, args.steps, log, MAX_SECONDS)
    shutil.rmtree(output, ignore_errors=True)
    if isinstance(lines, str):
        return {"error": lines[:200]}
    steady = lines[WARMUP_STEPS : args.steps]

    def median(key: str) -> float:
        return statistics.median(line.get(key, 0.0) for line in steady)

    return {
        "micro_batches": args.total_batch_size // size // args.num_processes,
        "step_seconds": median("step_seconds"),
        "tokens_per_second_per_device": median("tokens_per_second_per_device"),
        "mfu": median("mfu"),
        "peak_memory_gib": max(line.get("peak_memory_gib", 0.0) for line in lines),
        "peak_reserved_gib": max(line.get("peak_reserved_gib", 0.0) for line in lines),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The runs as a table."""
    lines = [
        "| activation checkpointing | per device | micro-batches | s/step | tokens/s/GPU | MFU % | peak GiB "
        "| reserved GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = {"false": "off", "true": "on"}[row["checkpointing"]]
        if "error" in row:
            lines.append(f"| {name} | {row['size']} | does not fit, or failed | - | - | - | - | - |")
        else:
            lines.append(
                f"| {name} | {row['size']} | {row['micro_batches']} | {row['step_seconds']:.3f} "
                f"| {row['tokens_per_second_per_device']:,.0f} | {100 * row['mfu']:.1f} "
                f"| {row['peak_memory_gib']:.1f} | {row['peak_reserved_gib']:.1f} |"
            )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Two panels: time per step and peak memory against the size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, key, label in zip(
        axes, ("step_seconds", "peak_memory_gib"), ("seconds per step", "peak memory, GiB"), strict=True
    ):
        for value, name in (("false", "activations kept"), ("true", "activation checkpointing")):
            points = [(row["size"], row[key]) for row in rows if row["checkpointing"] == value and key in row]
            axis.plot(*zip(*points, strict=True), marker="o", label=name) if points else None
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["size"] for row in rows}), labels=sorted({row["size"] for row in rows}))
        axis.set_ylim(bottom=0)
        axis.set_xlabel("per_device_train_batch_size")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
