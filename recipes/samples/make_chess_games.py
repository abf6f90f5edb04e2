"""Make the sample games: Stockfish plays against itself, with moves drawn at random from its best few.

    python recipes/samples/make_chess_games.py --output recipes/samples/chess_games.jsonl

A game follows from the seed, its number and the engine's version alone (a fresh hash table for each game, one thread, a
limit in nodes and not in time): the same games come on every machine and with any --num_processes. chess_games.jsonl is
from Stockfish 15.1 (Debian's package `stockfish`).
"""

import argparse
import functools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import chess
import chess.engine
from tqdm import tqdm

OPENING_PLIES = 8
NUM_CHOICES = 6  # moves that one is drawn from
# Centipawns: a move that is worse by so much than the best one is chosen e times more rarely.
OPENING_TEMPERATURE = 80
TEMPERATURES = (8, 20, 50, 100)  # one for each side and game, so that strong and weak players meet
MAX_PLIES = 160

engine: chess.engine.SimpleEngine  # of this process


def play_game(engine: chess.engine.SimpleEngine, nodes: int, seed: int, number: int) -> dict[str, object]:
    """Play one game to its end by the rules, draws claimed, or to MAX_PLIES; return it in LAION's form."""
    draw = random.Random(f"{seed}/{number}")
    board = chess.Board()
    moves: list[str] = []
    temperatures = draw.choices(TEMPERATURES, k=2)
    while (outcome := board.outcome(claim_draw=True)) is None and len(moves) < MAX_PLIES:
        temperature = OPENING_TEMPERATURE if len(moves) < OPENING_PLIES else temperatures[board.turn]
        # `game` is new for each game, which clears the engine's hash table.
        lines = engine.analyse(board, chess.engine.Limit(nodes=nodes), multipv=NUM_CHOICES, game=number)
        scores = [line["score"].relative.score(mate_score=10_000) for line in lines]
        weights = [math.exp((score - max(scores)) / temperature) for score in scores]
        move = draw.choices([line["pv"][0] for line in lines], weights)[0]
        moves.append(move.uci())
        board.push(move)
    return {
        "Moves": moves,
        "Termination": outcome.termination.name if outcome else "MAX_MOVES",
        "Result": outcome.result() if outcome else "1/2-1/2",
    }


def open_engine(path: str) -> None:
    """Start this process's engine; it ends when its input is closed, so that it never outlives the process."""
    global engine
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    engine = chess.engine.SimpleEngine.popen_uci(path)
    engine.configure({"Threads": 1, "Hash": 16})


def play_numbered_game(nodes: int, seed: int, number: int) -> dict[str, object]:
    """`play_game` with the engine of this process."""
    return play_game(engine, nodes, seed, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num_games", type=int, default=400)
    parser.add_argument("--nodes", type=int, default=400, help="positions that the engine looks at for each move")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--engine", default=shutil.which("stockfish", path=f"{os.environ['PATH']}:/usr/games"))
    args = parser.parse_args()
    if args.engine is None:
        parser.error("no stockfish on the PATH: install it (apt-get install stockfish), or name it with --engine")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the pool takes its processes along
    play = functools.partial(play_numbered_game, args.nodes, args.seed)
    with multiprocessing.Pool(args.num_processes, initializer=open_engine, initargs=(args.engine,)) as pool:
        games = pool.imap(play, range(args.num_games))
        rows = [json.dumps(game, separators=(",", ":")) for game in tqdm(games, total=args.num_games, unit="game")]
    args.output.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"{args.output}: {len(rows):,} games")


if __name__ == "__main__":
    main()
