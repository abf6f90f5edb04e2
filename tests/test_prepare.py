"""common/prepare.py and tools/prepare_data.py: the same files however they came about, which `datasets` loads."""

import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from common import prepare
from common.arguments import UserError
from common.documents import Encoder, Piece, is_held_out
from common.prepare import Settings
from tests.conftest import REPOSITORY
from tools.prepare_data import main

TOOL = REPOSITORY / "tools" / "prepare_data.py"
TOKENIZER = REPOSITORY / "recipes" / "samples" / "tokenizer"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    rng = random.Random(1)
    words = ["rice", "water", "boil", "the", "a", "of", "pot", "simmer", "é"]
    paths = []
    for name in ("b", "a"):
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(70)] + [""]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return paths


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_folder_holds_what_a_slow_reference_packs(
    files: list[Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "PART_BYTES", 1000)
    monkeypatch.setattr(prepare, "BATCH_TOKENS", 150)
    monkeypatch.setattr(prepare, "FILE_TOKENS", 600)
    settings = Settings("text", 50, 0.2, 7)
    reports = prepare.prepare({"train": files}, tmp_path / "out", tokenizer, settings)
    loaded = datasets.load_from_disk(str(tmp_path / "out"))

    encoder = Encoder(tokenizer)
    streams: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    num_bytes = {False: 0, True: 0}
    number = 0
    for file in files:
        for line in file.read_text().splitlines():
            piece = Piece(json.loads(line)["text"] or None, True, True, 0)
            if piece.text is not None:
                ids = tokenizer(piece.text, add_special_tokens=False)["input_ids"]
                held_out = is_held_out(piece, 0.2, 7)
                streams[held_out] += [(token, number) for token in [3, *ids, 1]]
                num_bytes[held_out] += len(piece.text.encode())
            number += 1
    for split, stream in (("train", streams[False]), ("validation", streams[True])):
        rows = [stream[start : start + 50] for start in range(0, len(stream), 50)]
        rest = len(rows[-1]) % 50
        if split == "train" and rest:
            del rows[-1]
        assert loaded[split]["input_ids"][:] == [[token for token, _ in row] for row in rows]
        assert loaded[split]["documents"][:] == [sorted({document for _, document in row}) for row in rows]
        report = reports[split]
        assert (report.tokens, report.sequences, report.bytes) == (
            len(stream), len(rows), num_bytes[split == "validation"],
        )  # fmt: skip
        assert report.documents == len({document for _, document in stream})
    assert reports["train"].dropped == {prepare.NO_TEXT: 2, prepare.REST: len(streams[False]) % 50}
    assert prepare.read_report(tmp_path / "out")["documents"]["train"] == [
        {"file": str(file), "documents": 71} for file in files
    ]
    assert len(list((tmp_path / "out" / "train").glob("*.arrow"))) > 3
    assert prepare.read_report(tmp_path / "out")["tokenizer"] == encoder.fingerprint


def test_same_files_for_any_number_of_workers_and_interruptions(
    files: list[Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "PART_BYTES", 2000)
    settings = Settings("text", 64, 0.1)
    prepare.prepare({"train": files}, tmp_path / "one", tokenizer, settings)
    expected = contents(tmp_path / "one")
    assert not any(name.startswith("parts") for name in expected)
    write_part, count = prepare.tokenize_part, 0

    def write_half(file: Any, **arrays: object) -> None:
        file.write(b"PK")
        raise KeyboardInterrupt

    def interrupted(*arguments: Any) -> None:
        nonlocal count
        count += 1
        with monkeypatch.context() as patch:
            if count % 3 == 0:
                patch.setattr(np, "savez", write_half)
            write_part(*arguments)

    monkeypatch.setattr(prepare, "tokenize_part", interrupted)
    num_starts = 0
    while not (tmp_path / "two" / prepare.COMPLETE).exists():
        num_starts += 1
        try:
            prepare.prepare({"train": files}, tmp_path / "two", tokenizer, settings)
        except KeyboardInterrupt:
            with pytest.raises(FileNotFoundError):
                datasets.load_from_disk(str(tmp_path / "two"))
    assert num_starts > 3 and contents(tmp_path / "two") == expected
    prepare.prepare({"train": files}, tmp_path / "two", tokenizer, settings)  # nothing is left to do
    assert contents(tmp_path / "two") == expected


def test_runs_that_prepare_the_same_wait_for_each_other(
    files: list[Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    settings = Settings("text", 16)
    prepare.prepare({"train": files}, tmp_path / "alone", tokenizer, settings)
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(prepare.prepare, {"train": files}, tmp_path / "shared", tokenizer, settings) for _ in range(4)
        ]
        reports = [run.result() for run in runs]
    assert reports == reports[:1] * 4
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")


def test_what_cannot_be_prepared(files: list[Path], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(UserError, match=r"short.txt: \d+ training tokens do not fill one sequence of --max_seq"):
        prepare.prepare({"train": [short]}, tmp_path / "a", tokenizer, Settings("text", 64))
    with pytest.raises(UserError, match=r"--validation_size 1e-09 sets none of 140 documents aside"):
        prepare.prepare({"train": files}, tmp_path / "b", tokenizer, Settings("text", 64, 1e-9))
    prepare.prepare({"train": files}, tmp_path / "b", tokenizer, Settings("text", 64, 0.5))  # nothing is in the way
    prepare.prepare({"train": files}, tmp_path / "c", tokenizer, Settings("text", 64))
    with pytest.raises(UserError, match=r"prepared otherwise \(max_seq_length, seed\)"):
        prepare.prepare({"train": files}, tmp_path / "c", tokenizer, Settings("text", 32, seed=1))
    (own := tmp_path / files[0].name).write_bytes(files[0].read_bytes())
    prepare.prepare({"train": [own, *files[1:]]}, tmp_path / "d", tokenizer, Settings("text", 64))
    own.write_bytes(own.read_bytes() + b"\n")
    with pytest.raises(UserError, match=rf"prepared otherwise \(files: {own} changed, new or gone\)"):
        prepare.prepare({"train": [own, *files[1:]]}, tmp_path / "d", tokenizer, Settings("text", 64))
    with pytest.raises(UserError, match=r"is not empty and holds no prepared data"):
        prepare.prepare({"train": files}, tmp_path, tokenizer, Settings("text", 32))


@pytest.mark.full
def test_tool_killed_and_started_again_gives_the_same_files(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """SIGKILL while two workers tokenize: none is left behind, and the second start finishes."""
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for _ in range(600):
                file.write(json.dumps({"text": " ".join(map(str, rng.integers(0, 10**6, 800)))}) + "\n")
    files = sorted(tmp_path.glob("*.jsonl"))
    flags = [f"{tmp_path}/*.jsonl", f"--tokenizer={TOKENIZER}", "--max_seq_length=128", "--num_workers=2"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(TOOL), *flags, f"--output={tmp_path / 'killed'}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    process = start()
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "killed").glob("parts/*.npz")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=30)
        deadline = time.monotonic() + 20
        while _group_is_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not _group_is_alive(process.pid)
        assert not (tmp_path / "killed" / prepare.COMPLETE).exists(), "the kill came too late to show anything"
        process = start()
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 0 and "train: 1,800 documents" in output and "MB/s" in output, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    prepare.prepare({"train": files}, tmp_path / "whole", tokenizer, Settings("text", 128))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_command_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text = (REPOSITORY / "README.md").read_text()
    (command,) = [line for line in text.splitlines() if line.startswith("python tools/prepare_data.py")]
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command)[2:], "--num_workers=1", "--seed=7"]) == 0
    output = capsys.readouterr().out
    assert "1 documents without text" in output and "MB/s" in output
    assert list(datasets.load_from_disk("runs/articles")) == ["train", "validation"]
    assert prepare.read_report(Path("runs/articles"))["seed"] == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: no such file"),
        (["a.txt", "--max_seq_length=1"], "--max_seq_length from 2"),
        (["a.txt", "--validation_file=a.txt", "--validation_size=0.1"], "give one of them"),
        (["."], "--output out: it lies in ., whose files are read"),
        (["a.txt", "--output=a.txt"], "--output a.txt: it is a file"),
        (["a.txt", "--tokenizer=."], "with --tokenizer."),
    ],
)
def test_mistakes_of_the_tool(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    try:
        code = main([f"--tokenizer={TOKENIZER}", "--output=out", *flags])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
