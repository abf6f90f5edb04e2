"""From the launch to the first step: seconds and host memory, by meta initialization and from a local checkpoint.

    python benchmarks/startup.py --num_processes 4 --output FOLDER [--parts meta pretrain agreement]

- meta: recipes/gpt_shakespeare.py, random weights, no process holds the whole model.
- pretrain: a bf16 checkpoint of the same shape is written to FOLDER (16 GB at 8B), and recipes/llama_pretrain.py trains
  from it with and without document masking.
- agreement: losses of a smaller shape from a checkpoint, by both ways of loading and by one process.

Host memory is sampled from /proc/PID/smaps_rollup while a run lives: a process's own (anonymous and shared) and that of
all together with mapped files, each page counted once (proportional set size).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from throughput import CONFIGS, REPOSITORY, run_recipe  # type: ignore[import-not-found]

SAMPLES = REPOSITORY / "recipes" / "samples"
FLAGS = [f"--tokenizer_name_or_path={SAMPLES / 'tokenizer'}", "--per_device_train_batch_size=1", "--logging_steps=1"]


class HostMemory(threading.Thread):
    """Peak host memory in GiB of this process's descendants while the block runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.process = 0.0
        self.node = 0.0
        self._is_over = threading.Event()

    def __enter__(self) -> "HostMemory":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        while not self._is_over.wait(0.2):
            node = 0.0
            for child in psutil.Process().children(recursive=True):
                try:
                    text = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
                except OSError:  # it has ended
                    continue
                fields = {line.split(":")[0]: line.split()[1] for line in text.splitlines()[1:]}
                own = int(fields["Pss_Anon"]) + int(fields["Pss_Shmem"])
                self.process = max(self.process, own / 2**20)
                node += (own + int(fields["Pss_File"])) / 2**20
            self.node = max(self.node, node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--num_processes", type=int, default=4)
    parser.add_argument("--model", default="recipes/configs/models/gpt_8b", help="folder with a config.json")
    parser.add_argument("--small_model", default="recipes/configs/models/gpt_1b", help="of the agreement")
    parser.add_argument("--config", default="fsdp_full_shard_compile", help="of accelerate_configs/, for pretrain")
    parser.add_argument("--seq_length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--text_file", type=Path, default=SAMPLES / "wikihow_articles.csv", help="to train on")
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    # Documents of 40 paragraphs.
    paragraphs = args.text_file.read_text(encoding="utf-8").split("\n\n")
    texts = ["\n\n".join(paragraphs[start : start + 40]) for start in range(0, len(paragraphs), 40)]
    args.documents = args.output / "documents.jsonl"
    args.documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for part in args.parts:
        PARTS[part](args)


def meta(args: argparse.Namespace) -> None:
    flags = [*FLAGS, "--config=gpt_shakespeare_8b", f"--model_config_path={args.model}"]
    flags += [f"--total_batch_size={args.num_processes}", f"--max_seq_length={min(1024, args.seq_length)}"]
    started = time.perf_counter()
    with HostMemory() as memory:
        config = CONFIGS / "fsdp_full_shard.yaml"
        lines = run_recipe("gpt_shakespeare", config, args.num_processes, 2, args.output, flags)
    report("meta", lines, memory, time.perf_counter() - started)


def pretrain(args: argparse.Namespace) -> None:
    folder = write_checkpoint(args, args.model)
    for masking in (False, True):
        flags = pretrain_flags(args, folder, args.num_processes)
        flags += [f"--max_seq_length={args.seq_length}", f"--document_masking={masking}"]
        started = time.perf_counter()
        with HostMemory() as memory:
            lines = run_recipe(
                "llama_pretrain", CONFIGS / f"{args.config}.yaml", args.num_processes, args.steps, args.output, flags
            )
        report(f"pretrain, document masking {masking}", lines, memory, time.perf_counter() - started)


def agreement(args: argparse.Namespace) -> None:
    folder = write_checkpoint(args, args.small_model)
    config = yaml.safe_load((CONFIGS / "fsdp_full_shard.yaml").read_text())
    for is_efficient, num_processes in ((True, args.num_processes), (False, args.num_processes), (True, 1)):
        config["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = is_efficient
        path = args.output / f"efficient_{is_efficient}_{num_processes}.yaml"
        path.write_text(yaml.safe_dump(config))
        flags = [*pretrain_flags(args, folder, args.num_processes), f"--max_seq_length={min(1024, args.seq_length)}"]
        started = time.perf_counter()
        with HostMemory() as memory:
            lines = run_recipe("llama_pretrain", path, num_processes, 10, args.output, flags)
        report(
            f"ram_efficient_loading {is_efficient}, {num_processes} process(es)",
            lines, memory, time.perf_counter() - started,
        )  # fmt: skip


PARTS = {"meta": meta, "pretrain": pretrain, "agreement": agreement}


def pretrain_flags(args: argparse.Namespace, folder: Path, total_batch_size: int) -> list[str]:
    return [
        *FLAGS, "--config=llama_pretrain_8b", f"--model_name_or_path={folder}", f"--train_file={args.documents}",
        f"--total_batch_size={total_batch_size}", "--eval_on_start=False", "--spike_factor=1000",
        "--validation_size=0.05",
    ]  # fmt: skip


def write_checkpoint(args: argparse.Namespace, model: str) -> Path:
    """Random weights in bf16 in Hugging Face's form; a process of its own, which takes its memory with it."""
    folder = Path(args.output) / f"{Path(model).name}_checkpoint"
    if not (folder / "config.json").exists():
        code = (
            "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM\n"
            "torch.manual_seed(0); device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
            "config = AutoConfig.from_pretrained(sys.argv[1])\n"
            "with torch.device(device):\n"
            "    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)\n"
            "model.save_pretrained(sys.argv[2], max_shard_size='5GB')\n"
        )
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, model, str(folder)], cwd=REPOSITORY, check=True)
        print(f"checkpoint of {num_gib(folder):.2f} GiB written in {time.perf_counter() - started:.1f} s", flush=True)
    return folder


def num_gib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**30


def report(name: str, lines: "list[dict[str, float]] | str", memory: HostMemory, seconds: float) -> None:
    if isinstance(lines, str):
        print(f"{name}: {lines}", flush=True)
        return
    steady = lines[len(lines) // 2 :]
    values: dict[str, Any] = {
        "launch to first logged step, s": lines[0]["seconds_to_first_line"],
        "host memory of a process, GiB": memory.process,
        "host memory of all with files, GiB": memory.node,
        "tokens/s/device": statistics.median(line["tokens_per_second_per_device"] for line in steady),
        "data wait, % of the step": 100 * statistics.median(
            line["data_wait_seconds"] / line["step_seconds"] for line in steady
        ),
        "losses": " ".join(f"{line['loss']:.5f}" for line in (lines[0], lines[1], lines[-1])),
        "whole run, s": seconds,
    }  # fmt: skip
    print(name, flush=True)
    for key, value in values.items():
        print(f"  {key:<36} {value if isinstance(value, str) else f'{value:.4g}'}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
