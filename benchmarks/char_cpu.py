"""nanoGPT's CPU setting through the recipe against a plain PyTorch loop of the same model: seconds a step.

    python benchmarks/char_cpu.py --text_file shakespeare.txt [--rounds 5] [--steps 150] [--threads 1]

The two take turns, because the speed of a machine that others use too drifts; the first window of each turn is
warm-up. The plain loop is what one would write by hand for one process: random windows, forward, backward, clip,
update. With --plain --evaluate --steps 2000 it gives the loss on the whole validation text to compare with.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PRESET = REPOSITORY / "recipes" / "configs" / "gpt_shakespeare_char_cpu.yaml"
WINDOW = 10  # steps that are timed together


def plain_loop(text_file: str, num_steps: int, seed: int, evaluate: bool) -> None:
    """Train by the preset's settings; prints the seconds a step of each window, and the validation loss when asked."""
    import torch
    import torch.nn.functional as F
    import yaml
    from transformers import AutoConfig, GPT2LMHeadModel

    sys.path.insert(0, str(REPOSITORY))
    from common.arguments import OptimizerArguments
    from common.optim import learning_rate

    preset = yaml.safe_load(PRESET.read_text())
    schedule = OptimizerArguments(
        learning_rate=float(preset["learning_rate"]),
        min_learning_rate=float(preset["min_learning_rate"]),
        lr_scheduler_type="cosine",
        warmup_steps=preset["warmup_steps"],
    )
    text = Path(text_file).read_text(encoding="utf-8")
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(character) for character in text])
    train_ids, eval_ids = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]
    batch_size, block_size = preset["total_batch_size"], preset["max_seq_length"]

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(REPOSITORY / preset["model_config_path"], vocab_size=len(characters))
    model = GPT2LMHeadModel(config)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": preset["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=schedule.learning_rate,
        betas=(0.9, preset["adam_beta2"]),
    )

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs, use_cache=False).logits.flatten(0, 1), targets.flatten())

    seconds = []
    started = time.perf_counter()
    for step in range(num_steps):
        starts = torch.randint(len(train_ids) - block_size, (batch_size,))
        inputs = torch.stack([train_ids[i : i + block_size] for i in starts])
        targets = torch.stack([train_ids[i + 1 : i + 1 + block_size] for i in starts])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(schedule, step, preset["max_steps"], steps_per_epoch=1)
        loss = loss_of(inputs, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), preset["max_grad_norm"])
        optimizer.step()
        if (step + 1) % WINDOW == 0:
            loss.item()
            seconds.append((time.perf_counter() - started) / WINDOW)
            started = time.perf_counter()
    result: dict[str, object] = {"step_seconds": seconds}
    if evaluate:
        with torch.no_grad():
            pieces = [eval_ids[start : start + block_size + 1] for start in range(0, len(eval_ids) - 1, block_size)]
            total = sum(loss_of(p[None, :-1], p[1:]).item() * (len(p) - 1) for p in pieces)
        result["eval_loss"] = total / (len(eval_ids) - 1)
    print(json.dumps(result))


def time_plain(text_file: str, num_steps: int, env: dict[str, str]) -> list[float]:
    command = [sys.executable, __file__, "--text_file", text_file, "--steps", str(num_steps), "--plain"]
    result = subprocess.run(command, cwd=REPOSITORY, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])["step_seconds"][1:]


def time_recipe(text_file: str, num_steps: int, env: dict[str, str]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "config": PRESET,
            "text_file": Path(text_file).resolve(),
            "max_steps": num_steps,
            "logging_steps": WINDOW,
            "eval_strategy": "no",
            "prompt": "",
            "output_dir": f"{folder}/run",
        }
        command = [sys.executable, "tools/launch.py", "--config_file", "accelerate_configs/single_device.yaml"]
        command += ["--mixed_precision", "no", "recipes/gpt_shakespeare.py"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        subprocess.run(command, cwd=REPOSITORY, env=env, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_seconds"] for line in lines][1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text_file", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1337, help="of the plain loop with --plain")
    parser.add_argument("--threads", default="1", help="of each process (OMP_NUM_THREADS)")
    parser.add_argument("--plain", action="store_true", help="one run of the plain loop alone")
    parser.add_argument("--evaluate", action="store_true", help="with --plain: the loss of the whole validation text")
    args = parser.parse_args()
    if args.plain:
        plain_loop(args.text_file, args.steps, args.seed, args.evaluate)
        return
    env = os.environ | {"OMP_NUM_THREADS": args.threads}
    plain: list[float] = []
    recipe: list[float] = []
    for _ in range(args.rounds):
        plain += time_plain(args.text_file, args.steps, env)
        recipe += time_recipe(args.text_file, args.steps, env)
    for name, seconds in (("plain loop", plain), ("recipe", recipe)):
        milliseconds = [1e3 * each for each in seconds]
        print(f"{name:<10} {statistics.median(milliseconds):7.2f} ms a step (median), {min(milliseconds):.2f} (least)")
    print(
        f"ratio      {statistics.median(recipe) / statistics.median(plain):7.3f} (medians), "
        f"{min(recipe) / min(plain):.3f} (least)"
    )


if __name__ == "__main__":
    main()
