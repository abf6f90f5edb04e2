"""Go on pretraining a causal language model, Llama-3-8B for instance, on your text, and see what it forgets.

    accelerate launch --config_file accelerate_configs/fsdp_full_shard.yaml recipes/llama_pretrain.py \
        --config recipes/configs/llama_pretrain_8b.yaml --train_file data/pretrain --forgetting_dataset general.jsonl

The YAML says how the run is spread over devices, the preset what is trained; without --config it is _8b where there are
GPUs and _demo, on the embedded articles, where there are none. Text is packed into sequences of --max_seq_length:
files (--train_file), a folder that tools/prepare_data.py or `datasets` has tokenized, a dataset on the hub
(--dataset_name), each also as it comes (--streaming). Several sources, with semicolons between, are mixed by weights.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from common import data
from common.arguments import TrainArguments, UserError, arg, num_training_steps, parse_args, plan_batch
from common.checkpoint import Checkpoints
from common.documents import Encoder
from common.evaluation import (
    continue_text,
    evaluation_batches,
    loss_and_accuracy,
    perplexity,
    sum_over_dataset,
    token_statistics,
)
from common.export import export_model
from common.launch import banner, build_accelerator, compute_dtype, run
from common.loop import train
from common.metrics import ModelFlops, Throughput, peak_flops_per_second
from common.models import (
    PACKING_KERNELS,
    check_kind,
    check_packing,
    describe_model,
    fit_config,
    load_config,
    load_model,
    load_tokenizer,
)
from common.optim import build_optimizer, build_scheduler, describe_schedule
from common.sharding import check_wrapping, describe_units, prepare_model
from common.sources import (
    Mixture,
    SourceSampler,
    SourceSettings,
    TokenRows,
    list_sources,
    load_held_out,
    load_sources,
    load_stream,
    source_name,
)
from common.tracking import RunLog

SAMPLE_FILE = Path(__file__).resolve().parent / "samples" / "wikihow_articles.csv"


@dataclass
class LlamaArguments(TrainArguments):
    presets: ClassVar[tuple[str, str]] = ("llama_pretrain_demo", "llama_pretrain_8b")

    train_file: str | None = arg(
        None,
        "Text, JSON lines, CSV, parquet or Arrow: files, folders, patterns, with commas; or a tokenized folder "
        "(default: the embedded articles). Semicolons separate sources.",
    )
    dataset_name: str | None = arg(None, "Datasets on the Hugging Face hub, as sources like those of --train_file.")
    source_weights: str | None = arg(None, "Shares of the sources in training, with commas; needed with several.")
    validation_file: str | None = arg(None, "Held-out text, in any form of --train_file.")
    validation_size: float = arg(0.01, "Without such: fraction of the first source's documents that is set aside.")
    forgetting_dataset: str | None = arg(
        None, "Text of what the model should not forget, in any form; semicolons separate. Implies --eval_on_start."
    )
    text_column: str = arg("text", "Column of the text.")
    max_seq_length: int = arg(2048, "Tokens of a training sequence.")
    document_masking: bool = arg(False, "No attention between the documents of a sequence; positions begin anew.")
    streaming: bool = arg(False, "Tokenize as training goes; needs --max_steps and --validation_file.")
    shuffle_window: int = arg(1024, "Sequences that are shuffled at a time in a stream.")
    prompt: str | None = arg(None, "Text to go on from, greedily, at each evaluation.")
    max_new_tokens: int = arg(60, "Tokens that follow the prompt.")

    def acting(self) -> dict[tuple[str, str], bool]:
        return super().acting() | {
            ("shuffle_window", "streaming"): self.streaming,
            ("max_train_samples", "streaming"): not self.streaming,
            ("validation_size", "validation_file"): self.validation_file is None or self.validation_size == 0,
            ("validation_size", "streaming"): not self.streaming or self.validation_size == 0,
            ("max_new_tokens", "prompt"): self.prompt is not None,
        }

    def no_slices(self) -> str | None:
        if not self.document_masking:
            return None
        return (
            "context parallelism has plain causal attention only, and documents are not to see each other: set "
            "--document_masking false, or take another YAML"
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_new_tokens", "shuffle_window", "max_seq_length"):
            if getattr(self, name) < 1 + (name == "max_seq_length"):
                raise UserError(f"--{name} is {getattr(self, name)}; it is too small.")
        if not 0 <= self.validation_size < 1:
            raise UserError(f"--validation_size is {self.validation_size}; a fraction below 1 is expected.")
        if self.document_masking and self.attn_implementation not in PACKING_KERNELS:
            raise UserError(
                f"--document_masking: {self.attn_implementation} would let documents see each other; use sdpa or "
                "flex_attention."
            )
        if self.streaming and self.max_steps < 0:
            raise UserError("--streaming: a stream's length is not known; give --max_steps.")
        if self.streaming and self.dataloader_num_workers:
            raise UserError("--streaming reads in a thread of its own; set --dataloader_num_workers 0.")
        if self.streaming and self.validation_file is None and self.eval_strategy != "no":
            raise UserError(
                "--streaming: give --validation_file (or --eval_strategy no); nothing is set aside of a stream."
            )
        self.sources = list_sources(self.train_file, self.dataset_name, self.source_weights, default=str(SAMPLE_FILE))
        self.eval_on_start = self.eval_on_start or bool(self.forgetting_dataset)


def load_data(
    args: LlamaArguments, tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> tuple[Mixture, SourceSampler, dict[str, TokenRows]]:
    """Training sequences, their order, and the held-out sets by the name of their metrics ("": the validation text)."""
    settings = SourceSettings(
        tokenizer, args.max_seq_length, args.document_masking, args.text_column, args.seed,
        num_workers=args.preprocessing_num_workers or 1,
    )  # fmt: skip
    weights = [source.weight for source in args.sources]
    held_out: dict[str, TokenRows] = {}
    if args.streaming:
        window, validation_file = args.shuffle_window, args.validation_file
        mixture = Mixture([load_stream(source, settings, window, validation_file) for source in args.sources], weights)
        if args.validation_file:
            held_out[""] = load_held_out(args.validation_file, "--validation_file", settings)
        sampler = SourceSampler(mixture, batch_size, args.seed, max(1, args.max_steps) * batch_size)
    else:
        rows, validation = load_sources(
            args.sources, settings.setting_aside(args.validation_size), args.validation_file
        )
        if validation is not None:
            held_out[""] = validation
        mixture = Mixture([data.head(source, args.max_train_samples) for source in rows], weights)
        sampler = SourceSampler(mixture, batch_size, args.seed)
    for text in filter(None, map(str.strip, (args.forgetting_dataset or "").split(";"))):
        if (name := f"{source_name(text)}_") in held_out:
            raise UserError(f"--forgetting_dataset {args.forgetting_dataset}: two are called {name[:-1]}; rename one.")
        held_out[name] = load_held_out(text, "--forgetting_dataset", settings)
    if not held_out and args.eval_strategy != "no":
        raise UserError(
            "nothing to evaluate on: give --validation_file, or --validation_size (of text; tokenized data has a "
            "validation split of its own or none), or --eval_strategy no."
        )
    return mixture, sampler, {name: data.head(rows, args.max_eval_samples) for name, rows in held_out.items()}


class Evaluation:
    """Held-out sets and the losses of the model before training."""

    def __init__(
        self,
        args: LlamaArguments,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        held_out: dict[str, TokenRows],
        checkpoints: Checkpoints,
    ) -> None:
        self.args, self.accelerator, self.tokenizer = args, accelerator, tokenizer
        self.sets: dict[str, tuple[data.EvalBatches, float]] = {}
        for name, rows in held_out.items():
            batches = evaluation_batches(args, accelerator, rows, data.collate_windows)
            assert batches is not None  # no set is empty
            self.sets[name] = batches, data.head(rows, batches.num_examples).targets_per_byte()
        checkpoints.evaluation_data = {f"eval_{name}": batches.description for name, (batches, _) in self.sets.items()}
        self.before = checkpoints.before_training
        self.is_before_training = checkpoints.found is None or checkpoints.found.step == 0
        self.unknown: set[str] = set()

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Loss, perplexity and bits per byte of each set; of --forgetting_dataset also what was lost. Collective."""
        metrics: dict[str, float] = {}
        for name, (batches, targets_per_byte) in self.sets.items():
            sums = loss_and_accuracy(sum_over_dataset(self.accelerator, model, batches, token_statistics))
            loss = sums["eval_loss"]
            sums |= {"eval_perplexity": perplexity(loss), "eval_bits_per_byte": loss / math.log(2) * targets_per_byte}
            metrics |= {key.replace("eval_", f"eval_{name}", 1): value for key, value in sums.items()}
        for name, (batches, _) in self.sets.items():
            if name:
                metrics |= self.forgetting(name, metrics[f"eval_{name}loss"], batches.description)
        self.is_before_training = False
        if self.args.prompt:
            text = continue_text(
                self.accelerator, model, self.tokenizer, self.args.prompt, max_new_tokens=self.args.max_new_tokens,
                context_length=self.args.max_seq_length, start_token_id=Encoder(self.tokenizer).bos_token_id,
            )  # fmt: skip
            self.accelerator.print(f"-- answer\n{text}")
        return metrics

    def forgetting(self, name: str, loss: float, description: str) -> dict[str, float]:
        """The loss less the one before training, where it was of the same examples; else nothing, and a line."""
        if self.is_before_training:
            self.before.setdefault(name, {"data": description, "loss": loss})
        before = self.before.get(name, {})
        if before.get("data") == description:
            return {f"eval_{name}forgetting": loss - before["loss"]}
        if name not in self.unknown:
            self.unknown.add(name)
            self.accelerator.print(f"no {name}forgetting: these examples were not evaluated before training")
        return {}


def main() -> None:
    args = parse_args(LlamaArguments)
    accelerator, strategy = build_accelerator(args)
    plan = plan_batch(args, accelerator.num_processes, strategy.context_size)
    config = load_config(args)
    check_kind(config, AutoModelForCausalLM)
    check_wrapping(args, config, AutoModelForCausalLM, strategy)
    if args.document_masking:
        check_packing(args, config, AutoModelForCausalLM, "document_masking")
    tokenizer = load_tokenizer(args)
    fit_config(args, config, tokenizer, args.max_seq_length, is_own_vocabulary=False)
    checkpoints = Checkpoints(args, accelerator, strategy, tokenizer)

    train_data, sampler, held_out = load_data(args, tokenizer, plan.total)
    evaluate = Evaluation(args, accelerator, tokenizer, held_out, checkpoints)
    num_steps = num_training_steps(args, sampler.num_examples, plan.total)

    model, weights = load_model(args, config, AutoModelForCausalLM, accelerator, packs=args.document_masking)
    description, flops = describe_model(model, args), ModelFlops.of_model(model, strategy.context_size)
    model = prepare_model(model, weights, args, accelerator, strategy)
    optimizer = build_optimizer(model, args)
    scheduler = build_scheduler(optimizer, args, num_steps, steps_per_epoch=sampler.num_examples / plan.total)
    peak_flops = peak_flops_per_second(accelerator.device, compute_dtype(args, strategy))

    log = RunLog(args, accelerator, project="llama-pretrain", run_id=checkpoints.tracker_run_id)
    banner(
        args, accelerator, strategy, model=description, sharding=describe_units(model),
        batch=f"{plan}, {num_steps} steps", schedule=describe_schedule(args, num_steps),
        data=f"{train_data}; held-out sets: {len(held_out)}",
    )  # fmt: skip
    data.show_samples(accelerator, args.show_samples, train_data, tokenizer)
    train(
        args, plan, accelerator, model, optimizer, scheduler, train_data, sampler, data.collate_windows, log,
        Throughput(accelerator.device, flops, peak_flops), checkpoints,
        num_steps=num_steps,
        evaluate=(lambda: evaluate(model)) if held_out else None,
        export=lambda folder: export_model(model, tokenizer, folder, accelerator),
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
