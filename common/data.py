"""Data: tables read and tokenized once per node, rows cleaned with counts by reason, batches in a fixed order.

The order of training examples is an endless sequence of per-epoch permutations. Global batch number `step` is a fixed
slice of it and processes take slices of the batch: a resumed run needs only the step, with any number of processes.
"""

import bisect
import csv
import functools
import glob
import itertools
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import xxhash
from accelerate import Accelerator, PartialState
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.fingerprint import Hasher
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from common.arguments import UserError
from common.files import bad_utf8_line
from common.losses import IGNORE_INDEX

TABLE_SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
SPLITS = ("train", "validation")
MAX_WINDOW_BATCHES = 50
MAX_NAMES = 16  # of examples in messages
HASHED_BYTES, HASHED_EXAMPLES = 2**30, 4096  # a table of more bytes is described by so many of its examples

Row = dict[str, Any]
Batch = dict[str, torch.Tensor]
Collator = Callable[[list[Row]], Batch]
Loaded = TypeVar("Loaded", Dataset, dict[str, Dataset])


# ---------------------------------------------------------------------------------------------------------------------
# Once per node


def once_per_node(build: Callable[[], Loaded]) -> Loaded:
    """Run `build` on the main process, then on one process of each other node, then everywhere else; return its data.

    `build` must go through the cache of `datasets`: the first turn does the work, later turns read its files (other
    nodes too where they share the file system). A failure in any turn is raised on every process, so that none waits.
    """
    state = PartialState()
    if state.num_processes == 1:
        return build()
    if not state.is_main_process:
        datasets.disable_progress_bars()
    group = _patient_group(torch.distributed.group.WORLD)
    my_turn = 0 if state.is_main_process else 1 if state.is_local_main_process else 2
    loaded: Loaded | None = None
    failure: Exception | None = None
    for turn in range(3):
        if turn == my_turn:
            try:
                loaded = build()
            except Exception as error:  # raised below, once the other processes know of it
                failure = error
        reports: list[Any] = [None] * state.num_processes
        said = failure and (isinstance(failure, UserError), str(failure))
        torch.distributed.all_gather_object(reports, said, group=group)
        if failure is not None:
            raise failure
        for is_user_error, message in filter(None, reports):
            raise UserError(message) if is_user_error else RuntimeError(f"another process: {message}")
    assert loaded is not None
    # A function whose hash differs between processes would have been run by each of them: racing, and N times the time.
    parts = loaded.values() if isinstance(loaded, dict) else [loaded]
    torch.distributed.all_gather_object(reports, tuple(part._fingerprint for part in parts), group=group)
    if len(set(reports)) > 1:
        raise UserError(
            "the machines of this run hold different data: the same files are needed on all of them, with the same "
            "times (rsync -t or cp -p keeps them), or a file system that they share."
        )
    return loaded


@functools.cache
def _patient_group(world: Any) -> torch.distributed.ProcessGroup:
    """Of the processes of `world`, for waits that may be longer than --ddp_timeout: millions of games are replayed.

    A process that dies ends them all the same.
    """
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(days=30))


# ---------------------------------------------------------------------------------------------------------------------
# Reading tables


def load_splits(
    *,
    columns: Sequence[tuple[str, ...]],
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    train_file: str | Path | None = None,
    validation_file: str | Path | None = None,
    hint: str = "",
) -> dict[str, Dataset]:
    """Read the "train" split and, where the source has one, the "validation" split; each has just the wanted columns.

    Source: `train_file` (and `validation_file`), each a CSV, JSON lines or parquet file or a folder of them, or
    `dataset_name`, an id on the Hugging Face hub. A folder's files go to the splits that their names say
    (`train-0001.csv`, `dev.jsonl`); where no name says one, all are "train". A "test" split is never used.
    `columns`: alternatives; the first one that every file has is taken. `hint` ends the error message when none fits.
    From files every column comes as text or as a list of texts; an absent or null value is None.
    Raises UserError for a missing file, missing columns, malformed rows, a hub that cannot be reached.
    """
    if (dataset_name is None) == (train_file is None):
        raise UserError("give either --dataset_name (a hub id) or --train_file (a file or folder), not both or neither")
    if dataset_name is not None:
        if validation_file is not None:
            raise UserError("--validation_file goes with --train_file; --dataset_name has its own validation split")
        return once_per_node(functools.partial(_load_hub_splits, dataset_name, dataset_config_name, columns, hint))
    assert train_file is not None
    files = list_tables(train_file, "--train_file")
    if "train" not in files:
        names = ", ".join(file.name for tables in files.values() for file in tables)
        raise UserError(f"--train_file {train_file}: no training file among {names}")
    if validation_file is not None:
        held_out = list_tables(validation_file, "--validation_file")
        files["validation"] = next(held_out[split] for split in ("validation", "test", "train") if split in held_out)
    splits = [split for split in SPLITS if split in files]
    return once_per_node(lambda: {split: _read_tables(files[split], columns, hint) for split in splits})


def list_tables(path: str | Path, flag: str) -> dict[str, list[Path]]:
    """The CSV, JSON lines and parquet files at `path`, a file or a folder, by split; `flag` is named in errors."""
    path = Path(path)
    if path.is_file():
        if path.suffix not in TABLE_SUFFIXES:
            raise UserError(f"{flag} {path}: a file ending in {', '.join(TABLE_SUFFIXES)} is expected")
        return {"train": [path]}
    if not path.is_dir():
        raise UserError(f"{flag} {path}: no such file or folder{'' if path.is_absolute() else f' in {Path.cwd()}'}")
    tables = sorted(file for file in path.iterdir() if file.suffix in TABLE_SUFFIXES)
    if not tables:
        raise UserError(f"{flag} {path}: the folder has no file ending in {', '.join(TABLE_SUFFIXES)}")
    by_split: dict[str, list[Path]] = {}
    for file in tables:
        words = re.split(r"[^a-z]+", file.stem.lower())
        split = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "")
        by_split.setdefault(split, []).append(file)
    if by_split.keys() == {""}:
        return {"train": tables}
    if unnamed := by_split.get(""):
        named = next(files[0] for split, files in by_split.items() if split)
        raise UserError(
            f"{flag} {path}: {named.name} is named for a split, {unnamed[0].name} is not: name all files for theirs, "
            "or none, or put those that are not meant elsewhere."
        )
    return by_split


def expand_paths(text: str, flag: str) -> list[str]:
    """Paths of a flag: with commas between, and patterns such as `games/*.pgn`.

    Raises `UserError` for a pattern without files, and for nothing between two commas, which would be this folder.
    """
    paths: list[str] = []
    parts = [text] if text.strip() and Path(text).exists() else [part.strip() for part in text.split(",")]
    for part in map(os.path.expanduser, parts):
        if not part:
            raise UserError(f"{flag} {text!r}: a path is empty; take out the comma that is too much.")
        found = sorted(glob.glob(part, recursive=True)) if glob.has_magic(part) and not Path(part).exists() else [part]
        if not found:
            raise UserError(f"{flag} {part}: no file has such a name.")
        paths += found
    return paths


def _read_tables(files: list[Path], columns: Sequence[tuple[str, ...]], hint: str) -> Dataset:
    found = {str(file): column_names(file) for file in files}
    wanted = _choose_columns(found, columns, hint)
    if not any(_has_rows(file) for file in files):
        raise UserError(f"{', '.join(map(str, files[:3]))}: no rows, only the names of the columns")
    parquet = [file for file in files if file.suffix == ".parquet"]
    others = [file for file in files if file.suffix != ".parquet"]
    parts = []
    try:
        if parquet:
            parts.append(
                datasets.load_dataset(
                    "parquet",
                    data_files=[str(file) for file in parquet],
                    columns=list(wanted),
                    features=_parquet_features(parquet, wanted),
                    split="train",
                )
            )
        if others:
            # Size and time are part of the cache key: an edited file is read again.
            keys = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in others]
            is_list = {name: any(_has_lists(file, name) for file in others) for name in wanted}
            features = Features({name: List(Value("string")) if is_list[name] else Value("string") for name in wanted})
            parts.append(
                Dataset.from_generator(
                    _read_rows, features=features, gen_kwargs={"files": keys, "columns": wanted, "is_list": is_list}
                )
            )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(f"{files[0]}{' and the files beside it' if files[1:] else ''}: {error.__cause__}") from error
    return datasets.concatenate_datasets(parts).select_columns(list(wanted))


def _choose_columns(found: Mapping[str, list[str]], columns: Sequence[tuple[str, ...]], hint: str) -> tuple[str, ...]:
    for choice in columns:
        if all(set(choice) <= set(names) for names in found.values()):
            return choice
    # With alternatives, the one that most files have says which file is the odd one out.
    best = max(columns, key=lambda choice: sum(set(choice) <= set(names) for names in found.values()))
    source, names = next((source, names) for source, names in found.items() if not set(best) <= set(names))
    missing = [name for name in best if name not in names]
    wanted = " or ".join(", ".join(choice) for choice in columns)
    message = f"{source}: no column {', '.join(map(repr, missing))}; it has {', '.join(names)}; wanted: {wanted}."
    raise UserError(f"{message} {hint}".strip())


def column_names(file: Path) -> list[str]:
    """Names of a table's columns; of JSON lines those that the first hundred rows have."""
    if file.suffix == ".parquet":
        try:
            return pq.read_schema(file).names
        except pa.ArrowInvalid as error:
            raise UserError(f"{file}: not a parquet file ({error})") from None
    if file.suffix == ".csv":
        names = next(csv_rows(file), [])
    else:  # optional keys may be absent from a row
        names = list(dict.fromkeys(key for _, row in itertools.islice(json_rows(file), 100) for key in row))
    if not names:
        raise UserError(f"{file}: the file is empty")
    return names


def _has_rows(file: Path) -> bool:
    if file.suffix == ".parquet":
        return pq.read_metadata(file).num_rows > 0
    return file.suffix != ".csv" or len(list(itertools.islice(csv_rows(file), 2))) == 2


def _parquet_features(files: list[Path], columns: tuple[str, ...]) -> Features:
    features: dict[str, Any] = {}
    for file in files:
        schema = pq.read_schema(file)
        for name in columns:
            kind = schema.field(name).type
            if pa.types.is_struct(kind) or pa.types.is_map(kind):
                raise UserError(f"{file}: column {name!r} is {kind}; text or a list of texts is expected")
            is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
            features[name] = List(Value("string")) if is_list else Value("string")
    return Features(features)


def _has_lists(file: Path, column: str) -> bool:
    return file.suffix != ".csv" and any(
        isinstance(row.get(column), list) for _, row in itertools.islice(json_rows(file), 100)
    )


def _read_rows(files: list[tuple[str, int, int]], columns: tuple[str, ...], is_list: dict[str, bool]) -> Iterator[Row]:
    """Rows of CSV and JSON lines files; own readers, which name a malformed row's line and pass over other columns."""
    for name, _, _ in files:
        file = Path(name)
        if file.suffix == ".csv":
            rows = csv_rows(file)
            header = next(rows)
            if twice := [column for column in columns if header.count(column) > 1]:
                raise UserError(f"{file}: column {twice[0]!r} is there {header.count(twice[0])} times; rename one")
            for values in rows:
                row = dict(zip(header, values, strict=False))  # a short row leaves its last columns empty
                yield {column: row.get(column) for column in columns}
        else:
            for line, row in json_rows(file):
                yield {
                    column: _text_value(row.get(column), is_list[column], f"{file} line {line}: {column!r}")
                    for column in columns
                }


def _text_value(value: Any, is_list: bool, where: str) -> Any:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        if not is_list:
            raise UserError(f"{where} is a list, unlike in the rows before; every row must have the same kind")
        for item in value:
            refuse_half_characters(item, where)
        return value
    if isinstance(value, (dict, list)):
        raise UserError(f"{where} is {json.dumps(value)[:60]}; text or a list of texts is expected")
    if value is None or (isinstance(value, float) and math.isnan(value)):  # as Python and pandas write a missing one
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    refuse_half_characters(text, where)
    return [text] if is_list else text


def refuse_half_characters(text: str, where: str) -> None:
    """Raise `UserError` for what JSON can spell, but no encoding of text and no tokenizer takes: a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} holds {text[error.start]!a}, half of a character; remove it or repair it") from None


def not_utf8(file: Path | str, error: UnicodeDecodeError) -> UserError:
    """The error about a file that is no UTF-8 text; `error` may be of a part of it."""
    line = bad_utf8_line(file)
    return UserError(
        f"{file} line {line}: not UTF-8 text ({error.reason}); convert it (iconv -t utf-8) or repair the line"
    )


def csv_rows(file: Path) -> Iterator[list[str]]:
    """The fields of each record, the header first. Fields may hold line breaks, as wikihowAll.csv's do."""
    csv.field_size_limit(2**24)  # the standard 2**17 is less than a long article
    text = ""  # the line read last, as it stands in the file

    def read_lines() -> Iterator[str]:
        nonlocal text
        with open(file, encoding="utf-8-sig", newline="") as lines:
            for text in lines:  # noqa: UP028 - `text` has to follow
                yield text

    reader = csv.reader(read_lines())
    width, first = 0, 1
    try:
        for fields in reader:
            width = width or len(fields)
            if len(fields) > width:
                raise UserError(f"{file} line {reader.line_num}: {len(fields)} fields where the header has {width}")
            if reader.line_num > first and fields[-1].endswith(text):
                raise UserError(f"{file} line {first}: a quote in this record is never closed")
            first = reader.line_num + 1
            if fields:
                yield fields
    except UnicodeDecodeError as error:
        raise not_utf8(file, error) from None
    except csv.Error as error:
        raise UserError(f"{file} line {reader.line_num}: {error}; is a quote before it never closed?") from None


def json_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """(line number, row) of each line that is not blank."""
    with open(file, encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (json.JSONDecodeError, RecursionError) as error:
                    raise UserError(
                        f"{file} line {number}: not JSON ({error}); one object a line is expected"
                    ) from None
                if not isinstance(row, dict):
                    raise UserError(f"{file} line {number}: a JSON {type(row).__name__}; one object a line is expected")
                yield number, row
        except UnicodeDecodeError as error:
            raise not_utf8(file, error) from None


def _load_hub_splits(
    dataset_name: str, config_name: str | None, columns: Sequence[tuple[str, ...]], hint: str
) -> dict[str, Dataset]:
    offline = "A preset that ends in _demo needs no network; --train_file reads local files."
    flag = f"--dataset_name {dataset_name}"
    try:
        loaded = datasets.load_dataset(dataset_name, config_name)
    except DatasetNotFoundError as error:
        page = f"https://huggingface.co/datasets/{dataset_name}"
        raise UserError(
            f"{flag}: {' '.join(str(error).split())} If it is gated, accept its licence at {page} and log in with "
            f"`hf auth login`; else check the name. {offline}"
        ) from error
    except ValueError as error:  # a configuration has to be chosen, or the chosen one does not exist
        raise UserError(f"{flag}, --dataset_config_name {config_name}: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise UserError(
            f"{flag}: the hub cannot be reached ({type(error).__name__}). Where there is a network, download it with "
            f'`make download ARGS="--dataset {dataset_name}"`, then set HF_HOME to that cache. {offline}'
        ) from error
    if "train" not in loaded:
        raise UserError(f"{flag}: no split 'train' among {', '.join(loaded)}")
    result = {}
    for name in SPLITS:
        if name in loaded:
            chosen = _choose_columns({f"{flag} ({name})": loaded[name].column_names}, columns, hint)
            result[name] = loaded[name].select_columns(list(chosen))
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Cleaning, splitting, tokenizing


def clean(
    dataset: Dataset,
    function: Callable[..., tuple[Row | None, str | None]],
    *,
    columns: Sequence[str],
    source: str,
    max_dropped_share: float = 0.5,
    num_workers: int | None = None,
) -> tuple[Dataset, Counter[str]]:
    """Apply `function(row) -> (new row, None) or (None, reason)`; return the new rows and the number dropped by reason.

    `columns` are those of the new rows, all of them text; `source` is named in errors. Cached like `tokenize`, with the
    same demands on `function`. Raises UserError where nothing is left or more than `max_dropped_share` was dropped.
    """
    if len(dataset) == 0:
        raise UserError(f"{source}: no rows")
    features = Features({name: Value("string") for name in (*columns, "dropped")})
    mapped = once_per_node(
        lambda: dataset.map(
            functools.partial(_clean_row, function=function, columns=tuple(columns), source=source),
            with_indices=True,
            remove_columns=dataset.column_names,
            features=features,
            num_proc=num_workers,
            new_fingerprint=_fingerprint(dataset, function, columns),
            desc="Cleaning",
        )
    )
    dropped = mapped.select_columns("dropped").with_format("arrow")[:]["dropped"]
    reasons = Counter({item["values"]: item["counts"] for item in pc.value_counts(dropped.drop_null()).to_pylist()})
    counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    if reasons.total() == len(dataset):
        raise UserError(f"{source}: no row of {len(dataset):,} is left after cleaning ({counts})")
    if reasons.total() > max_dropped_share * len(dataset):
        raise UserError(
            f"{source}: cleaning dropped {reasons.total():,} of {len(dataset):,} rows ({counts}), more than "
            f"{max_dropped_share:.0%}. Are these the right columns?"
        )
    if reasons:
        mapped = mapped.select(np.flatnonzero(pc.is_null(dropped).to_numpy()))
    return mapped.select_columns(list(columns)), reasons


def _clean_row(row: Row, index: int, function: Callable[..., Any], columns: tuple[str, ...], source: str) -> Row:
    try:
        new_row, reason = function(row)
    except UserError as error:
        raise UserError(f"{source}, row {index + 1}: {error}") from None
    return {**(new_row or dict.fromkeys(columns)), "dropped": reason}


def as_text(value: Any) -> str:
    """A cell as text: None and NaN are empty, lists of sentences are joined with spaces; others raise UserError."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, list) and all(item is None or isinstance(item, str) for item in value):
        return " ".join(item for item in value if item)
    if isinstance(value, (dict, list, bytes)):
        raise UserError(f"{type(value).__name__} {str(value)[:60]} where text is expected")
    return str(value)


def squeeze(text: str) -> str:
    """The text with each run of blanks made one, and without empty lines."""
    return "\n".join(filter(None, (" ".join(line.split()) for line in text.splitlines())))


def generate(
    function: Callable[..., Iterator[Row]], features: Features, *, num_workers: int | None = None, **arguments: Any
) -> Dataset:
    """The rows that `function(**arguments)` yields; once per node, cached under the hash of its file and the arguments.

    `num_workers`, where given, is an argument too, but one that must change no row: it is no part of the hash.
    `function` is called once: an argument that is a list would be cut in pieces by `datasets`, with a call for each.
    Raises the UserError that `function` raises.
    """
    assert not any(isinstance(value, list) for value in arguments.values())
    hasher = Hasher()
    hasher.update(Path(function.__code__.co_filename).read_bytes())
    for name, value in sorted(arguments.items()):
        hasher.update((name, value._fingerprint if isinstance(value, Dataset) else value))

    if num_workers is not None:
        arguments["num_workers"] = num_workers

    def build() -> Dataset:
        try:
            return Dataset.from_generator(
                function, features=features, gen_kwargs=arguments, fingerprint=hasher.hexdigest()
            )
        except DatasetGenerationError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise

    return once_per_node(build)


def head(dataset: Dataset, max_rows: int | None) -> Dataset:
    """The first `max_rows` rows; all of them for None."""
    return dataset if max_rows is None else dataset.select(range(min(max_rows, len(dataset))))


def without_copies(train: Dataset, validation: Dataset, column: str) -> Dataset:
    """The rows of `train` whose `column` has no text of `validation`: a model would know the answer."""
    held_out = set(validation[column][:])
    batches = train.select_columns(column).iter(1000)
    is_kept = [text not in held_out for batch in batches for text in batch[column]]
    if not any(is_kept):
        raise UserError(f"nothing to train on: the {column} of all {len(train)} rows is in the validation rows, too")
    return train.select(np.flatnonzero(is_kept))


def split(dataset: Dataset, validation_size: float, seed: int, column: str) -> tuple[Dataset, Dataset]:
    """(train, validation): `validation_size` rows drawn by `seed`; below 1 it is a fraction. Rows keep their order.

    Rows whose `column` has the same text as a row that is set aside are in neither.
    """
    num_rows = len(dataset)
    num_validation = max(1, round(validation_size * num_rows)) if validation_size < 1 else int(validation_size)
    if not 0 < num_validation < num_rows:
        raise UserError(f"{num_rows} rows are too few to set {num_validation} aside for validation")
    validation = dataset.select(np.sort(np.random.default_rng(seed).permutation(num_rows)[:num_validation]))
    return without_copies(dataset, validation, column), validation


def tokenize(
    dataset: Dataset,
    function: Callable[[dict[str, list[Any]]], dict[str, list[Any]]],
    *,
    num_workers: int | None = None,
) -> Dataset:
    """Replace the columns by what `function` makes of a batch of rows; once per node, cached under the hash of both.

    `function` must be deterministic: a function, or a `functools.partial` of one whose settings can be pickled.
    """
    return once_per_node(
        lambda: dataset.map(
            function,
            batched=True,
            remove_columns=dataset.column_names,
            num_proc=num_workers,
            new_fingerprint=_fingerprint(dataset, function),
            desc="Tokenizing",
        )
    )


def _fingerprint(dataset: Dataset, function: Callable[..., Any], *settings: Any) -> str:
    """Name of the result in the cache: what the rows were, the files that the code stands in, and the settings.

    Not `datasets`' own hash of the function: for a function of the script itself it pickles all that the script
    imports, which fails with some versions of the libraries, and then each process would have another name.
    """
    code = {Path(__file__)}
    values: list[Any] = list(settings)
    while isinstance(function, functools.partial):
        values += [function.args, *sorted(function.keywords.items(), key=lambda item: item[0])]
        function = function.func
    code.add(Path(function.__code__.co_filename))
    hasher = Hasher()
    hasher.update(dataset._fingerprint)
    for file in sorted(code):
        hasher.update(file.read_bytes())
    for value in values:
        name, content = value if isinstance(value, tuple) and len(value) == 2 else ("", value)
        if isinstance(content, PreTrainedTokenizerBase) and content.is_fast:
            # Without what a call leaves behind in it: the first process has used it, the others have not yet. As text:
            # the hasher would pickle each token and merge, seconds for 128,000 tokens.
            state = json.loads(content.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
            # Which of its tokens begin and end a text stands in another file.
            content = json.dumps([state, content.special_tokens_map], default=str)
        hasher.update((name, content))
    return hasher.hexdigest()


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int) -> list[list[int]]:
    """Token ids of each text, at most `max_length` of them; the last is always the end-of-sequence token."""
    # Cut here, not by the tokenizer: not every tokenizer appends that token, and cutting would change its state.
    encoded = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]
    if tokenizer.unk_token_id is not None:
        # Words that spell special tokens are text, but T5's vocabulary has them as words, and none for their `<`.
        special = dict.fromkeys(tokenizer.all_special_ids, tokenizer.unk_token_id)
        encoded = [[special.get(token, token) for token in ids] for ids in encoded]
    return [[*ids[: max_length - 1], tokenizer.eos_token_id] for ids in encoded]


def tokenize_pairs(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    columns: tuple[str, str],
    source_prefix: str,
    max_source_length: int,
    max_target_length: int,
    num_workers: int | None = None,
) -> Dataset:
    """Token ids of (source, target) texts for a sequence-to-sequence model.

    Columns of the result: `input_ids`, `attention_mask`, `labels`, and `length`, the tokens of both.
    """
    function = functools.partial(
        _encode_pairs,
        tokenizer=tokenizer,
        columns=columns,
        source_prefix=source_prefix,
        max_source_length=max_source_length,
        max_target_length=max_target_length,
    )
    return tokenize(dataset, function, num_workers=num_workers)


def _encode_pairs(
    rows: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    columns: tuple[str, str],
    source_prefix: str,
    max_source_length: int,
    max_target_length: int,
) -> dict[str, list[Any]]:
    input_ids = encode(tokenizer, [source_prefix + text for text in rows[columns[0]]], max_source_length)
    labels = encode(tokenizer, rows[columns[1]], max_target_length)
    return {
        "input_ids": input_ids,
        "attention_mask": [[1] * len(ids) for ids in input_ids],
        "labels": labels,
        "length": [len(ids) + len(target) for ids, target in zip(input_ids, labels, strict=True)],
    }


def column_array(dataset: Dataset, name: str) -> np.ndarray:
    """An integer column, for example the lengths, as an array."""
    return np.asarray(dataset.with_format("numpy", columns=[name])[:][name])


# ---------------------------------------------------------------------------------------------------------------------
# The order of training examples


class EpochOrder:
    """Endless order of `num_examples` examples: one permutation by (seed, epoch) after another."""

    def __init__(self, num_examples: int, seed: int) -> None:
        assert num_examples > 0
        self.num_examples = num_examples
        self.seed = seed
        self._permutations: dict[int, np.ndarray] = {}

    def __call__(self, start: int, end: int) -> np.ndarray:
        """Examples at the positions [start, end)."""
        parts = [np.empty(0, dtype=np.int64)]
        while start < end:
            epoch, offset = divmod(start, self.num_examples)
            part = self._permutation(epoch)[offset : offset + end - start]
            parts.append(part)
            start += len(part)
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            # 400 MB and about 10 seconds an epoch for 1e8 examples.
            examples = np.arange(self.num_examples, dtype=np.int32 if self.num_examples < 2**31 else np.int64)
            np.random.default_rng([self.seed, 0, epoch]).shuffle(examples)
            self._permutations = {old: kept for old, kept in self._permutations.items() if old == epoch - 1}
            self._permutations[epoch] = examples
        return self._permutations[epoch]


def first_names(names: list[str]) -> list[str]:
    """The beginning of a list for a message, and dots where it goes on."""
    return names[:MAX_NAMES] + ["..."] * (len(names) > MAX_NAMES)


class Sampler(ABC):
    """Which examples belong to global batch number `step`: a pure function of (seed, step)."""

    num_examples: int
    """Examples of an epoch."""
    batch_size: int
    lengths: np.ndarray | None = None
    """Of each example, where batches are grouped by them."""

    @abstractmethod
    def indices(self, step: int) -> np.ndarray:
        """The `batch_size` dataset indices of global batch `step`."""

    def micro_batches(
        self, step: int, process_index: int, num_processes: int, per_device_batch_size: int
    ) -> list[list[int]]:
        """This process's share of global batch `step`; micro-batch i has neighbouring examples on all processes."""
        assert self.batch_size % (num_processes * per_device_batch_size) == 0
        shares = self.indices(step).reshape(-1, num_processes, per_device_batch_size)
        return shares[:, process_index].tolist()

    def names(self, step: int) -> list[str]:
        """What batch `step` consists of, for messages."""
        return first_names(list(map(str, sorted(self.indices(step).tolist()))))

    def report(self, step: int) -> dict[str, float]:
        """Metrics of the first `step` batches, for the log."""
        return {}

    def state(self, step: int) -> Any:
        """What a checkpoint has to keep, besides the step, to go on with batch `step`; JSON values."""
        return None

    def restore(self, state: Any) -> None:
        """Go on from what `state` returned."""
        assert state is None


class StepSampler(Sampler):
    """Batches of one dataset, in an endless order of one permutation after another, one per epoch.

    Batch `step` is the positions [step * batch_size, (step + 1) * batch_size) of it. With `lengths` (one per example),
    windows of the order are sorted by length and cut into batches, and the batches of a window are shuffled; a batch
    has the shortest first. Nothing depends on the number of processes.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int, lengths: np.ndarray | None = None) -> None:
        assert num_examples > 0 and batch_size > 0
        assert lengths is None or len(lengths) == num_examples
        self.num_examples = num_examples
        self.batch_size = batch_size
        self.seed = seed
        self.lengths = lengths
        self._order = EpochOrder(num_examples, seed)
        # At most a quarter of an epoch: copies of an example from two epochs would be neighbours in a sorted window.
        largest = num_examples // (4 * batch_size)
        self.window_batches = 1 if lengths is None else max(1, min(MAX_WINDOW_BATCHES, largest))
        self._window: tuple[int, np.ndarray] = (-1, np.empty(0))

    def indices(self, step: int) -> np.ndarray:
        """The `batch_size` dataset indices of global batch `step`; with `lengths`, the shortest first."""
        window, position = divmod(step, self.window_batches)
        if self._window[0] != window:
            self._window = (window, self._make_window(window))
        return self._window[1][position]

    def _make_window(self, window: int) -> np.ndarray:
        size = self.window_batches * self.batch_size
        examples = self._order(window * size, (window + 1) * size)
        if self.lengths is None:
            return examples.reshape(1, -1)
        batches = examples[np.argsort(self.lengths[examples], kind="stable")].reshape(self.window_batches, -1)
        return batches[np.random.default_rng([self.seed, 1, window]).permutation(self.window_batches)]


class MixtureSampler(Sampler):
    """Batches that draw from several datasets, which lie one after another in the indices, by weights.

    Place number t of the endless order of examples belongs to the source in whose share of the numbers from 0 to 1 the
    fraction of t times the golden ratio falls: of any n places in a row each source has its share up to a few. Of its
    own endless order (`orders`, see `EpochOrder`) each source gives the next examples. So everything follows from the
    step; one source alone is what `StepSampler` makes of it.
    """

    def __init__(
        self,
        orders: Sequence[Callable[[int, int], np.ndarray]],
        starts: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        num_examples: int,
    ) -> None:
        assert len(orders) == len(starts) == len(weights) and batch_size > 0 and num_examples > 0
        self.orders, self.starts = orders, starts
        self.batch_size, self.num_examples = batch_size, num_examples
        shares = np.cumsum(weights)[:-1] / sum(weights)
        self._bounds = np.array([min(int(share * 2**64), 2**64 - 1) for share in shares], dtype=np.uint64)
        self._first = np.random.default_rng([seed, 2]).integers(2**64, dtype=np.uint64)
        self._counted = (0, np.zeros(len(orders), dtype=np.int64))

    def counts(self, step: int) -> np.ndarray:
        """Examples of each source in the batches before `step`."""
        counted, counts = self._counted
        begin, end, sign = (counted, step, 1) if counted <= step else (step, counted, -1)  # workers are asked ahead
        # A second for 1e8 examples, once after a resume; then what lies between two steps.
        for start in range(begin * self.batch_size, end * self.batch_size, 2**22):
            sources = self._sources(start, min(start + 2**22, end * self.batch_size))
            counts = counts + sign * np.bincount(sources, minlength=len(counts))
        self._counted = (step, counts)
        return counts

    def indices(self, step: int) -> np.ndarray:
        """The dataset indices of global batch `step`."""
        sources = self._sources(step * self.batch_size, (step + 1) * self.batch_size)
        batch = np.empty(self.batch_size, dtype=np.int64)
        for source, (order, start, count) in enumerate(zip(self.orders, self.starts, self.counts(step), strict=True)):
            places = np.flatnonzero(sources == source)
            batch[places] = start + order(int(count), int(count) + len(places))
        return batch

    def _sources(self, start: int, end: int) -> np.ndarray:
        golden_ratio = np.uint64(0x9E3779B97F4A7C15)  # its fraction, times 2**64; products wrap around
        values = np.arange(start, end, dtype=np.uint64) * golden_ratio + self._first
        return np.searchsorted(self._bounds, values, side="right")


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def train_batches(
    dataset: Dataset,
    sampler: Sampler,
    collate_fn: Collator,
    *,
    start_step: int,
    num_steps: int,
    process_index: int,
    num_processes: int,
    per_device_batch_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[list[Batch]]:
    """For each of `num_steps` steps from `start_step` on: this process's micro-batches, dicts of CPU tensors."""

    def shares() -> Iterator[list[list[int]]]:
        for step in range(start_step, start_step + num_steps):
            yield sampler.micro_batches(step, process_index, num_processes, per_device_batch_size)

    num_micro_batches = sampler.batch_size // (num_processes * per_device_batch_size)
    loaded = _load(dataset, itertools.chain.from_iterable(shares()), collate_fn, num_workers, pin_memory)
    for _ in range(num_steps):
        yield [next(loaded) for _ in range(num_micro_batches)]


@dataclass
class EvalBatch:
    """A batch of evaluation examples; `is_padding` marks one that only keeps this process in step with the others."""

    indices: list[int]
    batch: Batch
    is_padding: bool


class EvalBatches:
    """This process's batches of an evaluation, as an iterable of EvalBatch with a length.

    Over all processes each example comes once; each process gets the same number of batches, because evaluation is
    collective. The longest examples come first: what does not fit fails at once. The examples and how they are batched
    do not depend on the number of processes. `max_batches` limits them to the first
    `max_batches * per_device_batch_size` of the dataset; `num_examples` is how many there are.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate_fn: Collator,
        *,
        process_index: int,
        num_processes: int,
        per_device_batch_size: int,
        lengths: np.ndarray | None = None,
        max_batches: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        assert len(dataset) > 0
        size = per_device_batch_size
        self.num_examples = len(dataset) if max_batches is None else min(len(dataset), max_batches * size)
        order = np.arange(self.num_examples)
        if lengths is not None:
            order = np.argsort(-np.asarray(lengths, dtype=np.int64)[: self.num_examples], kind="stable")
        batches = [order[start : start + size].tolist() for start in range(0, len(order), size)]
        self._is_padding = [False] * len(batches)
        while len(batches) % num_processes:
            batches.append(batches[-1])  # the shortest examples cost the least
            self._is_padding.append(True)
        self._indices = batches[process_index::num_processes]
        self._is_padding = self._is_padding[process_index::num_processes]
        self._dataset, self._lengths = dataset, lengths
        self._batches = functools.partial(_load, dataset, self._indices, collate_fn, num_workers, pin_memory)

    @functools.cached_property
    def description(self) -> str:
        """What is evaluated; equal for every number of processes. Reads it."""
        return (
            f"{self.num_examples:,} examples, contents {contents_hash(self._dataset, self._lengths, self.num_examples)}"
        )

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[EvalBatch]:
        for indices, batch, is_padding in zip(self._indices, self._batches(), self._is_padding, strict=True):
            yield EvalBatch(indices, batch, is_padding)


def _load(dataset: Dataset, batches: Any, collate_fn: Collator, num_workers: int, pin_memory: bool) -> Iterator[Batch]:
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own: the default draws a seed for the workers from the global one
    )
    return _with_own_errors(loader) if num_workers else iter(loader)


def _with_own_errors(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches; torch puts a worker's traceback into the text of its error, and `UserError` is to be one line."""
    try:
        yield from batches
    except UserError as error:
        raise UserError(str(error).rpartition("UserError: ")[2].strip()) from error


# ---------------------------------------------------------------------------------------------------------------------
# Collators


class Seq2SeqCollator:
    """Pad rows of `input_ids`, `attention_mask` and `labels` (without a start token) to the longest of the batch.

    Adds `decoder_input_ids`: the start token and the labels but the last, as the model itself shifts them. Padding in
    the labels is -100, so it is no target. `pad_to_multiple_of` rounds both lengths up.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, decoder_start_token_id: int, pad_to_multiple_of: int | None = None
    ) -> None:
        self._pad = DataCollatorForSeq2Seq(
            tokenizer, pad_to_multiple_of=pad_to_multiple_of, label_pad_token_id=IGNORE_INDEX
        )
        self._pad_token_id = tokenizer.pad_token_id
        self._start_token_id = decoder_start_token_id

    def __call__(self, rows: list[Row]) -> Batch:
        batch = dict(self._pad([{key: row[key] for key in ("input_ids", "attention_mask", "labels")} for row in rows]))
        decoder_input_ids = batch["labels"].roll(1, dims=1)
        decoder_input_ids[:, 0] = self._start_token_id
        decoder_input_ids[decoder_input_ids == IGNORE_INDEX] = self._pad_token_id
        batch["decoder_input_ids"] = decoder_input_ids
        return batch


class CausalCollator:
    """Pad rows of `input_ids` and `labels` on the right to the longest of the batch, and what else a row has.

    There is no attention mask: causal attention looks to the left, so no token sees the padding, and attention kernels
    are faster without one. Padding is no target, whatever number it has. `pad_to_multiple_of` rounds the length up.
    """

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int = 1) -> None:
        self._fill = {
            "input_ids": pad_token_id, "labels": IGNORE_INDEX, "position_ids": 0, "moves": -1, "phases": -1,
        }  # fmt: skip
        self._multiple = pad_to_multiple_of

    def __call__(self, rows: list[Row]) -> Batch:
        longest = max(len(row["input_ids"]) for row in rows)
        length = math.ceil(longest / self._multiple) * self._multiple
        return {
            name: torch.tensor([row[name] + [fill] * (length - len(row[name])) for row in rows])
            for name, fill in self._fill.items()
            if name in rows[0]
        }


def pack(dataset: Dataset, max_length: int) -> Dataset:
    """Put rows of `input_ids` and `labels` together in sequences of at most `max_length`, each row whole.

    `position_ids` begin at 0 with each row, by which transformers' models keep the rows of a sequence apart where no
    attention mask is given. Rows are looked at a thousand at a time; the longest go first, each into the fullest
    sequence that has room.
    """
    return tokenize(dataset, functools.partial(_pack_rows, max_length=max_length))


def _pack_rows(rows: dict[str, list[Any]], max_length: int) -> dict[str, list[Any]]:
    lengths = [len(ids) for ids in rows["input_ids"]]
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, sequence), sorted
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        found = bisect.bisect_left(room, (lengths[row], 0))
        free, sequence = room.pop(found) if found < len(room) else (max_length, len(sequences))
        if sequence == len(sequences):
            sequences.append([])
        sequences[sequence].append(row)
        bisect.insort(room, (free - lengths[row], sequence))
    return {
        "input_ids": [list(itertools.chain(*(rows["input_ids"][row] for row in each))) for each in sequences],
        "labels": [list(itertools.chain(*(rows["labels"][row] for row in each))) for each in sequences],
        "position_ids": [list(itertools.chain(*(range(lengths[row]) for row in each))) for each in sequences],
        "length": [sum(lengths[row] for row in each) for each in sequences],
    }


# ---------------------------------------------------------------------------------------------------------------------
# One long text


class TokenWindows:
    """Pieces of one token array as a map-style dataset of `input_ids` and `labels`, without a copy of any token.

    Example i starts at `starts[i]` and has at most `block_size` positions, fewer at the end of the array; labels[t] is
    the target of position t, the token after it. `range(len(tokens) - block_size)` gives the full windows at every
    offset, which overlap; `range(0, len(tokens) - 1, block_size)` cuts the array so that each token but the first is a
    target exactly once.
    """

    column_names = ("input_ids", "labels")

    def __init__(self, tokens: np.ndarray, block_size: int, starts: range) -> None:
        assert not starts or (starts[0] >= 0 and starts[-1] + 1 < len(tokens)), "each example has a target"
        self.tokens = tokens
        self.block_size = block_size
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = self.starts[index]
        piece = self.tokens[start : start + self.block_size + 1]
        return {"input_ids": piece[:-1], "labels": piece[1:]}

    def select(self, indices: range) -> "TokenWindows":
        """The first examples, as `head` asks for them."""
        assert indices == range(len(indices))
        return TokenWindows(self.tokens, self.block_size, self.starts[: len(indices)])


def collate_windows(rows: list[Row]) -> Batch:
    """Batch of rows of `input_ids`, `labels` and, where there are, `position_ids`, all as arrays.

    Shorter ones get zeros after their end, which are no targets and which nothing attends to.
    """
    shape = len(rows), max(len(row["labels"]) for row in rows)
    names = [name for name in ("input_ids", "labels", "position_ids") if name in rows[0]]
    batch: Batch = {name: torch.full(shape, IGNORE_INDEX if name == "labels" else 0) for name in names}
    for index, row in enumerate(rows):
        for name, values in batch.items():
            values[index, : len(row[name])] = torch.from_numpy(row[name])
    return batch


# ---------------------------------------------------------------------------------------------------------------------
# What a user sees of the data


def describe(train: Dataset, validation: Dataset, left_out: Mapping[str, int]) -> str:
    """Counts for the banner: examples, and the rows that were left out by reason."""
    text = f"{len(train):,} training and {len(validation):,} validation examples"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count)
    return text + (f"; left out: {reasons}" if reasons else "")


@functools.singledispatch
def describe_contents(dataset: Any, lengths: np.ndarray | None = None) -> str:
    """What a checkpoint remembers of its training data, for another run to be compared with; paths do not count.

    Datasets of another kind register their own description.
    """
    return f"{len(dataset):,} training examples, contents {contents_hash(dataset, lengths)}"


def contents_hash(dataset: Any, lengths: np.ndarray | None = None, num_examples: int | None = None) -> str:
    """Hash of the lengths and of all values of a dataset, or of its first `num_examples`.

    Of tables of more than a gigabyte, and of datasets that are no tables, 4,096 examples spread over them are read.
    """
    digest = xxhash.xxh3_64()
    number = len(dataset) if num_examples is None else num_examples
    if lengths is not None:
        digest.update(np.ascontiguousarray(lengths[:number], dtype=np.int64).tobytes())
    hash_examples(dataset, digest, number)
    return str(digest.hexdigest())


@functools.singledispatch
def hash_examples(dataset: Any, digest: xxhash.xxh3_64, number: int) -> None:
    """Update the digest with the first `number` examples; datasets of another kind register their own way."""
    for index in _spread(number).tolist():
        row = {key: np.asarray(value).tolist() for key, value in dataset[index].items()}
        digest.update(json.dumps(row, sort_keys=True).encode())


@hash_examples.register
def hash_table(dataset: Dataset, digest: xxhash.xxh3_64, number: int, form: Any = None) -> None:
    """The same for a table; `form`: what else its examples depend on."""
    digest.update(repr((number, form)).encode())
    is_large = dataset.data.nbytes / max(1, len(dataset)) * number > HASHED_BYTES
    chosen = dataset.select(_spread(number)) if is_large else dataset.select(range(number))
    for table in chosen.with_format("arrow").iter(1000):
        for name in sorted(table.column_names):
            digest.update(name.encode())
            _hash_column(digest, table.column(name).combine_chunks())


@hash_examples.register
def _(dataset: TokenWindows, digest: xxhash.xxh3_64, number: int) -> None:
    digest.update(repr((dataset.block_size, dataset.starts[:number])).encode())
    last = dataset.starts[number - 1] if number else 0
    digest.update(np.ascontiguousarray(dataset.tokens[: last + dataset.block_size + 1]).data)


def _spread(number: int) -> np.ndarray:
    return np.linspace(0, number - 1, min(number, HASHED_EXAMPLES)).astype(int)


def _hash_column(digest: xxhash.xxh3_64, values: pa.Array) -> None:
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        _hash_column(digest, pc.fill_null(pc.list_value_length(values), -1))
        values = values.flatten()
    if pa.types.is_integer(values.type) and not values.null_count:
        digest.update(values.to_numpy(zero_copy_only=False).astype(np.int64).tobytes())
    else:
        digest.update(json.dumps(values.to_pylist(), default=str).encode())


def show_samples(
    accelerator: Accelerator, num_samples: int, dataset: Dataset, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Print the first training examples as the model sees them: decoded input and target."""
    for index in range(min(num_samples, len(dataset))):
        row = dataset[index]
        labels = [token for token in row["labels"] if token != IGNORE_INDEX]
        accelerator.print(f"-- example {index}: {len(row['input_ids'])} input tokens, {len(labels)} target tokens")
        accelerator.print(f"   input:  {tokenizer.decode(row['input_ids'])}\n   target: {tokenizer.decode(labels)}")
