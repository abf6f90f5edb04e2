"""Train a GPT from random weights on one text, Shakespeare for instance, and let it go on from a prompt.

    accelerate launch --config_file accelerate_configs/single_device.yaml recipes/gpt_shakespeare.py \
        --config recipes/configs/gpt_shakespeare_char_gpu.yaml --text_file data/shakespeare.txt --prompt "ROMEO:"

The YAML says how the run is spread over devices, the preset what is trained; without --config it is _124m where there
are GPUs and _demo where there are none. _char_cpu and _char_gpu are nanoGPT's settings for Shakespeare by characters.
--text_file is any UTF-8 text (Shakespeare: data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn), by
default the articles of the repository. With --model_name_or_path RUN/model --max_steps 0 an earlier model answers.
"""

import csv
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from accelerate import Accelerator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common import data
from common.arguments import TrainArguments, UserError, arg, num_training_steps, parse_args, plan_batch
from common.checkpoint import Checkpoints
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
    check_kind,
    describe_model,
    fit_config,
    load_config,
    load_model,
    load_tokenizer,
    max_positions,
)
from common.optim import build_optimizer, build_scheduler, describe_schedule
from common.sharding import check_wrapping, describe_units, prepare_model
from common.tracking import RunLog

SAMPLE_FILE = Path(__file__).resolve().parent / "samples" / "wikihow_articles.csv"
PIECE_CHARACTERS = 2**20  # that are tokenized at a time


@dataclass
class GPTArguments(TrainArguments):
    presets: ClassVar[tuple[str, str]] = ("gpt_shakespeare_demo", "gpt_shakespeare_124m")

    text_file: str | None = arg(None, "UTF-8 text; special tokens in it are such (default: the embedded articles).")
    validation_size: float = arg(0.1, "End of the text that is set aside, in characters; below 1: a fraction.")
    character_level: bool = arg(
        False, "Random weights: a token for each character of the text, instead of a tokenizer."
    )
    max_seq_length: int = arg(256, "Tokens of a training example.")
    prompt: str | None = arg(None, "Text to go on from after training (with --max_steps 0: at once).")
    max_new_tokens: int = arg(200, "Tokens that follow the prompt.")
    temperature: float = arg(0.8, "Of sampling after the prompt; 0: always the likeliest token.")

    def acting(self) -> dict[tuple[str, str], bool]:
        return super().acting() | {
            ("character_level", "model_name_or_path"): self.model_name_or_path is None,
            ("temperature", "prompt"): self.prompt is not None,
            ("max_new_tokens", "prompt"): self.prompt is not None,
        }

    def no_slices(self) -> str | None:
        return None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_seq_length", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be at least 1.")
        if self.validation_size <= 0:
            raise UserError(f"--validation_size is {self.validation_size}; it must be greater than 0.")
        if self.validation_size >= 1 and self.validation_size % 1:
            raise UserError(
                f"--validation_size is {self.validation_size}; give a fraction below 1 or whole characters."
            )
        if self.temperature < 0:
            raise UserError(f"--temperature is {self.temperature}; it must not be negative.")
        if self.character_level and self.tokenizer_name_or_path:
            raise UserError("--character_level makes its own tokenizer: drop it or --tokenizer_name_or_path.")


def read_text(args: GPTArguments) -> tuple[str, str]:
    """(training text, validation text), cut at a character as nanoGPT does; the embedded articles are joined."""
    if args.text_file is None:
        with SAMPLE_FILE.open(encoding="utf-8", newline="") as file:
            # Without what separates paragraphs in WikiHow's form of a text.
            articles = [re.sub(r";?\n+, ", "\n", row["text"]).strip() for row in csv.DictReader(file)]
        text = "\n\n".join(filter(None, articles))
    else:
        try:
            text = Path(args.text_file).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise UserError(
                f"--text_file {args.text_file}: cannot be read ({error.strerror}); give a text file."
            ) from error
        except UnicodeDecodeError as error:
            raise data.not_utf8(args.text_file, error) from None
    size = args.validation_size
    num_train = int(len(text) * (1 - size)) if size < 1 else len(text) - int(size)
    return text[: max(0, num_train)], text[max(0, num_train) :]


def character_tokenizer(text: str) -> PreTrainedTokenizerBase:
    """Tokenizer whose tokens are the text's characters in sorted order, without special tokens."""
    backend = Tokenizer(models.WordLevel({character: index for index, character in enumerate(sorted(set(text)))}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()  # without it, decoding puts a space between tokens
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, source: str) -> np.ndarray:
    """Token ids of the text, int32, without special tokens; `source` is named in errors."""
    try:
        # In pieces: what a tokenizer makes of a text takes some hundred bytes a token.
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids = [np.array(tokenizer(piece, **options)["input_ids"], dtype=np.int32) for piece in paragraphs(text)]
    except Exception as error:  # what `tokenizers` raises for a character that it has neither a token nor <unk> for
        unknown = "".join(sorted(set(text) - set(tokenizer.get_vocab())))
        raise UserError(
            f"{source}: {unknown[:20]!r} is not in the tokenizer's vocabulary; change it or the tokenizer."
        ) from error
    return np.concatenate(ids)


def paragraphs(text: str) -> Iterator[str]:
    """Pieces of the text, cut after the first empty line beyond each PIECE_CHARACTERS: no token reaches over one."""
    start = 0
    for end in itertools.chain((match.end() for match in re.finditer(r"\n\s*\n", text)), [len(text)]):
        if end - start >= PIECE_CHARACTERS or end == len(text):
            yield text[start:end]
            start = end


def load_blocks(
    args: GPTArguments, tokenizer: PreTrainedTokenizerBase, train_text: str, eval_text: str
) -> tuple[data.TokenWindows, data.TokenWindows]:
    """Training windows at every offset, as nanoGPT draws them, and the validation text cut into blocks."""
    source, block_size = f"--text_file {args.text_file or SAMPLE_FILE}", args.max_seq_length
    train_tokens, eval_tokens = (encode(tokenizer, text, source) for text in (train_text, eval_text))
    if len(train_tokens) <= block_size or len(eval_tokens) < 2:
        raise UserError(
            f"{source}: {len(train_tokens)} training and {len(eval_tokens)} validation tokens are too few: more than "
            f"--max_seq_length {block_size} and at least 2 are needed; give a longer text or another --validation_size."
        )
    train_data = data.TokenWindows(train_tokens, block_size, range(len(train_tokens) - block_size))
    eval_data = data.TokenWindows(eval_tokens, block_size, range(0, len(eval_tokens) - 1, block_size))
    return data.head(train_data, args.max_train_samples), data.head(eval_data, args.max_eval_samples)


def evaluate(
    accelerator: Accelerator, model: nn.Module, batches: data.EvalBatches, bytes_per_token: float
) -> dict[str, float]:
    """Loss over the whole validation text, per token and per byte, and token accuracy."""
    metrics = loss_and_accuracy(sum_over_dataset(accelerator, model, batches, token_statistics))
    loss = metrics["eval_loss"]
    return metrics | {"eval_perplexity": perplexity(loss), "eval_bits_per_byte": loss / math.log(2) / bytes_per_token}


def main() -> None:
    args = parse_args(GPTArguments)
    accelerator, strategy = build_accelerator(args)
    plan = plan_batch(args, accelerator.num_processes, strategy.context_size)
    config = load_config(args)
    check_kind(config, AutoModelForCausalLM)
    check_wrapping(args, config, AutoModelForCausalLM, strategy)
    train_text, eval_text = read_text(args)
    is_new_tokenizer = args.character_level and not args.model_name_or_path
    tokenizer = character_tokenizer(train_text + eval_text) if is_new_tokenizer else load_tokenizer(args)
    fit_config(args, config, tokenizer, args.max_seq_length, is_own_vocabulary=args.character_level)
    checkpoints = Checkpoints(args, accelerator, strategy, tokenizer)

    train_data, eval_data = load_blocks(args, tokenizer, train_text, eval_text)
    if args.prompt:
        encode(tokenizer, args.prompt, f"--prompt {args.prompt!r}")  # what cannot be answered is known before training
    sampler = data.StepSampler(len(train_data), plan.total, args.seed)
    eval_batches = evaluation_batches(args, accelerator, eval_data, data.collate_windows)
    assert eval_batches is not None, "load_blocks gives at least one block"
    checkpoints.evaluation_data = {"eval_": eval_batches.description}
    evaluated = eval_data.tokens[: eval_batches.num_examples * args.max_seq_length + 1]
    is_all = len(evaluated) == len(eval_data.tokens)
    bytes_per_token = len((eval_text if is_all else tokenizer.decode(evaluated)).encode()) / len(evaluated)
    num_steps = num_training_steps(args, len(train_data), plan.total)

    model, weights = load_model(args, config, AutoModelForCausalLM, accelerator)
    description, flops = describe_model(model, args), ModelFlops.of_model(model, strategy.context_size)
    model = prepare_model(model, weights, args, accelerator, strategy)
    optimizer = build_optimizer(model, args)
    scheduler = build_scheduler(optimizer, args, num_steps, steps_per_epoch=len(train_data) / plan.total)
    peak_flops = peak_flops_per_second(accelerator.device, compute_dtype(args, strategy))

    log = RunLog(args, accelerator, project="gpt-shakespeare", run_id=checkpoints.tracker_run_id)
    sizes = f"{len(train_data.tokens):,} training and {len(eval_data.tokens):,} validation tokens"
    banner(
        args, accelerator, strategy, model=description, sharding=describe_units(model),
        batch=f"{plan}, {num_steps} steps", schedule=describe_schedule(args, num_steps),
        data=f"{sizes}, vocabulary of {len(tokenizer):,}",
    )  # fmt: skip
    data.show_samples(accelerator, args.show_samples, train_data, tokenizer)
    train(
        args, plan, accelerator, model, optimizer, scheduler, train_data, sampler, data.collate_windows, log,
        Throughput(accelerator.device, flops, peak_flops), checkpoints,
        num_steps=num_steps,
        evaluate=lambda: evaluate(accelerator, model, eval_batches, bytes_per_token),
        export=lambda folder: export_model(model, tokenizer, folder, accelerator),
    )  # fmt: skip
    if args.prompt:
        text = continue_text(
            accelerator, model, tokenizer, args.prompt, max_new_tokens=args.max_new_tokens,
            context_length=max_positions(config) or args.max_seq_length, temperature=args.temperature, seed=args.seed,
        )  # fmt: skip
        accelerator.print(f"-- answer\n{text}")


if __name__ == "__main__":
    run(main)
