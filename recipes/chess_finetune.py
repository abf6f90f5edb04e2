"""Fine-tune a causal language model on chess games and judge it by the rules of chess: CodeLlama-7B on LAION's games.

    accelerate launch --config_file accelerate_configs/fsdp_full_shard.yaml recipes/chess_finetune.py \
        --config recipes/configs/chess_finetune_7b.yaml

The YAML says how the run is spread over devices, the preset what is trained; without --config it is _7b where there are
GPUs and _demo, on games that ship with the repository, where there are none. Data: PGN files, LAION's parquet or JSON
lines, or lines of moves (--train_file), or a dataset on the hub (--dataset_name). Every game is replayed; broken ones
are left out. --engine stockfish lets the model play against a UCI engine at each evaluation.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from accelerate import Accelerator
from datasets import Dataset, Features, Value
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

# `common.chess_games` and `common.chess_model` are imported by the functions that use them: without the package `chess`
# that is an error for the user, which `run` shows in one line.
from common import data
from common.arguments import TrainArguments, UserError, arg, num_training_steps, parse_args, plan_batch
from common.checkpoint import Checkpoints
from common.evaluation import evaluation_batches, loss_and_accuracy, perplexity, sum_over_dataset
from common.export import export_model
from common.launch import banner, build_accelerator, compute_dtype, run
from common.loop import train
from common.metrics import ModelFlops, Throughput, peak_flops_per_second
from common.models import (
    PACKING_KERNELS,
    check_kind,
    check_packing,
    describe_model,
    fit_config,
    load_config,
    load_model,
    load_tokenizer,
)
from common.optim import build_optimizer, build_scheduler, describe_schedule
from common.sharding import check_wrapping, describe_units, prepare_model
from common.tracking import RunLog

SAMPLE_FILE = Path(__file__).resolve().parent / "samples" / "chess_games.jsonl"
# Columns of a dataset on the hub: LAION's, or the text of a game.
COLUMNS: list[tuple[str, ...]] = [("Moves", "Termination", "Result"), ("Moves",), ("text",)]


@dataclass
class ChessArguments(TrainArguments):
    presets: ClassVar[tuple[str, str]] = ("chess_finetune_demo", "chess_finetune_7b")

    dataset_name: str | None = arg(None, "Dataset on the Hugging Face hub; its training split is read.")
    dataset_config_name: str | None = arg(None, "Configuration of that dataset.")
    train_file: str | None = arg(
        None, "PGN, parquet, JSON lines or text: files, folders, patterns, with commas (default: the embedded games)."
    )
    validation_file: str | None = arg(None, "The same for validation; games to train on are left out of it.")
    max_games: int | None = arg(None, "Read only the first so many games; replaying one takes about 4 ms.")
    validation_size: float = arg(0.05, "Fraction of the games that is set aside for validation without such a file.")
    notation: Literal["uci", "san"] = arg("uci", "How moves are written: e2e4 e7e5 (uci) or 1. e4 e5 (san).")
    square_tokenizer: bool = arg(
        False, "Random weights, uci: a token for each square instead of a tokenizer; two make a move."
    )
    max_seq_length: int = arg(1024, "Tokens of a training example; longer games are cut between moves.")
    packing: bool = arg(False, "Several games in a sequence, which do not see each other, instead of padding.")
    legal_move_samples: int = arg(256, "Positions of validation games that the model moves in; 0: none.")
    engine: str | None = arg(None, "UCI engine to play against at each evaluation: a path, or stockfish.")
    engine_games: int = arg(10, "Games against the engine.")
    engine_nodes: int = arg(1000, "Positions that the engine looks at for a move.")

    def acting(self) -> dict[tuple[str, str], bool]:
        return super().acting() | {
            ("validation_size", "validation_file"): self.validation_file is None,
            ("dataset_config_name", "dataset_name"): self.dataset_name is not None,
            ("square_tokenizer", "model_name_or_path"): self.model_name_or_path is None,
            ("engine", "eval_strategy"): self.evaluates,
            ("engine_games", "engine"): self.engine is not None,
            ("engine_nodes", "engine"): self.engine is not None,
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"max_games": 2, "legal_move_samples": 0, "engine_games": 1, "engine_nodes": 1, "max_seq_length": 32}
        for name, value in least.items():
            if getattr(self, name) is not None and getattr(self, name) < value:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be at least {value}.")
        if not 0 < self.validation_size < 1:
            raise UserError(f"--validation_size is {self.validation_size}; it must be a fraction between 0 and 1.")
        if self.dataset_name and self.train_file:
            raise UserError("give --dataset_name or --train_file, not both.")
        if self.validation_file and not self.train_file:
            raise UserError("--validation_file goes with --train_file; else a fraction of the games is set aside.")
        if self.square_tokenizer and (self.tokenizer_name_or_path or self.notation != "uci"):
            raise UserError(
                "--square_tokenizer (of the flags or the preset) makes its own tokenizer, for --notation uci: set it "
                "to false (with a --tokenizer_name_or_path and a model whose vocabulary holds it), or drop the others."
            )
        if self.packing and self.attn_implementation not in PACKING_KERNELS:
            raise UserError(
                f"--packing: {self.attn_implementation} would let games see each other; use sdpa or flex_attention."
            )


def load_games(args: ChessArguments) -> tuple[Dataset, Dataset, str]:
    """(training games, validation games, report of what was dropped); a row has `moves`: UCI with spaces between."""
    from common import chess_games

    if args.dataset_name:
        rows = data.load_splits(
            columns=COLUMNS, dataset_name=args.dataset_name, dataset_config_name=args.dataset_config_name
        )["train"]
        games, report = replay(args, args.dataset_name, rows=rows, source=args.dataset_name)
    else:
        games, report = replay_files(args, "--train_file", args.train_file or str(SAMPLE_FILE))
    if args.validation_file:
        train_games, (eval_games, eval_report) = games, replay_files(args, "--validation_file", args.validation_file)
        seen = set(train_games["moves"][:])
        unseen = [index for index, moves in enumerate(eval_games["moves"][:]) if moves not in seen]
        if not unseen:
            raise UserError(f"--validation_file {args.validation_file}: all its games are in --train_file too.")
        report += f"; for validation: {eval_report}"
        if num_seen := len(eval_games) - len(unseen):
            report += f"; {num_seen:,} of them left out, which are trained on"
        eval_games = eval_games.select(unseen)
    else:
        moves = (row["moves"].split() for row in games)
        train_games, eval_games = map(games.select, chess_games.split_by_game(moves, args.validation_size, args.seed))
    return data.head(train_games, args.max_train_samples), data.head(eval_games, args.max_eval_samples), report


def replay_files(args: ChessArguments, flag: str, paths: str) -> tuple[Dataset, str]:
    """(games, report) of files as --train_file takes them."""
    from common import chess_games

    files = chess_games.list_files(data.expand_paths(paths, flag))
    # Size and time are part of the cache key: an edited file is read again.
    versions = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return replay(args, f"{flag} {paths}", files=versions)


def replay(args: ChessArguments, name: str, **source: Any) -> tuple[Dataset, str]:
    """(games, report) of a source as `chess_games.game_rows` takes it."""
    from common import chess_games

    features = Features({"moves": Value("string"), "report": Value("string")})
    table = data.generate(
        chess_games.game_rows, features, num_workers=args.preprocessing_num_workers, max_games=args.max_games, **source
    )
    games, report = table.select(range(len(table) - 1)).select_columns("moves"), table[-1]["report"]
    if len(games) < 2:
        raise UserError(f"{name}: two good games are needed at least: {' '.join(report.split())}")
    return games, report


def tokenize_games(
    args: ChessArguments, tokenizer: PreTrainedTokenizerBase, games: Dataset, with_moves: bool = False
) -> Dataset:
    """Training examples of the games: `input_ids`, `labels` and `length`, see `encode_games`."""
    from common import chess_model

    function = functools.partial(
        chess_model.encode_games,
        tokenizer=tokenizer,
        notation=args.notation,
        max_length=args.max_seq_length,
        with_moves=with_moves,
    )
    return data.tokenize(games, function, num_workers=args.preprocessing_num_workers)


class Evaluation:
    """Validation games and positions, drawn once, and what the model makes of them."""

    def __init__(
        self,
        args: ChessArguments,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        games: Dataset,
        engine_path: str | None,
    ) -> None:
        from common import chess_model

        self.args, self.accelerator, self.tokenizer, self.games = args, accelerator, tokenizer, games
        self.engine_path = engine_path
        self.examples = tokenize_games(args, tokenizer, games, with_moves=True)
        collate = data.CausalCollator(chess_model.padding_token_id(tokenizer), pad_to_multiple_of=8)
        batches = evaluation_batches(args, accelerator, self.examples, collate)
        assert batches is not None  # there is always a validation game
        self.batches = batches
        self.max_prompt_length = args.max_seq_length - chess_model.MAX_MOVE_TOKENS
        self.positions = chess_model.draw_positions(
            games["moves"][:], tokenizer, args.notation, num_positions=args.legal_move_samples,
            max_prompt_length=self.max_prompt_length, seed=args.seed,
        )  # fmt: skip
        self.description = {"eval_": self.batches.description}
        if "legal" in args.metric_for_best_model:
            self.description["eval_legal"] = f"{len(self.positions):,} positions"

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Loss per token and per move, next-move accuracy, legal-move rates, score against the engine. Collective."""
        from common import chess_model

        args, accelerator, tokenizer = self.args, self.accelerator, self.tokenizer
        sums = sum_over_dataset(accelerator, model, self.batches, chess_model.move_statistics)
        metrics = loss_and_accuracy(sums)
        metrics["eval_perplexity"] = perplexity(metrics["eval_loss"])
        metrics |= chess_model.move_metrics(sums)
        if self.positions:
            metrics |= chess_model.legal_move_rates(
                accelerator, model, tokenizer, self.positions, args.notation,
                per_device_batch_size=args.per_device_eval_batch_size, seed=args.seed,
            )  # fmt: skip
        if self.engine_path:
            metrics |= chess_model.play_match(
                accelerator, model, tokenizer, self.engine_path, self.games["moves"][: args.engine_games],
                args.notation, num_games=args.engine_games, num_nodes=args.engine_nodes,
                max_prompt_length=self.max_prompt_length, per_device_batch_size=args.per_device_eval_batch_size,
            )  # fmt: skip
        accelerator.print(chess_model.table(metrics))
        return metrics


def main() -> None:
    args = parse_args(ChessArguments)
    from common import chess_model

    accelerator, strategy = build_accelerator(args)
    plan = plan_batch(args, accelerator.num_processes)
    config = load_config(args)
    check_kind(config, AutoModelForCausalLM)
    check_wrapping(args, config, AutoModelForCausalLM, strategy)
    if args.packing:
        check_packing(args, config, AutoModelForCausalLM, "packing")
    is_new_tokenizer = args.square_tokenizer and not args.model_name_or_path
    tokenizer = chess_model.square_tokenizer() if is_new_tokenizer else load_tokenizer(args)
    chess_model.check_tokenizer(tokenizer, args.notation)
    fit_config(args, config, tokenizer, args.max_seq_length, is_own_vocabulary=args.square_tokenizer)
    checkpoints = Checkpoints(args, accelerator, strategy, tokenizer)
    engine_path = chess_model.find_engine(args.engine) if args.engine else None

    train_games, eval_games, report = load_games(args)
    train_data = tokenize_games(args, tokenizer, train_games)
    if args.packing:
        train_data = data.pack(train_data, args.max_seq_length)
    evaluate = Evaluation(args, accelerator, tokenizer, eval_games, engine_path)
    checkpoints.evaluation_data = evaluate.description
    # Packed sequences are nearly full: with one length for all, kernels are compiled once.
    multiple = args.max_seq_length if args.packing else 8
    collate = data.CausalCollator(chess_model.padding_token_id(tokenizer), pad_to_multiple_of=multiple)
    sampler = data.StepSampler(len(train_data), plan.total, args.seed, data.column_array(train_data, "length"))
    num_steps = num_training_steps(args, len(train_data), plan.total)

    model, weights = load_model(args, config, AutoModelForCausalLM, accelerator, packs=args.packing)
    description, flops = describe_model(model, args), ModelFlops.of_model(model)
    model = prepare_model(model, weights, args, accelerator, strategy)
    optimizer = build_optimizer(model, args)
    scheduler = build_scheduler(optimizer, args, num_steps, steps_per_epoch=len(train_data) / plan.total)
    peak_flops = peak_flops_per_second(accelerator.device, compute_dtype(args, strategy))

    log = RunLog(args, accelerator, project="chess-finetune", run_id=checkpoints.tracker_run_id)
    sizes = f"{len(train_games):,} training games in {len(train_data):,} examples, {len(eval_games):,} for validation"
    banner(
        args, accelerator, strategy, model=description, sharding=describe_units(model),
        batch=f"{plan}, {num_steps} steps", schedule=describe_schedule(args, num_steps),
        data=f"{sizes}; {report}",
    )  # fmt: skip
    data.show_samples(accelerator, args.show_samples, train_data, tokenizer)
    train(
        args, plan, accelerator, model, optimizer, scheduler, train_data, sampler, collate, log,
        Throughput(accelerator.device, flops, peak_flops), checkpoints,
        num_steps=num_steps,
        evaluate=lambda: evaluate(model),
        export=lambda folder: export_model(model, tokenizer, folder, accelerator),
    )  # fmt: skip


if __name__ == "__main__":
    run(main)
