"""common/data.py: every reader, the cleaner, the order of examples, batches and collators."""

import csv
import json
import multiprocessing
import os
import random
import re
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import PartialState
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from common import data
from common.arguments import UserError
from common.losses import IGNORE_INDEX
from tests.forked import free_port

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_TOKENIZER = ROOT / "recipes" / "samples" / "tokenizer"
T5_TOKENIZER = ROOT.parent / "shared" / "data" / "t5_tokenizer"
SAMPLE_TOKENIZER = ROOT / "recipes" / "samples" / "tokenizer"
PAIR: list[tuple[str, ...]] = [("document", "summary")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


@pytest.fixture(params=[T5_TOKENIZER, SAMPLE_TOKENIZER], ids=["t5", "sample"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if not request.param.is_dir():
        pytest.skip(f"no tokenizer at {request.param}")
    return AutoTokenizer.from_pretrained(request.param)


def read(path: Path, columns: list[tuple[str, ...]] = PAIR) -> list[dict[str, Any]]:
    return list(data.load_splits(columns=columns, train_file=path)["train"])


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def test_csv_keeps_line_breaks_quotes_and_words_that_pandas_takes_for_missing(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(
        b"\xef\xbb\xbfid,summary,document\r\n"  # byte order mark, other column order, one column too many
        b'1,"\nOne.,\nTwo ""quoted"".",Line one.\r\n'
        b'2,s,"a\r\n\r\n, b"\r\n'
        b"\r\n"
        b"3,NA,null\r\n"
        b"4,,\r\n"
        b"5,short row\r\n"
    )
    assert read(file) == [
        {"document": "Line one.", "summary": '\nOne.,\nTwo "quoted".'},
        {"document": "a\r\n\r\n, b", "summary": "s"},
        {"document": "null", "summary": "NA"},
        {"document": "", "summary": ""},
        {"document": None, "summary": "short row"},
    ]


def test_csv_field_longer_than_the_standard_limit(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("document,summary\n" + "x" * 300_000 + ",s\n")
    assert len(read(file)[0]["document"]) == 300_000


def test_json_lines_with_lists_nulls_numbers_and_other_columns_that_differ(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"document": ["One.", "Two."], "summary": "s", "extra": 1}\n'
        "\n"
        '{"document": null, "extra": {"x": []}, "summary": 3}\n'
        '{"summary": null}\n'
        '{"summary": NaN}\n'
    )
    (tmp_path / "b.json").write_text('{"summary": "u", "document": "text", "extra": "y", "more": 1}\n')
    assert read(tmp_path) == [
        {"document": ["One.", "Two."], "summary": "s"},
        {"document": None, "summary": "3"},
        {"document": None, "summary": None},
        {"document": None, "summary": None},
        {"document": ["text"], "summary": "u"},
    ]


@pytest.mark.parametrize("value", [r'"b \ud83d"', r'["a", "b \ud83d"]'])
def test_half_a_character_in_json_lines(value: str, tmp_path: Path) -> None:
    whole = r'"a \ud83d\ude00"' if value.startswith('"') else r'["a \ud83d\ude00"]'
    rows = [f'{{"document": {text}, "summary": "s"}}\n' for text in (whole, value)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    with pytest.raises(UserError, match=r"a\.jsonl line 2: 'document' holds '\\ud83d', half of a character"):
        read(tmp_path)


def test_parquet_next_to_csv(tmp_path: Path) -> None:
    table = {"summary": ["s", None], "document": ["d", "e"], "n": [1, 2]}
    pq.write_table(pa.table(table), tmp_path / "b.parquet")
    (tmp_path / "a.csv").write_text("document,summary\nx,y\n")
    assert read(tmp_path) == [
        {"document": "d", "summary": "s"},
        {"document": "e", "summary": None},
        {"document": "x", "summary": "y"},
    ]
    assert read(tmp_path / "b.parquet", [("n",)]) == [{"n": "1"}, {"n": "2"}]


def test_parquet_lists(tmp_path: Path) -> None:
    pq.write_table(pa.table({"moves": [["e2e4", "e7e5"], []]}), tmp_path / "games.parquet")
    assert read(tmp_path / "games.parquet", [("moves",)]) == [{"moves": ["e2e4", "e7e5"]}, {"moves": []}]


def test_first_alternative_that_the_file_has(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("source,target,text\na,b,c\n")
    choices = [("text", "headline"), ("source", "target"), ("text",)]
    assert read(file, choices) == [{"source": "a", "target": "b"}]


def test_folder_is_split_by_file_names(tmp_path: Path) -> None:
    for name in ("train-00001-of-00002", "train-00002-of-00002", "dev", "my_test"):
        (tmp_path / f"{name}.csv").write_text(f"document\n{name}\n")
    splits = data.load_splits(columns=[("document",)], train_file=tmp_path)
    assert splits["train"]["document"][:] == ["train-00001-of-00002", "train-00002-of-00002"]
    assert splits["validation"]["document"][:] == ["dev"]
    assert set(splits) == {"train", "validation"}
    (tmp_path / "notes.csv").write_text("document\nnotes\n")
    other = data.load_splits(
        columns=[("document",)], train_file=tmp_path / "notes.csv", validation_file=tmp_path / "my_test.csv"
    )
    assert (other["train"]["document"][:], other["validation"]["document"][:]) == (["notes"], ["my_test"])
    with pytest.raises(UserError, match=r"dev\.csv is named for a split, notes\.csv is not: name all files for theirs"):
        data.load_splits(columns=[("document",)], train_file=tmp_path)
    (tmp_path / "notes.csv").unlink()
    (tmp_path / "dev.csv").unlink()
    (tmp_path / "one.csv").write_text("document\none\n")
    (tmp_path / "held_out").mkdir()
    for name in ("a_train", "b_test"):
        (tmp_path / "held_out" / f"{name}.csv").write_text(f"document\n{name}\n")
    held_out = data.load_splits(
        columns=[("document",)], train_file=tmp_path / "one.csv", validation_file=tmp_path / "held_out"
    )
    assert held_out["validation"]["document"][:] == ["b_test"]


def test_edited_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("document,summary\nold,s\n")
    assert read(file)[0]["document"] == "old"
    file.write_text("document,summary\nnew,s\n")
    os.utime(file, ns=(1, 1))  # another time, whatever the clock's resolution
    assert read(file)[0]["document"] == "new"


BAD_FILES: list[tuple[str, bytes, list[str]]] = [
    ("a.csv", b"", ["empty"]),
    ("a.jsonl", b"\n\n", ["empty"]),
    ("a.csv", b"document,summary\n\n", ["no rows"]),
    ("a.csv", b"document,title\nx,y\n", ["'summary'", "document, title"]),
    ("a.csv", b"document,summary\na,b\nc,d,e\n", ["line 3", "3 fields", "2"]),
    ("a.csv", b'document,summary\na,"never closed\nb,c\nd,e\n', ["quote", "never closed"]),
    ("a.csv", b"document,summary\n\xff\xfe,b\n", ["UTF-8"]),
    ("a.jsonl", b'{"document": "x", "summary": "y"}\n{"document": "x", \n', ["line 2", "not JSON"]),
    ("a.jsonl", b'[{"document": "x", "summary": "y"}]\n', ["line 1", "list", "one object a line"]),
    ("a.jsonl", b'{"document": {"t": 1}, "summary": "y"}\n', ["line 1", "'document'", "text"]),
    ("a.jsonl", b'{"document": "\xff", "summary": "y"}\n', ["UTF-8"]),
    ("a.jsonl", b'{"document": "x"}\n' * 2, ["'summary'"]),
    ("a.jsonl", b'{"a": "x"}\n' * 120 + b'{"a": ["y"]}\n', ["line 121", "'a'", "list"]),
    ("a.parquet", b"PAR1 no", ["not a parquet file"]),
    ("a.txt", b"words", [".csv", ".parquet"]),
]


@pytest.mark.parametrize(("name", "content", "expected"), BAD_FILES)
def test_bad_file(tmp_path: Path, name: str, content: bytes, expected: list[str]) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(file, [("a",)] if b'"a"' in content else PAIR)
    for part in [str(file), *expected]:
        assert part in str(error.value)
    assert len(str(error.value)) < 500


def test_struct_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"document": [{"x": 1}], "summary": ["s"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet.*'document'.*struct"):
        read(tmp_path / "a.parquet")


def test_parquet_without_rows(tmp_path: Path) -> None:
    empty = pa.table({"document": pa.array([], pa.string()), "summary": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: no rows"):
        read(tmp_path)


def test_columns_are_checked_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("document,summary\na,b\n")
    (tmp_path / "2.csv").write_text("document,abstract\na,b\n")
    with pytest.raises(UserError, match=r"2\.csv: no column 'summary'; it has document, abstract; .*Use --this\."):
        data.load_splits(columns=[("text", "headline"), *PAIR], train_file=tmp_path, hint="Use --this.")


def test_missing_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--train_file .*nowhere.csv: no such file"):
        read(tmp_path / "nowhere.csv")
    with pytest.raises(UserError, match="no file ending in .csv"):
        read(tmp_path)
    (tmp_path / "dev.csv").write_text("document,summary\na,b\n")
    with pytest.raises(UserError, match="no training file among dev.csv"):
        read(tmp_path)
    with pytest.raises(UserError, match="not both"):
        data.load_splits(columns=PAIR, train_file=tmp_path / "dev.csv", dataset_name="a/b")
    with pytest.raises(UserError, match="--validation_file .*none"):
        data.load_splits(columns=PAIR, train_file=tmp_path / "dev.csv", validation_file=tmp_path / "none")


def fake_hub(monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    def load_dataset(name: str, config: str | None) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ConnectionError("Couldn't reach 'a/b' on the Hub"), ['make download ARGS="--dataset a/b"', "_demo"]),
        (datasets.exceptions.DatasetNotFoundError("'a/b' is gated."), ["huggingface.co/datasets/a/b", "hf auth login"]),
        (ValueError("Config name is missing.\nAvailable: ['x', 'y']"), ["--dataset_config_name", "['x', 'y']"]),
    ],
)
def test_hub_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch, failure: Exception, expected: list[str]) -> None:
    fake_hub(monkeypatch, failure)
    with pytest.raises(UserError) as error:
        data.load_splits(columns=PAIR, dataset_name="a/b")
    for part in ["--dataset_name a/b", *expected]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_unreachable_hub_for_real() -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        data.load_splits(columns=PAIR, dataset_name="nobody/nothing")


def test_hub_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    part = datasets.Dataset.from_dict({"id": [1], "summary": ["s"], "document": ["d"]})
    fake_hub(monkeypatch, datasets.DatasetDict(train=part, validation=part, test=part))
    splits = data.load_splits(columns=PAIR, dataset_name="a/b")
    assert {name: rows[0] for name, rows in splits.items()} == dict.fromkeys(
        ("train", "validation"), {"document": "d", "summary": "s"}
    )
    fake_hub(monkeypatch, datasets.DatasetDict(test=part))
    with pytest.raises(UserError, match="no split 'train' among test"):
        data.load_splits(columns=PAIR, dataset_name="a/b")


def test_scitldr(shared_data: Path) -> None:
    folder = shared_data / "scitldr"
    splits = data.load_splits(columns=[("source", "target")], train_file=folder)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 1992, "validation": 619}
    rows = [json.loads(line) for line in (folder / "dev.jsonl").read_text().splitlines()]
    assert splits["validation"]["target"][:] == [row["target"] for row in rows]
    assert splits["validation"]["source"][:] == [row["source"] for row in rows]


# ---------------------------------------------------------------------------------------------------------------------
# Cleaning, splitting, tokenizing


def table(folder: Path, texts: list[str]) -> datasets.Dataset:
    """A dataset that has cache files, as real ones do."""
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    return data.load_splits(columns=[("text",)], train_file=folder / "table.csv")["train"]


def keep_words(row: dict[str, Any]) -> tuple[dict[str, str] | None, str | None]:
    if row["text"] == "crash":
        raise UserError("a crash")
    if not row["text"].strip():
        return None, "empty"
    if row["text"].isdigit():
        return None, "number"
    return {"word": row["text"].upper()}, None


def test_clean_counts_by_reason(tmp_path: Path) -> None:
    rows = table(tmp_path, ["a", "1", " ", "b", "2", "c", "d"])
    kept, dropped = data.clean(rows, keep_words, columns=["word"], source="table")
    assert kept.column_names == ["word"]
    assert kept["word"][:] == ["A", "B", "C", "D"]
    assert dropped == Counter(number=2, empty=1)
    with pytest.raises(UserError, match=r"table: cleaning dropped 3 of 7 rows \(2 number, 1 empty\), more than 40%"):
        data.clean(rows, keep_words, columns=["word"], source="table", max_dropped_share=0.4)


def test_clean_refuses_what_leaves_nothing_and_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"table: no row of 3 is left after cleaning \(2 number, 1 empty\)"):
        data.clean(table(tmp_path, ["1", "2", " "]), keep_words, columns=["word"], source="table")
    with pytest.raises(UserError, match="table: no rows"):
        data.clean(table(tmp_path, ["a"]).select([]), keep_words, columns=["word"], source="table")
    with pytest.raises(UserError, match="table, row 2: a crash"):
        data.clean(table(tmp_path, ["a", "crash"]), keep_words, columns=["word"], source="table")


def test_as_text() -> None:
    assert data.as_text(None) == data.as_text(float("nan")) == data.as_text([]) == ""
    assert data.as_text(["One.", None, "Two."]) == "One. Two."
    assert data.as_text(3) == "3"
    for value in ({"a": 1}, [1], b"x"):
        with pytest.raises(UserError, match="where text is expected"):
            data.as_text(value)


def test_paths_with_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.txt", "b.txt", "c, d.txt"):
        (tmp_path / name).touch()
    assert data.expand_paths("a.txt, b.txt", "--f") == ["a.txt", "b.txt"]
    assert data.expand_paths("c, d.txt", "--f") == ["c, d.txt"]
    assert data.expand_paths("a.txt,~/b.txt", "--f") == ["a.txt", str(tmp_path / "b.txt")]
    assert data.expand_paths("?.txt", "--f") == ["a.txt", "b.txt"]
    for text in ("a.txt,", "a.txt, ", ",a.txt", " ", ""):
        with pytest.raises(UserError, match=f"--f '{text}': a path is empty; take out the comma"):
            data.expand_paths(text, "--f")


def test_squeeze() -> None:
    assert data.squeeze(" a\t b\r\n\r\n \xa0\nc  ") == "a b\nc"


def test_split_is_seeded_and_disjoint() -> None:
    rows = datasets.Dataset.from_dict({"x": list(range(100))})
    train, validation = data.split(rows, 0.1, 1, "x")
    assert (len(train), len(validation)) == (90, 10)
    assert sorted(train["x"][:] + validation["x"][:]) == list(range(100))
    assert train["x"][:] == sorted(train["x"][:])
    assert data.split(rows, 10, 1, "x")[1]["x"][:] == validation["x"][:]
    assert data.split(rows, 0.1, 2, "x")[1]["x"][:] != validation["x"][:]
    assert len(data.split(rows, 0.001, 1, "x")[1]) == 1
    for size in (100, 1000):
        with pytest.raises(UserError, match=f"100 rows are too few to set {size} aside"):
            data.split(rows, size, 1, "x")
    with pytest.raises(UserError, match="1 rows are too few"):
        data.split(rows.select([0]), 0.1, 1, "x")


def test_copies_of_validation_rows_are_not_trained_on() -> None:
    rows = datasets.Dataset.from_dict({"text": [str(number // 2) for number in range(3000)], "row": range(3000)})
    train, validation = data.split(rows, 0.1, 0, "text")
    assert len(validation) == 300
    assert not set(train["text"][:]) & set(validation["text"][:])
    held_out = set(validation["text"][:])
    assert train["row"][:] == [row for row in range(3000) if str(row // 2) not in held_out]
    same = datasets.Dataset.from_dict({"text": ["a"] * 10})
    with pytest.raises(UserError, match="nothing to train on: the text of all 10 rows is in the validation"):
        data.split(same, 0.1, 0, "text")


def test_encode_always_ends_with_the_end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Keep the water just below a simmer."
    whole = tokenizer(text)["input_ids"]
    assert whole.count(tokenizer.eos_token_id) == 1 and whole[-1] == tokenizer.eos_token_id
    assert data.encode(tokenizer, [text, ""], 512) == [whole, [tokenizer.eos_token_id]]
    assert data.encode(tokenizer, [text], len(whole)) == [whole]
    assert data.encode(tokenizer, [text], len(whole) - 1) == [[*whole[:-2], tokenizer.eos_token_id]]
    assert data.encode(tokenizer, [text], 4) == [tokenizer(text, max_length=4, truncation=True)["input_ids"]]


def test_words_that_spell_special_tokens_are_text(tokenizer: PreTrainedTokenizerBase) -> None:
    [ids] = data.encode(tokenizer, ["Tap </s> or <pad>."], 64)
    assert not {*ids[:-1]} & {tokenizer.eos_token_id, tokenizer.pad_token_id}


def test_special_tokens_that_a_vocabulary_has_as_words() -> None:
    """As T5's has; a `<` it has not."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁Tap", -1.0), ("▁", -2.0)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    unigram = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    assert data.encode(unigram, ["Tap </s>"], 64) == [[3, 4, 2, 1]]


def test_tokenize_pairs(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = datasets.Dataset.from_dict(
        {"id": [1, 2], "a": ["Boil water. " * 30, "Rest."], "b": ["Boil.", "Wait. " * 30]}
    )
    encoded = data.tokenize_pairs(
        rows, tokenizer, columns=("a", "b"), source_prefix="summarize: ", max_source_length=24, max_target_length=9
    )
    assert encoded.column_names == ["input_ids", "attention_mask", "labels", "length"]
    for row, new in zip(rows, encoded, strict=True):
        source = tokenizer("summarize: " + row["a"], max_length=24, truncation=True)["input_ids"]
        target = tokenizer(row["b"], max_length=9, truncation=True)["input_ids"]
        assert new["input_ids"] == source
        assert new["attention_mask"] == [1] * len(source)
        assert new["labels"] == target
        assert new["length"] == len(source) + len(target)
    assert data.column_array(encoded, "length").tolist() == encoded["length"][:]
    assert len(encoded[0]["input_ids"]) == 24 and len(encoded[1]["labels"]) == 9


def count_letters(rows: dict[str, list[Any]], log: Path, tokenizer: Any = None) -> dict[str, list[Any]]:
    """Stands for a tokenizing function; writes down each execution."""
    with open(log, "a") as file:
        file.write(f"{os.getpid()} {len(rows['text'])}\n")
    if tokenizer is not None:
        tokenizer(rows["text"], truncation=True, max_length=4, padding="max_length")  # changes the tokenizer's state
    return {"length": [len(text) for text in rows["text"]]}


def executions(log: Path) -> Counter[str]:
    """Rows done by each process."""
    counts: Counter[str] = Counter()
    for line in log.read_text().splitlines() if log.exists() else []:
        process, num_rows = line.split()
        counts[process] += int(num_rows)
    return counts


def test_tokenizing_is_cached(tmp_path: Path) -> None:
    log = tmp_path / "log"
    table(tmp_path, ["a", "bb", "ccc"])
    for _ in range(2):
        rows = data.load_splits(columns=[("text",)], train_file=tmp_path / "table.csv")["train"]
        rows, _ = data.split(rows, 1, 0, "text")
        assert len(data.tokenize(rows, partial(count_letters, log=log))) == 2
    assert executions(log).total() == 2
    table(tmp_path, ["a", "bb", "dddd"])
    os.utime(tmp_path / "table.csv", ns=(1, 1))
    rows = data.load_splits(columns=[("text",)], train_file=tmp_path / "table.csv")["train"]
    assert data.tokenize(rows, partial(count_letters, log=log))["length"][:] == [1, 2, 4]


def test_tokens_that_end_texts_are_part_of_the_cache_key(tmp_path: Path) -> None:
    """They stand in tokenizer_config.json: base and chat models share the rest."""
    shutil.copytree(SAMPLE_TOKENIZER, tmp_path / "other")
    config = tmp_path / "other" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<pad>"}))
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (SAMPLE_TOKENIZER, tmp_path / "other")]
    (tmp_path / "rows.csv").write_text("a,b\nBoil water.,Boil.\n")
    rows = data.load_splits(columns=[("a", "b")], train_file=tmp_path / "rows.csv")["train"]
    settings: dict[str, Any] = {"source_prefix": "", "max_source_length": 24, "max_target_length": 9}
    found = [data.tokenize_pairs(rows, tokenizer, columns=("a", "b"), **settings) for tokenizer in tokenizers]
    assert [encoded[0]["labels"][-1] for encoded in found] == [tokenizer.eos_token_id for tokenizer in tokenizers]
    assert found[0][0]["labels"] != found[1][0]["labels"]


# ---------------------------------------------------------------------------------------------------------------------
# Once per node


def _run_rank(rank: int, nodes: list[int], port: int, function: Callable[[int], Any], results: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        torch.set_num_threads(1)
        PartialState._reset_state()
        PartialState(cpu=True)
        results.put((rank, function(rank)))
    except BaseException as error:  # noqa: B036
        results.put((rank, error if isinstance(error, UserError | AssertionError) else traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def run_ranks(nodes: list[int], function: Callable[[int], Any], timeout: float = 60) -> list[Any]:
    """What `function(rank)` returns or raises on each rank of a gloo group; `nodes` says on which node a rank is."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = [(rank, nodes, port, function, results) for rank in range(len(nodes))]
    processes = [context.Process(target=_run_rank, args=args, daemon=True) for args in arguments]
    try:
        for process in processes:
            process.start()
        return [result for _, result in sorted((results.get(timeout=timeout) for _ in nodes), key=lambda item: item[0])]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(("nodes", "num_executions"), [([0, 0], 1), ([0, 0, 1], 1)])
def test_everything_is_done_once(tmp_path: Path, nodes: list[int], num_executions: int) -> None:
    """The first process works and the others read; nodes that share the cache do not repeat the work."""
    log = tmp_path / "log"
    with open(tmp_path / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], *([f"text {i}"] for i in range(20)), ["7"]])
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_TOKENIZER) if SAMPLE_TOKENIZER.is_dir() else None

    def prepare(rank: int) -> Any:
        time.sleep(0.2 * (len(nodes) - rank))  # the main process is the last to arrive
        rows = data.load_splits(columns=[("text",)], train_file=tmp_path / "table.csv")["train"]
        rows, dropped = data.clean(rows, keep_words, columns=["word"], source="table")
        rows = rows.rename_column("word", "text")
        parts = data.split(rows, 0.25, 3, "text")
        # The second call meets a tokenizer whose state the first one changed on the main process alone.
        function = partial(count_letters, log=log, tokenizer=tokenizer)
        lengths = [data.tokenize(part, function)["length"][:] for part in parts]
        return os.getpid(), lengths, dropped

    results = run_ranks(nodes, prepare)
    assert all(isinstance(result, tuple) for result in results), results
    assert all(result[1:] == results[0][1:] for result in results)
    assert [len(lengths) for lengths in results[0][1]] == [15, 5]
    assert executions(log) == {str(results[0][0]): 20 * num_executions}


def test_other_node_reads_for_itself_when_it_shares_nothing(tmp_path: Path) -> None:
    """Each node's first process works where the nodes have caches of their own."""
    log = tmp_path / "log"
    (tmp_path / "table.csv").write_text("text\na\nbb\n")
    nodes = [0, 0, 1, 1]

    def prepare(rank: int) -> Any:
        datasets.config.HF_DATASETS_CACHE = tmp_path / f"cache_of_node_{nodes[rank]}"
        rows = data.load_splits(columns=[("text",)], train_file=tmp_path / "table.csv")["train"]
        return os.getpid(), data.tokenize(rows, partial(count_letters, log=log))["length"][:]

    results = run_ranks(nodes, prepare)
    assert [result[1] for result in results] == [[1, 2]] * 4
    assert executions(log) == {str(results[0][0]): 2, str(results[2][0]): 2}


def test_failure_of_one_process_reaches_all(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("text\na\nb,c\n")

    def read_bad_file(rank: int) -> Any:
        return data.load_splits(columns=[("text",)], train_file=tmp_path / "table.csv")

    def fail_later(rank: int) -> Any:
        def build() -> datasets.Dataset:
            if rank == 1:
                raise OSError("disk full")
            return datasets.Dataset.from_dict({"x": [1]})

        return data.once_per_node(build)

    started = time.monotonic()
    for result in run_ranks([0, 0], read_bad_file):
        assert isinstance(result, UserError) and "table.csv line 3: 2 fields" in str(result)
    first, second = run_ranks([0, 0], fail_later)
    assert "RuntimeError: another process: disk full" in first and "OSError: disk full" in second
    assert time.monotonic() - started < 30


def test_preparation_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    def build(rank: int) -> Any:
        torch.distributed.destroy_process_group()
        # Not at the first group's port, which may still be closing.
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=3))

        def prepare() -> datasets.Dataset:
            time.sleep(4 * (rank == 0))
            return datasets.Dataset.from_dict({"x": [1]})

        return data.once_per_node(prepare)["x"][:]

    assert run_ranks([0, 0], build) == [[1], [1]]


def test_processes_that_hold_different_data_stop() -> None:
    def build(rank: int) -> Any:
        return data.once_per_node(lambda: datasets.Dataset.from_dict({"x": [rank]}))

    for result in run_ranks([0, 0], build):
        assert isinstance(result, UserError) and "different data" in str(result)


# ---------------------------------------------------------------------------------------------------------------------
# The order of examples


def stream(sampler: data.StepSampler, num_steps: int) -> list[int]:
    return np.concatenate([sampler.indices(step) for step in range(num_steps)]).tolist()


@pytest.mark.parametrize(("num_examples", "batch_size"), [(10, 5), (10, 4), (7, 3), (3, 8), (1, 4), (100, 1)])
def test_stream_is_one_permutation_after_another(num_examples: int, batch_size: int) -> None:
    num_epochs = 12
    num_steps = -(-num_epochs * num_examples // batch_size)
    order = stream(data.StepSampler(num_examples, batch_size, seed=5), num_steps)
    epochs = [order[i * num_examples : (i + 1) * num_examples] for i in range(num_epochs)]
    assert all(sorted(epoch) == list(range(num_examples)) for epoch in epochs)
    if num_examples >= 7:
        assert len(set(map(tuple, epochs))) == num_epochs
    assert order == stream(data.StepSampler(num_examples, batch_size, seed=5), num_steps)
    if num_examples >= 7:
        assert order != stream(data.StepSampler(num_examples, batch_size, seed=6), num_steps)


def test_batch_size_moves_only_the_cuts() -> None:
    assert stream(data.StepSampler(11, 2, seed=0), 18) == stream(data.StepSampler(11, 6, seed=0), 6)


@pytest.mark.parametrize("with_lengths", [False, True])
def test_step_alone_decides(with_lengths: bool) -> None:
    """Steps in any order, each from a new sampler, as after a resume."""
    lengths = np.random.default_rng(0).integers(1, 50, 90) if with_lengths else None
    sampler = data.StepSampler(90, 4, 1, lengths)
    expected = [sampler.indices(step).tolist() for step in range(60)]
    for step in np.random.default_rng(1).permutation(60).tolist():
        assert sampler.indices(step).tolist() == expected[step]
        assert data.StepSampler(90, 4, 1, lengths).indices(step).tolist() == expected[step]


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize(
    ("num_processes", "per_device"), [(1, 24), (1, 1), (2, 12), (2, 3), (3, 8), (3, 2), (4, 6), (4, 1)]
)
def test_any_split_has_the_same_examples(with_lengths: bool, num_processes: int, per_device: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 200) if with_lengths else None
    sampler = data.StepSampler(200, 24, 7, lengths)
    for step in range(20):
        batch = sampler.indices(step).tolist()
        shares = [sampler.micro_batches(step, p, num_processes, per_device) for p in range(num_processes)]
        assert all(len(micro) == per_device for share in shares for micro in share)
        assert len({len(share) for share in shares}) == 1
        # Micro-batch i of all processes together is the i-th piece of the batch, sorted by length.
        pieces = [sum((share[i] for share in shares), []) for i in range(len(shares[0]))]
        assert sum(pieces, []) == batch
        if lengths is not None:
            assert lengths[batch].tolist() == sorted(lengths[batch].tolist())


def test_length_grouping_permutes_within_windows() -> None:
    num_examples, batch_size = 1000, 10
    lengths = np.random.default_rng(0).integers(1, 500, num_examples)
    plain = data.StepSampler(num_examples, batch_size, 3)
    grouped = data.StepSampler(num_examples, batch_size, 3, lengths)
    window = grouped.window_batches
    assert window == 25  # a quarter of an epoch
    for first in range(0, 8 * window, window):
        expected = np.concatenate([plain.indices(step) for step in range(first, first + window)])
        batches = [grouped.indices(step) for step in range(first, first + window)]
        assert sorted(np.concatenate(batches).tolist()) == sorted(expected.tolist())
        # Batches cover disjoint ranges of length, and are not in the order of length.
        spans = [(lengths[batch].min(), lengths[batch].max()) for batch in batches]
        assert all(low[1] <= high[0] for low, high in zip(sorted(spans), sorted(spans)[1:], strict=False))
        assert spans != sorted(spans)
    orders = [
        tuple(lengths[grouped.indices(step)].mean() for step in range(w * window, (w + 1) * window)) for w in (0, 4)
    ]
    assert np.argsort(orders[0]).tolist() != np.argsort(orders[1]).tolist()  # the shuffle differs by window


def test_length_grouping_saves_padding() -> None:
    lengths = np.random.default_rng(0).integers(10, 512, 4000)

    def padded(sampler: data.StepSampler) -> float:
        micro = [m for step in range(100) for p in range(2) for m in sampler.micro_batches(step, p, 2, 4)]
        return sum(len(m) * lengths[m].max() for m in micro) / sum(lengths[m].sum() for m in micro)

    assert padded(data.StepSampler(4000, 32, 0)) > 1.4
    assert padded(data.StepSampler(4000, 32, 0, lengths)) < 1.05


def test_small_dataset_with_lengths_does_not_repeat_an_example_in_a_batch() -> None:
    sampler = data.StepSampler(64, 8, 0, np.arange(64))
    batches = [sampler.indices(step).tolist() for step in range(8 * 20)]
    assert all(len(set(batch)) == 8 for batch in batches)
    assert Counter(sum(batches, [])) == dict.fromkeys(range(64), 20)


def test_dataset_smaller_than_the_batch() -> None:
    sampler = data.StepSampler(3, 8, 0, np.array([5, 1, 3]))
    counts = Counter(stream(sampler, 9))
    assert counts == {0: 24, 1: 24, 2: 24}


def test_two_permutations_are_kept_at_most() -> None:
    sampler = data.StepSampler(10, 25, 0)
    for step in range(10):
        sampler.indices(step)
        assert len(sampler._order._permutations) <= 2


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def numbers(num_rows: int) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": list(range(num_rows))})


def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([row["x"] for row in rows])}


def steps_of(batches: Iterator[list[data.Batch]]) -> list[list[list[int]]]:
    return [[micro["x"].tolist() for micro in step] for step in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_train_batches_follow_the_sampler_and_resume(num_workers: int) -> None:
    sampler = data.StepSampler(20, 12, 0)
    run = partial(
        data.train_batches,
        numbers(20),
        collate_fn=stack,
        num_processes=2,
        per_device_batch_size=3,
        num_workers=num_workers,
    )
    for process in range(2):
        whole = steps_of(run(sampler=sampler, start_step=0, num_steps=9, process_index=process))
        assert whole == [sampler.micro_batches(step, process, 2, 3) for step in range(9)]
        resumed = data.StepSampler(20, 12, 0)
        assert steps_of(run(sampler=resumed, start_step=4, num_steps=5, process_index=process)) == whole[4:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_leave_the_global_random_numbers_alone(num_workers: int) -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
    common: dict[str, Any] = {"process_index": 0, "num_processes": 1, "per_device_batch_size": 2}
    common["num_workers"] = num_workers
    list(data.train_batches(numbers(6), data.StepSampler(6, 4, 0), stack, start_step=0, num_steps=3, **common))
    list(data.EvalBatches(numbers(6), stack, **common))
    after = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_is_one_line(num_workers: int) -> None:
    def collate(rows: list[Any]) -> Any:
        raise UserError("news: row 3 has no tokens; prepare it anew.")

    batches = data.train_batches(
        numbers(6), data.StepSampler(6, 4, 0), collate, start_step=0, num_steps=3, process_index=0, num_processes=1,
        per_device_batch_size=2, num_workers=num_workers,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"^news: row 3 has no tokens; prepare it anew\.$"):
        list(batches)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 11])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_each_evaluation_example_comes_once(num_rows: int, batch_size: int) -> None:
    lengths = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])[:num_rows]
    composition = set()
    for num_processes in range(1, 5):
        loaders = [
            data.EvalBatches(
                numbers(num_rows),
                stack,
                process_index=process,
                num_processes=num_processes,
                per_device_batch_size=batch_size,
                lengths=lengths,
            )
            for process in range(num_processes)
        ]
        assert len({len(loader) for loader in loaders}) == 1  # collectives
        batches = [item for loader in loaders for item in loader]
        assert len(batches) == sum(map(len, loaders))
        assert all(item.batch["x"].tolist() == item.indices for item in batches)
        real = [item.indices for item in batches if not item.is_padding]
        assert sorted(sum(real, [])) == list(range(num_rows))
        assert sum(item.is_padding for item in batches) < num_processes
        assert {loader.num_examples for loader in loaders} == {num_rows}
        composition.add(tuple(sorted(map(tuple, real))))
    assert len(composition) == 1  # also the padding inside a batch is the same with any number of processes


def test_evaluation_starts_with_the_longest_and_can_be_cut_short() -> None:
    lengths = np.array([1, 5, 3, 9, 7])
    for num_processes in (1, 2, 3):
        run = partial(data.EvalBatches, numbers(5), stack, num_processes=num_processes, per_device_batch_size=2)
        first = list(run(process_index=0, lengths=lengths))[0]
        assert first.indices == [3, 4]
        cut = [item for p in range(num_processes) for item in run(process_index=p, lengths=lengths, max_batches=2)]
        assert sorted(i for item in cut if not item.is_padding for i in item.indices) == [0, 1, 2, 3]
        assert run(process_index=0, max_batches=2).num_examples == 4
        assert run(process_index=0, max_batches=9).num_examples == 5


def test_contents_are_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[str, list[Any]] = {
        "input_ids": [[i, i + 1, i + 2] for i in range(3000)],
        "text": [str(i) for i in range(3000)],
    }
    table = datasets.Dataset.from_dict(rows)
    plain = data.contents_hash(table)
    assert plain == data.contents_hash(datasets.concatenate_datasets([table.select(range(7)), table.skip(7)]))
    assert plain == data.contents_hash(table.cast_column("input_ids", datasets.List(datasets.Value("int32"))))
    for name, value in (("input_ids", [7, 1235, 1236]), ("input_ids", [1234, 1235]), ("text", "")):
        changed: dict[str, Any] = {column: [*values] for column, values in rows.items()}
        changed[name][1234] = value
        assert data.contents_hash(datasets.Dataset.from_dict(changed)) != plain
    with monkeypatch.context() as patch:
        patch.setattr(data, "HASHED_BYTES", 1)
        patch.setattr(data, "HASHED_EXAMPLES", 2)
        assert data.contents_hash(table) not in (plain, data.contents_hash(table.select(range(2999))))
    tokens, changed_tokens = np.arange(99), np.arange(99)
    changed_tokens[50] = 0
    changed_end = np.append(tokens[:-1], 0)
    windows = [data.TokenWindows(tokens, 8, range(0, 90, step)) for step in (8, 9)]
    windows.append(data.TokenWindows(changed_tokens, 8, range(0, 90, 9)))
    windows.append(data.TokenWindows(changed_end, 8, range(0, 98, 9)))
    windows.append(data.TokenWindows(tokens, 8, range(0, 98, 9)))
    assert len({data.contents_hash(each) for each in windows}) == 5
    assert data.contents_hash(windows[1], num_examples=5) == data.contents_hash(windows[2], num_examples=5)


def test_an_evaluation_is_described_by_what_it_reads() -> None:
    run = partial(data.EvalBatches, collate_fn=stack)
    sizes: dict[str, Any] = {"num_processes": 1, "per_device_batch_size": 2}
    first = run(numbers(5), process_index=0, **sizes, max_batches=2).description
    assert re.fullmatch(r"4 examples, contents \w{16}", first)
    same = (numbers(4), sizes), (numbers(9), sizes | {"max_batches": 2}), (numbers(4), sizes | {"num_processes": 3})
    assert all(run(rows, process_index=0, **more).description == first for rows, more in same)
    other = (numbers(5), sizes), (numbers(5), sizes | {"max_batches": 1}), (numbers(9).select(range(1, 5)), sizes)
    assert first not in [run(rows, process_index=0, **more).description for rows, more in other]


# ---------------------------------------------------------------------------------------------------------------------
# Collators


def rows_of(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    pairs = [
        ("Boil the water and wait.", "Boil."),
        ("Rest.", "Let it rest for a whole night."),
        ("Stir it.", "Stir now."),
    ]
    return [
        {"input_ids": source, "attention_mask": [1] * len(source), "labels": target, "length": 0}
        for source, target in ((data.encode(tokenizer, [text], 99)[0] for text in pair) for pair in pairs)
    ]


def tiny_t5(tokenizer: PreTrainedTokenizerBase) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("multiple", [None, 8])
def test_seq2seq_collator(tokenizer: PreTrainedTokenizerBase, multiple: int | None) -> None:
    rows = rows_of(tokenizer)
    batch = data.Seq2SeqCollator(tokenizer, decoder_start_token_id=0, pad_to_multiple_of=multiple)(rows)
    assert set(batch) == {"input_ids", "attention_mask", "labels", "decoder_input_ids"}
    assert all(tensor.dtype == torch.int64 and tensor.device.type == "cpu" for tensor in batch.values())
    widths = [max(len(row[key]) for row in rows) for key in ("input_ids", "labels")]
    if multiple:
        widths = [-(-width // multiple) * multiple for width in widths]
    assert [batch["input_ids"].shape[1], batch["labels"].shape[1]] == widths
    for i, row in enumerate(rows):
        n, m = len(row["input_ids"]), len(row["labels"])
        assert batch["input_ids"][i].tolist() == row["input_ids"] + [tokenizer.pad_token_id] * (widths[0] - n)
        assert batch["attention_mask"][i].tolist() == [1] * n + [0] * (widths[0] - n)
        assert batch["labels"][i].tolist() == row["labels"] + [-100] * (widths[1] - m)
        # One start token, then the target: position t sees what comes before target t.
        assert batch["decoder_input_ids"][i, : m + 1].tolist() == [0, *row["labels"]][: widths[1]]
        assert row["labels"][0] != 0
    assert int((batch["labels"] != IGNORE_INDEX).sum()) == sum(len(row["labels"]) for row in rows)


def test_seq2seq_collator_shifts_as_the_model_does(tokenizer: PreTrainedTokenizerBase) -> None:
    batch = data.Seq2SeqCollator(tokenizer, decoder_start_token_id=0, pad_to_multiple_of=8)(rows_of(tokenizer))
    expected = tiny_t5(tokenizer).prepare_decoder_input_ids_from_labels(batch["labels"])
    assert torch.equal(batch["decoder_input_ids"], expected)


def test_a_column_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("document,summary,summary\na,b,c\n")
    with pytest.raises(UserError, match=r"a\.csv: column 'summary' is there 2 times"):
        data.load_splits(columns=PAIR, train_file=tmp_path / "a.csv")


def test_json_that_is_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl line 1: not JSON"):
        data.load_splits(columns=PAIR, train_file=tmp_path / "a.jsonl")


def test_padding_is_no_target(tokenizer: PreTrainedTokenizerBase) -> None:
    """The loss of a padded batch is the mean over the real tokens of each example alone."""
    model, rows = tiny_t5(tokenizer), rows_of(tokenizer)
    batch = data.Seq2SeqCollator(tokenizer, decoder_start_token_id=0, pad_to_multiple_of=16)(rows)
    with torch.no_grad():
        padded = model(**batch).loss.item()
        total = 0.0
        for row in rows:
            logits = model(
                input_ids=torch.tensor([row["input_ids"]]),
                decoder_input_ids=torch.tensor([[0, *row["labels"][:-1]]]),
            ).logits[0]
            total -= sum(logits.log_softmax(-1)[t, label].item() for t, label in enumerate(row["labels"]))
    assert padded == pytest.approx(total / int((batch["labels"] != IGNORE_INDEX).sum()), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Causal batches


@pytest.mark.parametrize(("multiple", "length"), [(1, 3), (8, 8)])
def test_causal_collator(multiple: int, length: int) -> None:
    rows = [
        {"input_ids": [5, 6, 7], "labels": [IGNORE_INDEX, 7, 1], "length": 3, "moves": [-1, 0, 0]},
        {"input_ids": [8], "labels": [1], "length": 1, "moves": [4]},
    ]
    batch = data.CausalCollator(1, multiple)(rows)
    assert set(batch) == {"input_ids", "labels", "moves"}  # no mask
    assert batch["input_ids"].tolist() == [[5, 6, 7] + [1] * (length - 3), [8] + [1] * (length - 1)]
    assert batch["labels"].tolist() == [
        [IGNORE_INDEX, 7, 1] + [IGNORE_INDEX] * (length - 3), [1] + [IGNORE_INDEX] * (length - 1)
    ]  # fmt: skip
    assert batch["moves"].tolist() == [[-1, 0, 0] + [-1] * (length - 3), [4] + [-1] * (length - 1)]


def test_pack_keeps_every_row_whole_and_once() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, 40) for _ in range(1200)]
    rows = [[1000 * number + position for position in range(length)] for number, length in enumerate(lengths)]
    dataset = datasets.Dataset.from_dict({"input_ids": rows, "labels": [[-t for t in row] for row in rows]})
    packed = data.pack(dataset, 40)
    found = []
    for row in packed:
        assert row["length"] == len(row["input_ids"]) == len(row["labels"]) == len(row["position_ids"]) <= 40
        assert row["labels"] == [-token for token in row["input_ids"]]
        starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            found.append(row["input_ids"][start:end])
            assert row["position_ids"][start:end] == list(range(len(found[-1])))
    assert sorted(found) == rows
    assert sum(lengths) / (40 * len(packed)) > 0.97


def _numbers(first: int, last: int) -> Iterator[dict[str, Any]]:
    if last < first:
        raise UserError("nothing to count")
    yield from ({"number": number} for number in range(first, last + 1))


def test_generated_rows_are_cached_by_arguments_and_user_errors_come_through() -> None:
    features = datasets.Features({"number": datasets.Value("int64")})
    first, again, other = (data.generate(_numbers, features, first=1, last=last) for last in (3, 3, 4))
    assert first["number"][:] == again["number"][:] == [1, 2, 3] and other["number"][:] == [1, 2, 3, 4]
    assert first._fingerprint == again._fingerprint != other._fingerprint
    assert first.cache_files == again.cache_files != other.cache_files
    with pytest.raises(UserError, match="^nothing to count$"):
        data.generate(_numbers, features, first=1, last=0)
