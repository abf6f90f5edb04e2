"""Make games of a weighted random player, from which a model can learn the rules of chess alone, and not good play.

    python benchmarks/chess_games.py --output FOLDER --num_games 60000 --num_processes 2

Writes FOLDER/train.parquet and FOLDER/validation.parquet in the form of laion/strategic_game_chess (Moves, Termination,
Result), no game twice. A game follows from the seed, the file's name and its number alone, with any --num_processes.
"""

import argparse
import functools
import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import chess
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

MAX_PLIES = (60, 100)  # games that go on are adjudicated by material, each after a length from this range
WINNING_ADVANTAGE = 3  # in pawns; less is a draw
VALUES = (0, 1, 3, 3, 5, 9, 0)  # of a piece by its type, in pawns; 0: no piece
# How likely a move is, compared with other legal ones.
QUIET_WEIGHTS = (0.0, 3.0, 4.0, 4.0, 2.0, 1.5, 0.5)  # by the type of the piece
CAPTURE_WEIGHT = 8.0  # for each pawn of value won
RECAPTURE_FACTOR = 4.0  # where the move before has ended
CENTER_FACTOR, OPENING_MOVES = 3.0, 8
PROMOTION_WEIGHTS = {chess.QUEEN: 60.0, chess.ROOK: 3.0, chess.BISHOP: 3.0, chess.KNIGHT: 3.0}
CASTLING_WEIGHT = 30.0
BLUNDER_FACTOR = 0.15  # to where a pawn takes something of more value

GAMES_PER_TASK = 100
SCHEMA = pa.schema([("Moves", pa.list_(pa.string())), ("Termination", pa.string()), ("Result", pa.string())])


def weigh(board: chess.Board, moves: list[chess.Move]) -> list[float]:
    """Weights of the legal moves."""
    types = [0] * 64  # by square; 0: empty
    for piece in chess.PIECE_TYPES:
        for square in chess.scan_forward(board.pieces_mask(piece, True) | board.pieces_mask(piece, False)):
            types[square] = piece
    last = board.peek().to_square if board.move_stack else None
    center = chess.BB_CENTER if board.fullmove_number <= OPENING_MOVES else chess.BB_EMPTY
    guarded = pawn_attacks(board, not board.turn)
    weights = []
    for move in moves:
        source, target, promotion = move.from_square, move.to_square, move.promotion
        piece, victim = types[source], types[target]
        weight = QUIET_WEIGHTS[piece]
        if victim:
            weight += CAPTURE_WEIGHT * VALUES[victim]
            if target == last:
                weight *= RECAPTURE_FACTOR
        elif center >> target & 1:
            weight *= CENTER_FACTOR
        if promotion:
            weight += PROMOTION_WEIGHTS[promotion]
        elif piece == chess.KING and abs(source - target) == 2:
            weight = CASTLING_WEIGHT
        if guarded >> target & 1 and VALUES[piece] > VALUES[victim]:
            weight *= BLUNDER_FACTOR
        weights.append(weight)
    return weights


def pawn_attacks(board: chess.Board, color: chess.Color) -> chess.Bitboard:
    """The squares that the pawns of a side attack."""
    pawns = board.pieces_mask(chess.PAWN, color)
    left, right = pawns & ~chess.BB_FILE_A, pawns & ~chess.BB_FILE_H
    return left << 7 | right << 9 if color == chess.WHITE else left >> 9 | right >> 7


def play_game(seed: str, number: int) -> dict[str, Any]:
    """Play one game; return it in LAION's form."""
    draw = random.Random(f"{seed}/{number}")
    max_plies = draw.randint(*MAX_PLIES)
    board = chess.Board()
    while len(board.move_stack) < max_plies and not board.is_insufficient_material():
        legal = list(board.legal_moves)
        if not legal:
            break
        first, second = draw.choices(legal, weigh(board, legal), k=2)
        board.push(second if board.gives_check(second) else first)  # checks come twice as often
    if (outcome := board.outcome()) is not None:
        termination, result = outcome.termination.name, outcome.result()
    else:
        termination, advantage = "ADJUDICATION", material(board, chess.WHITE) - material(board, chess.BLACK)
        result = "1/2-1/2" if abs(advantage) < WINNING_ADVANTAGE else "1-0" if advantage > 0 else "0-1"
    return {"Moves": [move.uci() for move in board.move_stack], "Termination": termination, "Result": result}


def material(board: chess.Board, color: chess.Color) -> int:
    """Value of a side's pieces."""
    return sum(VALUES[piece] * chess.popcount(board.pieces_mask(piece, color)) for piece in chess.PIECE_TYPES)


def play_games(seed: str, first: int) -> list[dict[str, Any]]:
    """`GAMES_PER_TASK` games."""
    return [play_game(seed, number) for number in range(first, first + GAMES_PER_TASK)]


def write_games(pool: Any, path: Path, seed: str, num_games: int, seen: set[tuple[str, ...]]) -> str:
    """Write `num_games` games that are not in `seen`, and add them to it; return a summary."""
    counts: Counter[str] = Counter()
    started, num_plies = time.perf_counter(), 0
    unfinished = path.with_name(f".{path.name}.tmp")
    # Some more than asked for, in place of those that come twice, which few short ones do.
    tasks = range(0, num_games + 2 * GAMES_PER_TASK, GAMES_PER_TASK)
    with (
        pq.ParquetWriter(unfinished, SCHEMA, compression="zstd", compression_level=19) as writer,
        tqdm(desc=path.name, total=num_games, unit="game", mininterval=5) as bar,
    ):
        rows: list[dict[str, Any]] = []
        for games in pool.imap(functools.partial(play_games, seed), tasks):
            for game in games:
                if (moves := tuple(game["Moves"])) not in seen and counts.total() < num_games:
                    seen.add(moves)
                    rows.append(game)
                    num_plies += len(moves)
                    counts[game["Termination"]] += 1
            bar.update(counts.total() - bar.n)
            if len(rows) >= 20_000 or counts.total() == num_games:
                writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
                rows = []
            if counts.total() == num_games:
                break
    unfinished.replace(path)
    ends = ", ".join(f"{name.lower()} {100 * count / num_games:.1f} %" for name, count in counts.most_common())
    return (
        f"{path}: {num_games:,} games of {num_plies / num_games:.1f} plies on average, "
        f"{path.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - started:.0f} s; {ends}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num_games", type=int, default=60_000)
    parser.add_argument("--num_validation_games", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--num_processes", type=int, default=1)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the pool takes its processes along
    seen: set[tuple[str, ...]] = set()
    with multiprocessing.Pool(args.num_processes) as pool:
        for name, num_games in {"validation": args.num_validation_games, "train": args.num_games}.items():
            summary = write_games(pool, args.output / f"{name}.parquet", f"{args.seed}/{name}", num_games, seen)
            print(summary, flush=True)


if __name__ == "__main__":
    main()
