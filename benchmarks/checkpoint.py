"""Saving and resuming at a model's full size: time against the disk's bandwidth, pause of an asynchronous save.

    python benchmarks/checkpoint.py --shape llama3_8b --num_processes 4 --output FOLDER
    python benchmarks/checkpoint.py --shape tiny --num_processes 2 --output FOLDER     # rehearsal without a GPU

Starts two runs through tools/launch.py on random weights and tokens: one trains, saves, and trains on; the other
resumes from the last checkpoint, and its next losses must be equal. Prints a table last; FOLDER/*.json has the numbers.

- disk: each process writes its share of the checkpoint's bytes (at most 8 GB) to one file and flushes it; GB/s of all
  together.
- sync: a save that training waits for.
- async: what training waits in the call; by how much the next steps, while it is written, are slower than the median
  step before; how long the end of the run would wait for the rest. The first save and the second.
- --one_at_a_time: each save is deleted before the next, for a disk that holds one, and there is one asynchronous save.
- --without_sync: no synchronous save, which takes its time.
- resume: finding the checkpoint and comparing all checksums; loading into a fresh model. The files are in the page
  cache where they fit into memory.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

REPOSITORY = Path(__file__).resolve().parent.parent
SHAPES: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama3_8b_10_layers": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 10, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama3_1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": False,
    },
}  # fmt: skip
NUM_STEPS_COMPARED = 5
WORKER = "CHECKPOINT_BENCHMARK_WORKER"  # in the environment of the two runs
BLOCK = 64 * 2**20
MOST_WRITTEN = 8 * 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3_8b")
    parser.add_argument("--config", default="fsdp_full_shard", help="name in accelerate_configs/")
    parser.add_argument("--num_processes", default="4")
    parser.add_argument("--output", required=True, type=Path, help="on the disk that is measured; needs 2 checkpoints")
    parser.add_argument("--one_at_a_time", action="store_true", help="never two checkpoints on the disk")
    parser.add_argument("--without_sync", action="store_true", help="asynchronous saves alone")
    parser.add_argument("--seq_length", default="2048")
    args = parser.parse_args()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    (args.output / "config.json").write_text(json.dumps({"model_type": "llama"} | SHAPES[args.shape]))
    preset = {
        "model_config_path": str(args.output / "config.json"),
        "tokenizer_name_or_path": "recipes/samples/tokenizer",
        "output_dir": str(args.output / "run"),
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,  # the one that is written comes on top
        "per_device_train_batch_size": 1,
        "seq_length": int(args.seq_length),
        "deterministic": True,
        "results": str(args.output),
        "one_at_a_time": args.one_at_a_time,
        "without_sync": args.without_sync,
    }
    (args.output / "preset.yaml").write_text("\n".join(f"{key}: {value}" for key, value in preset.items()))
    config = REPOSITORY / "accelerate_configs" / f"{args.config}.yaml"
    command = [sys.executable, "tools/launch.py", "--config_file", str(config), "--num_processes", args.num_processes]
    command += [__file__, "--config", str(args.output / "preset.yaml")]
    for more in ([], ["--resume_from_checkpoint=latest"]):
        subprocess.run([*command, *more], cwd=REPOSITORY, check=True, env=os.environ | {WORKER: "1"})
    saved, resumed = (json.loads((args.output / f"{name}.json").read_text()) for name in ("saved", "resumed"))
    assert resumed.pop("losses") == saved.pop("losses"), "the resumed run's losses differ"
    print(f"{args.shape}, {args.config}, {args.num_processes} processes")
    for name, value in (saved | resumed).items():
        print(f"  {name:<44} {value if isinstance(value, str) else f'{value:.4g}'}")
    print(f"  {f'next {NUM_STEPS_COMPARED} losses after the resume':<44} equal")


def worker() -> None:
    import torch
    import torch.distributed as dist
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from common.arguments import TrainArguments, arg, parse_args, plan_batch
    from common.checkpoint import Checkpoints
    from common.data import StepSampler, train_batches
    from common.launch import build_accelerator
    from common.loop import seed_step, train_step
    from common.models import load_config, load_model, load_tokenizer
    from common.optim import build_optimizer
    from common.sharding import prepare_model

    @dataclass
    class BenchmarkArguments(TrainArguments):
        presets: ClassVar[tuple[str, str]] = ("", "")

        seq_length: int = arg(2048, "Tokens of an example.")
        results: str = arg("", "Folder of the results.")
        one_at_a_time: bool = arg(False, "Delete each save before the next.")
        without_sync: bool = arg(False, "Asynchronous saves alone.")

    args = parse_args(BenchmarkArguments)
    accelerator, strategy = build_accelerator(args)
    plan = plan_batch(args, accelerator.num_processes)
    device = accelerator.device
    is_cuda = device.type == "cuda"

    class Results(dict[str, Any]):
        """Printed as they come: a call that runs out of time has said what it knew."""

        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            if accelerator.is_main_process:
                print(f"{key}: {value}", flush=True)

    results = Results()
    num_saves = 0 if args.one_at_a_time else 3  # 0: no check that there is room for several, or for an export

    def timed(action: Callable[[], Any]) -> float:
        """Seconds until the action is over on all processes and on the device."""
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        action()
        if is_cuda:
            torch.cuda.synchronize()
        accelerator.wait_for_everyone()
        return time.perf_counter() - started

    tokenizer = load_tokenizer(args)
    if args.resume_from_checkpoint:
        checkpoints: Any = None

        def find() -> None:
            nonlocal checkpoints
            checkpoints = Checkpoints(args, accelerator, strategy, tokenizer)

        results["resume: find and compare checksums, s"] = timed(find)
    else:
        checkpoints = Checkpoints(args, accelerator, strategy, tokenizer)
    config = load_config(args)
    model, weights = load_model(args, config, AutoModelForCausalLM, accelerator)
    model = prepare_model(model, weights, args, accelerator, strategy)
    optimizer = build_optimizer(model, args)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (64, args.seq_length + 1), generator=generator)
    dataset = Dataset.from_dict({"ids": ids.tolist()}).with_format("torch")
    sampler = StepSampler(len(dataset), plan.total, args.seed)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = torch.stack([row["ids"] for row in rows])
        return {"input_ids": batch[:, :-1].contiguous(), "labels": batch[:, 1:].contiguous()}

    def train(start: int, num_steps: int) -> tuple[list[float], list[float]]:
        """(seconds, losses) of the steps from `start` on."""
        seconds, losses = [], []
        batches = train_batches(
            dataset, sampler, collate, start_step=start, num_steps=num_steps, process_index=accelerator.process_index,
            num_processes=accelerator.num_processes, per_device_batch_size=plan.per_device,
        )  # fmt: skip
        for step, micro_batches in enumerate(batches, start=start):
            seed_step(args.seed, step, accelerator.process_index)

            def update() -> None:
                result = train_step(accelerator, model, optimizer, micro_batches, max_grad_norm=1.0)  # noqa: B023
                losses.append(accelerator.reduce(result.loss.detach()).item())

            seconds.append(timed(update))
        return seconds, losses

    def save(to: Checkpoints, step: int) -> float:
        if args.one_at_a_time:
            if accelerator.is_main_process:
                for folder in to.folder.glob("step_*"):
                    shutil.rmtree(folder)
            accelerator.wait_for_everyone()
        return timed(lambda: to.save(step, {}, best_step=None))

    if args.resume_from_checkpoint:
        results["resume: load into model and optimizer, s"] = timed(
            lambda: checkpoints.start(model, optimizer, plan, dataset, None, num_steps=10**6, num_saves=0)
        )
        results["losses"] = train(checkpoints.found.step, NUM_STEPS_COMPARED)[1]
        name = "resumed"
    else:
        checkpoints.start(model, optimizer, plan, dataset, None, num_steps=10**6, num_saves=num_saves)
        step_seconds = statistics.median(train(0, 8)[0][3:])
        hardware = torch.cuda.get_device_name() if is_cuda else "CPU"
        results["hardware"] = f"{accelerator.num_processes} x {hardware}, torch {torch.__version__}"
        results["step, s"] = step_seconds
        if not args.without_sync:
            seconds = save(checkpoints, 8)
            folder = checkpoints.folder / "step_00000008"
            num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            share = min(num_bytes // accelerator.num_processes, MOST_WRITTEN)
            path = Path(args.results) / f"disk_{accelerator.process_index}"
            disk_seconds = timed(lambda: write_and_flush(path, share))
            results["checkpoint, GB"] = num_bytes / 1e9
            results["disk, GB/s"] = share * accelerator.num_processes / disk_seconds / 1e9
            results["sync: save, s"] = seconds
            results["sync: save, GB/s"] = num_bytes / seconds / 1e9
        asynchronous = Checkpoints(replace(args, async_save=True), accelerator, strategy, tokenizer)
        results["async: preparation at the start, s"] = timed(
            lambda: asynchronous.start(model, optimizer, plan, dataset, None, num_steps=10**6, num_saves=num_saves)
        )
        train(8, 1)
        step = 9
        for number in ("first",) if args.one_at_a_time else ("first", "second"):
            results[f"async: pause of the {number} call, s"] = save(asynchronous, step)
            all_seconds, results["losses"] = train(step, NUM_STEPS_COMPARED)
            results[f"async: excess of the next steps, {number}, s"] = " ".join(
                f"{seconds - step_seconds:+.3f}" for seconds in all_seconds
            )
            results[f"async: rest of the writing, {number}, s"] = timed(asynchronous.finish)
            step += NUM_STEPS_COMPARED
        name = "saved"
    if accelerator.is_main_process:
        (Path(args.results) / f"{name}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


def write_and_flush(path: Path, num_bytes: int) -> None:
    block = os.urandom(BLOCK)
    with path.open("wb", buffering=0) as file:
        for start in range(0, num_bytes, BLOCK):
            file.write(block[: num_bytes - start])
        os.fsync(file.fileno())
    path.unlink()


if __name__ == "__main__":
    worker() if WORKER in os.environ else main()
