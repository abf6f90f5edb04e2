"""common/chess_games.py: nothing but whole, legal games is read, whatever the file; text and moves are one to one."""

import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import chess
import chess.pgn
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common import chess_games as cg
from common.arguments import UserError
from tests.conftest import REPOSITORY

SAMPLES = REPOSITORY / "recipes" / "samples"

# Morphy's game at the opera, 1858, in both notations.
OPERA = (
    "1. e4 e5 2. Nf3 d6 3. d4 Bg4 4. dxe5 Bxf3 5. Qxf3 dxe5 6. Bc4 Nf6 7. Qb3 Qe7 8. Nc3 c6 9. Bg5 b5 10. Nxb5 cxb5 "
    "11. Bxb5+ Nbd7 12. O-O-O Rd8 13. Rxd7 Rxd7 14. Rd1 Qe6 15. Bxd7+ Nxd7 16. Qb8+ Nxb8 17. Rd8#"
)
OPERA_UCI = (
    "e2e4 e7e5 g1f3 d7d6 d2d4 c8g4 d4e5 g4f3 d1f3 d6e5 f1c4 g8f6 f3b3 d8e7 b1c3 c7c6 c1g5 b7b5 c3b5 c6b5 "
    "c4b5 b8d7 e1c1 a8d8 d1d7 d8d7 h1d1 e7e6 b5d7 f6d7 b3b8 d7b8 d1d8"
)
FOOLS_MATE = ("f2f3", "e7e5", "g2g4", "d8h4")
# Sam Loyd's stalemate in ten moves.
STALEMATE = (
    "1. e3 a5 2. Qh5 Ra6 3. Qxa5 h5 4. h4 Rah6 5. Qxc7 f6 6. Qxd7+ Kf7 7. Qxb7 Qd3 8. Qxb8 Qh7 9. Qxc8 Kg6 10. Qe6"
)
PROMOTION = "1. d4 e5 2. dxe5 f6 3. exf6 Nh6 4. fxg7 Nf5 5. gxh8=Q"  # not over


def read(*paths: Path) -> tuple[list[cg.Game], cg.ReadReport]:
    report = cg.ReadReport()
    games = list(cg.read_games(paths, report))
    assert report.num_games == len(games)
    return games, report


def read_text(folder: Path, text: str | bytes, name: str = "games.pgn") -> tuple[list[cg.Game], cg.ReadReport]:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(path)


def uci(*texts: str) -> list[tuple[str, ...]]:
    """Moves of SAN texts by python-chess alone."""
    found = []
    for text in texts:
        board = chess.Board()
        for token in text.split():
            if not token[0].isdigit():
                board.push_san(token)
        found.append(tuple(move.uci() for move in board.move_stack))
    return found


def moves(games: Iterable[cg.Game]) -> list[tuple[str, ...]]:
    return [game.moves for game in games]


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("name", ["chess_game_0001.sample16.parquet", "laion_strategic_game_chess_real_rows.jsonl"])
def test_every_real_game_replays_to_its_stated_result(shared_data: Path, name: str) -> None:
    games, report = read(shared_data / "chess" / name)
    assert len(games) == 16 and not report.dropped
    with open(shared_data / "chess" / "laion_strategic_game_chess_real_rows.jsonl") as lines:
        rows = [json.loads(line) for line in lines]
    for game, row in zip(games, rows, strict=True):
        assert game.to_row() == {key: row[key] for key in ("Moves", "Termination", "Result")}
        board = chess.Board()
        for move in game.moves:
            board.push_uci(move)
        outcome = board.outcome()
        assert outcome is not None and (outcome.result(), outcome.termination.name) == (game.result, game.termination)


MIXED_PGN = r"""% a line for some program
This file was put together by hand.

[Event "Opera"]
[White "Morphy"]
[Result "1-0"]

1. e4 e5 2. Nf3 d6 3. d4 Bg4 {a weak move [%clk 0:03:01] (1-0)} 4. dxe5 Bxf3 (4... dxe5 5. Qxd8+ (5. Nxe5 $1) 5... Kxd8
{a comment
over lines, with 1-0 and

an empty one}) 5. Qxf3 dxe5 6. Bc4 Nf6 7. Qb3 $1 Qe7 8. Nc3 c6 ; the rest of the line 9. Qh5 *
9. Bg5! b5?! 10. Nxb5 cxb5 11. Bxb5+ Nbd7 12. 0-0-0 Rd8 13. Rxd7 Rxd7 14. Rd1 Qe6 15. Bxd7+ +- Nxd7
% escaped
16. Qb8+!! Nxb8 17. Rd8# 1-0 {mate}

[Event "no blank line before the moves"]
[Result "0-1"]
1.f3 e5
2.g4?? Qh4#
0-1
[Event "nor before the next game"]
[Result "1/2-1/2"]
1. d4 d5 1/2-1/2

[Event "illegal"]
[Result "1-0"]

1. e4 e5 2. Ke3 Nc6 3. Nf3 1-0

[Event "junk in the moves"]
[Result "1-0"]

1. e4 e5 2. <b>Nf3</b> Nc6 1-0

[Event "moves torn apart"]
[Result "1-0"]

1. N f3 N f6 2. g3 1-0

[Event "cut off"]
[Result "1-0"]

1. c4 c5 2. Nc3 Nc6 3.

[Event "a piece is missing"]
[Result "1-0"]

1. Nf3 Nf6 5. Nc3 Nc6 1-0

[Event "unfinished"]
[Result "*"]

1. b3 b6 *

[Event "Chess960"]
[Variant "Chess960"]
[FEN "bbqnnrkr/pppppppp/8/8/8/8/PPPPPPPP/BBQNNRKR w KQkq - 0 1"]
[SetUp "1"]

1. e4 e5 1-0

[Event "crazyhouse, legal as chess"]
[Result "1-0"]
[Variant "Crazyhouse"]

1. a4 a5 1-0

[Event "from a position"]
[SetUp "1"]
[FEN "4k3/8/8/8/8/8/4P3/4K3 w - - 0 1"]

1. e4 Kd7 1-0

[Event "the usual position, said twice"]
[FEN "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"]
[SetUp "1"]

1. a3 a6 1/2-1/2

[Event "other result than the moves say"]
[Result "0-1"]

1. h4 h5 1-0

[Event "other result than the mate says"]
[Result "1-0"]

1. f4 e5 2. g4 Qh4# 1-0

[Event "null move"]
[Result "1-0"]

1. e4 -- 2. d4 d5 1-0

[Event "ambiguous"]
[Result "1-0"]

1. Nf3 d5 2. d3 Nf6 3. Nd2 e6 4. e4 1-0

[Event "no moves"]
[Result "1-0"]

1-0

[Event "comment that is never closed"]
[Result "1-0"]

1. c3 {why c6 2. d4 1-0

[Event "the opera again"]
[Result "1-0"]

OPERA 1-0

[Event "a quote \" and [brackets]"] [Site "a "club" house"]
[Bad tag
[Round 4]
[Result "0-1"]

1. g3 g6 2. Bg2 Bg7 0-1

1. h3 {neither tags} h6 1/2-1/2

Nc3 1-0

<html>404 { ( * </html>

[Event "the last one, mated, without a result"]

1. f3 e5 2. g4 d6 3. Nc3 Qh4#
""".replace("OPERA", OPERA)

MIXED_GOOD = (
    OPERA,
    "1. f3 e5 2. g4 Qh4#",
    "1. d4 d5",
    "1. a3 a6",
    "1. g3 g6 2. Bg2 Bg7",
    "1. h3 h6",
    "1. f3 e5 2. g4 d6 3. Nc3 Qh4#",
)


def test_mixed_pgn_gives_exactly_the_good_games(tmp_path: Path) -> None:
    games, report = read_text(tmp_path, MIXED_PGN)
    assert moves(games) == uci(*MIXED_GOOD)
    assert [game.result for game in games] == ["1-0", "0-1", "1/2-1/2", "1/2-1/2", "0-1", "1/2-1/2", "0-1"]
    assert [game.termination for game in games] == ["CHECKMATE", "CHECKMATE", None, None, None, None, "CHECKMATE"]
    assert report.dropped == {
        # Prose, <b>, torn moves, open comment, a lone move, html.
        cg.UNREADABLE: 6,
        cg.ILLEGAL: 3,
        cg.NO_RESULT: 1,
        cg.OUT_OF_ORDER: 1,
        cg.UNFINISHED: 1,
        cg.VARIANT: 3,
        cg.CONTRADICTION: 2,
        cg.NO_MOVES: 1,
        cg.DUPLICATE: 1,
    }


def test_positions_of_dropped_games_are_told(tmp_path: Path) -> None:
    lines = MIXED_PGN.split("\n")
    games, report = read_text(tmp_path, MIXED_PGN)
    path = tmp_path / "games.pgn"
    at = {event: lines.index(f'[Event "{event}"]') + 1 for event in ("Opera", "illegal", "null move", "cut off")}
    assert games[0].source == f"{path} line {at['Opera']}"
    assert moves(read_text(tmp_path, MIXED_PGN, "games.txt")[0]) == moves(games)  # known by its tags
    assert report.examples[cg.ILLEGAL][:2] == [
        f"{path} line {at['illegal']} ('Ke3' at move 2, white)",
        f"{path} line {at['null move']} ('--' at move 1, black)",
    ]
    assert report.examples[cg.NO_RESULT] == [f"{path} line {at['cut off']}"]
    assert len(report.examples[cg.UNREADABLE]) == cg.MAX_EXAMPLES
    shown = str(report).splitlines()
    assert shown[0] == "7 games kept, 19 dropped"
    assert shown[1].startswith("  6 unreadable text: ") and shown[1].endswith(", ...")


@pytest.fixture(scope="module")
def sample_games() -> list[cg.Game]:
    games, report = read(SAMPLES / "chess_games.jsonl")
    assert not report.dropped
    return games


def to_pgn(games: Iterable[cg.Game]) -> str:
    """PGN as python-chess writes it, with comments."""
    texts = []
    for number, game in enumerate(games):
        board = chess.Board()
        for move in game.moves:
            board.push_uci(move)
        pgn = chess.pgn.Game.from_board(board)
        pgn.headers.update({"Event": f"game {number}", "White": "Müller", "Result": game.result or "*"})
        for node in list(pgn.mainline())[::7]:
            node.comment = "[%eval 0.17] [%clk 0:00:30]"
        texts.append(f"{pgn}\n")
    return "\n".join(texts)


def test_games_written_by_python_chess_are_read_in_full(tmp_path: Path, sample_games: list[cg.Game]) -> None:
    games, report = read_text(tmp_path, to_pgn(sample_games[:20]))
    assert moves(games) == moves(sample_games[:20]) and not report.dropped
    assert [game.result for game in games] == [game.result for game in sample_games[:20]]


def test_a_file_cut_anywhere_gives_no_partial_game(tmp_path: Path, sample_games: list[cg.Game]) -> None:
    chosen = sorted(sample_games, key=lambda game: len(game.moves))[:3]
    whole = to_pgn(chosen)
    draw = random.Random(0)
    for end in draw.sample(range(len(whole)), 60):
        complete = sum(1 for match in re.finditer(r" (1-0|0-1|1/2-1/2)\n", whole) if match.end() - 1 <= end)
        games, _ = read_text(tmp_path, whole[:end])
        assert moves(games)[:complete] == moves(chosen)[:complete]
        # One more where the last thing lost is the result after a mate.
        assert moves(games)[complete:] in ([], moves(chosen)[complete : complete + 1])
        games, _ = read_text(tmp_path, whole[end:])
        assert moves(games) == moves(chosen)[len(chosen) - len(games) :]


def test_damaged_bytes_never_raise(tmp_path: Path, sample_games: list[cg.Game]) -> None:
    whole = to_pgn(sample_games[:2]).encode()
    rows = "".join(json.dumps(game.to_row()) + "\n" for game in sample_games[:2]).encode()
    draw = random.Random(1)
    for name, content in (("games.pgn", whole), ("games.txt", whole), ("games.jsonl", rows)):
        for _ in range(30):
            damaged = bytearray(content)
            for _ in range(draw.randint(1, 40)):
                start = draw.randrange(len(damaged))
                damaged[start : start + draw.choice([0, 1, 1, 30])] = draw.randbytes(draw.choice([0, 1, 1, 5]))
            for game in read_text(tmp_path, bytes(damaged), name)[0]:
                board = chess.Board()
                for move in game.moves:
                    board.push_uci(move)  # raises for an illegal one
    for name in ("noise.pgn", "noise.txt", "noise.jsonl"):
        assert read_text(tmp_path, draw.randbytes(50_000), name)[0] == []


PGN = (
    f'[Event "Café"]\n[White "Müller"]\n[Result "1-0"]\n\n{OPERA} 1-0\n\n'
    '[Event "Öl"]\n[Result "0-1"]\n\n1. f3 e5 2. g4 Qh4# 0-1\n'
)


@pytest.mark.parametrize(
    ("content", "num_recoded"),
    [
        (PGN.encode(), 0),
        (PGN.encode("utf-8-sig"), 0),
        (PGN.encode("utf-16"), 0),
        (PGN.encode("latin-1"), 3),
        (PGN.replace("\n", "\r\n").encode("utf-8-sig"), 0),
        (PGN.replace("\n", "\r").encode("latin-1"), 3),
        (PGN.replace("\n", "\n\n").encode(), 0),
        (PGN.encode() + b"\x1a", 0),
    ],
    ids=["utf-8", "bom", "utf-16", "latin-1", "crlf", "cr", "doubled line ends", "dos"],
)
@pytest.mark.parametrize("name", ["games.pgn", "GAMES.PGN", "games.txt"])
def test_encodings_and_line_ends(tmp_path: Path, content: bytes, num_recoded: int, name: str) -> None:
    games, report = read_text(tmp_path, content, name)
    assert moves(games) == [tuple(OPERA_UCI.split()), FOOLS_MATE] and not report.dropped
    assert report.num_recoded_lines == num_recoded
    assert report.num_bytes_read == len(content)


def test_joined_files_with_byte_order_marks(tmp_path: Path) -> None:
    first, second = '[Event "d4"]\n\n1. Nf3 d5 1-0\n\n', '[Event "é"]\n\n1. c4 c5 1-0\n'
    content = (
        first.encode("utf-8-sig") + second.encode("utf-8-sig") + b"\n" + second.replace("c4", "b4").encode("latin-1")
    )
    games, report = read_text(tmp_path, content)
    assert moves(games) == uci("1. Nf3 d5", "1. c4 c5", "1. b4 c5") and not report.dropped
    assert "1 lines that are not UTF-8 were read as Latin-1" in str(report)


def test_text_lines(tmp_path: Path) -> None:
    text = f"""# one game a line
{OPERA_UCI}
{OPERA}
f2f3 e7e5 g2g4 d8h4 0-1
e4 e5 Nf3 Nc6
1.d4 d5 2.c4 e6 1/2-1/2
1. d4 d5 2. c4 e5 *
e2e4 e7e5 e1e3
d4 Nf6 1-0 d4
d4 {{never closed
d2d4 d7d5 c2c4 d5c4 a2a3 c4c3 a3a4 c3b2 a4a5 b2a1q
e2e4 c7c5
2. Nf3 d6
"""
    games, report = read_text(tmp_path, text, "games.txt")
    assert moves(games) == [
        tuple(OPERA_UCI.split()),
        FOOLS_MATE,
        *uci("e4 e5 Nf3 Nc6", "d4 d5 c4 e6", "d4 d5 c4 dxc4 a3 c3 a4 cxb2 a5 bxa1=Q"),
    ]
    assert [game.result for game in games] == ["1-0", "0-1", None, "1/2-1/2", None]
    assert report.dropped == {
        cg.DUPLICATE: 1,
        cg.UNFINISHED: 1,
        cg.ILLEGAL: 1,
        cg.UNREADABLE: 2,
        cg.NO_RESULT: 1,  # the last game goes on in the next line
        cg.OUT_OF_ORDER: 1,
    }


def test_castling_and_promotion_in_any_spelling_are_one_move_list(tmp_path: Path) -> None:
    lines = [
        "e2e4 e7e5 g1f3 g8f6 f1c4 f8c5 e1g1 e8g8",
        "e2e4 e7e5 g1f3 g8f6 f1c4 f8c5 e1h1 e8h8",  # the king takes its rook: Chess960's spelling
        "1. e4 e5 2. Nf3 Nf6 3. Bc4 Bc5 4. O-O O-O",
        "1. e2-e4 e7-e5 2. Ng1-f3 Ng8f6 3. Bc4 Bc5 4. 0-0 0-0",
    ]
    games, report = read_text(tmp_path, "\n".join(lines), "games.txt")
    assert moves(games) == [tuple(lines[0].split())] and report.dropped == {cg.DUPLICATE: 3}
    promotions = [PROMOTION, PROMOTION.replace("=Q", "Q"), "d2d4 e7e5 d4e5 f7f6 e5f6 g8h6 f6g7 h6f5 g7h8q"]
    games, report = read_text(tmp_path, "\n".join(promotions), "games.txt")
    assert moves(games) == [tuple(promotions[2].split())] and report.dropped == {cg.DUPLICATE: 2}


OPERA_ROW = {"Moves": OPERA_UCI.split(), "Termination": "CHECKMATE", "Result": "1-0"}
REPETITION = ("g1f3 g8f6 f3g1 f6g8 " * 4).split()  # the first position for the fifth time


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (OPERA_ROW, ("1-0", "CHECKMATE")),
        ({"Moves": OPERA_UCI.split()}, ("1-0", "CHECKMATE")),
        ({**OPERA_ROW, "Termination": None}, ("1-0", "CHECKMATE")),
        ({**OPERA_ROW, "row": 7}, ("1-0", "CHECKMATE")),
        ({"Moves": OPERA}, ("1-0", "CHECKMATE")),
        ({"text": OPERA}, ("1-0", "CHECKMATE")),
        ({"text": OPERA_UCI, "Moves": None}, ("1-0", "CHECKMATE")),
        ({"text": f'[Event "x"]\n[Result "1-0"]\n\n{OPERA} 1-0'}, ("1-0", "CHECKMATE")),
        ({"Moves": ["e2e4"], "Result": "1-0", "Termination": "Time forfeit"}, ("1-0", "Time forfeit")),
        ({"Moves": ["e2e4"], "Result": "1/2-1/2", "Termination": "MAX_MOVES"}, ("1/2-1/2", "MAX_MOVES")),
        ({"Moves": ["e2e4"]}, (None, None)),
        ({"text": STALEMATE}, ("1/2-1/2", "STALEMATE")),
        ({"Moves": REPETITION, "Result": "1/2-1/2"}, ("1/2-1/2", "FIVEFOLD_REPETITION")),
        (
            {"Moves": REPETITION[:8], "Result": "1/2-1/2", "Termination": "THREEFOLD_REPETITION"},
            ("1/2-1/2", "THREEFOLD_REPETITION"),
        ),
        # Partial and contradictory ones.
        ({**OPERA_ROW, "Result": "0-1"}, cg.CONTRADICTION),
        ({**OPERA_ROW, "Result": "1/2-1/2"}, cg.CONTRADICTION),
        ({**OPERA_ROW, "Moves": OPERA_UCI.split()[:-1]}, cg.CONTRADICTION),
        ({"text": STALEMATE, "Result": "1-0"}, cg.CONTRADICTION),
        ({"Moves": REPETITION[:-4], "Termination": "FIVEFOLD_REPETITION", "Result": "1/2-1/2"}, cg.CONTRADICTION),
        ({"Moves": REPETITION[:8], "Termination": "THREEFOLD_REPETITION", "Result": "1-0"}, cg.CONTRADICTION),
        ({"text": "1. e4 e5 1-0", "Result": "0-1"}, cg.CONTRADICTION),
        ({"Moves": ["e2e4"], "Result": "*"}, cg.UNFINISHED),
        ({"Moves": ["e2e4"], "Result": "1-0", "Termination": "unterminated"}, cg.UNFINISHED),
        ({"text": '[Event "x"]\n\n1. e4 e5', "Result": "1-0"}, cg.NO_RESULT),
        ({"text": '[Event "x"]\n\n1. e4 e5 1-0\n\n[Event "y"]\n\n1. d4 d5 1-0'}, cg.UNREADABLE),
        ({"Moves": ["e2e4", "e2e4"], "Result": "1-0"}, cg.ILLEGAL),
        ({"Moves": ["e2e4", "0000"], "Result": "1-0"}, cg.ILLEGAL),
        ({"Moves": ["e2e4", "e7e5 g1f3"], "Result": "1-0"}, cg.UNREADABLE),
        ({"Moves": ["e2e4", None], "Result": "1-0"}, cg.UNREADABLE),
        ({"Moves": 5}, cg.UNREADABLE),
        ({"Result": "1-0"}, cg.UNREADABLE),
        ({**OPERA_ROW, "Result": "white"}, cg.UNREADABLE),
        ({"Moves": [], "Result": "1-0"}, cg.NO_MOVES),
        ({"text": "", "Result": "1-0"}, cg.NO_MOVES),
    ],
)
def test_rows(row: dict[str, Any], expected: tuple[str | None, str | None] | str) -> None:
    report = cg.ReadReport()
    games = list(cg.read_rows([row], "rows", report))
    if isinstance(expected, str):
        assert games == [] and report.dropped == {expected: 1} and report.examples[expected][0].startswith("rows row 1")
    else:
        assert not report.dropped
        assert [(game.result, game.termination, game.source) for game in games] == [(*expected, "rows row 1")]


def test_json_lines_with_bad_lines(tmp_path: Path) -> None:
    good = json.dumps(OPERA_ROW)
    lines = ["", "not json", good[:-40], "[1, 2]", json.dumps({"Result": "1-0"}), "\ufeff" + good, "9" * 5000, good]
    games, report = read_text(tmp_path, "\n".join(lines), "games.jsonl")
    assert [game.to_row() for game in games] == [OPERA_ROW]
    assert report.dropped == {cg.UNREADABLE: 5, cg.DUPLICATE: 1}
    assert report.examples[cg.UNREADABLE][0].startswith(f"{tmp_path / 'games.jsonl'} line 2 (")


@pytest.mark.parametrize("row_group_size", [1, 100])
def test_parquet(tmp_path: Path, row_group_size: int) -> None:
    path = tmp_path / "games.parquet"
    rows = [{"text": OPERA, "other": 1}, {"text": None, "other": 2}, {"text": "1. f3 e5 2. g4 Qh4#", "other": 3}]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    games, report = read(path)
    assert moves(games) == [tuple(OPERA_UCI.split()), FOOLS_MATE] and report.dropped == {cg.UNREADABLE: 1}
    assert games[1].source == f"{path} row 3"
    assert report.num_bytes_read == path.stat().st_size


def test_several_processes_read_the_same(tmp_path: Path, sample_games: list[cg.Game]) -> None:
    rows = [json.dumps(game.to_row()) for game in sample_games[:120]]
    rows[7:7] = ["{", rows[3], '{"Moves": ["e2e5"]}', "[1]"]
    path = tmp_path / "games.jsonl"
    path.write_text("\n".join(rows))
    alone, together = cg.ReadReport(), cg.ReadReport()
    expected = list(cg.read_games([path], alone))
    assert list(cg.read_games([path], together, num_workers=2)) == expected and len(expected) == 120
    assert together == alone and alone.dropped == {"unreadable text": 2, "duplicate": 1, "illegal move": 1}


def test_what_is_no_file_of_games_is_a_user_error(tmp_path: Path) -> None:
    def error(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            list(cg.read_games([path]))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such file" in error(tmp_path / "absent.pgn")
    assert "no file ending in .pgn" in error(tmp_path)
    (tmp_path / "games.pgn.zst").write_bytes(b"")
    assert "decompress" in error(tmp_path / "games.pgn.zst")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    assert "broken.parquet: not a readable parquet file" in error(tmp_path / "broken.parquet")
    pq.write_table(pa.table({"moves_of_game": ["e2e4"]}), tmp_path / "columns.parquet")
    assert error(tmp_path / "columns.parquet").endswith("no column 'Moves' or 'text'; it has moves_of_game")


def test_folder_and_duplicates_over_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(OPERA_UCI)
    (tmp_path / "a.pgn").write_text(PGN)
    (tmp_path / "notes.md").write_text("no games")
    games, report = read(tmp_path)
    assert moves(games) == [tuple(OPERA_UCI.split()), FOOLS_MATE]
    assert report.dropped == {cg.DUPLICATE: 1}
    assert report.examples[cg.DUPLICATE] == [f"{tmp_path / 'b.txt'} line 1"]


def test_reading_is_lazy_and_passes_over_endless_lines(tmp_path: Path) -> None:
    path = tmp_path / "games.pgn"
    path.write_text(PGN + "\n" + "x" * (3 * cg.MAX_LINE_CHARACTERS) + '\n[Event "after"]\n\n1. a3 a6 1-0\n')
    report = cg.ReadReport()
    games = cg.read_games([path], report)
    next(games)
    assert report.num_bytes_read < path.stat().st_size / 10
    assert moves(games) == [FOOLS_MATE, *uci("1. a3 a6")] and report.dropped == {cg.UNREADABLE: 1}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chess", None)
    assert cg.__file__
    spec = importlib.util.spec_from_file_location("chess_games_again", cg.__file__)
    assert spec and spec.loader
    with pytest.raises(UserError, match=re.escape("pip install -e .[chess]")):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# ---------------------------------------------------------------------------------------------------------------------
# Text

NOTATIONS: tuple[cg.Notation, ...] = get_args(cg.Notation)


def test_format_of_a_known_game() -> None:
    game = cg.Game(tuple(OPERA_UCI.split()))
    assert cg.format_game(game, "san") == OPERA
    assert cg.format_game(game, "uci") == OPERA_UCI
    assert cg.parse_game_text(OPERA, "san") == cg.parse_game_text(OPERA_UCI, "uci") == game.moves


def test_published_openings_keep_their_text(shared_data: Path) -> None:
    lines = (shared_data / "chess" / "chess_openings.tsv").read_text().splitlines()[1::12]
    for text in (line.split("\t")[2] for line in lines):
        assert cg.format_game(cg.parse_game_text(text, "san"), "san") == text


@pytest.mark.parametrize("notation", NOTATIONS)
def test_round_trip_and_spans_of_the_sample_games(notation: cg.Notation, sample_games: list[cg.Game]) -> None:
    for game in sample_games[::8]:
        text, spans = cg.format_with_spans(game, notation)
        assert text == cg.format_game(game.moves, notation)
        assert cg.parse_game_text(text, notation) == game.moves
        assert "".join(text[span.lead : span.end] for span in spans) == text
        assert [span.ply for span in spans] == list(range(len(game.moves)))
        board = chess.Board()
        for span, move in zip(spans, game.moves, strict=True):
            alone = text[span.start : span.end]
            assert alone == move if notation == "uci" else board.parse_san(alone).uci() == move
            assert text[span.lead : span.start].strip() in ("", f"{span.ply // 2 + 1}.")
            board.push_uci(move)


@pytest.mark.parametrize("notation", NOTATIONS)
def test_prompt_and_next_move_are_the_training_text(notation: cg.Notation) -> None:
    opera = tuple(OPERA_UCI.split())
    text, spans = cg.format_with_spans(opera, notation)
    for span in spans:
        prompt = cg.format_prompt(opera[: span.ply], notation)
        assert prompt == text[: span.start].rstrip()
    assert cg.format_prompt((), notation) == {"uci": "", "san": "1."}[notation]
    assert cg.format_prompt(opera[:2], notation) == {"uci": "e2e4 e7e5", "san": "1. e4 e5 2."}[notation]


@pytest.mark.parametrize(
    ("text", "notation"),
    [
        ("e2e4 e7e5 e1e3", "uci"),
        ("e4 e5", "uci"),
        ("1. e4 e5 3. Nf3", "san"),
        ("1. e2e4", "san"),
        ("1. e4 2. e5", "san"),
    ],
)
def test_text_that_is_no_game_is_an_error(text: str, notation: cg.Notation) -> None:
    with pytest.raises(ValueError, match="at ply"):
        cg.parse_game_text(text, notation)


@pytest.mark.parametrize(
    ("before", "text", "notation", "expected"),
    [
        ("", "e4", "san", "e2e4"),
        ("", " 1. e4 e5", "san", "e2e4"),
        ("", "1.e4", "san", "e2e4"),
        ("", "e 4", "san", "e2e4"),
        ("1. e4", "N f6", "san", "g8f6"),
        ("1. e4", "1... Nf6 2. e5", "san", "g8f6"),
        ("1. e4", "1. ... N f 6 2. e5", "san", "g8f6"),
        ("1. e4 d5", "e x d5", "san", "e4d5"),
        ("1. e4 d5", "exd5+", "san", "e4d5"),
        ("1. e4 e5 2. Nf3 Nf6 3. Bc4 Bc5", "O-O", "san", "e1g1"),
        ("1. e4 e5 2. Nf3 Nf6 3. Bc4 Bc5", "4. O - O Nc6", "san", "e1g1"),
        ("1. d4 e5 2. dxe5 f6 3. exf6 Nh6 4. fxg7 Nf5", "gxh8 = Q", "san", "g7h8q"),
        ("1. d4 e5 2. dxe5 f6 3. exf6 Nh6 4. fxg7 Nf5", "gxh8=N d6", "san", "g7h8n"),
        ("1. d4 e5 2. dxe5 f6 3. exf6 Nh6 4. fxg7 Nf5", "gxh8", "san", "illegal"),
        ("", "e5", "san", "illegal"),
        ("1. e4 e5", "e5 e4", "san", "illegal"),
        ("", "e4 e5", "san", "e2e4"),
        ("1. e4", "e4 e5", "san", "illegal"),  # not e4e5
        ("", "Qxf7#", "san", "illegal"),
        ("", "O-O", "san", "illegal"),
        ("1. Nf3 d5 2. d3 Nf6", "Nd2", "san", "illegal"),  # either knight
        ("1. Nf3 d5 2. d3 Nf6", "Nbd2", "san", "b1d2"),
        ("", "e2e4", "san", "unparsable"),
        ("", "--", "san", "unparsable"),
        ("", "", "san", "unparsable"),
        ("", "12.", "san", "unparsable"),
        ("", "Nf9", "san", "unparsable"),
        ("", "hello e4", "san", "unparsable"),
        ("", "e2e4 e7e5", "uci", "e2e4"),
        ("", "e2 e4", "uci", "e2e4"),
        ("", "e2e4 b", "uci", "e2e4"),
        ("", "e2e5", "uci", "illegal"),
        ("", "e2e4q", "uci", "illegal"),
        ("", "0000", "uci", "unparsable"),
        ("", "e4", "uci", "unparsable"),
        ("", "e2e4e7e5", "uci", "unparsable"),
        ("1. d4 e5 2. dxe5 f6 3. exf6 Nh6 4. fxg7 Nf5", "g7h8q", "uci", "g7h8q"),
        ("1. d4 e5 2. dxe5 f6 3. exf6 Nh6 4. fxg7 Nf5", "g7h8 r d7d6", "uci", "g7h8r"),
        ("1. d4 e5 2. dxe5 f6 3. exf6 Nh6 4. fxg7 Nf5", "g7h8", "uci", "illegal"),
        ("1. e4 e5 2. Nf3 Nf6 3. Bc4 Bc5", "e1g1", "uci", "e1g1"),
    ],
)
def test_parse_move(before: str, text: str, notation: cg.Notation, expected: str) -> None:
    board = chess.Board()
    for token in before.split():
        if not token[0].isdigit():
            board.push_san(token)
    move = cg.parse_move(text, board, notation)
    assert (move.uci() if isinstance(move, chess.Move) else move) == expected


def test_phases() -> None:
    assert cg.game_phase(chess.Board()) == "opening"
    full = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR"
    assert cg.game_phase(chess.Board(f"{full} b - - 0 10")) == "opening"  # ply 19
    assert cg.game_phase(chess.Board(f"{full} w - - 0 11")) == "middlegame"  # ply 20
    assert cg.game_phase(chess.Board("rnb1k1nr/pppppppp/8/8/8/8/PPPPPPPP/4KB1R w - - 0 30")) == "middlegame"  # 7
    assert cg.game_phase(chess.Board("rnb1k1nr/pppppppp/8/8/8/8/PPPPPPPP/4K2R w - - 0 30")) == "endgame"  # 6
    assert cg.game_phase(chess.Board("4k3/8/8/8/8/8/4P3/4K3 w - - 0 60")) == "endgame"


# ---------------------------------------------------------------------------------------------------------------------
# Split


def random_games(num_games: int) -> list[tuple[str, ...]]:
    draw = random.Random(3)
    return [tuple(f"move{draw.randrange(1000)}" for _ in range(5)) for _ in range(num_games)]


def test_split_follows_from_moves_and_seed_alone() -> None:
    games = random_games(2000)
    train, validation = cg.split_by_game(games, 0.1, seed=1)
    assert sorted(train + validation) == list(range(2000))
    assert 150 < len(validation) < 250  # binomial: 200 with a deviation of 13
    held_out = {games[index] for index in validation}

    shuffled = random.Random(4).sample(games, 2000)
    assert {shuffled[index] for index in cg.split_by_game(shuffled, 0.1, seed=1)[1]} == held_out
    part = games[500:1500]
    assert {part[index] for index in cg.split_by_game(part, 0.1, seed=1)[1]} == held_out & set(part)
    assert {games[index] for index in cg.split_by_game(games, 0.1, seed=2)[1]} != held_out
    assert held_out < {games[index] for index in cg.split_by_game(games, 0.2, seed=1)[1]}


def test_equal_games_are_on_one_side() -> None:
    games = random_games(50)
    doubled: list[cg.Game | tuple[str, ...]] = [*games, *(cg.Game(moves, source="again") for moves in games)]
    train, validation = cg.split_by_game(doubled, 0.3, seed=0)
    assert {index % 50 for index in train}.isdisjoint(index % 50 for index in validation)


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_each_side_has_a_game(fraction: float) -> None:
    games = random_games(3)
    train, validation = cg.split_by_game([*games, games[0]], fraction, seed=0)
    assert train and validation and len(train + validation) == 4
    with pytest.raises(UserError, match="2 games with 1 different"):
        cg.split_by_game([games[0], games[0]], fraction, seed=0)


# ---------------------------------------------------------------------------------------------------------------------
# The sample games


def test_sample_games_are_what_the_readme_says(sample_games: list[cg.Game]) -> None:
    path = SAMPLES / "chess_games.jsonl"
    assert path.stat().st_size < 500_000
    assert len(sample_games) >= 320
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [game.to_row() for game in sample_games] == rows  # nothing had to be changed or dropped
    assert 60 < sum(len(game.moves) for game in sample_games) / len(sample_games) < 120
    assert len({game.moves[:8] for game in sample_games}) > 0.9 * len(sample_games)
    assert set(Counter(game.result for game in sample_games)) == {"1-0", "0-1", "1/2-1/2"}
    assert {game.termination for game in sample_games} <= {*cg.ENDS, "MAX_MOVES"}


def test_the_script_makes_the_same_games_again(tmp_path: Path) -> None:
    engine = shutil.which("stockfish", path="/usr/local/bin:/usr/bin:/usr/games")
    if engine is None:
        pytest.skip("stockfish is not installed")
    if "Stockfish 15.1" not in subprocess.run([engine, "quit"], capture_output=True, text=True, timeout=60).stdout:
        pytest.skip("the sample games are from Stockfish 15.1")
    script, output = SAMPLES / "make_chess_games.py", tmp_path / "games.jsonl"
    command = f"{sys.executable} {script} --output {output} --num_games 2 --num_processes 2 --engine {engine}"
    subprocess.run(command.split(), check=True, timeout=120)
    expected = (SAMPLES / "chess_games.jsonl").read_text().splitlines()[:2]
    assert output.read_text().splitlines() == expected
