"""Every YAML of accelerate_configs/ with T5-large's shape through the real recipe: loss, memory, speed, in one table.

    python benchmarks/strategies.py --data FOLDER --tokenizer FOLDER --output FOLDER [--configs ddp ...]

FOLDER of data: files that --train_file accepts, for example SciTLDR's train.jsonl and dev.jsonl. Random weights, all
runs on the same batches. A YAML that does not run has the last line of its error in the table.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--configs", nargs="+", default=sorted(p.stem for p in REPOSITORY.glob("accelerate_configs/*")))
    parser.add_argument("--num_processes", default="4")
    parser.add_argument("--steps", default="20")
    parser.add_argument("--model", default="recipes/configs/models/t5_large")
    parser.add_argument("flags", nargs="*", help="after --: further flags of the recipe")
    args = parser.parse_args()
    print(
        f"{'config':<26} {'loss 1':>8} {'loss last':>9} {'grad 1':>7} {'tok/s/GPU':>9} {'s/step':>7} {'peak GiB':>9} "
        f"{'wall s':>6}",
        flush=True,
    )
    for config in args.configs:
        output = args.output / config
        command = [sys.executable, "tools/launch.py", "--config_file", f"accelerate_configs/{config}.yaml"]
        if config != "single_device":
            command += ["--num_processes", args.num_processes]
        flags = {
            "config": "t5_summarize_large",
            "model_config_path": args.model,
            "tokenizer_name_or_path": args.tokenizer,
            "train_file": args.data,
            "output_dir": output,
            "max_steps": args.steps,
            "total_batch_size": 32,
            "per_device_train_batch_size": 8,
            "rouge_samples": 0,
            "eval_strategy": "no",
            "save_strategy": "no",
            "logging_steps": 1,
            "overwrite_output_dir": True,
        }
        command += ["recipes/t5_summarize.py", *(f"--{name}={value}" for name, value in flags.items()), *args.flags]
        started = time.perf_counter()
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        if result.returncode:
            (args.output / f"{config}.log").write_text(result.stdout + result.stderr)
            print(f"{config:<26} exit {result.returncode}: {result.stderr.strip().splitlines()[-1][:160]}", flush=True)
            continue
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(output)
        steady = lines[len(lines) // 2 :]
        speed = statistics.median(line["tokens_per_second_per_device"] for line in steady)
        step = statistics.median(line["step_seconds"] for line in steady)
        peak = max(line.get("peak_memory_gib", 0.0) for line in lines)
        print(
            f"{config:<26} {lines[0]['loss']:>8.4f} {lines[-1]['loss']:>9.4f} {lines[0]['grad_norm']:>7.4f} "
            f"{speed:>9,.0f} {step:>7.3f} {peak:>9.2f} {seconds:>6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
