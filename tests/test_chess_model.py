"""common/chess_model.py: games as tokens against their text, sums against loops, matches with a real engine."""

import json
import os
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import chess
import chess.engine
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from common import chess_games, data
from common import chess_model as cm
from common.arguments import UserError
from common.losses import token_loss
from tests.conftest import REPOSITORY

SAMPLES = REPOSITORY / "recipes" / "samples"
IGNORED = -100
STOCKFISH = shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")


@pytest.fixture(scope="module")
def games() -> list[str]:
    """20 of the embedded games, the longest among them, as UCI texts."""
    texts = [" ".join(json.loads(line)["Moves"]) for line in (SAMPLES / "chess_games.jsonl").open()]
    return [max(texts, key=len), *texts[:19]]


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def subword_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(SAMPLES / "tokenizer")


TOKENIZERS: dict[str, tuple[Any, chess_games.Notation]] = {
    "squares": (cm.square_tokenizer, "uci"), "bpe": (subword_tokenizer, "uci"), "san": (subword_tokenizer, "san")
}  # fmt: skip


@pytest.fixture(params=TOKENIZERS)
def tokenizer_and_notation(request: pytest.FixtureRequest) -> tuple[PreTrainedTokenizerBase, chess_games.Notation]:
    make, notation = TOKENIZERS[request.param]
    return make(), notation


def make_model(tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, pad_token_id=0, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, **settings,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


# ---------------------------------------------------------------------------------------------------------------------
# Games as tokens


def test_square_tokenizer(games: list[str], tmp_path: Path) -> None:
    tokenizer = cm.square_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        for game in games:
            ids = each(game, add_special_tokens=False)["input_ids"]
            promotions = sum(len(move) == 5 for move in game.split())
            assert len(ids) == 2 * len(game.split()) + promotions
            assert each.decode(ids) == game
    assert len(tokenizer) == 4 + 128 + 4
    assert tokenizer("e2e4 a7a8q")["input_ids"] == tokenizer.convert_tokens_to_ids(["e2", "e4", " a7", "a8", "q"])


def test_one_begin_one_end_and_the_text_between(
    games: list[str], tokenizer_and_notation: tuple[PreTrainedTokenizerBase, chess_games.Notation]
) -> None:
    tokenizer, notation = tokenizer_and_notation
    columns = cm.encode_games({"moves": games}, tokenizer, notation, 4096, with_moves=True)
    assert len(columns["input_ids"]) == len(games)
    for game, ids, labels, length, moves in zip(
        games, columns["input_ids"], columns["labels"], columns["length"], columns["moves"], strict=True
    ):
        text = chess_games.format_game(game.split(), notation)
        assert ids[1:] == labels[:-1] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id and labels[-1] == tokenizer.eos_token_id
        assert len(ids) == len(labels) == length == len(moves)
        assert tokenizer.bos_token_id not in labels and tokenizer.eos_token_id not in ids
        # What is said to be move number i is its text and nothing else.
        board = chess.Board()
        for ply, uci in enumerate(game.split()):
            written = tokenizer.decode([label for label, move in zip(labels, moves, strict=True) if move == ply])
            assert written.strip() == (uci if notation == "uci" else board.san(chess.Move.from_uci(uci)))
            board.push_uci(uci)
        assert max(moves) == len(game.split()) - 1 and moves[-1] == -1


def test_prompts_are_what_stands_before_a_move(
    games: list[str], tokenizer_and_notation: tuple[PreTrainedTokenizerBase, chess_games.Notation]
) -> None:
    tokenizer, notation = tokenizer_and_notation
    columns = cm.encode_games({"moves": games}, tokenizer, notation, 4096, with_moves=True)
    for game, ids, moves in zip(games[:4], columns["input_ids"], columns["moves"], strict=False):
        for ply in range(0, len(game.split()), 5):
            assert cm.encode_prompt(game.split()[:ply], tokenizer, notation) == ids[: moves.index(ply) + 1]


@pytest.mark.parametrize("max_length", [32, 50, 128])
def test_long_games_are_cut_between_moves(
    games: list[str], tokenizer_and_notation: tuple[PreTrainedTokenizerBase, chess_games.Notation], max_length: int
) -> None:
    tokenizer, notation = tokenizer_and_notation
    for game in games[:5]:
        whole = cm.encode_games({"moves": [game]}, tokenizer, notation, 4096, with_moves=True)
        parts = cm.encode_games({"moves": [game]}, tokenizer, notation, max_length, with_moves=True)
        assert len(parts["input_ids"]) > 1 and max(parts["length"]) <= max_length
        targets = [[label for label in labels if label != IGNORED] for labels in parts["labels"]]
        assert sum(targets, []) == whole["labels"][0]  # each token is a target once
        assert sum(map(len, targets)) / len(targets) > max_length / 4  # and most of an example is new
        assert [len(set(moves) - {-1}) for moves in parts["moves"]] == [max(moves) + 1 for moves in parts["moves"]]
        assert sum(max(moves) + 1 for moves in parts["moves"]) == len(game.split())  # no move is in two examples
        phases = [[p for p in phases if p >= 0] for phases in parts["phases"]]
        assert sum(phases, []) == [phase for phase in whole["phases"][0] if phase >= 0]
        boundaries = {chess_games.format_game(game.split()[:ply], notation) for ply in range(len(game.split()))}
        stream, position = whole["input_ids"][0], 0
        for ids, labels, new in zip(parts["input_ids"], parts["labels"], targets, strict=True):
            num_context = len(labels) - len(new)
            assert num_context == 0 or num_context < max_length // 2
            begin = position - num_context
            assert stream[begin : begin + len(ids)] == ids
            assert begin == 0 or tokenizer.decode(stream[1:begin]) in boundaries
            position += len(new)


def test_phases_are_those_of_the_positions(games: list[str]) -> None:
    columns = cm.encode_games({"moves": games[:1]}, cm.square_tokenizer(), "uci", 4096, with_moves=True)
    board = chess.Board()
    for ply, uci in enumerate(games[0].split()):
        found = {p for p, m in zip(columns["phases"][0], columns["moves"][0], strict=True) if m == ply}
        assert found == {cm.PHASES.index(chess_games.game_phase(board))}
        board.push_uci(uci)
    assert set(columns["phases"][0]) == {-1, 0, 1, 2}


def test_the_end_is_learned_where_padding_has_its_number() -> None:
    tokenizer = cm.square_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    columns = cm.encode_games({"moves": ["e2e4 e7e5", "e2e4"]}, tokenizer, "uci", 64)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    batch = data.CausalCollator(cm.padding_token_id(tokenizer))(rows)
    end = tokenizer.eos_token_id
    assert (batch["labels"] == end).sum(1).tolist() == [1, 1]
    assert batch["labels"][1].tolist()[2:] == [end, IGNORED, IGNORED]
    assert batch["input_ids"][1].tolist()[3:] == [end, end]


def test_tokenizers_that_cannot_write_games_are_refused() -> None:
    tokenizer = cm.square_tokenizer()
    cm.check_tokenizer(tokenizer, "uci")
    with pytest.raises(UserError, match="no token for .* --notation san"):
        cm.check_tokenizer(tokenizer, "san")
    cm.check_tokenizer(subword_tokenizer(), "san")
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        cm.check_tokenizer(tokenizer, "uci")
    tokenizer = cm.square_tokenizer()
    tokenizer.add_tokens(["e4 d7"])
    with pytest.raises(UserError, match="joins two moves in one token"):
        cm.check_tokenizer(tokenizer, "uci")


# ---------------------------------------------------------------------------------------------------------------------
# Packing


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_the_loss_of_a_game_does_not_depend_on_its_neighbours(games: list[str], attn_implementation: str) -> None:
    tokenizer = cm.square_tokenizer()
    columns = cm.encode_games({"moves": [" ".join(game.split()[:20]) for game in games]}, tokenizer, "uci", 64)
    model = make_model(tokenizer, torch.float64, attn_implementation=attn_implementation)
    collate = data.CausalCollator(0, pad_to_multiple_of=8)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    packed = data._pack_rows(columns, max_length=140)
    packed_rows = [dict(zip(packed, values, strict=True)) for values in zip(*packed.values(), strict=True)]
    assert 1 < len(packed_rows) <= len(rows) // 2
    alone = [token_loss(model, collate([row])).item() for row in rows]
    together = token_loss(model, collate(packed_rows)).item()
    assert together == pytest.approx(sum(alone), rel=1e-12)
    without_positions = [{key: row[key] for key in ("input_ids", "labels")} for row in packed_rows]
    assert token_loss(model, collate(without_positions)).item() != pytest.approx(sum(alone), rel=1e-7)
    assert token_loss(model, collate(rows)).item() == pytest.approx(sum(alone), rel=1e-12)  # nor on padding


# ---------------------------------------------------------------------------------------------------------------------
# Moves of given games


def test_move_sums_against_a_loop(games: list[str]) -> None:
    tokenizer = cm.square_tokenizer()
    columns = cm.encode_games({"moves": games[:6]}, tokenizer, "uci", 128, with_moves=True)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    batch = data.CausalCollator(0)(rows)
    torch.manual_seed(0)
    logits = torch.randn(*batch["labels"].shape, len(tokenizer), dtype=torch.float64)
    lucky = torch.rand(batch["labels"].shape) < 0.7  # most tokens are right
    logits.scatter_add_(2, batch["labels"].clamp(min=0)[..., None], 20.0 * lucky[..., None].double())
    sums = {name: value.item() for name, value in cm.move_sums(logits, **batch).items()}

    expected: defaultdict[str, float] = defaultdict(float)
    for row, scores in zip(rows, logits, strict=True):
        by_move: dict[int, list[tuple[float, bool, int]]] = {}
        for target, move, phase, position in zip(row["labels"], row["moves"], row["phases"], scores, strict=False):
            if target != IGNORED:
                nll = (position.exp().sum().log() - position[target]).item()
                expected["nll"] += nll
                expected["tokens"] += 1
                expected["correct"] += position.argmax().item() == target
                if move >= 0:
                    by_move.setdefault(move, []).append((nll, position.argmax().item() == target, phase))
        for tokens in by_move.values():
            name = cm.PHASES[tokens[0][2]]
            expected[f"moves_{name}"] += 1
            expected[f"right_{name}"] += all(is_right for _, is_right, _ in tokens)
            expected[f"nll_{name}"] += sum(nll for nll, _, _ in tokens)
    assert sums == pytest.approx(dict(expected), rel=1e-9)
    assert 0 < sums["right_middlegame"] < sums["moves_middlegame"]

    metrics = cm.move_metrics(sums)
    num_moves = sum(len(game.split()) for game in games[:6])
    assert metrics["eval_loss_per_move"] == pytest.approx(sum(sums[f"nll_{p}"] for p in cm.PHASES) / num_moves)
    assert metrics["eval_move_accuracy_endgame"] == sums["right_endgame"] / sums["moves_endgame"]
    only = {f"{name}_{phase}": float(phase == "opening") for name in ("nll", "right", "moves") for phase in cm.PHASES}
    assert "eval_move_accuracy_endgame" not in cm.move_metrics(only)


# ---------------------------------------------------------------------------------------------------------------------
# Moves that the model gives


def test_positions_are_drawn_from_the_games(games: list[str]) -> None:
    tokenizer = cm.square_tokenizer()

    def draw(num: int, seed: int = 1, length: int = 1000) -> list[cm.Position]:
        return cm.draw_positions(
            games, tokenizer, "uci", num_positions=num, max_prompt_length=length, seed=seed
        )  # fmt: skip

    positions = draw(100)
    assert len(positions) == 100 and positions == draw(100) != draw(100, seed=2)
    before = {tuple(game.split()[:ply]) for game in games for ply in range(len(game.split()))}
    for position in positions:
        assert position.moves in before
        assert position.prompt == cm.encode_prompt(position.moves, tokenizer, "uci")
    everything = draw(10**6)
    assert len(everything) == sum(len(game.split()) for game in games)
    assert draw(0) == []
    short = draw(100, length=40)
    assert short == [position for position in positions if len(position.prompt) <= 40] and 0 < len(short) < 100


def test_next_moves_equal_generation_one_by_one(accelerator: Accelerator, games: list[str]) -> None:
    tokenizer = cm.square_tokenizer()
    model = make_model(tokenizer)
    prompts = [
        cm.encode_prompt(game.split()[:ply], tokenizer, "uci")
        for ply, game in zip((9, 0, 30, 4, 17), games, strict=False)
    ]
    texts = cm.next_moves(accelerator, model, tokenizer, prompts, per_device_batch_size=2)
    for prompt, text in zip(prompts, texts or [], strict=True):
        ids = torch.tensor([prompt])
        for _ in range(cm.MAX_MOVE_TOKENS):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
            if ids[0, -1] == tokenizer.eos_token_id:
                break
        assert text == tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True).strip()
    draws = [
        cm.next_moves(accelerator, model, tokenizer, prompts, per_device_batch_size=2, seed=seed) for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_verdicts_and_rates() -> None:
    opening = cm.Position(("e2e4",), [])
    plies = [
        "e2e4",
        "e7e5",
        "g1f3",
        "b8c6",
        "f1b5",
        "a7a6",
        "b5a4",
        "g8f6",
        "e1g1",
        "f8e7",
        "f1e1",
        "b7b5",
        "a4b3",
        "d7d6",
        "c2c3",
        "e8g8",
        "h2h3",
        "c6b8",
        "d2d4",
        "b8d7",
    ]
    middlegame = cm.Position(tuple(plies), [])
    positions = [opening, opening, opening, middlegame, middlegame]
    counts = cm.judge_moves(positions, ["e7e5 g1f3", "e7e4", "", "c3c4 e5", "Nxe5"], "uci")
    assert counts == {
        ("legal", "opening"): 1, ("illegal", "opening"): 1, ("unparsable", "opening"): 1,
        ("legal", "middlegame"): 1, ("unparsable", "middlegame"): 1,
    }  # fmt: skip
    assert cm.legality_metrics(counts, "eval_") == pytest.approx({
        "eval_legal_move_rate": 0.4, "eval_illegal_move_rate": 0.2, "eval_unparsable_move_rate": 0.4,
        "eval_legal_move_rate_opening": 1 / 3, "eval_legal_move_rate_middlegame": 0.5,
    })  # fmt: skip
    assert cm.judge_moves([opening], ["N f6"], "san") == {("legal", "opening"): 1}


def test_table_has_every_phase_and_a_dash_where_nothing_was_counted() -> None:
    lines = cm.table(
        {"eval_loss_per_move": 3.0, "eval_move_accuracy": 0.25, "eval_loss_per_move_endgame": 2.5}
    ).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["all", *cm.PHASES]
    assert lines[1].split()[1:] == ["3.000", "0.250", "-", "-"] and lines[4].split()[1] == "2.500"


# ---------------------------------------------------------------------------------------------------------------------
# Games against an engine


class Puppet(torch.nn.Module):
    """Stands for a model: what it writes after a prompt is looked up."""


def play(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, engine: str, writer: Any, **settings: Any
) -> dict[str, float]:
    tokenizer = cm.square_tokenizer()

    def next_moves(accelerator: Any, model: Any, tokenizer: Any, prompts: list[list[int]], **_: Any) -> list[str]:
        return [writer(tokenizer.decode(prompt[1:]).split()) for prompt in prompts]

    monkeypatch.setattr(cm, "next_moves", next_moves)
    arguments = {"num_games": 4, "num_nodes": 50, "max_prompt_length": 600, "per_device_batch_size": 2} | settings
    openings = ["e2e4 e7e5 g1f3 b8c6 f1b5", "d2d4 d7d5 c2c4 e7e6 b1c3"]
    return cm.play_match(accelerator, Puppet(), tokenizer, engine, openings, "uci", **arguments)


def first_legal(moves: list[str]) -> str:
    return sorted(move.uci() for move in cm.board_after(moves).legal_moves)[0]


def engines() -> list[int]:
    """Processes named stockfish that this process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            if name == "stockfish" and int(rest.split()[1]) == os.getpid() and rest.split()[0] != "Z":
                found.append(int(folder.name))
    return found


def assert_no_engine() -> None:
    deadline = time.monotonic() + 5
    while engines() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not engines()


needs_stockfish = pytest.mark.skipif(STOCKFISH is None, reason="stockfish is not installed")


@needs_stockfish
def test_match_against_stockfish(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = play(accelerator, monkeypatch, STOCKFISH or "", first_legal)
    assert metrics["eval_engine_games"] == 4 and metrics["eval_engine_illegal_games"] == 0
    assert metrics["eval_engine_score"] <= 0.25 and metrics["eval_engine_plies"] > 8
    assert_no_engine()


@needs_stockfish
def test_the_first_illegal_move_loses(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both colours of each opening; the model moves legally until ply 8 and then not at all.
    metrics = play(
        accelerator, monkeypatch, STOCKFISH or "", lambda moves: first_legal(moves) if len(moves) < 8 else "a1"
    )
    assert metrics == {
        "eval_engine_score": 0.0, "eval_engine_plies": (8 + 9) / 2, "eval_engine_illegal_games": 4,
        "eval_engine_games": 4,
    }  # fmt: skip


@needs_stockfish
def test_the_engine_ends_with_what_ends_the_match(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(moves: list[str]) -> str:
        assert len(engines()) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(accelerator, monkeypatch, STOCKFISH or "", interrupt)
    assert_no_engine()


@needs_stockfish
def test_games_that_outgrow_the_model_are_draws(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = play(accelerator, monkeypatch, STOCKFISH or "", first_legal, max_prompt_length=8)
    assert metrics["eval_engine_score"] == 0.5 and metrics["eval_engine_plies"] == 4.5


@pytest.mark.parametrize("script", ["raise SystemExit(3)", "print('uciok', flush=True)\ninput()\ninput()"])
def test_a_failing_engine_ends_the_match_alone(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    program = tmp_path / "engine"
    program.write_text(f"#!{sys.executable}\n{script}\n")
    program.chmod(0o755)
    assert play(accelerator, monkeypatch, str(program), first_legal) == {}
    assert f"--engine {program} failed (EngineTerminatedError" in capsys.readouterr().out


def test_checkmate_and_draws_count_for_the_model() -> None:
    game = cm.MatchGame(["f2f3", "e7e5", "g2g4", "a7a6"], chess.BLACK)
    assert game.moves == ("f2f3", "e7e5", "g2g4", "a7a6") and game.score is None
    game = cm.MatchGame(["f2f3", "e7e5", "g2g4"], chess.BLACK)
    game.answer("d8h4", "uci")
    assert game.score == 1.0
    game = cm.MatchGame(["f2f3", "e7e5", "g2g4"], chess.WHITE)
    game.push(chess.Move.from_uci("d8h4"))
    assert game.score == 0.0 and not game.has_illegal_move
    game = cm.MatchGame([], chess.WHITE)
    for move in ("g1f3", "g8f6", "f3g1", "f6g8") * 2:
        game.push(chess.Move.from_uci(move))
    assert game.score == 0.5  # threefold repetition
    mated = cm.MatchGame(["f2f3", "e7e5", "g2g4", "d8h4"], chess.WHITE)
    assert mated.moves == ("f2f3", "e7e5", "g2g4") and mated.score is None, "there is a move left to play"


def test_engines_are_found_or_named(tmp_path: Path) -> None:
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\nread line\necho uciok\nread line\n")
    program.chmod(0o755)
    assert cm.find_engine(str(program)) == str(program)
    assert_no_engine()
    with pytest.raises(UserError, match="--engine nothing-of-the-kind: no such program"):
        cm.find_engine("nothing-of-the-kind")


def test_a_program_that_is_no_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text, reason in (
        ("empty", "", "OSError|EngineTerminatedError"),
        ("ends", "#!/bin/sh\n", "EngineTerminatedError"),
        ("fails", "#!/no/such/interpreter\n", "EngineTerminatedError"),
    ):
        program = tmp_path / name
        program.write_text(text)
        program.chmod(0o755)
        with pytest.raises(UserError, match=rf"--engine {program}: does not start as a UCI engine \(({reason}) "):
            cm.find_engine(str(program))
    monkeypatch.setenv("RANK", "1")  # the match is on another process, which is the one to say it
    assert cm.find_engine(str(program)) == str(program)
