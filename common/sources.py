"""Training data of a pretraining run: packed sequences from one or several sources, prepared or streamed.

A source is a map-style dataset of examples (`input_ids`, `labels`, and `position_ids` with document masking). Prepared
ones (`TokenRows`) are read in any order; a stream (`TokenStream`) only forward, from a state that a checkpoint keeps.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets import Dataset, DatasetDict, IterableDataset
from datasets.exceptions import DatasetNotFoundError
from transformers import PreTrainedTokenizerBase

from common.arguments import UserError
from common.data import (
    EpochOrder,
    MixtureSampler,
    Row,
    describe_contents,
    first_names,
    hash_examples,
    hash_table,
    load_splits,
)
from common.documents import (
    SUFFIXES,
    Encoder,
    Packer,
    Piece,
    Sequence,
    digest,
    digests,
    encoded,
    list_documents,
    read_pieces,
    refuse_shared,
)
from common.losses import IGNORE_INDEX
from common.prepare import COMPLETE, REPORT, Settings, prepared, read_report, report_of

SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation"}
STREAM_LENGTH = 2**40  # of the indices that are a stream's in a mixture
# Of a streamed file, hashed to know it again: it is too long to be read for that.
NUM_SAMPLES, SAMPLE_BYTES = 8, 2**16


def make_example(tokens: np.ndarray, labels: np.ndarray | None, eos_token_id: int, document_masking: bool) -> Row:
    """int64 `input_ids` and `labels` of a sequence: labels[t] is the target of position t, the token after it.

    labels: of the tokens themselves, as Hugging Face's models take them; the tokens for None. With document_masking
    also `position_ids`, which begin at 0 after each end token: transformers' models keep apart what they count anew
    where no attention mask is given. The first token of a document is no target of the one before then.
    """
    tokens = tokens.astype(np.int64)
    targets = np.append((tokens if labels is None else labels.astype(np.int64))[1:], IGNORE_INDEX)
    if not document_masking:
        return {"input_ids": tokens, "labels": targets}
    is_end = tokens == eos_token_id
    targets[is_end] = IGNORE_INDEX
    first = np.zeros_like(tokens)
    first[1:][is_end[:-1]] = np.flatnonzero(is_end[:-1]) + 1
    positions = np.arange(len(tokens)) - np.maximum.accumulate(first)
    return {"input_ids": tokens, "labels": targets, "position_ids": positions}


# ---------------------------------------------------------------------------------------------------------------------
# Prepared


def _check_column(rows: Dataset, column: str, name: str) -> None:
    kind = rows.data.column(column).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise UserError(f"{name}: {column} is of type {kind}; expected a list of integers in each row.")
    if rows.data.column(column).null_count:
        index = next(index for index, value in enumerate(rows.data.column(column)) if not value.is_valid)
        raise UserError(f"{name} row {index}: {column} is null; expected a list of integers.")


class TokenRows:
    """Rows of a tokenized dataset as examples: `input_ids`, and where there are `attention_mask` and `labels`.

    `labels` are of the tokens themselves. `folder`: of prepared data, for names of documents and counts of bytes.
    Raises UserError for rows that are longer than a sequence, and for tokens that are not the tokenizer's.
    """

    column_names = ("input_ids", "labels", "position_ids")

    def __init__(
        self,
        rows: Dataset,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_length: int,
        document_masking: bool,
        folder: Path | None = None,
        split: str = "train",
    ) -> None:
        self.name = name
        self.rows = rows
        self.split = split
        self.folder = folder
        self._tokenizer = tokenizer
        self._eos_token_id = tokenizer.eos_token_id  # which the tokenizer looks up each time
        self.document_masking = document_masking
        self._is_part = False  # of the rows that the folder's report counts
        self.is_compared = True  # with the validation text, whose documents it is without
        if "input_ids" not in rows.column_names:
            raise UserError(f"{name}: a tokenized dataset has input_ids; this one has {', '.join(rows.column_names)}.")
        columns = [column for column in ("input_ids", "attention_mask", "labels") if column in rows.column_names]
        for column in columns:
            _check_column(rows, column, name)
        self._arrays = rows.with_format("numpy", columns=columns)
        longest = pc.max(pc.list_value_length(rows.data.column("input_ids"))).as_py() if len(rows) else None
        if not longest:
            raise UserError(f"{name}: there are no tokens in its {split} split.")
        is_silent = "labels" in columns and all(
            pc.all(pc.equal(chunk.flatten(), IGNORE_INDEX)).as_py() for chunk in rows.data.column("labels").chunks
        )
        if longest < 2 or is_silent:
            reason = f"all labels are {IGNORE_INDEX}" if is_silent else "no row has two tokens"
            raise UserError(f"{name}: nothing can be predicted in its {split} split, {reason}.")
        if longest > max_seq_length:
            raise UserError(f"{name}: rows of up to {longest} tokens, more than --max_seq_length {max_seq_length}.")
        sample = np.linspace(0, len(rows) - 1, min(len(rows), 256)).astype(int)
        for index in sample.tolist():
            self._check_row(index, self._arrays[index])

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        text = f"{len(self):,} sequences" if self.folder is None else str(report_of(self.folder, self.split))
        return f"{self.name}: {text}{'' if self.is_compared else ', not compared with the validation text'}"

    def _check_row(self, index: int, row: Row) -> None:
        for column, least in (("input_ids", 0), ("labels", IGNORE_INDEX)):
            if column not in row:
                continue
            values = row[column]
            if len(values) != len(row["input_ids"]):
                raise UserError(
                    f"{self.name} row {index}: {len(values)} {column} for {len(row['input_ids'])} input_ids."
                )
            is_wrong = (values >= len(self._tokenizer)) | ((values < 0) & (values != least))
            if is_wrong.any():
                raise UserError(
                    f"{self.name} row {index}: {column} has {values[is_wrong][0]}, which is no token of the "
                    f"tokenizer's {len(self._tokenizer)}; the data needs the tokenizer that it was made with."
                )

    def __getitem__(self, index: int) -> Row:
        row = self._arrays[index]
        self._check_row(index, row)
        tokens, labels = row["input_ids"], row.get("labels")
        if "attention_mask" in row and not row["attention_mask"].all():
            length = int(row["attention_mask"].sum())
            if row["attention_mask"][length:].any():
                raise UserError(
                    f"{self.name} row {index}: its attention_mask has gaps; padding is expected at the end."
                )
            tokens, labels = tokens[:length], None if labels is None else labels[:length]
        return make_example(tokens, labels, self._eos_token_id, self.document_masking)

    def select(self, indices: range) -> "TokenRows":
        """Some of the rows."""
        if indices == range(len(self)):
            return self
        part = TokenRows(
            self.rows.select(indices), self.name, self._tokenizer, 2**62, self.document_masking, self.folder, self.split
        )
        part._is_part, part.is_compared = True, self.is_compared
        return part

    def names(self, index: int) -> list[str]:
        """The documents that a row has tokens of: files and the numbers of the documents in them, from 1."""
        if self.folder is None:
            return [f"{self.name} row {index}"]
        return document_names(self.rows[index]["documents"], read_report(self.folder)["documents"]["train"])

    def targets_per_byte(self) -> float:
        """Targets for each byte of the text, end tokens included; by decoding where the preparation did not count."""
        if self.folder is not None and not self._is_part:
            counts = read_report(self.folder)["splits"][self.split]
            # A document's start token is a target of the document before, unless that does not see it.
            has_bos = self._tokenizer.bos_token_id not in (None, self._tokenizer.eos_token_id)
            return (counts["tokens"] - (has_bos and self.document_masking) * counts["documents"]) / counts["bytes"]
        num_targets, num_bytes = 0, 0
        for index in range(len(self)):
            targets = self[index]["labels"]
            targets = targets[targets != IGNORE_INDEX]
            num_targets += len(targets)
            num_bytes += len(self._tokenizer.decode(targets, skip_special_tokens=True).encode())
        return num_targets / max(1, num_bytes)


def document_names(numbers: list[int], files: list[dict[str, Any]]) -> list[str]:
    """`file.jsonl:12` for each document number; a text file is one document."""
    ends = list(itertools.accumulate(file["documents"] for file in files))
    names = []
    for number in numbers:
        file = next(index for index, end in enumerate(ends) if number < end)
        name, first = Path(files[file]["file"]).name, ends[file] - files[file]["documents"]
        names.append(name if files[file]["documents"] == 1 else f"{name}:{number - first + 1}")
    return names


# ---------------------------------------------------------------------------------------------------------------------
# Streamed


class FileReader:
    """Documents of files, in order."""

    def __init__(self, files: list[Path], text_column: str) -> None:
        self.files = files
        self.text_column = text_column
        self.description = ", ".join(f"{file.name} ({file.stat().st_size:,} bytes)" for file in files)
        self.sample = xxhash.xxh3_64_hexdigest(b"".join(_sample(file) for file in files))
        """Hash of parts of the files, by which one that was edited at the same size is known, though not for sure."""

    def read(self, position: Any) -> Iterator[tuple[Piece, Any]]:
        """Pieces from a position on (None: the start), each with the position after it."""
        first, offset = position or (0, 0)
        for index, file in enumerate(self.files[first:], first):
            for piece in read_pieces(file, self.text_column, offset):
                yield piece, (index, piece.next_offset)
            offset = 0


def _sample(file: Path) -> bytes:
    """Hash of blocks of the file, from its beginning to its end."""
    digest, size = xxhash.xxh3_64(), file.stat().st_size
    with open(file, "rb") as content:
        for number in range(NUM_SAMPLES):
            content.seek(number * max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            digest.update(content.read(SAMPLE_BYTES))
    return digest.digest()


class HubReader:
    """Documents of a dataset on the hub as they come over the network."""

    sample = ""

    def __init__(self, rows: IterableDataset, name: str, text_column: str) -> None:
        self.rows, self.text_column, self.description = rows, text_column, name
        self._start = rows.state_dict()

    def read(self, position: Any) -> Iterator[tuple[Piece, Any]]:
        """Rows from a state of the dataset on (None: the start), each with the state after it."""
        rows = self.rows
        # A state that is loaded into a dataset stays there for all passes over it, until another one is.
        rows.load_state_dict(self._start if position is None else position)
        for row in rows:
            if self.text_column not in row:
                raise UserError(
                    f"{self.description}: no column {self.text_column!r}; it has {', '.join(row)}: choose with "
                    "--text_column."
                )
            text = row[self.text_column]
            if text is not None and not isinstance(text, str):
                raise UserError(f"{self.description}: {self.text_column!r} is {type(text).__name__}; text is expected.")
            yield Piece(text if text and text.strip() else None, True, True, 0), rows.state_dict()


@dataclass(frozen=True)
class StreamState:
    """Where a window of a stream begins; JSON values."""

    first: int = 0
    """Number of its first sequence in the endless stream."""
    epoch: int = 0
    window: int = 0
    position: Any = None
    """Of the reader."""
    document: int = 0
    """Number of the document that comes next."""
    carry: list[int] = field(default_factory=list)
    """Tokens left over from the window before, and the documents that they are of."""
    documents: list[int] = field(default_factory=list)


@dataclass
class _Window:
    state: StreamState
    sequences: list[Sequence]
    next_state: StreamState


class TokenStream:
    """Sequences of a stream, endless, shuffled within windows, to be read in their order.

    A window is read, permuted by (seed, epoch, window) and used up while a thread reads the next: with one that is as
    long as the corpus, the order is that of prepared data. Its beginning is all that has to be kept to go on: what it
    has is read again. Each process reads the whole stream and takes its share, so the number of processes is free.
    """

    column_names = ("input_ids", "labels", "position_ids")

    def __init__(
        self,
        reader: FileReader | HubReader,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_length: int,
        document_masking: bool,
        *,
        window: int,
        seed: int,
        held_out: frozenset[int] = frozenset(),
    ) -> None:
        """held_out: `digests` of documents that are read as if they were empty."""
        self._held_out = held_out
        digest_of_all = xxhash.xxh3_64_hexdigest(np.array(sorted(held_out), dtype=np.uint64).tobytes())
        self._without = f", without {len(held_out):,} documents ({digest_of_all})" if held_out else ""
        self.name, self.reader, self.window, self.seed = name, reader, window, seed
        self._encoder = Encoder(tokenizer)
        self._length = max_seq_length
        self._document_masking = document_masking
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._num_kept = 2
        self._pieces: Iterator[tuple[Piece, np.ndarray]] | None = None  # the thread's
        self.restore(asdict(StreamState()))

    def __len__(self) -> int:
        return STREAM_LENGTH

    def __str__(self) -> str:
        return f"{self.name}: stream of {self.reader.description}"

    @property
    def contents(self) -> str:
        """All that its sequences and their order follow from, besides the seed and the tokenizer."""
        masking = " of documents that do not see each other" if self._document_masking else ""
        return (
            f"{self} {self.reader.sample}, column {self.reader.text_column}, sequences of {self._length} "
            f"tokens{masking}, shuffled by {self.window}{self._without}"
        )

    def remember(self, num_sequences: int) -> None:
        """Keep at least so many sequences that have been read, for their names."""
        self._num_kept = 2 + num_sequences // self.window

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._start = StreamState(**state)
        self._windows: deque[_Window] = deque()
        self._next: Future[_Window] = self._executor.submit(self._read_window, self._start, is_new=True)

    def state(self, index: int) -> dict[str, Any]:
        """From where sequence `index`, the next to be read, can be reached."""
        last = self._windows[-1] if self._windows else None
        if last is None or index < last.state.first:
            return asdict(self._start)
        return asdict(last.state if index < last.next_state.first else last.next_state)

    def _find(self, index: int) -> Sequence | None:
        for window in self._windows:
            if window.state.first <= index < window.next_state.first:
                return window.sequences[index - window.state.first]
        return None

    def __getitem__(self, index: int) -> Row:
        if self._windows and index < self._windows[0].state.first:
            self.restore(asdict(self._start))
        while not self._windows or index >= self._windows[-1].next_state.first:
            window = self._next.result()
            self._next = self._executor.submit(self._read_window, window.next_state)
            self._windows.append(window)
            if len(self._windows) > self._num_kept:
                self._windows.popleft()
        sequence = self._find(index)
        assert sequence is not None, "it is before the beginning"
        return make_example(sequence.tokens, None, self._encoder.eos_token_id, self._document_masking)

    def names(self, index: int) -> list[str]:
        """The numbers in the stream of the documents that sequence `index` has tokens of, from 1."""
        sequence = self._find(index)
        return [] if sequence is None else [f"{self.name}:{number + 1}" for number in sequence.documents]

    # In the thread.

    def _read_window(self, start: StreamState, is_new: bool = False) -> _Window:
        packer = Packer(self._length)
        if start.carry:
            packer.carry, packer.num_carried = [np.array(start.carry, dtype=np.int32)], len(start.carry)
            packer.documents = list(start.documents)
        if is_new or self._pieces is None:
            self._positions: deque[Any] = deque()
            self._pieces = encoded(self._note_positions(start.position), self._encoder)
        document, position = start.document, start.position
        sequences: list[Sequence] = []
        for piece, tokens in self._pieces:
            position = self._positions.popleft()
            sequences += packer.add(tokens, document)
            document += piece.ends
            if len(sequences) >= self.window:
                break
        else:
            self._pieces = None
            if not sequences and start.window == 0:
                raise UserError(
                    f"{self.name}: {packer.num_carried:,} tokens do not fill one sequence of "
                    f"--max_seq_length {self._length}; give more text, or lower it."
                )
        first = start.first + len(sequences)
        if self._pieces is None:
            following = StreamState(first, start.epoch + 1)
        else:
            rest = packer.rest()
            following = StreamState(
                first, start.epoch, start.window + 1, position, document, rest.tokens.tolist(), rest.documents
            )
        # The first window's as `EpochOrder` draws it.
        key = [self.seed, 0, start.epoch, start.window] if start.window else [self.seed, 0, start.epoch]
        order = np.arange(len(sequences))
        np.random.default_rng(key).shuffle(order)
        return _Window(start, [sequences[index] for index in order.tolist()], following)

    def _note_positions(self, position: Any) -> Iterator[Piece]:
        for piece, after in self.reader.read(position):
            self._positions.append(after)
            yield piece._replace(text=None) if self._held_out and digest(piece) in self._held_out else piece


# ---------------------------------------------------------------------------------------------------------------------
# Several


Source = TokenRows | TokenStream


class Mixture:
    """Sources one after another in the indices of one dataset, and the weights by which training draws from them."""

    def __init__(self, sources: list[Source], weights: list[float]) -> None:
        assert sources and len(sources) == len(weights)
        self.sources, self.weights = sources, weights
        self.starts = [0, *itertools.accumulate(map(len, sources))][:-1]

    def __len__(self) -> int:
        return self.starts[-1] + len(self.sources[-1])

    def __str__(self) -> str:
        parts = [str(source) for source in self.sources]
        if len(parts) == 1:
            return parts[0]
        return "; ".join(f"{part}, weight {weight:g}" for part, weight in zip(parts, self.weights, strict=True))

    def locate(self, index: int) -> tuple[Source, int]:
        """The source of an index, and the index in it."""
        number = max(number for number, start in enumerate(self.starts) if start <= index)
        return self.sources[number], index - self.starts[number]

    def __getitem__(self, index: int) -> Row:
        source, own_index = self.locate(index)
        return source[own_index]


@hash_examples.register
def _(dataset: TokenRows, digest: xxhash.xxh3_64, number: int) -> None:
    hash_table(dataset.rows, digest, number, dataset.document_masking)


@describe_contents.register
def _(dataset: TokenStream, lengths: np.ndarray | None = None) -> str:
    return dataset.contents


@describe_contents.register
def _(dataset: Mixture, lengths: np.ndarray | None = None) -> str:
    parts = zip(dataset.sources, dataset.weights, strict=True)
    total = sum(dataset.weights)
    return "; ".join(f"{describe_contents(source)}, weight {weight / total:g}" for source, weight in parts)


class SourceSampler(MixtureSampler):
    """Batches of a mixture; an epoch lasts until the first source was seen once."""

    def __init__(self, mixture: Mixture, batch_size: int, seed: int, num_examples: int | None = None) -> None:
        """num_examples: of an epoch where the first source is a stream, whose end nobody knows."""
        self.mixture = mixture
        orders: list[Callable[[int, int], np.ndarray]] = [
            np.arange if isinstance(source, TokenStream) else EpochOrder(len(source), seed + number)
            for number, source in enumerate(mixture.sources)
        ]
        if num_examples is None:
            num_examples = max(1, round(len(mixture.sources[0]) * sum(mixture.weights) / mixture.weights[0]))
        for source in mixture.sources:
            if isinstance(source, TokenStream):
                source.remember(batch_size)
        super().__init__(orders, mixture.starts, mixture.weights, batch_size, seed, num_examples)

    def names(self, step: int) -> list[str]:
        """Names of the documents of batch `step`, of a long list its beginning."""
        found: dict[str, None] = {}
        for index in self.indices(step).tolist():
            source, own_index = self.mixture.locate(index)
            found |= dict.fromkeys(source.names(own_index))
        return first_names(list(found))

    def report(self, step: int) -> dict[str, float]:
        """Sequences of each source in the first `step` batches, where there are several."""
        if len(self.mixture.sources) == 1:
            return {}
        counts = zip(self.mixture.sources, self.counts(step).tolist(), strict=True)
        return {f"num_sequences/{source.name}": count for source, count in counts}

    def state(self, step: int) -> dict[str, Any]:
        """What has to be kept to go on with batch `step`: of each stream, by its name."""
        counts = zip(self.mixture.sources, self.counts(step).tolist(), strict=True)
        return {source.name: source.state(count) for source, count in counts if isinstance(source, TokenStream)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned. A stream that was no part of it is read from its beginning."""
        for source in self.mixture.sources:
            if isinstance(source, TokenStream) and source.name in state:
                source.restore(state[source.name])


# ---------------------------------------------------------------------------------------------------------------------
# From what a user gives


@dataclass(frozen=True)
class SourceSettings:
    """How sources are read."""

    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int
    document_masking: bool
    text_column: str
    seed: int
    validation_size: float = 0.0
    only_train: bool = False
    """What is set aside is left out, because the validation text is another one."""
    num_workers: int = 1

    def setting_aside(self, validation_size: float) -> "SourceSettings":
        """The same with a share of the documents set aside for validation."""
        return replace(self, validation_size=validation_size)


@dataclass(frozen=True)
class SourceSpec:
    """What a user gives for a source of training."""

    text: str
    """Files, a tokenized folder or a hub id."""
    flag: str
    """That gave it: --train_file or --dataset_name."""
    weight: float


def list_sources(
    train_file: str | None, dataset_name: str | None, weights: str | None, default: str
) -> list[SourceSpec]:
    """Sources of the flags, with semicolons between in each; `default` is the file where there are none.

    Raises UserError unless there is a weight for each of several.
    """
    given = ((train_file, "--train_file"), (dataset_name, "--dataset_name"))
    found = [(part.strip(), flag) for text, flag in given for part in (text or "").split(";") if part.strip()]
    found = found or [(default, "--train_file")]
    if weights is None and len(found) > 1:
        raise UserError(f"--source_weights: {len(found)} sources need {len(found)} weights, such as 0.9,0.1.")
    try:
        values = [float(word) for word in (weights or "1").split(",")]
    except ValueError:
        raise UserError(f"--source_weights {weights}: numbers with commas are expected.") from None
    if weights is not None and len(found) == 1:
        raise UserError(f"--source_weights {weights} does nothing with one source: drop it.")
    if len(values) != len(found) or not all(0 < value < math.inf for value in values):
        raise UserError(
            f"--source_weights {weights}: a number above 0 for each of the sources is expected, and there are "
            f"{len(found)} (sources are separated by ;)."
        )
    names = [source_name(text) for text, _ in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{found[names.index(twice[0])][1]}: two sources are called {twice[0]!r}; rename one.")
    return [SourceSpec(text, flag, value) for (text, flag), value in zip(found, values, strict=True)]


def source_name(text: str) -> str:
    """Short name of a source in logs: its last part without a suffix."""
    parts = [part for part in text.rstrip("/").split("/") if not set(part) & set("*?[")]
    return parts[-1].partition(".")[0] if parts else text


def load_sources(
    sources: list[SourceSpec], settings: SourceSettings, validation_text: str | None
) -> tuple[list[TokenRows], TokenRows | None]:
    """(training sequences of each source, the validation text: `validation_text`, or else what the first one has).

    Documents of the validation text are trained on in no source, as far as both are text here; where they are not, the
    source says so. Collective.
    """
    beside = replace(settings, validation_size=0.0, only_train=True)
    if validation_text is not None:
        held_out = _held_out_files(validation_text, settings)
        rows = [load_source(source, beside, held_out)["train"] for source in sources]
        validation: TokenRows | None = load_held_out(validation_text, "--validation_file", settings)
        unsure = rows
    else:
        first = load_source(sources[0], settings)
        validation, held_out = first.get("validation"), []
        if validation is not None and validation.folder is not None:
            report = read_report(validation.folder)
            beside = replace(beside, validation_size=report["validation_size"], seed=report["seed"])
            files = (Path(name) for name, *_ in report["files"].get("validation", ()))
            held_out = [file for file in files if file.is_file()]
        unsure = [load_source(source, beside, held_out)["train"] for source in sources[1:]]
        rows = [first["train"], *unsure]
    if validation is not None:
        for source_rows in unsure:
            source_rows.is_compared = _leaves_out(source_rows, held_out, beside)
    return rows, validation


def _leaves_out(rows: TokenRows, held_out: list[Path], settings: SourceSettings) -> bool:
    """Whether the rows were prepared without the documents of these files, and those that `settings` sets aside."""
    if rows.folder is None or not (held_out or settings.validation_size):
        return False
    report = read_report(rows.folder)
    known = {name for split in ("validation", "held_out") for name, *_ in report["files"].get(split, ())}
    share = (settings.validation_size, settings.seed)
    is_set_aside = not settings.validation_size or (report["validation_size"], report["seed"]) == share
    return is_set_aside and {str(file.resolve()) for file in held_out} <= known


def load_source(
    source: SourceSpec, settings: SourceSettings, held_out: list[Path] | None = None
) -> dict[str, TokenRows]:
    """The "train" split of files, a tokenized folder or a dataset on the hub, and "validation" where there is one.

    held_out: files whose documents are left out. Collective: files are tokenized once per node, and found again by
    later runs.
    """
    text, flag = source.text, source.flag
    if _is_tokenized(text):
        own = _load_tokenized(Path(text), flag, settings)
        if "train" not in own:
            raise UserError(f"{flag} {text}: it has no split train.")
        return own
    if flag == "--dataset_name":
        splits = _hub_files(text, settings.text_column)
    else:
        splits = {"train": list_documents(text, flag, settings.text_column)}
    if settings.only_train:
        splits = {"train": splits["train"]}
    elif "validation" in splits:
        settings = replace(settings, validation_size=0.0)
    if held_out:
        splits["held_out"] = held_out
    return _load_files(splits, text, settings)


def _held_out_files(text: str | None, settings: SourceSettings) -> list[Path]:
    """Files of the validation text; none where it is tokenized."""
    if text is None or _is_tokenized(text):
        return []
    return list_documents(text, "--validation_file", settings.text_column)


def load_held_out(text: str, flag: str, settings: SourceSettings) -> TokenRows:
    """All of some files; of a tokenized folder or a dataset on the hub the validation split, else all. Collective."""
    settings = replace(settings, validation_size=0.0)
    if _is_tokenized(text):
        own = _load_tokenized(Path(text), flag, settings)
        return own.get("validation") or own["train"]
    if flag == "--validation_file" or Path(text).suffix in SUFFIXES or set(text) & set("*?[,") or Path(text).exists():
        files = list_documents(text, flag, settings.text_column)
    else:
        splits = _hub_files(text, settings.text_column)
        files = splits.get("validation") or splits["train"]
    return _load_files({"validation": files}, text, settings)["validation"]


def load_stream(
    source: SourceSpec, settings: SourceSettings, window: int, validation_text: str | None = None
) -> TokenStream:
    """Stream of files or of a dataset on the hub, without the documents of the validation text."""
    held_out = _held_out_files(validation_text, settings)
    text, flag = source.text, source.flag
    reader: FileReader | HubReader
    if flag == "--dataset_name":
        try:
            reader = HubReader(datasets.load_dataset(text, split="train", streaming=True), text, settings.text_column)
        except (DatasetNotFoundError, ValueError, OSError) as error:
            raise UserError(f"{flag} {text}: it cannot be streamed ({' '.join(str(error).split())[:200]}).") from error
    elif _is_tokenized(text):
        raise UserError(f"{flag} {text}: a tokenized folder is read without --streaming: drop the flag.")
    else:
        files = list_documents(text, flag, settings.text_column)
        refuse_shared(files, held_out)
        reader = FileReader(files, settings.text_column)
    return TokenStream(
        reader, source_name(text), settings.tokenizer, settings.max_seq_length, settings.document_masking,
        window=window, seed=settings.seed, held_out=digests(held_out, settings.text_column),
    )  # fmt: skip


def _is_tokenized(text: str) -> bool:
    """Raises `UserError` for a folder that tools/prepare_data.py has not finished."""
    folder = Path(text)
    if (folder / REPORT).is_file() and not (folder / COMPLETE).is_file():
        raise UserError(f"{text}: its preparation is not complete; run the same tools/prepare_data.py command again.")
    if any((folder / name).is_file() for name in (COMPLETE, "state.json")):
        return True
    if splits := sorted(path.parent.name for path in folder.glob("*/state.json")):
        raise UserError(
            f"{text}: without {COMPLETE}, {', '.join(splits)} in it are datasets of their own; give each, such as "
            f"{folder / splits[0]}, to its flag, or save them together as a DatasetDict."
        )
    return False


def _load_tokenized(path: Path, flag: str, settings: SourceSettings) -> dict[str, TokenRows]:
    try:
        loaded = datasets.load_from_disk(str(path))
    except IndexError as error:  # what datasets 5.2 makes of it
        raise UserError(f"{flag} {path}: a dataset in it has no rows.") from error
    parts = loaded if isinstance(loaded, DatasetDict) else {"train": loaded}
    if {"valid", "validation"} <= parts.keys():
        raise UserError(f"{flag} {path}: it has both a split valid and a split validation; take one out.")
    splits = {SPLIT_NAMES[name]: rows for name, rows in parts.items() if name in SPLIT_NAMES}
    if not splits:
        raise UserError(f"{flag} {path}: no split train, validation or valid among {', '.join(parts)}.")
    folder = path if (path / REPORT).is_file() else None
    if folder and read_report(folder)["tokenizer"] != Encoder(settings.tokenizer).fingerprint:
        raise UserError(f"{flag} {path}: it was prepared with another tokenizer than the model's; prepare it anew.")
    return _as_rows(splits, str(path), settings, folder)


def _load_files(splits: dict[str, list[Path]], text: str, settings: SourceSettings) -> dict[str, TokenRows]:
    own = Settings(
        settings.text_column, settings.max_seq_length, settings.validation_size, settings.seed, settings.only_train
    )
    folder = prepared(splits, settings.tokenizer, own, settings.num_workers)
    return _as_rows(dict(datasets.load_from_disk(str(folder))), text, settings, folder)


def _as_rows(
    splits: dict[str, Dataset], text: str, settings: SourceSettings, folder: Path | None
) -> dict[str, TokenRows]:
    return {
        split: TokenRows(
            rows,
            source_name(text),
            settings.tokenizer,
            settings.max_seq_length,
            settings.document_masking,
            folder,
            split,
        )  # fmt: skip
        for split, rows in splits.items()
    }


def _hub_files(name: str, text_column: str) -> dict[str, list[Path]]:
    """The Arrow files into which `datasets` has put a dataset of the hub, by split."""
    splits = load_splits(columns=[(text_column,)], dataset_name=name, hint="Choose with --text_column.")
    return {split: [Path(file["filename"]) for file in rows.cache_files] for split, rows in splits.items()}
