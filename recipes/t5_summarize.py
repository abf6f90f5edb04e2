"""Fine-tune T5 to summarize: T5-3B on WikiHow, scored with ROUGE, after PyTorch's advanced FSDP tutorial.

    accelerate launch --config_file accelerate_configs/fsdp_full_shard.yaml recipes/t5_summarize.py \
        --config recipes/configs/t5_summarize_3b.yaml

The YAML says how the run is spread over devices, the preset what is trained; without --config it is _3b where there are
GPUs and _demo, on articles that ship with the repository, where there are none. Data: WikiHow's wikihowAll.csv or
wikihowSep.csv, placed by hand (--train_file data/wikihowAll.csv), a dataset on the hub (--dataset_name), or any CSV,
JSON lines or parquet file (--document_column, --summary_column).
"""

import functools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from common import data
from common.accelerate_config import FP16_WITH_T5
from common.arguments import TrainArguments, UserError, arg, num_training_steps, parse_args, plan_batch
from common.checkpoint import Checkpoints
from common.evaluation import evaluation_batches, generate_texts, loss_and_accuracy, sum_over_dataset, token_statistics
from common.export import export_model
from common.launch import banner, build_accelerator, compute_dtype, run
from common.loop import train
from common.metrics import ModelFlops, Throughput, peak_flops_per_second
from common.models import (
    check_kind,
    check_positions,
    check_vocabulary,
    describe_model,
    load_config,
    load_model,
    load_tokenizer,
)
from common.optim import build_optimizer, build_scheduler, describe_schedule
from common.rouge import Rouge, one_sentence_per_line
from common.sharding import check_wrapping, describe_units, prepare_model
from common.tracking import RunLog

SAMPLE_FILE = Path(__file__).resolve().parent / "samples" / "wikihow_articles.csv"
WIKIHOW_FILES = ("wikihowAll.csv", "wikihowSep.csv")
# (document, summary) columns that need no flag: WikiHow's, and the usual ones of other summarization datasets.
KNOWN_COLUMNS: list[tuple[str, ...]] = [
    ("text", "headline"), ("document", "summary"), ("article", "highlights"), ("source", "target")
]  # fmt: skip


@dataclass
class T5Arguments(TrainArguments):
    presets: ClassVar[tuple[str, str]] = ("t5_summarize_demo", "t5_summarize_3b")

    dataset_name: str | None = arg(None, "Dataset on the Hugging Face hub.")
    dataset_config_name: str | None = arg(None, "Configuration of that dataset, such as 3.0.0.")
    train_file: str | None = arg(None, "CSV, JSON lines or parquet file or folder (default: the embedded articles).")
    validation_file: str | None = arg(None, "The same for validation (default: the official split, or a seeded one).")
    validation_size: float = arg(0.05, "Rows set aside where there is no validation split; below 1: a fraction.")
    document_column: str | None = arg(None, "Column to summarize; a list of sentences is joined (default: by name).")
    summary_column: str | None = arg(None, "Column of the summary; the first of a list of them (default: by name).")
    max_summary_ratio: float = arg(0.75, "Drop rows whose summary is not shorter than this times the document.")
    source_prefix: str = arg("summarize: ", "Put before every document.")
    max_source_length: int = arg(512, "Tokens of a document; the rest is cut.")
    max_target_length: int = arg(150, "Tokens of a summary; the rest is cut.")
    num_beams: int = arg(4, "Beams of generated summaries; 1: greedy.")
    max_new_tokens: int = arg(150, "Tokens of a generated summary.")
    rouge_samples: int | None = arg(None, "Summarize only so many validation examples; 0: no ROUGE (default: all).")

    def acting(self) -> dict[tuple[str, str], bool]:
        return super().acting() | {
            ("validation_size", "validation_file"): self.validation_file is None,
            ("dataset_config_name", "dataset_name"): self.dataset_name is not None,
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"num_beams": 1, "max_new_tokens": 1, "max_source_length": 2, "max_target_length": 2}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be at least {value}.")
        if self.rouge_samples is not None and self.rouge_samples < 0:
            raise UserError(f"--rouge_samples is {self.rouge_samples}; give a number of examples, or 0 for no ROUGE.")
        if self.validation_size <= 0 or self.max_summary_ratio <= 0:
            raise UserError("--validation_size and --max_summary_ratio must be greater than 0.")
        if self.validation_size >= 1 and self.validation_size % 1:
            raise UserError(f"--validation_size is {self.validation_size}; give a fraction below 1 or whole rows.")
        if self.document_column and self.document_column == self.summary_column:
            raise UserError(f"--document_column and --summary_column are both {self.document_column}.")
        if bool(self.document_column) != bool(self.summary_column):
            raise UserError("--document_column and --summary_column go together: give both or neither.")


def load_articles(args: T5Arguments) -> tuple[Dataset, Dataset, Counter[str]]:
    """(training rows, validation rows, number of left-out rows by reason); a row has `document` and `summary`."""
    file = Path(args.train_file or SAMPLE_FILE)
    if file.name in WIKIHOW_FILES and not file.exists():
        raise UserError(
            f"--train_file {file}: no such file. WikiHow is placed by hand: find {file.name} (columns headline, title, "
            f"text) through https://github.com/mahnazkoupaee/WikiHow-Dataset and save it as {file.absolute()}, beside "
            "it all_train.txt and all_val.txt for the official split. Without it: --config t5_summarize_demo"
        )
    titles = {} if args.dataset_name or args.validation_file else official_titles(file)
    columns = KNOWN_COLUMNS
    if args.document_column and args.summary_column:
        columns = [(args.document_column, args.summary_column)]
    splits = data.load_splits(
        columns=[(*pair, "title") for pair in columns] if titles else columns,
        dataset_name=args.dataset_name,
        dataset_config_name=args.dataset_config_name,
        train_file=None if args.dataset_name and not args.train_file else file,
        validation_file=args.validation_file,
        hint="Name others with --document_column and --summary_column.",
    )
    left_out: Counter[str] = Counter()
    if titles:
        rows = splits["train"]
        keys = [title_key(data.as_text(title)) for title in rows["title"][:]]
        splits = {name: rows.select([i for i, key in enumerate(keys) if key in titles[name]]) for name in titles}
        if not all(len(rows) for rows in splits.values()):
            raise UserError(f"{file}: no row has a title of all_train.txt, or none one of all_val.txt, beside it")
        left_out["title in neither list"] = sum(all(key not in listed for listed in titles.values()) for key in keys)
    for name, rows in splits.items():
        splits[name], dropped = data.clean(
            rows,
            functools.partial(clean_article, columns=rows.column_names[:2], max_summary_ratio=args.max_summary_ratio),
            columns=("document", "summary"),
            source=f"{args.dataset_name or file} ({name})",
            num_workers=args.preprocessing_num_workers,
        )
        left_out += dropped
    rows, is_drawn = splits["train"], "validation" not in splits
    if is_drawn:
        train, validation = data.split(rows, args.validation_size, args.seed, "document")
    else:
        train, validation = rows, splits["validation"]
    if args.validation_file:
        train = data.without_copies(train, validation, "document")
    num_copies = len(rows) - len(train) - (len(validation) if is_drawn else 0)
    left_out += Counter({"copy of a validation document": num_copies})
    return data.head(train, args.max_train_samples), data.head(validation, args.max_eval_samples), left_out


def clean_article(
    row: dict[str, Any], columns: list[str], max_summary_ratio: float
) -> tuple[dict[str, str] | None, str | None]:
    """(document and summary with one paragraph or step a line, None), or (None, why the row is dropped).

    WikiHow, known by its `headline`, is cleaned as by the dataset's own process.py. What that leaves of the separators
    between steps (`;` and `,` at the ends of lines, `., ` inside them) goes too.
    """
    document, summary = row[columns[0]], row[columns[1]]
    if isinstance(summary, list):  # several summaries of the same document
        summary = next(filter(None, summary), None)
    document, summary = (data.as_text(text).replace("\r\n", "\n").strip() for text in (document, summary))
    is_too_long = len(summary) >= max_summary_ratio * len(document)
    if columns[1] == "headline":
        summary = summary.replace(".,", ".")
        document = re.sub(r"[.]+\n+,", ".\n", document)
        document = re.sub(r"(?<=\w{3}[.!?]),\s+(?=[A-Z])", "\n", document)  # three letters: not "e.g., Word"
        document, summary = (re.sub(r"(?m)^[ ;,]+|[ ;,]+$", "", text) for text in (document, summary))
    document, summary = data.squeeze(document), data.squeeze(summary)
    if not any(map(str.isalnum, document)):
        return None, "empty text"
    if not any(map(str.isalnum, summary)):
        return None, "empty summary"
    if is_too_long:
        return None, f"summary not shorter than {max_summary_ratio:g} x text"
    return {"document": document, "summary": summary}, None


def official_titles(file: Path) -> dict[str, set[str]]:
    """Titles of WikiHow's splits, from the lists beside `file` or in that folder; empty unless both are there."""
    folder = file if file.is_dir() else file.parent
    lists = {"train": folder / "all_train.txt", "validation": folder / "all_val.txt"}
    if not all(path.is_file() for path in lists.values()):
        return {}
    return {name: {title_key(line) for line in path.read_text("utf-8").splitlines()} for name, path in lists.items()}


def title_key(title: str) -> str:
    """A title as the lists have it: letters and digits only."""
    return "".join(filter(str.isalnum, title))


def tokenize_articles(args: T5Arguments, tokenizer: PreTrainedTokenizerBase, rows: Dataset) -> Dataset:
    """Token ids of the articles: `input_ids`, `attention_mask`, `labels`, and `length`, the tokens of both."""
    return data.tokenize_pairs(
        rows,
        tokenizer,
        columns=("document", "summary"),
        source_prefix=args.source_prefix,
        max_source_length=args.max_source_length,
        max_target_length=args.max_target_length,
        num_workers=args.preprocessing_num_workers,
    )


def evaluate(
    args: T5Arguments, accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, rows: Dataset,
    batches: data.EvalBatches | None, rouge_batches: data.EvalBatches | None,
) -> dict[str, float]:  # fmt: skip
    """Validation loss, token accuracy, and ROUGE of generated summaries, of which two are shown."""
    assert batches is not None  # there is always a validation example
    metrics = loss_and_accuracy(sum_over_dataset(accelerator, model, batches, token_statistics))
    if rouge_batches is None:
        return metrics
    texts = generate_texts(
        accelerator, model, tokenizer, rouge_batches, max_new_tokens=args.max_new_tokens, num_beams=args.num_beams
    )
    if texts is not None:  # on the main process
        predictions = [one_sentence_per_line(text) for text in texts]
        references = [one_sentence_per_line(text) for text in rows[: len(texts)]["summary"]]
        scores = Rouge().compute(predictions=predictions, references=references)
        metrics |= {f"eval_{name}": score for name, score in scores.items()} | {"eval_rouge_examples": len(texts)}
        for pair in zip(references[:2], predictions[:2], strict=True):
            tqdm.write("  reference: {}\n  predicted: {}".format(*(" ".join(text.split()) for text in pair)))
    return broadcast_object_list([metrics])[0]


def main() -> None:
    args = parse_args(T5Arguments)
    accelerator, strategy = build_accelerator(args)
    if strategy.asked_precision == "fp16":
        key = strategy.launch.named("mixed_precision")
        raise UserError(f"{key}: {FP16_WITH_T5}.")
    plan = plan_batch(args, accelerator.num_processes)
    config = load_config(args)
    check_kind(config, AutoModelForSeq2SeqLM)
    check_wrapping(args, config, AutoModelForSeq2SeqLM, strategy)
    tokenizer = load_tokenizer(args)
    check_vocabulary(config, tokenizer)
    check_positions(config, "max_source_length", args.max_source_length)
    check_positions(config, "max_target_length", args.max_target_length)
    config.prefix = args.source_prefix  # what reads the exported model finds it there
    checkpoints = Checkpoints(args, accelerator, strategy, tokenizer)

    train_rows, eval_rows, left_out = load_articles(args)
    train_data, eval_data = (tokenize_articles(args, tokenizer, rows) for rows in (train_rows, eval_rows))
    # The relative position bias is the mask of the attention kernels, and they copy it where its rows are no multiple
    # of 16 long.
    collate = data.Seq2SeqCollator(tokenizer, config.decoder_start_token_id, pad_to_multiple_of=16)
    sampler = data.StepSampler(len(train_data), plan.total, args.seed, data.column_array(train_data, "length"))
    eval_batches = evaluation_batches(args, accelerator, eval_data, collate)
    rouge_batches = evaluation_batches(args, accelerator, data.head(eval_data, args.rouge_samples), collate)
    checkpoints.evaluation_data = {"eval_": eval_batches.description} if eval_batches else {}
    if rouge_batches and "rouge" in args.metric_for_best_model:
        how = f"{args.max_new_tokens} new tokens, {args.num_beams} beams"
        checkpoints.evaluation_data["eval_rouge"] = f"{rouge_batches.description}, {how}"
    num_steps = num_training_steps(args, len(train_data), plan.total)

    model, weights = load_model(args, config, AutoModelForSeq2SeqLM, accelerator)
    description, flops = describe_model(model, args), ModelFlops.of_model(model)
    model = prepare_model(model, weights, args, accelerator, strategy)
    optimizer = build_optimizer(model, args)
    scheduler = build_scheduler(optimizer, args, num_steps, steps_per_epoch=len(train_data) / plan.total)
    peak_flops = peak_flops_per_second(accelerator.device, compute_dtype(args, strategy))

    log = RunLog(args, accelerator, project="t5-summarize", run_id=checkpoints.tracker_run_id)
    banner(
        args, accelerator, strategy, model=description, sharding=describe_units(model),
        batch=f"{plan}, {num_steps} steps", schedule=describe_schedule(args, num_steps),
        data=data.describe(train_data, eval_data, left_out),
    )  # fmt: skip
    data.show_samples(accelerator, args.show_samples, train_data, tokenizer)
    train(
        args, plan, accelerator, model, optimizer, scheduler, train_data, sampler, collate, log,
        Throughput(accelerator.device, flops, peak_flops), checkpoints,
        num_steps=num_steps,
        evaluate=lambda: evaluate(args, accelerator, model, tokenizer, eval_rows, eval_batches, rouge_batches),
        export=lambda folder: export_model(model, tokenizer, folder, accelerator),
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
