"""Documents of text files, their tokens, and sequences of a fixed length that are packed from them.

Whether tokens are prepared ahead (`common.prepare`) or as training goes (`common.sources`), they come from here and
are the same: a document is one start token, where the tokenizer has one of its own, its text, one end token; sequences
are cut from the documents one after another, and what is left of one sequence begins the next.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from transformers import PreTrainedTokenizerBase

from common.arguments import UserError
from common.data import column_names, csv_rows, expand_paths, json_rows, not_utf8, refuse_half_characters

SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet", ".arrow")
LINES = (".jsonl", ".json")
PIECE_BYTES = 2**20
# What the tokenizer gets at a time: enough to keep it busy, little enough for any memory.
BATCH_PIECES = 512
BATCH_CHARACTERS = 2**22
# To the last line break: tokenizers of Llama 3's kind begin a new token there, as at the start of a text.
_PARAGRAPH = re.compile(rb"\n(?:[ \t\r]*\n)+")


class Piece(NamedTuple):
    """The text of a document, or of a part of a long text file, which is one document read in pieces."""

    text: str | None
    """None: the document is dropped."""
    starts: bool
    """Whether the document starts here."""
    ends: bool
    next_offset: int
    """Where the next piece is read from: bytes of .txt and JSON lines, rows of other files."""


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def list_documents(texts: str | list[str], flag: str, text_column: str) -> list[Path]:
    """Files of documents: of paths, folders (searched to the bottom) and patterns, with commas between.

    Raises UserError for what does not exist, is named twice, has another suffix or lacks the column.
    """
    files: list[Path] = []
    texts = [texts] if isinstance(texts, str) else texts
    for path in map(Path, itertools.chain.from_iterable(expand_paths(text, flag) for text in texts)):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not found:
                raise UserError(f"{flag} {path}: the folder has no file ending in {', '.join(SUFFIXES)}.")
            files += found
        elif not path.is_file():
            raise UserError(f"{flag} {path}: no such file or folder{'' if path.is_absolute() else f' in {Path.cwd()}'}")
        elif path.suffix not in SUFFIXES:
            raise UserError(f"{flag} {path}: a file ending in {', '.join(SUFFIXES)} is expected.")
        else:
            files.append(path)
    named = Counter(file.resolve() for file in files)
    for file in files:
        if named[file.resolve()] > 1:
            raise UserError(f"{flag}: {file} is named twice; take one of them out.")
        names = [text_column] if file.suffix == ".txt" else _names(file)
        if text_column not in names:
            raise UserError(f"{file}: no column {text_column!r}; it has {', '.join(names)}: choose with --text_column.")
        if names.count(text_column) > 1:
            raise UserError(f"{file}: column {text_column!r} is there {names.count(text_column)} times; rename one.")
    return files


def _names(file: Path) -> list[str]:
    return _open_arrow(file).schema.names if file.suffix == ".arrow" else column_names(file)


def file_size(file: Path) -> int:
    """Bytes of .txt and JSON lines, rows of other files: the end of their offsets."""
    if file.suffix in (".txt", *LINES):
        return file.stat().st_size
    if file.suffix == ".parquet":
        return int(pq.read_metadata(file).num_rows)
    if file.suffix == ".arrow":
        return sum(batch.num_rows for batch in _arrow_batches(file))
    return sum(1 for _ in csv_rows(file)) - 1


def read_pieces(file: Path, text_column: str, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
    """The pieces that begin at the offsets [start, stop), to the end of the file for None.

    `start` and `stop` need not be where pieces begin in .txt and JSON lines files.
    """
    if file.suffix == ".txt":
        yield from _read_text(file, start, stop)
    elif file.suffix in LINES:
        yield from _read_lines(file, text_column, start, stop)
    else:
        for row, value in enumerate(_values(file, text_column, start), start):
            if stop is not None and row >= stop:
                return
            yield Piece(_text(value, text_column, f"{file} row {row + 1}"), True, True, row + 1)


def _read_text(file: Path, start: int, stop: int | None) -> Iterator[Piece]:
    """One document, cut near each multiple of PIECE_BYTES after an empty line, or else after a line."""
    size = file.stat().st_size
    with open(file, "rb") as lines:
        begin = _next_cut(lines, start, size)
        while begin < (size if stop is None else min(stop, size)) or begin == size == 0:
            end = _next_cut(lines, begin + 1, size)
            lines.seek(begin)
            block = lines.read(end - begin)
            try:
                text = block.decode("utf-8-sig" if begin == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(file, error) from None
            is_empty = begin == 0 and end == size and not text.strip()
            yield Piece(None if is_empty else text, begin == 0, end == size, end)
            if size == 0:
                return
            begin = end


def _next_cut(lines: Any, position: int, size: int) -> int:
    """The first cut at `position` or after it: of the multiple before may come one after a line that was long."""
    number = position // PIECE_BYTES
    cuts = (_cut(lines, each, size) for each in (number - 1, number, number + 1) if each >= 0)
    return min((cut for cut in cuts if cut >= position), default=size)


def _cut(lines: Any, number: int, size: int) -> int:
    """Where a text file is cut after byte `number` * PIECE_BYTES; follows from the bytes after that alone."""
    position = number * PIECE_BYTES
    if position == 0 or position >= size:
        return min(position, size)
    lines.seek(position)
    block = lines.read(PIECE_BYTES)
    found = _PARAGRAPH.search(block)
    if found is not None and found.end() < len(block):
        return position + found.end()
    newline = block.find(b"\n")
    while newline < 0 and block:
        position += len(block)
        block = lines.read(PIECE_BYTES)
        newline = block.find(b"\n")
    return position + newline + 1 if block else size


def _read_lines(file: Path, column: str, start: int, stop: int | None) -> Iterator[Piece]:
    with open(file, "rb") as lines:
        if start:  # the line that begins before belongs to what is before
            lines.seek(start - 1)
            lines.readline()
        offset = lines.tell()
        while stop is None or offset < stop:
            line = lines.readline()
            if not line:
                return
            offset += len(line)
            if line.isspace():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if offset == len(line) else "utf-8"))
                if not isinstance(row, dict):
                    raise ValueError(f"a JSON {type(row).__name__}")
                text = _text(row.get(column), column, "")
            except (ValueError, RecursionError) as error:
                for _ in json_rows(file):  # names the line of what is no JSON object
                    pass
                lines.seek(0)
                number = lines.read(offset).count(b"\n") + (not line.endswith(b"\n"))
                raise UserError(f"{file} line {number}: {str(error).strip()}") from None
            yield Piece(text, True, True, offset)


def _values(file: Path, column: str, start: int) -> Iterator[Any]:
    """Values of the column from row `start` on."""
    if file.suffix == ".csv":
        rows = csv_rows(file)
        index = next(rows).index(column)
        for row, values in enumerate(rows):
            if row >= start:
                yield values[index] if index < len(values) else None
        return
    batches = _parquet_batches(file, column, start) if file.suffix == ".parquet" else _arrow_batches(file)
    for batch in batches:
        if start < batch.num_rows:
            yield from batch.column(column).slice(start).to_pylist()
        start = max(0, start - batch.num_rows)


def _parquet_batches(file: Path, column: str, start: int) -> Iterator[pa.RecordBatch]:
    table = pq.ParquetFile(file)
    for group in range(table.num_row_groups):
        num_rows = table.metadata.row_group(group).num_rows
        if start >= num_rows:  # not read; rows that stand for them are counted off by the caller
            yield pa.record_batch({column: pa.nulls(num_rows)})
        else:
            yield from table.iter_batches(batch_size=1024, row_groups=[group], columns=[column])
        start = max(0, start - num_rows)


def _open_arrow(file: Path) -> Any:
    source = pa.memory_map(str(file))
    try:
        return pa.ipc.open_stream(source)  # as `datasets` writes
    except pa.ArrowInvalid:
        pass
    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid as error:
        raise UserError(f"{file}: not an Arrow file ({error}).") from None


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    reader = _open_arrow(file)
    if isinstance(reader, pa.RecordBatchStreamReader):
        yield from reader
    else:
        yield from map(reader.get_batch, range(reader.num_record_batches))


def _text(value: Any, column: str, where: str) -> str | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, str):
        kind = type(value).__name__
        raise UserError(f"{where}: {column!r} is of type {kind} ({str(value)[:40]}); text is expected.".lstrip(": "))
    refuse_half_characters(value, f"{where}: {column!r}".lstrip(": "))
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


class Encoder:
    """Tokens of pieces; works in other processes and on several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__} has no fast form (tokenizer.json); give one that has.")
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token, which separates documents; give one that has.")
        self._tokenizer = tokenizer.backend_tokenizer.__class__.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_token_id: int = tokenizer.eos_token_id
        # GPT-2's start token is its end token: one between documents is enough.
        self.bos_token_id: int | None = tokenizer.bos_token_id
        if self.bos_token_id == self.eos_token_id:
            self.bos_token_id = None

    @property
    def fingerprint(self) -> str:
        """Hash of what decides about the tokens."""
        return xxhash.xxh3_64_hexdigest(f"{self._tokenizer.to_str()} {self.bos_token_id} {self.eos_token_id}".encode())

    def encode(self, pieces: list[Piece]) -> list[np.ndarray]:
        """int32 tokens of each piece; empty for a dropped one."""
        # Words in a text that look like special tokens are text. Pickling forgets it.
        self._tokenizer.encode_special_tokens = True
        kept = [piece for piece in pieces if piece.text is not None]
        # encode_batch_fast leaves out offsets and takes a quarter more time for byte-level BPE (tokenizers 0.23.3).
        encodings = iter(self._tokenizer.encode_batch([piece.text for piece in kept], add_special_tokens=False))
        return [self._with_ends(piece, next(encodings).ids) if piece.text is not None else _NONE for piece in pieces]

    def _with_ends(self, piece: Piece, ids: list[int]) -> np.ndarray:
        if piece.starts and self.bos_token_id is not None:
            ids = [self.bos_token_id, *ids]
        if piece.ends:
            ids.append(self.eos_token_id)
        return np.array(ids, dtype=np.int32)


_NONE = np.empty(0, dtype=np.int32)


def encoded(pieces: Iterable[Piece], encoder: Encoder) -> Iterator[tuple[Piece, np.ndarray]]:
    """Pieces with their tokens, tokenized many at a time."""
    batch: list[Piece] = []
    num_characters = 0
    for piece in pieces:
        batch.append(piece)
        num_characters += len(piece.text or "")
        if len(batch) == BATCH_PIECES or num_characters >= BATCH_CHARACTERS:
            yield from zip(batch, encoder.encode(batch), strict=True)
            batch, num_characters = [], 0
    yield from zip(batch, encoder.encode(batch), strict=True)


def is_held_out(piece: Piece, share: float, seed: int) -> bool:
    """Whether a document is set aside for validation: by its text, so that copies of it stay on one side.

    Long text files, which are read in pieces, never are.
    """
    value = digest(piece, seed) if share else None
    return value is not None and value < share * 2**64


def digests(files: Iterable[Path], text_column: str) -> frozenset[int]:
    """Of the texts of all documents in the files, but for long text files, which are read in pieces."""
    pieces = itertools.chain.from_iterable(read_pieces(file, text_column) for file in files)
    return frozenset(value for value in map(digest, pieces) if value is not None)


def digest(piece: Piece, seed: int = 0) -> int | None:
    """Of a document's text, whatever blanks are between its words; None where the piece is not a whole document."""
    if piece.text is None or not (piece.starts and piece.ends):
        return None
    return xxhash.xxh3_64_intdigest(" ".join(piece.text.split()).encode(), seed=seed)


def refuse_shared(train: Iterable[Path], held_out: Iterable[Path]) -> None:
    """Raise `UserError` for a file that is both to be trained on and held out."""
    shared = {file.resolve() for file in train} & {file.resolve() for file in held_out}
    if shared:
        raise UserError(f"{min(shared)} is both trained on and the validation text; give another validation file.")


# ---------------------------------------------------------------------------------------------------------------------
# Packing


class Sequence(NamedTuple):
    """A packed sequence and the numbers of the documents that it has tokens of."""

    tokens: np.ndarray
    documents: list[int]


@dataclass
class Packer:
    """Cuts documents, one after another, into sequences of `length` tokens; keeps what is left over for the next."""

    length: int
    carry: list[np.ndarray] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    num_carried: int = 0

    def add(self, tokens: np.ndarray, document: int) -> Iterator[Sequence]:
        """The sequences that are full with these tokens, of the document of this number."""
        while len(tokens):
            part, tokens = np.split(tokens, [self.length - self.num_carried])
            self.carry.append(part)
            self.num_carried += len(part)
            if self.documents[-1:] != [document]:
                self.documents.append(document)
            if self.num_carried == self.length:
                yield self.rest()

    def rest(self) -> Sequence:
        """What is left over, as a shorter sequence, which is left over no more."""
        sequence = Sequence(np.concatenate([_NONE, *self.carry]), self.documents)
        self.carry, self.documents, self.num_carried = [], [], 0
        return sequence


@dataclass
class Report:
    """What became of the documents of a split."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    sequences: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Documents, and tokens at the end that fill no sequence, by reason."""

    def __str__(self) -> str:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items() if count)
        counts = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.sequences:,} sequences"
        return counts + (f"; left out: {dropped}" if dropped else "")
