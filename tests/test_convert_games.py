"""tools/convert_games.py: LAION's form out of any file of games, counts by reason, exit codes, whole files only."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tools import convert_games

PGN = """[Event "good"]
[Result "0-1"]

1. f3 {hm} e5 2. g4 Qh4# 0-1

[Event "illegal"]
[Result "1-0"]

1. e5 1-0

[Event "good too"]
[Result "1/2-1/2"]
[Termination "Normal"]

1. Nf3 Nf6 1/2-1/2
"""
ROWS = [
    {"Moves": ["f2f3", "e7e5", "g2g4", "d8h4"], "Termination": "CHECKMATE", "Result": "0-1"},
    {"Moves": ["g1f3", "g8f6"], "Termination": "Normal", "Result": "1/2-1/2"},
]


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def pgn(tmp_path: Path) -> Path:
    path = tmp_path / "games.pgn"
    path.write_text(PGN)
    return path


def test_good_games_are_written_and_bad_ones_counted(pgn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = pgn.with_name("games.jsonl")
    assert convert_games.main([str(pgn), "-o", str(output)]) == 0
    assert rows(output) == ROWS
    assert capsys.readouterr().out.splitlines() == [
        "2 games kept, 1 dropped",
        f"  1 illegal move: {pgn} line 6 ('e5' at move 1, white)",
        f"written to {output}",
    ]


def test_what_was_written_is_read_back_as_it_is(pgn: Path) -> None:
    first, text, again = (pgn.with_name(name) for name in ("first.jsonl", "more.txt", "again.jsonl"))
    text.write_text("e2e4 e7e5\n")  # without a result
    assert convert_games.main([str(pgn), str(text), "-o", str(first)]) == 0
    assert rows(first)[2] == {"Moves": ["e2e4", "e7e5"], "Termination": None, "Result": None}
    assert convert_games.main([str(first), "-o", str(again)]) == 0
    assert again.read_bytes() == first.read_bytes()
    assert convert_games.main([str(again), "-o", str(again)]) == 2
    assert convert_games.main([str(pgn), "-o", str(pgn)]) == 2  # would have lost what PGN has beside the moves
    assert again.read_bytes() == first.read_bytes() and pgn.read_text().startswith("[")


def test_what_is_no_file_is_not_replaced(pgn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, folder = pgn.with_name("pipe"), pgn.with_name("folder")
    os.mkfifo(pipe)
    folder.mkdir()
    for output in (pipe, folder):
        assert convert_games.main([str(pgn), "-o", str(output)]) == 2
        assert capsys.readouterr().err == f"error: -o {output}: is no file; name one to write.\n"
    assert pipe.is_fifo()


def test_real_games(shared_data: Path, tmp_path: Path) -> None:
    source, output = shared_data / "chess" / "chess_game_0001.sample16.parquet", tmp_path / "games.jsonl"
    assert convert_games.main([str(source), "-o", str(output)]) == 0
    real = rows(shared_data / "chess" / "laion_strategic_game_chess_real_rows.jsonl")
    assert rows(output) == [{key: row[key] for key in ("Moves", "Termination", "Result")} for row in real]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1. e5 1-0", "no good game was found"),
        (None, "no such file"),
    ],
)
def test_nothing_good_leaves_the_output_alone(
    pgn: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    source, output = pgn.with_name("bad.pgn"), pgn.with_name("games.jsonl")
    output.write_text("from before")
    if content is not None:
        source.write_text(content)
    assert convert_games.main([str(source), "-o", str(output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert output.read_text() == "from before"
    assert {path.name for path in pgn.parent.iterdir()} <= {"games.pgn", "bad.pgn", "games.jsonl"}


def test_a_failure_half_way_leaves_nothing(pgn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = pgn.with_name("z.parquet")
    broken.write_bytes(b"PAR1")
    assert convert_games.main([str(pgn), str(broken), "-o", str(pgn.with_name("games.jsonl"))]) == 2
    assert "z.parquet: not a readable parquet file" in capsys.readouterr().err
    assert {path.name for path in pgn.parent.iterdir()} == {"games.pgn", "z.parquet"}


def test_a_full_disk_is_an_error_and_leaves_nothing(
    pgn: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert convert_games.main([str(pgn), "-o", str(pgn.with_name("games.jsonl"))]) == 1
    assert "games.jsonl cannot be written: No space left on device" in capsys.readouterr().err
    assert {path.name for path in pgn.parent.iterdir()} == {"games.pgn"}


def test_the_script_runs(pgn: Path) -> None:
    output = pgn.with_name("absent") / "games.jsonl"
    command: list[str | Path] = [sys.executable, REPOSITORY / "tools" / "convert_games.py", pgn, "-o", output]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"error: -o {output}: no folder {output.parent}\n"
