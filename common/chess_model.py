"""A causal language model at the board: games as its tokens, the moves it gives, and games against an engine."""

# First, because it says what to install where the package `chess` is missing.
from common.chess_games import Notation, Phase, format_prompt, format_with_spans, game_phase, parse_move

# isort: split
import bisect
import contextlib
import functools
import itertools
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import chess
import chess.engine
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.arguments import UserError, is_first_process
from common.data import Batch, EvalBatches, Row
from common.evaluation import generate_texts
from common.losses import IGNORE_INDEX, compute_logits

PHASES: tuple[Phase, ...] = get_args(Phase)
MIN_SEQ_LENGTH = 32  # half of it and the longest move, written letter by letter, with its number and the end token
MAX_MOVE_TOKENS = 10  # a space and `Qa1xb2+` letter by letter, or with spaces between
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

# ---------------------------------------------------------------------------------------------------------------------
# Games as tokens


def square_tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer of UCI text with two tokens a move, ` e2` and `e4`, and a third for a promotion."""
    squares = [chess.square_name(square) for square in chess.SQUARES]
    words = ["<pad>", "<s>", "</s>", "<unk>", *squares, *(f" {square}" for square in squares), *"qrbn"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[a-h][1-8]"), "isolated")
    backend.decoder = decoders.Fuse()  # without it, decoding puts a space between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False,
        pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
    )  # fmt: skip


def start_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token before a game's first: the begin token, or the end token of a tokenizer that has no other."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def padding_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills up batches; it may be the end token, because no label is made from it."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, notation: Notation) -> None:
    """Raise `UserError` where the tokenizer cannot write games in this notation."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-sequence token, which every game ends with; give another one.")
    if not tokenizer.is_fast:
        raise UserError("the tokenizer has no tokenizer.json, which says where moves begin; give another one.")
    encode_games({"moves": ["e2e4 d7d5 e4d5 d8d5 g1f3 c8g4 f1e2"]}, tokenizer, notation, MIN_SEQ_LENGTH)


def encode_prompt(moves: Sequence[str], tokenizer: PreTrainedTokenizerBase, notation: Notation) -> list[int]:
    """Tokens of a game until now, as `encode_games` writes them, after which the next move comes."""
    text = format_prompt(moves, notation)
    return [start_token_id(tokenizer), *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def encode_games(
    rows: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    notation: Notation,
    max_length: int,
    with_moves: bool = False,
) -> dict[str, list[Any]]:
    """Training examples of games (`moves`: UCI moves with spaces between), each of at most `max_length` positions.

    A game is one start token, its text, one end token; labels[t] is the target of position t. A longer game becomes
    several examples, cut between moves: each begins with the moves before it, half of `max_length` at most, as context
    without labels, so that every token of the game is a target exactly once. `length` is the number of positions.
    `with_moves` adds for each target which move of the example it is part of (`moves`, -1: none, as of numbers and the
    end token) and the move's phase (`phases`, a place in PHASES or -1).
    """
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": []}
    if with_moves:
        columns |= {"moves": [], "phases": []}
    for game in rows["moves"]:
        tokens, starts, plies = _tokens_of_game(game.split(), tokenizer, notation)
        phases = _phases(game.split()) if with_moves else []
        for begin, first_target, end in _windows(starts, len(tokens), max_length):
            ignored = first_target - begin - 1
            columns["input_ids"].append(tokens[begin : end - 1])
            columns["labels"].append([IGNORE_INDEX] * ignored + tokens[first_target:end])
            columns["length"].append(end - 1 - begin)
            if with_moves:
                targets = plies[first_target:end]
                first = min((ply for ply in targets if ply >= 0), default=0)
                columns["moves"].append([-1] * ignored + [ply - first if ply >= 0 else -1 for ply in targets])
                columns["phases"].append([-1] * ignored + [phases[ply] if ply >= 0 else -1 for ply in targets])
    return columns


def _tokens_of_game(
    moves: list[str], tokenizer: PreTrainedTokenizerBase, notation: Notation
) -> tuple[list[int], list[int], list[int]]:
    """(tokens; where each move begins in them; for each token the ply of the move it is part of, or -1)."""
    text, spans = format_with_spans(moves, notation)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens, plies = [start_token_id(tokenizer)], [-1]
    starts: list[int] = []
    for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        last = max(begin, end - 1)
        if len(starts) < len(spans) and last >= spans[len(starts)].lead:
            if begin < spans[len(starts)].lead or last >= spans[len(starts)].end:
                raise UserError(f"the tokenizer joins two moves in one token ({text[begin:end]!r}); give another one.")
            starts.append(len(tokens))
        if token == tokenizer.unk_token_id:
            raise UserError(
                f"the tokenizer has no token for {text[begin:end]!r} of a game in --notation {notation}: change either."
            )
        tokens.append(token)
        span = spans[len(starts) - 1]
        # The space before a move, a token of its own for some words, comes after the prompt: it counts to the move.
        plies.append(span.ply if last >= max(span.lead, span.start - 1) else -1)
    assert len(starts) == len(spans)
    return [*tokens, tokenizer.eos_token_id], starts, [*plies, -1]


def _windows(starts: list[int], num_tokens: int, max_length: int) -> Iterator[tuple[int, int, int]]:
    """(first input, first target, end) of each example: its inputs are [first input, end - 1)."""
    assert max_length >= MIN_SEQ_LENGTH
    bounds = [*starts[1:], num_tokens]  # an example may end here; the end token stays with the last move
    begin, first_target = 0, 1
    while True:
        end = bounds[bisect.bisect_right(bounds, begin + max_length + 1) - 1]
        assert end > first_target
        yield begin, first_target, end
        if end == num_tokens:
            return
        begin = starts[bisect.bisect_left(starts, end - max_length // 2)]
        first_target = end
        assert begin < first_target, "a move is longer than half an example"


def _phases(moves: list[str]) -> list[int]:
    """Phase of the position before each move, as its place in PHASES."""
    board, phases = chess.Board(), []
    for move in moves:
        phases.append(PHASES.index(game_phase(board)))
        board.push(chess.Move.from_uci(move))
    return phases


# ---------------------------------------------------------------------------------------------------------------------
# Moves of given games


def move_statistics(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """`move_sums` of a batch of `encode_games(with_moves=True)`."""
    return move_sums(compute_logits(model, {"input_ids": batch["input_ids"]}), **batch)


def move_sums(
    logits: torch.Tensor, labels: torch.Tensor, moves: torch.Tensor, phases: torch.Tensor, **_: torch.Tensor
) -> dict[str, torch.Tensor]:
    """`token_sums`, and by phase `moves_`, `nll_` of their tokens, `right_`: moves with every token the likeliest.

    logits: (batch, length, vocabulary); the others: (batch, length), see `encode_games`.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    nll, correct = nll.view_as(labels), logits.argmax(-1) == labels
    sums = {"nll": nll.sum(), "tokens": (labels != IGNORE_INDEX).sum(), "correct": correct.sum()}
    column = moves + 1  # 0: no move
    num_wrong = torch.zeros_like(moves[:, :1]).repeat(1, moves.shape[1] + 1).scatter_add(1, column, (~correct).long())
    is_first = (moves >= 0) & (moves != F.pad(moves, (1, 0), value=-1)[:, :-1])
    is_right = is_first & (num_wrong.gather(1, column) == 0)
    for number, phase in enumerate(PHASES):
        is_phase = phases == number
        sums[f"moves_{phase}"] = (is_first & is_phase).sum()
        sums[f"right_{phase}"] = (is_right & is_phase).sum()
        sums[f"nll_{phase}"] = (nll * is_phase).sum()
    return sums


def move_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Loss per move (natural logarithm) and next-move accuracy, of all moves and of those in each phase that occurs."""
    metrics: dict[str, float] = {}
    for suffix, phases in [("", PHASES), *((f"_{phase}", (phase,)) for phase in PHASES)]:
        nll, right, moves = (sum(sums[f"{name}_{phase}"] for phase in phases) for name in ("nll", "right", "moves"))
        if moves:
            metrics |= {f"eval_loss_per_move{suffix}": nll / moves, f"eval_move_accuracy{suffix}": right / moves}
    return metrics


# ---------------------------------------------------------------------------------------------------------------------
# Moves that the model gives


class Position(NamedTuple):
    """A position of a game, by the moves (UCI) until then, and the prompt that asks for the next one."""

    moves: tuple[str, ...]
    prompt: list[int]


def draw_positions(
    games: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    notation: Notation,
    *,
    num_positions: int,
    max_prompt_length: int,
    seed: int,
) -> list[Position]:
    """Positions before moves of the games, all alike likely; fewer where prompts would be too long for the model."""
    ends = list(itertools.accumulate(len(game.split()) for game in games))
    draws = random.Random(seed).sample(range(ends[-1]), min(num_positions, ends[-1]))
    positions = []
    for draw in sorted(draws):
        number = bisect.bisect_right(ends, draw)
        moves = games[number].split()
        before = tuple(moves[: draw - ends[number] + len(moves)])
        prompt = encode_prompt(before, tokenizer, notation)
        if len(prompt) <= max_prompt_length:
            positions.append(Position(before, prompt))
    return positions


def next_moves(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    *,
    per_device_batch_size: int,
    seed: int | None = None,
) -> list[str] | None:
    """What the model writes after each prompt; None except on the main process. Collective, equal prompts everywhere.

    Greedy, or with a seed drawn from the model's distribution, the same with any number of processes.
    """
    padding = padding_token_id(tokenizer)
    batches = EvalBatches(
        [{"input_ids": prompt} for prompt in prompts],
        functools.partial(collate_prompts, pad_token_id=padding),
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
        per_device_batch_size=per_device_batch_size,
        lengths=np.array([len(prompt) for prompt in prompts]),
    )
    settings: dict[str, Any] = {"pad_token_id": padding} | (SAMPLING if seed is not None else {})
    return generate_texts(accelerator, model, tokenizer, batches, max_new_tokens=MAX_MOVE_TOKENS, seed=seed, **settings)


def collate_prompts(rows: list[Row], pad_token_id: int) -> Batch:
    """Batch of prompts, padded on the left so that all end at the last position."""
    longest = max(len(row["input_ids"]) for row in rows)
    gaps = [longest - len(row["input_ids"]) for row in rows]
    return {
        "input_ids": torch.tensor(
            [[pad_token_id] * gap + row["input_ids"] for gap, row in zip(gaps, rows, strict=True)]
        ),
        "attention_mask": torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps]),
    }


def judge_moves(positions: Sequence[Position], texts: Sequence[str], notation: Notation) -> Counter[tuple[str, Phase]]:
    """How many of the texts begin with a legal move, one that is illegal, or none at all (unparsable), by phase."""
    counts: Counter[tuple[str, Phase]] = Counter()
    for position, text in zip(positions, texts, strict=True):
        board = board_after(position.moves)
        move = parse_move(text, board, notation)
        counts[move if isinstance(move, str) else "legal", game_phase(board)] += 1
    return counts


def board_after(moves: Iterable[str]) -> chess.Board:
    """The board after these legal moves (UCI)."""
    board = chess.Board()
    for move in moves:
        board.push(chess.Move.from_uci(move))
    return board


def legality_metrics(counts: Counter[tuple[str, Phase]], prefix: str) -> dict[str, float]:
    """Shares of legal, illegal and unparsable moves, and the share of legal ones in each phase that occurs."""
    total = counts.total()
    metrics = {
        f"{prefix}{verdict}_move_rate": sum(counts[verdict, phase] for phase in PHASES) / total
        for verdict in ("legal", "illegal", "unparsable")
    }
    for phase in PHASES:
        if of_phase := sum(count for (_, other), count in counts.items() if other == phase):
            metrics[f"{prefix}legal_move_rate_{phase}"] = counts["legal", phase] / of_phase
    return metrics


def legal_move_rates(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    positions: list[Position],
    notation: Notation,
    *,
    per_device_batch_size: int,
    seed: int,
) -> dict[str, float]:
    """Metrics of one move after each position, greedy (`eval_legal_move_rate`) and drawn (`eval_sampled_...`)."""
    metrics: dict[str, float] = {}
    prompts = [position.prompt for position in positions]
    for prefix, draw in (("eval_", None), ("eval_sampled_", seed)):
        texts = next_moves(
            accelerator, model, tokenizer, prompts, per_device_batch_size=per_device_batch_size, seed=draw
        )
        if texts is not None:
            metrics |= legality_metrics(judge_moves(positions, texts, notation), prefix)
    return broadcast_object_list([metrics])[0]


def table(metrics: dict[str, float]) -> str:
    """What an evaluation says of moves, by phase of the game, as lines of text."""
    columns = {
        "loss per move": "eval_loss_per_move", "accuracy": "eval_move_accuracy", "legal": "eval_legal_move_rate",
        "legal, drawn": "eval_sampled_legal_move_rate",
    }  # fmt: skip
    lines = ["  next move   " + "".join(f"{title:>15}" for title in columns)]
    for phase in ("", *PHASES):
        keys = [f"{name}_{phase}" if phase else name for name in columns.values()]
        values = ["-" if key not in metrics else f"{metrics[key]:.3f}" for key in keys]
        lines.append(f"  {phase or 'all':<12}" + "".join(f"{value:>15}" for value in values))
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Games against an engine

OPENING_PLIES = 4  # moves of a known game that a match game begins with: else all games of a colour would be the same
MAX_PLIES = 300
MAX_SECONDS_PER_MOVE = 60  # an engine that takes longer has failed


def find_engine(engine: str) -> str:
    """Path of a UCI engine, given by path or by its name on the PATH (or in Debian's /usr/games).

    Raises `UserError` when there is none, or, in the process that will play the match, when it does not start as one.
    """
    path = shutil.which(engine) or shutil.which(engine, path="/usr/games")
    if path is None:
        raise UserError(f"--engine {engine}: no such program on the PATH; install it (Debian: apt install stockfish).")
    if is_first_process():
        try:
            _start_engine(path).close()
        except (chess.engine.EngineError, OSError, TimeoutError) as error:
            reason = f"{type(error).__name__} {error}".strip()
            raise UserError(f"--engine {path}: does not start as a UCI engine ({reason}); give another.") from error
    return path


# Becomes the engine (argv[1]) after asking to be killed with the thread that started it. Most engines leave when their
# input closes, but not while they think.
_DIE_WITH_PARENT = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def open_engine(path: str) -> Iterator[chess.engine.SimpleEngine]:
    """A running engine, which ends with this block in any case, and on Linux with this process however that ends."""
    engine = _start_engine(path)
    try:
        yield engine
    finally:
        with contextlib.suppress(chess.engine.EngineError, TimeoutError):
            engine.quit()
        engine.close()  # kills one that did not leave


def _start_engine(path: str) -> chess.engine.SimpleEngine:
    command = [path]
    if sys.platform == "linux":
        command = [sys.executable, "-c", _DIE_WITH_PARENT, path]
    return chess.engine.SimpleEngine.popen_uci(command)


class MatchGame:
    """One game of the match, from the first plies of a known game."""

    def __init__(self, opening: Sequence[str], model_color: chess.Color) -> None:
        self.board = board_after(opening[:OPENING_PLIES])
        if self.board.is_game_over(claim_draw=True):  # a game as short as that: with its last move to be found
            self.board.pop()
        self.model_color = model_color
        self.score: float | None = None  # the model's, once the game is over
        self.has_illegal_move = False

    @property
    def moves(self) -> tuple[str, ...]:
        return tuple(move.uci() for move in self.board.move_stack)

    def answer(self, text: str, notation: Notation) -> None:
        """Take the model's move; one that is not legal loses."""
        move = parse_move(text, self.board, notation)
        if isinstance(move, str):
            self.score, self.has_illegal_move = 0.0, True
        else:
            self.push(move)

    def push(self, move: chess.Move) -> None:
        self.board.push(move)
        if (outcome := self.board.outcome(claim_draw=True)) is not None:
            self.score = 0.5 if outcome.winner is None else float(outcome.winner == self.model_color)
        elif len(self.board.move_stack) >= MAX_PLIES:
            self.score = 0.5


def play_match(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    engine_path: str,
    openings: Sequence[str],
    notation: Notation,
    *,
    num_games: int,
    num_nodes: int,
    max_prompt_length: int,
    per_device_batch_size: int,
) -> dict[str, float]:
    """Play all games at once, each opening with both colours; the engine runs on the main process. Collective.

    `eval_engine_score` is the model's mean (win 1, draw 1/2); an illegal or unparsable move loses, a game that outgrows
    the model's length or MAX_PLIES is a draw. `eval_engine_plies`: mean length until the first illegal move or the end.
    A failing engine ends the match and not the run; there are no metrics then.
    """
    games = [
        MatchGame(openings[number // 2 % len(openings)].split(), chess.COLORS[number % 2])
        for number in range(num_games)
    ]
    with contextlib.ExitStack() as stack:
        engine: chess.engine.SimpleEngine | None = None
        while True:
            prompts: list[list[int]] = []
            failure = ""
            if accelerator.is_main_process:
                try:
                    engine = engine or stack.enter_context(open_engine(engine_path))
                    prompts = _let_engine_move(engine, games, num_nodes, max_prompt_length, tokenizer, notation)
                except (chess.engine.EngineError, OSError, TimeoutError) as error:
                    failure = f"{type(error).__name__} {error}".strip()
            prompts, failure = broadcast_object_list([prompts, failure])
            if failure:
                accelerator.print(f"--engine {engine_path} failed ({failure}): no match")
                return {}
            if not prompts:
                break
            texts = next_moves(accelerator, model, tokenizer, prompts, per_device_batch_size=per_device_batch_size)
            if texts is not None:
                waiting = [game for game in games if game.score is None]
                for game, text in zip(waiting, texts, strict=True):
                    game.answer(text, notation)
    metrics = {
        "eval_engine_score": sum(game.score or 0.0 for game in games) / num_games,
        "eval_engine_plies": sum(len(game.board.move_stack) for game in games) / num_games,
        "eval_engine_illegal_games": sum(game.has_illegal_move for game in games),
        "eval_engine_games": num_games,
    }
    return broadcast_object_list([metrics])[0]


def _let_engine_move(
    engine: chess.engine.SimpleEngine,
    games: list[MatchGame],
    num_nodes: int,
    max_prompt_length: int,
    tokenizer: PreTrainedTokenizerBase,
    notation: Notation,
) -> list[list[int]]:
    """Answer in each game where the engine is to move; return the prompts of the games that go on."""
    limit = chess.engine.Limit(nodes=num_nodes, time=MAX_SECONDS_PER_MOVE)
    prompts = []
    for game in games:
        if game.score is None and game.board.turn != game.model_color:
            move = engine.play(game.board, limit, game=id(game)).move
            if move is None:
                raise chess.engine.EngineError("it gave no move")
            game.push(move)
        if game.score is None:
            prompt = encode_prompt(game.moves, tokenizer, notation)
            if len(prompt) > max_prompt_length:
                game.score = 0.5
            else:
                prompts.append(prompt)
    return prompts
