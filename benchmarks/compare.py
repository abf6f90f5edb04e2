"""Llama-3-8B's shape trained by this repository, torchtitan and transformers.Trainer on the same GPUs, in one table.

    python benchmarks/compare.py --num_processes 4 --output FOLDER [--setups ours titan trainer ...]

Random weights, one sequence of 8,192 tokens a GPU, bf16 compute with float32 masters, fused AdamW, clipping. Ours is
recipes/gpt_shakespeare.py with its preset _8b, through tools/launch.py: the real loop. torchtitan (PyPI 0.2.2) compiles
and keeps what its selective checkpointing keeps, as its documents recommend. Speed is the median of the steps
after the first half, as each program logs it; peak is the allocator's reserved memory, the only one torchtitan logs.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from techniques import SAMPLE_TOKENIZER, SAMPLES, SHAPES, run_setup  # type: ignore[import-not-found]
from throughput import CONFIGS, REPOSITORY, run_until  # type: ignore[import-not-found]

TEXT = SAMPLES / "wikihow_articles.csv"
SEQUENCE_LENGTH = 8192
WORKER = "COMPARE_BENCHMARK_WORKER"  # in the environment of the Trainer's processes: where its metrics go
OURS = SHAPES["llama3_8b"].setups
TITAN = {
    "titan": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
    "titan_no_checkpointing": ["--activation_checkpoint.mode=none"],
}
HEADER = (
    f"{'setup':<26} {'tok/s/GPU':>9} {'/ titan':>8} {'MFU %':>6} {'resv GiB':>9} {'loss 1':>8} {'loss last':>9} "
    f"{'start s':>7}"
)
PEAK_FLOPS = 989e12  # H100 SXM and H200, dense bf16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", nargs="+", default=["titan", "trainer", "ours"], choices=[*OURS, *TITAN, "trainer"])
    parser.add_argument("--logging_steps", type=int, default=5, help="of ours and of torchtitan")
    parser.add_argument("--num_processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, float]] | str] = {}
    for name in args.setups:
        run: Callable[[str, argparse.Namespace], Any] = run_trainer
        if name in OURS:
            run = run_ours
        elif name in TITAN:
            run = run_titan
        results[name] = run(name, args)
        print(row(name, results[name], float("nan")), flush=True)
    titan = results.get("titan", "not run")
    if not isinstance(titan, str):
        print(HEADER)
        for name, lines in results.items():
            print(row(name, lines, speed(titan)))
    (args.output / "compare.json").write_text(json.dumps(results))


def row(name: str, lines: "list[dict[str, float]] | str", titan_speed: float) -> str:
    if isinstance(lines, str):
        return f"{name:<26} {lines[:160]}"
    return (
        f"{name:<26} {speed(lines):>9,.0f} {speed(lines) / titan_speed:>8.3f} "
        f"{100 * speed(lines) * flops_per_token() / PEAK_FLOPS:>6.1f} "
        f"{max(line['peak_reserved_gib'] for line in lines):>9.1f} {lines[0]['loss']:>8.3f} "
        f"{lines[-1]['loss']:>9.3f} {lines[0]['seconds_to_first_line']:>7.1f}"
    )


def speed(lines: list[dict[str, float]]) -> float:
    return statistics.median(line["tokens_per_second_per_device"] for line in lines[len(lines) // 2 :])


def flops_per_token() -> float:
    """torchtitan's convention: 6 a parameter without the input embedding, attention without causal discount."""
    config = json.loads((REPOSITORY / "recipes/configs/models/gpt_8b/config.json").read_text())
    width, layers, inner = (config[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    key_width = width // config["num_attention_heads"] * config["num_key_value_heads"]
    block = width * (2 * width + 2 * key_width + 3 * inner) + 2 * width
    parameters = layers * block + width + config["vocab_size"] * width
    return 6.0 * parameters + 12.0 * layers * width * SEQUENCE_LENGTH


def run_ours(name: str, args: argparse.Namespace) -> "list[dict[str, float]] | str":
    flags = [f"--logging_steps={args.logging_steps}"]
    return run_setup(name, SHAPES["llama3_8b"], args.num_processes, args.steps, args.output, flags)


def run_titan(name: str, args: argparse.Namespace) -> "list[dict[str, float]] | str":
    data = args.output / "titan_data"
    data.mkdir(exist_ok=True)
    text = TEXT.read_text(encoding="utf-8")
    (data / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(100)))
    # torchtitan reads its own log: the lines are turned into ours as they come.
    folder = args.output / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [
        sys.executable, __file__, "--", sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={args.num_processes}", "--local-ranks-filter=0", "-m", "torchtitan.train",
        "--model.name=llama3", "--model.flavor=8B", f"--model.hf_assets_path={SAMPLE_TOKENIZER}",
        "--training.dataset=c4_test",
        f"--training.dataset_path={data}", f"--training.seq_len={SEQUENCE_LENGTH}", "--training.local_batch_size=1",
        f"--training.steps={args.steps + 2}", f"--metrics.log_freq={args.logging_steps}",
        "--metrics.disable_color_printing",
        f"--job.dump_folder={folder}", "--compile.enable", "--lr_scheduler.warmup_steps=2", *TITAN[name],
    ]  # fmt: skip
    metrics = folder / "metrics.jsonl"
    return run_until(command, metrics, args.steps, args.output / f"{name}.log", 600.0, {WORKER: str(metrics)})


def translate_titan(command: list[str]) -> None:
    """Run torchtitan and write a line of metrics for each line that it logs about a step."""
    import subprocess

    pattern = re.compile(r"step: +(\d+) +loss: +([\d.]+) .*grad_norm: +([\d.]+) +memory: +([\d.]+)GiB.*tps: +([\d,]+)")
    with (
        open(os.environ[WORKER], "w", buffering=1) as metrics,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := pattern.search(line):
                step, loss, norm, memory, tps = found.groups()
                values = {
                    "step": int(step), "loss": float(loss), "grad_norm": float(norm),
                    "peak_reserved_gib": float(memory), "tokens_per_second_per_device": float(tps.replace(",", "")),
                }  # fmt: skip
                metrics.write(json.dumps(values) + "\n")
    raise SystemExit(process.returncode)


def run_trainer(name: str, args: argparse.Namespace) -> "list[dict[str, float]] | str":
    config = yaml.safe_load((CONFIGS / "fsdp_full_shard.yaml").read_text())
    config["fsdp_config"] |= {
        "fsdp_activation_checkpointing": True,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    }
    path = args.output / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    metrics = args.output / f"{name}.jsonl"
    metrics.unlink(missing_ok=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    command += ["--num_processes", str(args.num_processes), __file__]
    return run_until(command, metrics, args.steps, args.output / f"{name}.log", 600.0, {WORKER: str(metrics)})


def train_with_trainer() -> None:
    """One process of the comparison's transformers.Trainer, which logs to the file that the environment names."""
    import time

    import torch
    from torch.utils.data import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Random(Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(0, 128256, (SEQUENCE_LENGTH,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids}

    class Log(TrainerCallback):
        started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.started

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if state.is_world_process_zero and logs and "loss" in logs:
                line = {
                    "step": state.global_step, "loss": float(logs["loss"]), "grad_norm": float(logs["grad_norm"]),
                    "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
                    "tokens_per_second_per_device": SEQUENCE_LENGTH / self.seconds,
                }  # fmt: skip
                with open(os.environ[WORKER], "a") as file:
                    file.write(json.dumps(line) + "\n")

    config = AutoConfig.from_pretrained(REPOSITORY / "recipes" / "configs" / "models" / "gpt_8b", use_cache=False)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    args = TrainingArguments(
        output_dir=os.environ[WORKER] + "_trainer", per_device_train_batch_size=1, max_steps=1000, logging_steps=1,
        bf16=True, optim="adamw_torch_fused", learning_rate=1e-4, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=args, train_dataset=Random(), callbacks=[Log()]).train()


if __name__ == "__main__":
    if WORKER in os.environ:
        translate_titan(sys.argv[2:]) if sys.argv[1:2] == ["--"] else train_with_trainer()
    else:
        main()
