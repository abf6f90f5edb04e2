"""recipes/chess_finetune.py: where games come from, its presets, and short runs of the whole script."""

import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import common
from common import chess_games, chess_model
from common.arguments import UserError, parse_args
from tests.conftest import REPOSITORY, load_recipe
from tests.forked import ForkedParent, Result

RECIPE = REPOSITORY / "recipes" / "chess_finetune.py"
SAMPLES = REPOSITORY / "recipes" / "samples"
MODELS = REPOSITORY / "recipes" / "configs" / "models"
FLAGS = [
    "--config=chess_finetune_demo", "--config_overrides=hidden_size=32,intermediate_size=64,num_hidden_layers=2",
    "--max_games=40", "--max_seq_length=64", "--max_steps=16", "--warmup_steps=0", "--learning_rate=1e-2",
    "--legal_move_samples=12", "--logging_steps=1", "--max_eval_samples=3", "--validation_size=0.2",
]  # fmt: skip
STOCKFISH = shutil.which("stockfish") or shutil.which("stockfish", path="/usr/games")


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe(RECIPE)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


def run(forked: ForkedParent, output: Path, *flags: str, config: str = "fsdp_full_shard", num: int = 2) -> Result:
    return forked.run(
        RECIPE, *FLAGS, f"--output_dir={output}", *flags, config=config, num_processes=num,
        launcher_flags=["--mixed_precision", "no"],
    )  # fmt: skip


def read_metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------------------
# Games


def test_games_are_split_without_overlap(recipe: ModuleType) -> None:
    train, validation, report = recipe.load_games(recipe.ChessArguments(max_games=60, validation_size=0.2))
    assert report == "60 games kept, 0 dropped"
    assert len(train) + len(validation) == 60 and 4 < len(validation) < 25
    assert not set(train["moves"][:]) & set(validation["moves"][:])
    first = {" ".join(json.loads(line)["Moves"]) for line in (SAMPLES / "chess_games.jsonl").open().readlines()[:60]}
    assert {*train["moves"][:], *validation["moves"][:]} == first
    short = recipe.ChessArguments(max_games=60, validation_size=0.2, max_train_samples=5, max_eval_samples=2)
    assert [len(part) for part in recipe.load_games(short)[:2]] == [5, 2]
    _, other, _ = recipe.load_games(recipe.ChessArguments(max_games=60, validation_size=0.2, seed=1))
    assert set(other["moves"][:]) != set(validation["moves"][:])


def test_files_folders_and_patterns(recipe: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.pgn").write_text("1. e4 e5 1-0\n\n1. d4 d5 0-1\n\n1. d4 d4 0-1\n")
    (tmp_path / "b,c.txt").write_text("e2e4 c7c5\n1. e4 e5\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.jsonl").write_text('{"Moves": ["g1f3"], "Termination": null, "Result": null}\n')

    def read(text: str) -> tuple[set[str], str]:
        train, validation, report = recipe.load_games(recipe.ChessArguments(train_file=text))
        return {*train["moves"][:], *validation["moves"][:]}, report

    games, report = read(f"{tmp_path}/a.pgn")
    assert games == {"e2e4 e7e5", "d2d4 d7d5"} and report.startswith("2 games kept, 1 dropped\n  1 illegal move: ")
    games, report = read(f"{tmp_path}/*.pgn,{tmp_path}/folder")
    assert games == {"e2e4 e7e5", "d2d4 d7d5", "g1f3"}
    assert read(f"{tmp_path}/b,c.txt")[0] == {"e2e4 c7c5", "e2e4 e7e5"}
    games, report = read(f"{tmp_path}/a.pgn,{tmp_path}/b?c.txt")
    assert games == {"e2e4 e7e5", "d2d4 d7d5", "e2e4 c7c5"} and "1 duplicate" in report
    (tmp_path / "a.pgn").write_text("1. c4 e5 1-0\n\n1. d4 d5 0-1\n")  # an edited file is read again
    assert read(f"{tmp_path}/a.pgn")[0] == {"c2c4 e7e5", "d2d4 d7d5"}
    for text, message in [
        (f"{tmp_path}/*.parquet", r"\*\.parquet: no file has such a name"),
        (f"{tmp_path}/none.pgn", "none.pgn: no such file or folder"),
        (f"{tmp_path}/folder", "two good games are needed at least: 1 games kept, 0 dropped"),
    ]:
        with pytest.raises(UserError, match=message):
            read(text)


def test_validation_games_from_a_file(recipe: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "train.pgn").write_text("1. e4 e5 1-0\n\n1. d4 d5 0-1\n")
    (tmp_path / "new.pgn").write_text("1. c4 e5 1-0\n\n1. d4 d5 0-1\n\n1. d4 e4 0-1\n\n1. g3 e5 1-0\n")

    def read(name: str) -> tuple[list[str], list[str], str]:
        args = recipe.ChessArguments(train_file=f"{tmp_path}/train.pgn", validation_file=f"{tmp_path}/{name}")
        train, validation, report = recipe.load_games(args)
        return train["moves"][:], validation["moves"][:], report

    train, validation, report = read("new.pgn")
    assert train == ["e2e4 e7e5", "d2d4 d7d5"] and validation == ["c2c4 e7e5", "g2g3 e7e5"]
    assert report.startswith("2 games kept, 0 dropped; for validation: 3 games kept, 1 dropped\n")
    assert report.endswith("; 1 of them left out, which are trained on")
    with pytest.raises(UserError, match="train.pgn: all its games are in --train_file too"):
        read("train.pgn")
    with pytest.raises(UserError, match="none.pgn: no such file"):
        read("none.pgn")


def test_a_choice_by_legal_moves_is_among_the_same_positions(recipe: ModuleType) -> None:
    def description(metric: str, num_samples: int) -> dict[str, str]:
        args = recipe.ChessArguments(max_games=20, legal_move_samples=num_samples, metric_for_best_model=metric)
        _, games, _ = recipe.load_games(args)
        accelerator = Accelerator(cpu=True)
        return recipe.Evaluation(args, accelerator, chess_model.square_tokenizer(), games, None).description

    by_loss, by_rate = description("eval_loss", 4), description("eval_legal_move_rate", 4)
    assert by_loss.keys() == {"eval_"} and description("eval_loss", 5) == by_loss
    assert by_rate == by_loss | {"eval_legal": "4 positions"}
    assert description("eval_legal_move_rate", 5) == by_loss | {"eval_legal": "5 positions"}


def test_a_missing_package_is_an_error_for_the_user(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chess", None)
    for name in ("chess_games", "chess_model"):
        monkeypatch.delitem(sys.modules, f"common.{name}")
        monkeypatch.delattr(common, name)
    monkeypatch.setattr(sys, "argv", ["chess_finetune.py", "--config=chess_finetune_demo"])
    with pytest.raises(UserError, match=r"pip install -e \.\[chess\]"):
        recipe.main()


def test_real_games(recipe: ModuleType, shared_data: Path) -> None:
    train, validation, report = recipe.load_games(
        recipe.ChessArguments(train_file=f"{shared_data}/chess/*sample16.parquet")
    )
    assert len(train) + len(validation) == 16 and report == "16 games kept, 0 dropped"


@pytest.mark.parametrize("rows", [
    {"Moves": [["e2e4"], ["d2d4"], ["d2d5"]], "Termination": [None] * 3, "Result": [None] * 3},
    {"text": ["1. e4", "d2d4", "1. e5"]},
])  # fmt: skip
def test_dataset_of_the_hub(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, rows: dict[str, Any]) -> None:
    table = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: table)
    train, validation, report = recipe.load_games(recipe.ChessArguments(dataset_name="laion/strategic_game_chess"))
    assert {*train["moves"][:], *validation["moves"][:]} == {"e2e4", "d2d4"}
    assert "1 illegal move: laion/strategic_game_chess row 3" in report


# ---------------------------------------------------------------------------------------------------------------------
# Presets


@pytest.mark.parametrize(
    ("model", "millions"), [("100m", 99.217152), ("135m", 134.515008), ("7b", 6738.546688), ("demo", 0.87)]
)
def test_shapes_of_the_presets(model: str, millions: float) -> None:
    """Published: SmolLM2-135M has 134,515,008 parameters, CodeLlama-7b 6,738,546,688."""
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS / f"chess_{model}")).num_parameters()
    assert count / 1e6 == pytest.approx(millions, rel=1e-2 if model == "demo" else 1e-9)


@pytest.mark.parametrize("preset", sorted(path.stem for path in MODELS.parent.glob("chess_finetune_*.yaml")))
def test_presets_are_read(recipe: ModuleType, preset: str) -> None:
    args = parse_args(recipe.ChessArguments, ["--config", preset])
    assert args.eval_on_start and args.total_batch_size % (args.per_device_train_batch_size or 1) == 0
    from_hub = preset not in ("chess_finetune_demo", "chess_finetune_100m")
    assert bool(args.model_name_or_path) == bool(args.dataset_name) == from_hub
    own = parse_args(recipe.ChessArguments, [f"--config={preset}", "--train_file=games.pgn"])
    assert (own.train_file, own.dataset_name) == ("games.pgn", None), "a flag's data take the place of the preset's"


# ---------------------------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def trained(forked: ForkedParent, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(output folder, what was printed) of a run under FSDP2 with two processes."""
    output = tmp_path_factory.mktemp("trained") / "run"
    engine = [f"--engine={STOCKFISH}", "--engine_games=3", "--engine_nodes=20"] if STOCKFISH else []
    result = run(forked, output, *engine)
    assert result.exit_code == 0, result.output
    return output, result.output


def test_metrics_before_and_after(recipe: ModuleType, trained: tuple[Path, str]) -> None:
    output, printed = trained
    lines = read_metrics(output)
    losses = [line["loss"] for line in lines if "loss" in line]
    before, after = (line for line in lines if "eval_loss" in line)
    assert (before["step"], after["step"], len(losses)) == (0, 16, 16)
    assert before["eval_loss"] == pytest.approx(math.log(136), abs=0.1)
    assert after["eval_loss"] < before["eval_loss"] - 0.1
    assert after["eval_loss_per_move"] < before["eval_loss_per_move"] - 0.1
    for line in (before, after):
        for prefix in ("eval_", "eval_sampled_"):
            rates = [line[f"{prefix}{verdict}_move_rate"] for verdict in ("legal", "illegal", "unparsable")]
            assert sum(rates) == pytest.approx(1)
        assert line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
        if STOCKFISH:
            assert line["eval_engine_games"] == 3 and 0 <= line["eval_engine_score"] <= 0.5
            assert line["eval_engine_plies"] >= 4
    assert printed.count("next move     loss per move") == 2 and "kept, 0 dropped" in printed

    # The exported model over whole validation games, window by window, and at the same positions.
    args = parse_args(recipe.ChessArguments, [*FLAGS, f"--output_dir={output}"])
    _, games, _ = recipe.load_games(args)
    model = AutoModelForCausalLM.from_pretrained(output / "model").double().eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    assert model.config.vocab_size == len(tokenizer) == 136
    nll = tokens = right = num_moves = 0.0
    for game in games["moves"]:
        examples = chess_model.encode_games({"moves": [game]}, tokenizer, "uci", 64, with_moves=True)
        for ids, labels, moves in zip(examples["input_ids"], examples["labels"], examples["moves"], strict=True):
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            wrong = {-1}
            for position, (label, move) in enumerate(zip(labels, moves, strict=True)):
                if label != -100:
                    nll, tokens = nll - scores[position, label].item(), tokens + 1
                    if scores[position].argmax().item() != label:
                        wrong.add(move)
            right, num_moves = right + len(set(moves) - wrong), num_moves + len(set(moves) - {-1})
    assert num_moves == sum(len(game.split()) for game in games["moves"])
    assert after["eval_loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert after["eval_move_accuracy"] == pytest.approx(right / num_moves)

    positions = chess_model.draw_positions(
        games["moves"][:], tokenizer, "uci", num_positions=12, max_prompt_length=54, seed=42
    )
    legal = 0
    for drawn in positions:
        ids = torch.tensor([drawn.prompt])
        new = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, pad_token_id=0
        )
        text = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        board = chess_model.board_after(drawn.moves)
        legal += not isinstance(chess_games.parse_move(text, board, "uci"), str)
    assert after["eval_legal_move_rate"] == pytest.approx(legal / len(positions))


def test_evaluation_of_an_exported_model_in_another_layout(
    forked: ForkedParent, trained: tuple[Path, str], tmp_path: Path
) -> None:
    flags = [f"--model_name_or_path={trained[0] / 'model'}", "--max_steps=0", "--square_tokenizer=false"]
    overrides = "--config_overrides=num_hidden_layers=2"
    result = run(forked, tmp_path / "run", *flags, overrides, config="single_device", num=1)
    assert result.exit_code == 0, result.output
    wanted, found = read_metrics(trained[0])[-1], read_metrics(tmp_path / "run")[-1]
    same = [key for key in wanted if key.startswith("eval_") and "engine" not in key]
    assert len(same) > 15
    assert {key: found[key] for key in same} == pytest.approx({key: wanted[key] for key in same}, rel=1e-4)


def test_san_packed_with_subwords(forked: ForkedParent, tmp_path: Path) -> None:
    flags = [
        "--square_tokenizer=false",
        f"--tokenizer_name_or_path={SAMPLES / 'tokenizer'}",
        "--notation=san",
        "--packing",
    ]
    size = "--config_overrides=hidden_size=32,intermediate_size=64,num_hidden_layers=1,vocab_size=2048"
    result = run(forked, tmp_path / "run", *flags, size, "--show_samples=1", config="ddp")
    assert result.exit_code == 0, result.output
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2048), abs=0.2) and losses[-1] < losses[0] - 1
    assert re.search(r"input: .* \d+\. [NBRQKa-hO]", result.output)


def children(pids: list[int], name: str) -> list[int]:
    """Running processes of this name that the given ones have started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:  # it has ended
                continue
            if command == name and int(rest.split()[1]) in pids:
                found.append(int(folder.name))
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


# An engine that never answers and leaves neither when its input closes nor when it is asked to.
DEAF_ENGINE = """#!/bin/sh
trap '' TERM HUP INT PIPE
read line; echo uciok
while true; do read line || sleep 0.1; [ "$line" = isready ] && echo readyok; done
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_engine_outlives_a_killed_run(forked: ForkedParent, tmp_path: Path) -> None:
    program = tmp_path / "deaf"
    program.write_text(DEAF_ENGINE)
    program.chmod(0o755)
    flags = [f"--output_dir={tmp_path / 'run'}", f"--engine={program}", "--legal_move_samples=0"]
    handle = forked.start(RECIPE, *FLAGS, *flags, config="fsdp_full_shard", num_processes=2)
    wait_for(lambda: "training games" in handle.output)  # the one that was tried before the data were read has ended
    [engine] = wait_for(lambda: children(handle.pids, "deaf"))
    for pid in handle.pids:  # and not what they have started, which handle.kill() would end too
        os.kill(pid, signal.SIGKILL)
    handle.wait()
    wait_for(lambda: not Path(f"/proc/{engine}").exists(), 10)


@pytest.mark.skipif(STOCKFISH is None or sys.platform != "linux", reason="needs stockfish, looks into /proc")
def test_a_stop_in_a_match_ends_the_engine_and_saves(forked: ForkedParent, tmp_path: Path) -> None:
    flags = [f"--output_dir={tmp_path / 'run'}", f"--engine={STOCKFISH}", "--legal_move_samples=0"]
    flags += ["--engine_games=40", "--engine_nodes=100000"]
    handle = forked.start(RECIPE, *FLAGS, *flags, config="fsdp_full_shard", num_processes=2)
    wait_for(lambda: "training games" in handle.output)
    [engine] = wait_for(lambda: children(handle.pids, "stockfish"))
    handle.send_signal(signal.SIGTERM)
    result = handle.wait()
    assert result.exit_code == 75 and "stopped by SIGTERM at step 0" in result.output, result.output
    wait_for(lambda: not Path(f"/proc/{engine}").exists(), 10)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train_file=missing.pgn"], "missing.pgn: no such file or folder"),
        (["--train_file=a.pgn", "--dataset_name=b"], "give --dataset_name or --train_file, not both"),
        (["--validation_file=a.pgn"], "--validation_file goes with --train_file"),
        (["--notation=san"], "makes its own tokenizer, for --notation uci: set it to false"),
        (["--max_seq_length=1024"], "--max_seq_length 1024: the model has 512 positions"),
        (["--max_seq_length=16"], "--max_seq_length is 16; it must be at least 32"),
        (["--engine=no-such-engine"], "--engine no-such-engine: no such program on the PATH"),
        (["--engine=true"], "true: does not start as a UCI engine (EngineTerminatedError"),
        (["--packing", "--attn_implementation=flash_attention_2"], "--packing: flash_attention_2 would let games see"),
        (["--validation_size=3"], "--validation_size is 3.0; it must be a fraction"),
        (
            ["--config=chess_finetune_7b", "--config_overrides=num_hidden_layers=2"],
            "model codellama/CodeLlama-7b-hf is not in the local cache and the hub cannot be reached: run `make "
            'download ARGS="--model codellama/CodeLlama-7b-hf"`',
        ),
    ],
)
def test_mistakes_are_one_line(forked: ForkedParent, tmp_path: Path, flags: list[str], message: str) -> None:
    result = run(forked, tmp_path / "run", *flags)
    assert result.exit_code == 2 and result.output.count("error: ") == 1, result.output
    assert message in result.output and "Traceback" not in result.output
    assert not (tmp_path / "run").exists()
