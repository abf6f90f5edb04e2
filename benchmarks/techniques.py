"""What each technique gives: edits of a YAML and flags of a recipe, one run each, in one table.

    python benchmarks/techniques.py t5_3b --num_processes 2 --output FOLDER --tokenizer FOLDER [--setups tutorial ...]
    python benchmarks/techniques.py t5_3b --lengths wikihow ...     # ragged documents, in examples per second
    python benchmarks/techniques.py demo --output FOLDER            # rehearsal without a GPU

Random weights, the recipe's real loop, one micro-batch a step. Runs are ended after their last step. Speed is the
median of the second half of the steps, the ratio is to the first setup that ran.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from throughput import CONFIGS, HEADER, REPOSITORY, row, run_recipe  # type: ignore[import-not-found]

SAMPLES = REPOSITORY / "recipes" / "samples"
SAMPLE_TOKENIZER = SAMPLES / "tokenizer"
NUM_ARTICLES = 4096
# Words of WikiHow's articles and summaries: means as published (Koupaee and Wang 2018), log-normal, spread assumed.
ARTICLE_WORDS, SUMMARY_WORDS = (580, 0.7), (62, 0.6)


@dataclass
class Setup:
    """Edits of fsdp_full_shard.yaml (fsdp_ keys go into fsdp_config) and flags of the recipe."""

    edits: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    per_device: int | None = None
    """Sequences at a time on a device, where it is not the model's own number."""

    def __add__(self, more: "Setup") -> "Setup":
        return Setup(self.edits | more.edits, self.flags + more.flags, more.per_device or self.per_device)


@dataclass
class Shape:
    """A model with its recipe and the data that it trains on."""

    recipe: str
    flags: list[str]
    per_device: int
    setups: dict[str, Setup]


EAGER = Setup()
COMPILED = Setup({"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}})
KEPT = Setup({"fsdp_reshard_after_forward": False})
CHECKPOINTING = Setup({"fsdp_activation_checkpointing": True})
BF16_REDUCE = Setup(flags=["--reduce_dtype=bf16"])
NCCL = Setup(flags=["--peer_copies=false"])
FP8 = Setup(
    {
        "mixed_precision": "fp8",
        "fp8_config": {"fp8_backend": "AO", "fp8_enable_fsdp_float8_all_gather": True, "fp8_pad_inner_dim": True},
    }
)
PRODUCTS = Setup(flags=["--attn_implementation=eager"])  # attention as two matrix products, its softmax compiled
SDPA = Setup(flags=["--attn_implementation=sdpa"])
ROWWISE = Setup(
    FP8.edits | {"fp8_config": FP8.edits["fp8_config"] | {"fp8_enable_fsdp_float8_all_gather": False}},
    ["--fp8_recipe=rowwise"],
)
FORWARD_PREFETCH = Setup({"fsdp_forward_prefetch": True})
NO_WRAP = Setup({"fsdp_auto_wrap_policy": "NO_WRAP"})
SIZE_WRAP = Setup({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 100_000_000})


def blocks(number: int) -> Setup:
    return Setup(flags=[f"--blocks_per_unit={number}"])


def recomputed(every: int) -> Setup:
    return CHECKPOINTING + Setup(flags=[f"--recompute_matmuls={every}"])


def batch(per_device: int) -> Setup:
    return Setup(per_device=per_device)


LLAMA_SETUPS = {
    "eager": EAGER,
    "eager_checkpointing": CHECKPOINTING,
    "ours": COMPILED,
    "ours_forward_prefetch": COMPILED + FORWARD_PREFETCH,
    "ours_no_wrap": COMPILED + NO_WRAP,
    "ours_size_wrap": COMPILED + SIZE_WRAP,
    "ours_2_blocks": COMPILED + blocks(2),
    "ours_4_blocks": COMPILED + blocks(4),
    "ours_chunked_loss": COMPILED + Setup(flags=["--loss_chunk_tokens=2048"]),
    "ours_bf16_reduce": COMPILED + BF16_REDUCE,
    "ours_kept": COMPILED + KEPT,
    "ours_kept_bf16_reduce": COMPILED + KEPT + BF16_REDUCE,
    "ours_kept_nccl": COMPILED + KEPT + NCCL,
    "ours_sdpa_kept_bf16_reduce": COMPILED + KEPT + BF16_REDUCE + SDPA,
    "ours_checkpointing": COMPILED + CHECKPOINTING,
    "ours_selective": COMPILED + recomputed(2),
    "ours_selective_4": COMPILED + recomputed(4),
    "ours_fp8": COMPILED + FP8 + BF16_REDUCE,
    "ours_fp8_kept": COMPILED + FP8 + KEPT + BF16_REDUCE,
    "ours_fp8_kept_copies": COMPILED + FP8 + KEPT,
    "ours_rowwise_kept": COMPILED + ROWWISE + KEPT + BF16_REDUCE,
}
T5_SETUPS = {
    "tutorial": CHECKPOINTING + Setup(flags=["--attn_implementation=eager"]),
    "eager": EAGER,
    "ours": COMPILED,
    "ours_16": COMPILED + batch(16),
    "ours_16_kept": COMPILED + batch(16) + KEPT,
    "ours_32_kept": COMPILED + batch(32) + KEPT,
    "ours_16_kept_bf16_reduce": COMPILED + batch(16) + KEPT + BF16_REDUCE,
    "ours_32_kept_bf16_reduce": COMPILED + batch(32) + KEPT + BF16_REDUCE,
    "ours_40_kept_bf16_reduce": COMPILED + batch(40) + KEPT + BF16_REDUCE,
    "ours_48_kept_bf16_reduce": COMPILED + batch(48) + KEPT + BF16_REDUCE,
    "ours_56_kept_bf16_reduce": COMPILED + batch(56) + KEPT + BF16_REDUCE,
    "ours_32_sdpa": COMPILED + batch(32) + KEPT + BF16_REDUCE + SDPA,
    "ours_16_products": COMPILED + batch(16) + KEPT + BF16_REDUCE + PRODUCTS,
}
SHAPES = {
    "llama3_8b": Shape(
        "gpt_shakespeare",
        ["--config=gpt_shakespeare_8b", f"--tokenizer_name_or_path={SAMPLE_TOKENIZER}", "--max_seq_length=8192"],
        1, LLAMA_SETUPS,
    ),
    "codellama_7b": Shape(
        "chess_finetune",
        [
            "--config=chess_finetune_7b", "--model_config_path=recipes/configs/models/chess_7b", "--packing=true",
            f"--tokenizer_name_or_path={SAMPLE_TOKENIZER}", "--max_seq_length=1024", "--legal_move_samples=0",
            f"--train_file={SAMPLES / 'chess_games.jsonl'}", "--eval_on_start=false",
        ],
        8, LLAMA_SETUPS,
    ),
    "t5_3b": Shape(
        "t5_summarize",
        ["--config=t5_summarize_3b", "--model_config_path=recipes/configs/models/t5_3b", "--rouge_samples=0"],
        8, T5_SETUPS,
    ),
    "demo": Shape(
        "t5_summarize",
        ["--config=t5_summarize_demo", "--max_source_length=64", "--max_target_length=16", "--rouge_samples=0"],
        2, {"tutorial": T5_SETUPS["tutorial"], "eager": EAGER, "ours_kept": COMPILED + KEPT},
    ),
}  # fmt: skip


def run_setup(
    name: str, shape: Shape, num_processes: int, steps: int, output: Path, flags: list[str]
) -> "list[dict[str, float]] | str":
    """Lines of metrics.jsonl of one setup, or its error."""
    setup = shape.setups[name]
    config = yaml.safe_load((CONFIGS / "fsdp_full_shard.yaml").read_text())
    for key, value in setup.edits.items():
        (config["fsdp_config"] if key.startswith("fsdp_") else config)[key] = value
    path = output / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    per_device = setup.per_device or shape.per_device
    own = [f"--per_device_train_batch_size={per_device}", f"--total_batch_size={per_device * num_processes}"]
    return run_recipe(shape.recipe, path, num_processes, steps, output, [*shape.flags, *own, *setup.flags, *flags])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--setups", nargs="+", help="default: all of the shape")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lengths", choices=("equal", "wikihow"), default="equal", help="of T5's documents")
    parser.add_argument("--tokenizer", default=SAMPLE_TOKENIZER, type=Path, help="T5's, for its shapes")
    parser.add_argument("--output", required=True, type=Path)
    args, flags = parser.parse_known_args()
    shape = SHAPES[args.shape]
    names = args.setups or list(shape.setups)
    if unknown := set(names) - set(shape.setups):
        parser.error(f"--setups: {', '.join(sorted(unknown))} not in {', '.join(shape.setups)}")
    args.output.mkdir(parents=True, exist_ok=True)
    if shape.recipe == "t5_summarize":
        articles = args.output / "articles.jsonl"
        articles.write_text("".join(json.dumps(row) + "\n" for row in make_articles(args.lengths)))
        flags = [f"--tokenizer_name_or_path={args.tokenizer}", f"--train_file={articles}", *flags]
    print(f"{HEADER} {'ratio':>6} {'ex/s':>7}", flush=True)
    first = None
    for name in names:
        lines = run_setup(name, shape, args.num_processes, args.steps, args.output, flags)
        text = row(name, lines)
        if not isinstance(lines, str):
            steady = lines[len(lines) // 2 :]
            speed = statistics.median(line["tokens_per_second_per_device"] for line in steady)
            seconds = statistics.median(line["step_seconds"] for line in steady)
            first = first or speed
            num_examples = (shape.setups[name].per_device or shape.per_device) * args.num_processes
            text += f" {speed / first:>6.2f} {num_examples / seconds:>7.1f}"
        print(text, flush=True)


def make_articles(lengths: str) -> Iterator[dict[str, str]]:
    """Articles of the sample's words: all longer than what is cut, or as long as WikiHow's."""
    words = (SAMPLES / "wikihow_articles.csv").read_text(encoding="utf-8").split()
    rng = random.Random(0)

    def text(num_words: int) -> str:
        start = rng.randrange(len(words))
        return " ".join((words[start:] + words * (num_words // len(words) + 1))[:num_words])

    def draw(mean: float, sigma: float) -> int:
        return max(3, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

    for _ in range(NUM_ARTICLES):
        if lengths == "equal":
            yield {"document": text(700), "summary": text(250)}
        else:
            yield {"document": text(draw(*ARTICLE_WORDS)), "summary": text(draw(*SUMMARY_WORDS))}


if __name__ == "__main__":
    main()
