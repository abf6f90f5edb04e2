"""Tokenize and pack files ahead, in several processes, into a folder that `datasets` loads memory-mapped.

The input is cut into parts, which workers tokenize; each finished part is a file, so that a preparation that was killed
goes on where it was. At the end the parts are packed, in order, into sequences:

    dataset_dict.json            written last: the folder is complete
    report.json                  counts by split, and the documents of each file
    train/  validation/          rows of `input_ids`, and `documents`, the numbers of the documents that a row is of
    parts/                       while it is prepared

The files do not depend on the number of workers, nor on interruptions.
"""

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from datasets import Dataset, DatasetInfo, Features, List, Value
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from common.arguments import UserError
from common.data import once_per_node
from common.documents import (
    LINES,
    PIECE_BYTES,
    Encoder,
    Packer,
    Piece,
    Report,
    Sequence,
    digest,
    digests,
    encoded,
    file_size,
    is_held_out,
    read_pieces,
    refuse_shared,
)
from common.files import locked, write_text
from common.stopping import leave_with_parent

FORMAT_VERSION = 3
NO_TEXT, REST = "documents without text", "tokens at the end that fill no sequence"
HELD_OUT = "documents that are held out"
COMPLETE = "dataset_dict.json"
REPORT = "report.json"
PART_BYTES = 32 * PIECE_BYTES
FILE_TOKENS = 2**26
BATCH_TOKENS = 2**20
FEATURES = Features({"input_ids": List(Value("int32")), "documents": List(Value("int64"))})


@dataclass(frozen=True)
class Settings:
    """What decides about the prepared data, besides the files."""

    text_column: str
    max_seq_length: int
    validation_size: float = 0.0
    """Share of the training documents that becomes the validation split."""
    seed: int = 42
    """Of which documents these are."""
    only_train: bool = False
    """There is no validation split of these files: what is set aside is left out."""


@dataclass(frozen=True)
class Part:
    """Offsets [start, stop) of a file; to its end for None."""

    split: str
    file: Path
    start: int
    stop: int | None


def plan_parts(splits: Mapping[str, list[Path]]) -> list[Part]:
    """Parts of about PART_BYTES; a CSV file, which can only be read from its start, is one."""
    parts = []
    for split, files in splits.items():
        for file in files if split in ("train", "validation") else ():
            num_bytes, step, end = file.stat().st_size, PART_BYTES, file.stat().st_size
            if file.suffix not in (".txt", *LINES):
                end = 1 if file.suffix == ".csv" else file_size(file)
                step = max(1, -(-end // max(1, -(-num_bytes // PART_BYTES))))
            starts = range(0, max(1, end), step)
            parts += [Part(split, file, start, None if start == starts[-1] else start + step) for start in starts]
    return parts


# ---------------------------------------------------------------------------------------------------------------------
# A part


def tokenize_part(part: Part, encoder: Encoder, settings: Settings, known: frozenset[int], output: Path) -> None:
    """Write the tokens of a part to `output`, a file of numpy arrays that appears once it is complete.

    known: digests of documents that are not to be trained on.

    tokens: of all pieces; for each piece that was kept lengths, in tokens, documents, numbered from 0 in the part, and
    is_held_out; num_bytes of both splits; num_documents that end in the part; num_dropped, those without text;
    num_held_out, those in `known` and, with settings.only_train, those that are set aside.
    """
    tokens: list[np.ndarray] = []
    documents, held_out, num_bytes, num_documents, num_dropped, num_held_out = [], [], [0, 0], 0, 0, 0

    def pieces() -> Iterator[Piece]:
        nonlocal num_held_out
        for piece in read_pieces(part.file, settings.text_column, part.start, part.stop):
            is_known = bool(known) and part.split == "train" and digest(piece) in known
            if settings.only_train:
                is_known |= is_held_out(piece, settings.validation_size, settings.seed)
            num_held_out += is_known
            yield piece._replace(text=None) if is_known else piece

    for piece, ids in encoded(pieces(), encoder):
        if piece.text is None:
            num_dropped += 1
        else:
            is_validation = is_held_out(piece, settings.validation_size, settings.seed)
            num_bytes[is_validation] += len(piece.text.encode())
            tokens.append(ids)
            documents.append(num_documents)
            held_out.append(is_validation)
        num_documents += piece.ends
    temporary = output.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.empty(0, dtype=np.int32), *tokens]),
            lengths=np.array([len(ids) for ids in tokens], dtype=np.int64),
            documents=np.array(documents, dtype=np.int64),
            is_held_out=np.array(held_out, dtype=bool),
            num_bytes=np.array(num_bytes),
            num_documents=np.array(num_documents),
            num_dropped=np.array(num_dropped - num_held_out),
            num_held_out=np.array(num_held_out),
        )
    temporary.replace(output)


_worker: tuple[Encoder, Settings, frozenset[int]]


def _start_worker(encoder: Encoder, settings: Settings, known: frozenset[int]) -> None:
    global _worker
    _worker = encoder, settings, known
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are as many as there are to be
    leave_with_parent()


def _work(part: Part, output: Path) -> Part:
    tokenize_part(part, *_worker, output)
    return part


def _tokenize(
    parts: list[tuple[Part, Path]], encoder: Encoder, settings: Settings, known: frozenset[int], num_workers: int
) -> Iterator[Part]:
    if min(num_workers, len(parts)) <= 1:
        for part, output in parts:
            tokenize_part(part, encoder, settings, known, output)
            yield part
        return
    # Not forked: a training process has threads and collectives.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(
        min(num_workers, len(parts)), context, initializer=_start_worker, initargs=(encoder, settings, known)
    ) as pool:
        try:
            for future in as_completed([pool.submit(_work, part, output) for part, output in parts]):
                yield future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


# ---------------------------------------------------------------------------------------------------------------------
# Packing


class _Writer:
    """Arrow files of a split, as `datasets` writes them."""

    def __init__(self, folder: Path, length: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.folder = folder
        self.files: list[str] = []
        self._rows: list[Sequence] = []
        self._batch_rows = max(1, BATCH_TOKENS // length)
        self._file_batches = max(1, FILE_TOKENS // (self._batch_rows * length))
        self._num_batches = 0
        self._file: pa.RecordBatchStreamWriter | None = None

    def add(self, sequence: Sequence) -> None:
        self._rows.append(sequence)
        if len(self._rows) == self._batch_rows:
            self._flush()

    def _flush(self) -> None:
        columns = [
            _list_array([row.tokens for row in self._rows], pa.int32()),
            _list_array([np.array(row.documents) for row in self._rows], pa.int64()),
        ]
        batch = pa.record_batch(columns, schema=FEATURES.arrow_schema)
        if self._num_batches % self._file_batches == 0:
            self._close()
            self.files.append(f"data-{len(self.files):05}.arrow")
            self._file = pa.ipc.new_stream(str(self.folder / self.files[-1]), FEATURES.arrow_schema)
        assert self._file is not None
        self._file.write_batch(batch)
        self._num_batches += 1
        self._rows = []

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def finish(self, fingerprint: str) -> None:
        """Write what is left and the files that `datasets.load_from_disk` looks for."""
        if self._rows or not self.files:
            self._flush()
        self._close()
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in self.files], "_fingerprint": fingerprint,
            "_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False,
            "_split": self.folder.name,
        }  # fmt: skip
        (self.folder / "state.json").write_text(json.dumps(state, indent=2))
        DatasetInfo(features=FEATURES).write_to_directory(str(self.folder))


def _list_array(rows: list[np.ndarray], kind: pa.DataType) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    values = np.concatenate([np.empty(0, dtype=np.int32), *rows])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, type=kind))


def _pack(
    parts: list[tuple[Part, Path]], output: Path, settings: Settings, fingerprint: str
) -> tuple[dict[str, Report], dict[str, list[dict[str, Any]]]]:
    """Reports by split, and the files of each split with the number of their documents."""
    names = {part.split for part, _ in parts}
    if settings.validation_size and not settings.only_train:
        names.add("validation")
    reports: dict[str, Report] = {split: Report() for split in ("train", "validation") if split in names}
    writers = {split: _Writer(output / split, settings.max_seq_length) for split in reports}
    packers = {split: Packer(settings.max_seq_length) for split in reports}
    files: dict[str, list[dict[str, Any]]] = {split: [] for split in reports}
    first_document = dict.fromkeys(reports, 0)  # each split's files have numbers of their own
    for part, path in parts:
        with np.load(path) as arrays:
            content = {name: arrays[name] for name in arrays.files}
        if not files[part.split] or files[part.split][-1]["file"] != str(part.file):
            files[part.split].append({"file": str(part.file), "documents": 0})
        files[part.split][-1]["documents"] += int(content["num_documents"])
        dropped = reports[part.split].dropped
        for reason, name in ((NO_TEXT, "num_dropped"), (HELD_OUT, "num_held_out")):
            if reason == NO_TEXT or content[name]:
                dropped[reason] = dropped.get(reason, 0) + int(content[name])
        begin = 0
        for length, document, is_validation in zip(
            content["lengths"].tolist(), content["documents"].tolist(), content["is_held_out"].tolist(), strict=True
        ):
            split = "validation" if is_validation else part.split
            for sequence in packers[split].add(
                content["tokens"][begin : begin + length], first_document[part.split] + document
            ):
                writers[split].add(sequence)
                reports[split].sequences += 1
            begin += length
        first_document[part.split] += int(content["num_documents"])
        for split, is_validation in ((part.split, False), ("validation", True)):
            if split in reports:
                chosen = content["is_held_out"] == is_validation
                reports[split].documents += len(np.unique(content["documents"][chosen]))
                reports[split].tokens += int(content["lengths"][chosen].sum())
                reports[split].bytes += int(content["num_bytes"][int(is_validation)])
    for split, report in reports.items():
        rest = packers[split].rest()
        if len(rest.tokens) and split == "validation":  # which counts every token
            writers[split].add(rest)
            report.sequences += 1
        elif len(rest.tokens):
            report.dropped[REST] = len(rest.tokens)
        if report.sequences:
            writers[split].finish(f"{fingerprint}{split}")
    return reports, files


# ---------------------------------------------------------------------------------------------------------------------
# A folder


def prepare(
    splits: Mapping[str, list[Path]],
    output: Path,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    num_workers: int = 1,
    quiet: bool = False,
) -> dict[str, Report]:
    """Prepare the files of each split ("train", "validation") in the folder `output`; nothing where that is done.

    Documents of the validation files, and of files that are there as "held_out", are left out of the training split.

    Raises UserError for a folder that holds something else, bad input, and too little of it.
    """
    refuse_shared(splits.get("train", ()), [*splits.get("validation", ()), *splits.get("held_out", ())])
    encoder = Encoder(tokenizer)
    identity = describe(splits, encoder, settings)
    with locked(output):
        return _prepare(splits, output, encoder, settings, identity, num_workers, quiet)


def _prepare(
    splits: Mapping[str, list[Path]],
    output: Path,
    encoder: Encoder,
    settings: Settings,
    identity: dict[str, Any],
    num_workers: int,
    quiet: bool,
) -> dict[str, Report]:
    parts_folder = output / "parts"
    if any(output.iterdir()):
        _check_same(output, identity)
    else:
        _write_json(output / REPORT, identity)
    if not (output / COMPLETE).exists():
        parts_folder.mkdir(exist_ok=True)
        parts = [(part, parts_folder / f"{index:06}.npz") for index, part in enumerate(plan_parts(splits))]
        todo = [(part, path) for part, path in parts if not path.exists()]
        held_out = [*splits.get("validation", ()), *splits.get("held_out", ())]
        known = digests(held_out, settings.text_column) if todo and "train" in splits else frozenset()
        with tqdm(
            desc="tokenizing", total=len(parts), initial=len(parts) - len(todo), unit="part", delay=2, disable=quiet
        ) as bar:
            for _ in _tokenize(todo, encoder, settings, known, num_workers):
                bar.update()
        reports, files = _pack(parts, output, settings, xxhash.xxh3_64_hexdigest(json.dumps(identity).encode()))
        try:
            _check_enough(reports, splits, settings)
        except UserError:
            shutil.rmtree(output)  # nothing half-written, and the way is free for other settings
            raise
        _write_json(output / REPORT, identity | {
            "splits": {split: asdict(report) for split, report in reports.items()}, "documents": files,
        })  # fmt: skip
        _write_json(output / COMPLETE, {"splits": list(reports)})
    shutil.rmtree(parts_folder, ignore_errors=True)
    return {split: report_of(output, split) for split in read_report(output)["splits"]}


def describe(splits: Mapping[str, list[Path]], encoder: Encoder, settings: Settings) -> dict[str, Any]:
    """What prepared data is of, as JSON values."""
    files = {
        split: [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        for split, files in splits.items()
    }
    version = {"format_version": FORMAT_VERSION, "part_bytes": PART_BYTES, "tokenizer": encoder.fingerprint}
    return json.loads(json.dumps(version | asdict(settings) | {"files": files}))


def _check_same(output: Path, identity: dict[str, Any]) -> None:
    try:
        found = json.loads((output / REPORT).read_text())
    except (OSError, ValueError):
        raise UserError(f"{output} is not empty and holds no prepared data; give another folder.") from None
    changed = [key for key, value in identity.items() if found.get(key) != value]
    if changed == ["files"]:
        then, now = ({tuple(file) for files in of["files"].values() for file in files} for of in (found, identity))
        names = sorted({name for name, *_ in then ^ now})
        changed = [f"files: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} changed, new or gone"]
    if changed:
        raise UserError(
            f"{output} holds data that was prepared otherwise ({', '.join(changed)}); remove it or give another folder."
        )


def _check_enough(reports: dict[str, Report], splits: Mapping[str, list[Path]], settings: Settings) -> None:
    files = splits.get("train") or [file for files in splits.values() for file in files]
    source = ", ".join(map(str, files[:3]))
    if "train" in reports and not reports["train"].documents and reports["train"].dropped.get(HELD_OUT):
        raise UserError(f"{source}: all its documents are held out for validation; give other text to train on.")
    if "train" in reports and reports["train"].sequences == 0:
        raise UserError(
            f"{source}: {reports['train'].tokens:,} training tokens do not fill one sequence of "
            f"--max_seq_length {settings.max_seq_length}; give more text, or lower it."
        )
    if "validation" in reports and reports["validation"].sequences == 0:
        if "validation" in splits:
            raise UserError(f"{splits['validation'][0]}: no text in the validation files.")
        raise UserError(
            f"{source}: --validation_size {settings.validation_size} sets none of {reports['train'].documents:,} "
            "documents aside (a text file is one document); raise it, give more documents, or --validation_file."
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_report(folder: Path) -> dict[str, Any]:
    """What was prepared, the counts by split, and the number of documents of each file."""
    return json.loads((folder / REPORT).read_text())


def report_of(folder: Path, split: str) -> Report:
    """The counts of a split."""
    return Report(**read_report(folder)["splits"][split])


def prepared(
    splits: Mapping[str, list[Path]], tokenizer: PreTrainedTokenizerBase, settings: Settings, num_workers: int
) -> Path:
    """Folder in the cache of `datasets` where the files are prepared, once per node; collective."""
    identity = describe(splits, Encoder(tokenizer), settings)
    name = xxhash.xxh3_64_hexdigest(json.dumps(identity).encode())
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "prepared" / name

    def build() -> dict[str, Dataset]:
        prepare(splits, folder, tokenizer, settings, num_workers, quiet=True)
        return dict(datasets.load_from_disk(str(folder)))

    once_per_node(build)
    return folder
