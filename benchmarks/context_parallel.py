"""Context parallelism against full shard on the same batches, and the longest Llama-3-8B sequence that trains.

    python benchmarks/context_parallel.py parity --num_processes 2 --output FOLDER
    python benchmarks/context_parallel.py longest --num_processes 2 --output FOLDER [--settings NAME ...] [--lengths N]

Both run recipes/gpt_shakespeare.py through tools/launch.py. `parity`: a small Llama in float32 and bf16, losses and
gradient norms of 5 steps side by side; its sequences have a length that has to be padded to be cut. `longest`: the
shape of Llama-3-8B, one sequence on each device or, with context parallelism, on each two; growing lengths until a
device is out of memory. A length trains when its second step is done: the optimizer's state is there since the first.
Each result is printed and added to FOLDER/longest.jsonl at once. Without a GPU `parity` is a rehearsal.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from throughput import CONFIGS, REPOSITORY, run_recipe  # type: ignore[import-not-found]

SAMPLES = REPOSITORY / "recipes" / "samples"
CONTEXT = "fsdp_context_parallel"
COMPILED = {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}}
RECOMPUTED = {"fsdp_activation_checkpointing": True}
OFFLOADED = RECOMPUTED | {"fsdp_activation_checkpointing_offload": True}
CHUNKED = ["--loss_chunk_tokens=4096"]
SMALL = (
    "hidden_size=512,intermediate_size=1024,num_hidden_layers=4,num_attention_heads=8,num_key_value_heads=4,vocab_size=4096,"
    "max_position_embeddings=4096"
)
K = 1024
# name -> (YAML, edits, flags of the recipe, lengths)
LONGEST: dict[str, tuple[str, dict[str, Any], list[str], list[int]]] = {
    "cp_compiled_chunked": (CONTEXT, RECOMPUTED | COMPILED, CHUNKED, [96 * K, 128 * K, 192 * K, 224 * K, 256 * K]),
    "compiled_chunked": ("fsdp_full_shard", RECOMPUTED | COMPILED, CHUNKED, [64 * K, 96 * K, 112 * K, 128 * K]),
    "checkpointing": ("fsdp_full_shard", RECOMPUTED, [], [16 * K, 24 * K, 32 * K, 40 * K, 48 * K]),
    "cp_checkpointing": (CONTEXT, RECOMPUTED, [], [32 * K, 48 * K, 64 * K, 80 * K, 96 * K]),
    "checkpointing_offload": ("fsdp_full_shard", OFFLOADED, [], [32 * K, 40 * K, 48 * K]),
    "compiled_chunked_offload": ("fsdp_full_shard", OFFLOADED | COMPILED, CHUNKED, [112 * K, 128 * K, 160 * K]),
    "cp_compiled_chunked_offload": (CONTEXT, OFFLOADED | COMPILED, CHUNKED, [192 * K, 256 * K, 320 * K]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["parity", "longest"])
    parser.add_argument("--settings", nargs="+", default=list(LONGEST), choices=list(LONGEST))
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--lengths", nargs="+", type=int, help="instead of the settings' own")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run, its start included")
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.part == "parity":
        compare(args)
    else:
        for name in args.settings:
            find_longest(name, args)


def train(
    name: str, config: str, edits: dict[str, Any], length: int, flags: list[str], steps: int, args: argparse.Namespace
) -> "list[dict[str, float]] | str":
    """Lines of metrics.jsonl, or the error; FOLDER/NAME.log has the run's output."""
    content = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    for key, value in edits.items():
        (content["fsdp_config"] if key.startswith("fsdp_") else content)[key] = value
    groups = args.num_processes
    if config == CONTEXT:
        groups //= content["parallelism_config"]["parallelism_config_cp_size"]
        content["parallelism_config"]["parallelism_config_dp_shard_size"] = groups
    path = args.output / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    flags = [
        "--config=gpt_shakespeare_8b", f"--tokenizer_name_or_path={SAMPLES / 'tokenizer'}",
        f"--text_file={long_text(args.output, length)}", "--validation_size=2000", f"--max_seq_length={length}",
        "--warmup_steps=0", "--per_device_train_batch_size=1", *flags,
    ]  # fmt: skip
    if not any(flag.startswith("--total_batch_size") for flag in flags):
        flags.append(f"--total_batch_size={groups}")
    return run_recipe("gpt_shakespeare", path, args.num_processes, steps, args.output, flags, args.timeout)


def long_text(folder: Path, num_tokens: int) -> Path:
    """The embedded articles over and over, enough for a few sequences of that length."""
    path = folder / f"text_{num_tokens}.txt"
    if not path.exists():
        with (SAMPLES / "wikihow_articles.csv").open(encoding="utf-8", newline="") as file:
            articles = "\n\n".join(row["text"] for row in csv.DictReader(file))
        path.write_text(articles * (6 * num_tokens // len(articles) + 2), encoding="utf-8")  # under 6 characters each
    return path


def compare(args: argparse.Namespace) -> None:
    flags = [f"--config_overrides={SMALL}", f"--total_batch_size={args.num_processes}", "--learning_rate=1e-3"]
    for precision in ("no", "bf16"):
        results = {}
        setups: dict[str, tuple[str, dict[str, Any]]] = {"full_shard": ("fsdp_full_shard", {}), "cp": (CONTEXT, {})}
        if precision == "bf16":
            setups["cp_compiled"] = (CONTEXT, COMPILED)
        for name, (config, edits) in setups.items():
            edits = edits | {"mixed_precision": precision}
            results[name] = train(f"{name}_{precision}", config, edits, 1022, flags, 5, args)
            print(f"{precision:<5} {name:<12} {series(results[name])}", flush=True)
        (args.output / f"parity_{precision}.json").write_text(json.dumps(results))


def series(lines: "list[dict[str, float]] | str") -> str:
    if isinstance(lines, str):
        return lines[:300]
    return "loss / grad norm: " + "  ".join(f"{line['loss']:.6f} / {line['grad_norm']:.5f}" for line in lines)


def find_longest(name: str, args: argparse.Namespace) -> None:
    config, edits, flags, lengths = LONGEST[name]
    for length in args.lengths or lengths:
        overrides = f"--config_overrides=max_position_embeddings={length}"
        lines = train(name, config, edits, length, [overrides, *flags], 2, args)
        result: dict[str, Any] = {"setting": name, "length": length, "num_processes": args.num_processes}
        if isinstance(lines, str):
            said = (args.output / f"{name}.log").read_text(errors="replace")
            is_out_of_memory = "out of device memory" in said or "out of memory" in said
            result["error"] = "out of memory" if is_out_of_memory else lines[:300]
        else:
            last = lines[-1]
            keys = (
                "loss",
                "step_seconds",
                "tokens_per_second_per_device",
                "mfu",
                "peak_memory_gib",
                "peak_reserved_gib",
            )
            result |= {key: last[key] for key in keys if key in last}
        print(json.dumps(result), flush=True)
        with (args.output / "longest.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        if isinstance(lines, str):
            return


if __name__ == "__main__":
    main()
