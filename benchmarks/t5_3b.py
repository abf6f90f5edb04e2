"""T5-3B's shape from random weights through the real recipe: speed, memory, ROUGE, export and reload, per strategy.

    python benchmarks/t5_3b.py --data FOLDER --tokenizer FOLDER --output FOLDER [--configs fsdp_full_shard ...]

FOLDER of data: files that --train_file accepts, for example SciTLDR's train.jsonl and dev.jsonl. Prints a table last.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RELOAD = """
import sys, torch
from transformers import AutoModelForSeq2SeqLM
model, report = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], output_loading_info=True, device_map="cuda:0")
assert not report["missing_keys"] and not report["unexpected_keys"], report
ids = torch.arange(3, 35, device="cuda:0")[None]
logits = model(input_ids=ids, decoder_input_ids=ids[:, :8]).logits
assert logits.isfinite().all()
print(f"reloaded {sum(p.numel() for p in model.parameters())/1e9:.3f}B parameters in {model.dtype}")
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--configs", nargs="+", default=["fsdp_full_shard", "fsdp1_full_shard"])
    parser.add_argument("--num_processes", default="4")
    parser.add_argument("--steps", default="30")
    parser.add_argument("--model", default="recipes/configs/models/t5_3b")
    parser.add_argument("flags", nargs="*", help="after --: further flags of the recipe")
    args = parser.parse_args()
    rows = []
    for config in args.configs:
        output = args.output / config
        command = [sys.executable, "tools/launch.py", "--config_file", f"accelerate_configs/{config}.yaml"]
        command += ["--num_processes", args.num_processes, "recipes/t5_summarize.py", "--config=t5_summarize_3b"]
        flags = {
            "model_config_path": args.model,
            "tokenizer_name_or_path": args.tokenizer,
            "train_file": args.data,
            "output_dir": output,
            "max_steps": args.steps,
            "total_batch_size": 8 * int(args.num_processes),
            "max_eval_samples": 64,
            "rouge_samples": 64,
            "eval_strategy": "steps",
            "eval_steps": args.steps,
            "logging_steps": 5,
        }
        command += [f"--{name}={value}" for name, value in flags.items()] + args.flags
        started = time.perf_counter()
        subprocess.run(command, cwd=REPOSITORY, check=True)
        seconds = time.perf_counter() - started
        subprocess.run([sys.executable, "-c", RELOAD, str(output / "model")], check=True)
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        train = [line for line in lines if "loss" in line]
        steady = train[2:]
        evaluation = next(line for line in lines if "eval_loss" in line)

        def median(key: str, lines: list[dict[str, float]] = steady) -> float:
            return statistics.median(line[key] for line in lines)

        rows.append(
            f"{config:<24} {median('tokens_per_second_per_device'):>9,.0f} {100 * median('mfu'):>6.1f} "
            f"{median('step_seconds'):>8.3f} {max(line['peak_memory_gib'] for line in train):>9.1f} "
            f"{max(line['peak_reserved_gib'] for line in train):>9.1f} {train[0]['loss']:>7.3f} "
            f"{train[-1]['loss']:>7.3f} {evaluation['eval_loss']:>7.3f} "
            f"{evaluation['eval_rougeLsum']:>8.4f} {seconds:>6.0f}"
        )
    print(
        f"{'config':<24} {'tok/s/GPU':>9} {'MFU %':>6} {'s/step':>8} {'peak GiB':>9} {'resv GiB':>9} {'loss':>7} "
        f"{'-> loss':>7} {'eval':>7} {'RougeLs':>8} {'wall s':>6}"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
