"""common/documents.py: every format, offsets, tokens with their ends, and packing against a slow reference."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common import documents
from common.arguments import UserError
from common.documents import Encoder, Packer, Piece, encoded, is_held_out, list_documents, read_pieces
from tests.conftest import REPOSITORY

TEXTS = ["One.", "Two\n\nlines é 中😀", "", "  \n", "Five </s> <s>", "six"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(REPOSITORY / "recipes" / "samples" / "tokenizer")


def write(folder: Path, kind: str, texts: list[str | None]) -> Path:
    file = folder / f"data.{kind}"
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.string())})
    if kind in ("jsonl", "json"):
        file.write_text("\ufeff" + "\n\n".join(json.dumps({"id": 1, "text": text}) for text in texts), encoding="utf-8")
    elif kind == "csv":
        rows = "\n".join(f'{i},"{(text or "")}"' for i, text in enumerate(texts))
        file.write_text(f"id,text\n{rows}\n", encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(table, file, row_group_size=2)
    else:
        opened = pa.ipc.new_stream if kind == "arrow" else pa.ipc.new_file
        file = folder / f"{kind}.arrow"
        with opened(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "arrow_file"])
def test_every_format_gives_the_same_documents_from_every_offset(kind: str, tmp_path: Path) -> None:
    file = write(tmp_path, kind, [*TEXTS, None])
    assert list_documents(str(tmp_path), "--train_file", "text") == [file]
    pieces = list(read_pieces(file, "text"))
    assert [piece.text for piece in pieces] == [text if text.strip() else None for text in [*TEXTS, ""]]
    assert all(piece.starts and piece.ends for piece in pieces)
    for number, piece in enumerate(pieces, 1):
        assert list(read_pieces(file, "text", piece.next_offset)) == pieces[number:]
    if kind != "csv":  # any cut of the offsets gives each document once
        size = documents.file_size(file)
        for cut in range(0, size + 1, max(1, size // 40)):
            assert [*read_pieces(file, "text", 0, cut), *read_pieces(file, "text", cut)] == pieces


def test_long_text_is_one_document_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    rng = random.Random(0)
    text = "".join(rng.choice(["word é ", "中" * 9, "\n", "\n\n", "  ", "x" * 150]) for _ in range(300))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = list(read_pieces(tmp_path / "a.txt", "text"))
    assert "".join(piece.text or "" for piece in pieces) == text and len(pieces) > 20
    assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all((piece.text or "").endswith("\n") for piece in pieces[:-1])
    file = tmp_path / "a.txt"
    for cut in range(0, len(text.encode()) + 64, 16):
        assert [*read_pieces(file, "text", 0, cut), *read_pieces(file, "text", cut)] == pieces
    for number, piece in enumerate(pieces, 1):
        assert list(read_pieces(file, "text", piece.next_offset)) == pieces[number:]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_text_without_words_is_dropped(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert [piece.text for piece in read_pieces(tmp_path / "a.txt", "text")] == [None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl line 2: not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', r"a.jsonl line 2: a JSON list; one object"),
        ("a.csv", b"text,text\na,b\n", r"a.csv: column 'text' is there 2 times; rename one"),
        (
            "a.jsonl",
            b'{"text": "a \\ud83d\\ude00"}\n{"text": "b \\ud83d"}\n',
            r"a.jsonl line 2: 'text' holds '\\ud83d', half of a character",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"a.jsonl line 2: 'text' is of type int \(3\); text is expected"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl line 2: not UTF-8 text"),
        ("a.txt", b"abc\n\n" * 2**18 + b"\xe4b\n", r"a.txt line 524289: not UTF-8 text"),
        ("a.jsonl", b'{"txt": "a"}\n', r"a.jsonl: no column 'text'; it has txt: choose with --text_column"),
        ("a.arrow", b"nothing", r"a.arrow: not an Arrow file"),
        ("a.md", b"", r"--train_file .*a.md: a file ending in .txt"),
    ],
)
def test_bad_files_are_named_with_the_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        for file in list_documents(str(tmp_path / name), "--train_file", "text"):
            list(read_pieces(file, "text"))


def test_columns_are_checked_in_every_file(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", ["a"])
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "z.parquet")
    with pytest.raises(UserError, match=r"z.parquet: no column 'text'; it has body"):
        list_documents(f"{tmp_path}/*.jsonl,{tmp_path}/z.parquet", "--train_file", "text")
    with pytest.raises(UserError, match=r"no-such.txt: no such file"):
        list_documents(f"{tmp_path}/no-such.txt", "--train_file", "text")


def test_a_file_is_named_once(tmp_path: Path) -> None:
    file = write(tmp_path, "jsonl", ["a"])
    (tmp_path / "link").symlink_to(tmp_path)
    for text in (f"{tmp_path}/*.jsonl,{file}", f"{tmp_path},{file}", f"{file},{tmp_path}/link/{file.name}"):
        with pytest.raises(UserError, match=rf"--train_file: .*{file.name} is named twice"):
            list_documents(text, "--train_file", "text")
    with pytest.raises(UserError, match=rf"FILE: {file} is named twice"):
        list_documents([str(file), str(file)], "FILE", "text")


def test_each_document_has_one_start_and_one_end(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Also where its text spells them, and for a document in pieces."""
    encoder = Encoder(tokenizer)
    tokens = [ids for _, ids in encoded([Piece(text or "x", True, True, 0) for text in TEXTS], encoder)]
    for text, ids in zip(TEXTS, tokens, strict=True):
        assert ids[0] == tokenizer.bos_token_id and ids[-1] == tokenizer.eos_token_id
        assert not set(ids[1:-1].tolist()) & {tokenizer.bos_token_id, tokenizer.eos_token_id}
        assert tokenizer.decode(ids[1:-1]) == (text or "x")
    pieces = [Piece("ab ", True, False, 0), Piece(None, True, True, 0), Piece("cd", False, True, 0)]
    first, dropped, last = (ids.tolist() for _, ids in encoded(pieces, encoder))
    assert first[0] == 3 and 1 not in first and dropped == [] and last[-1] == 1 and 3 not in last


def test_gpt2s_end_token_stands_alone_between_documents(tokenizer: PreTrainedTokenizerBase) -> None:
    same = AutoTokenizer.from_pretrained(REPOSITORY / "recipes" / "samples" / "tokenizer", bos_token="</s>")
    assert [ids.tolist().count(1) for _, ids in encoded([Piece("a", True, True, 0)] * 2, Encoder(same))] == [1, 1]
    without = AutoTokenizer.from_pretrained(REPOSITORY / "recipes" / "samples" / "tokenizer", eos_token=None)
    with pytest.raises(UserError, match="no end-of-sequence token"):
        Encoder(without)


def test_held_out_documents_follow_from_the_text() -> None:
    pieces = [Piece(f"text {number}", True, True, 0) for number in range(4000)]
    chosen = [is_held_out(piece, 0.1, 3) for piece in pieces]
    assert sum(chosen) == pytest.approx(400, abs=60)
    assert chosen == [is_held_out(piece, 0.1, 3) for piece in pieces]
    assert chosen != [is_held_out(piece, 0.1, 4) for piece in pieces]
    assert not is_held_out(pieces[0]._replace(ends=False), 0.999, 3) and not is_held_out(pieces[0], 0, 3)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 1000])
def test_packing_equals_a_slow_reference(length: int) -> None:
    rng = np.random.default_rng(length)
    chunks = [(rng.integers(5, 100, rng.integers(0, 40)), document // 2) for document in range(60)]
    packer, found = Packer(length), []
    for tokens, document in chunks:
        found += [(tokens.tolist(), documents) for tokens, documents in packer.add(tokens, document)]
    stream = [(int(token), document) for tokens, document in chunks for token in tokens]
    expected = []
    for start in range(0, len(stream) - length + 1, length):
        piece = stream[start : start + length]
        expected.append(([token for token, _ in piece], sorted({document for _, document in piece})))
    assert found == expected
    rest = stream[len(expected) * length :]
    assert packer.num_carried == len(rest)
    assert packer.rest().tokens.tolist() == [token for token, _ in rest]
    assert packer.rest().tokens.tolist() == [] and packer.num_carried == 0
