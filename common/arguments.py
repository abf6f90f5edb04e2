"""Arguments of every recipe: defaults < preset (--config) < flags."""

import argparse
import dataclasses
import difflib
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import yaml
from transformers import HfArgumentParser

from common.files import bad_utf8_line


class UserError(ValueError):
    """A mistake in a flag, a file or a configuration: shown as one line, without a traceback; exit code 2."""


def arg(default: Any, help: str) -> Any:
    """Field of an argument dataclass."""
    return field(default=default, metadata={"help": help})


@dataclass
class RunArguments:
    _argument_group_name: ClassVar[str] = "run"

    output_dir: str | None = arg(None, "Folder of the run (default: runs/<preset>).")
    overwrite_output_dir: bool = arg(False, "Start afresh in a folder that holds another run; its files are replaced.")
    seed: int = arg(42, "Seed of initial weights, data order and dropout.")
    max_steps: int = arg(-1, "Optimizer steps; -1: as many as --num_train_epochs needs; 0: evaluate and stop.")
    num_train_epochs: float = arg(1.0, "Passes over the training data, where --max_steps does not say how long.")
    report_to: str = arg("none", "Trackers besides metrics.jsonl: none, wandb, tensorboard, or both with a comma.")
    resume_from_checkpoint: str | None = arg(None, "latest, or the folder of a checkpoint, to go on from.")
    allow_changed: str | None = arg(
        None, "Settings, with commas, that may differ from the checkpoint's: learning_rate,data."
    )
    max_run_seconds: float | None = arg(
        None, "Save and stop with exit code 75 this long after the start of the process; loading counts."
    )
    run_name: str | None = arg(None, "Name of the run in the trackers (default: the output folder's name).")
    wandb_project: str | None = arg(None, "wandb project (default: the recipe's name).")
    wandb_entity: str | None = arg(None, "wandb team or user.")
    wandb_log_model: bool = arg(False, "Upload the exported model folder to wandb as an artifact at the end.")
    print_model: bool = arg(False, "Print the sharded module tree.")
    show_samples: int = arg(0, "Print this many training examples: cleaned input and labels.")
    deterministic: bool = arg(False, "Deterministic kernels (slower on GPUs): needed there for bit-exact repetition.")
    accelerate_config: str | None = arg(
        None,
        "accelerate YAML for torchrun and mpiexec (or ACCELERATE_CONFIG_FILE); accelerate launch has --config_file.",
    )
    ddp_timeout: int = arg(1800, "Seconds after which a collective that some process never joins is an error.")
    debug: bool = arg(False, "Show tracebacks of user errors too.")


@dataclass
class BatchArguments:
    _argument_group_name: ClassVar[str] = "batch"

    total_batch_size: int | None = arg(None, "Sequences per optimizer step over all processes and micro-batches.")
    per_device_train_batch_size: int | None = arg(None, "Sequences of one micro-batch on one process.")
    gradient_accumulation_steps: int | None = arg(None, "Micro-batches per optimizer step.")
    per_device_eval_batch_size: int = arg(8, "Sequences of one evaluation batch on one process.")
    dataloader_num_workers: int = arg(0, "Processes that prepare batches, for each training process.")


@dataclass
class OptimizerArguments:
    _argument_group_name: ClassVar[str] = "optimizer and schedule"

    optim: Literal["adamw", "adafactor", "adadelta"] = arg("adamw", "Optimizer.")
    learning_rate: float = arg(5e-5, "Peak learning rate.")
    min_learning_rate: float = arg(0.0, "Learning rate at the end of the schedule.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "step"] = arg(
        "linear", "Decay after warm-up; step: times --lr_gamma after each epoch."
    )
    lr_gamma: float = arg(0.85, "Factor per epoch of the step schedule.")
    warmup_steps: float = arg(0.0, "Linear warm-up steps; below 1: that fraction of all steps.")
    weight_decay: float = arg(0.0, "Weight decay of matrices, embeddings included; biases and norms have none.")
    adam_beta1: float = arg(0.9, "AdamW's beta1.")
    adam_beta2: float = arg(0.999, "AdamW's beta2.")
    adam_epsilon: float = arg(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = arg(1.0, "Clip the gradient to this norm; 0: only measure it.")
    max_skipped_steps: int = arg(
        0, "Leave out up to so many steps whose gradient is not finite; above 0 each step waits for the device."
    )
    spike_factor: float | None = arg(
        None, "A step whose loss or gradient norm is so many times the median of those before is a spike."
    )
    spike_action: Literal["warn", "stop"] = arg("warn", "After a spike: name its batch and go on, or end the run.")


@dataclass
class CadenceArguments:
    _argument_group_name: ClassVar[str] = "logging, evaluation, saving"

    logging_steps: int = arg(10, "Write metrics every so many steps; of single steps the terminal shows every tenth.")
    eval_strategy: Literal["no", "steps", "epoch"] = arg("epoch", "When to evaluate; the last step always is.")
    eval_steps: int | None = arg(None, "Steps between evaluations (eval_strategy steps).")
    evals_per_epoch: int = arg(1, "Evaluations in an epoch (eval_strategy epoch).")
    eval_on_start: bool = arg(False, "Evaluate before the first step too.")
    max_eval_batches: int | None = arg(
        None, "Evaluate the first max_eval_batches x per_device_eval_batch_size examples only."
    )
    save_strategy: Literal["no", "steps", "epoch"] = arg("epoch", "When to save; no: only the last weights are kept.")
    save_steps: int | None = arg(None, "Steps between checkpoints (save_strategy steps).")
    save_total_limit: int | None = arg(None, "Keep only so many checkpoints, and always the newest and the best.")
    async_save: bool = arg(False, "Write checkpoints while training goes on; needs the state once more in host memory.")
    save_only_model: bool = arg(
        False, "Leave the optimizer out of checkpoints due by --save_strategy; training cannot go on from them."
    )
    metric_for_best_model: str = arg(
        "eval_loss", "Evaluation metric that chooses best/; *loss*, *perplexity*, *bits_per_byte*, *forgetting*: low."
    )


@dataclass
class DataArguments:
    _argument_group_name: ClassVar[str] = "data"

    max_train_samples: int | None = arg(None, "Use only so many training examples.")
    max_eval_samples: int | None = arg(None, "Use only so many evaluation examples.")
    preprocessing_num_workers: int | None = arg(None, "Processes that tokenise, and replay games but for PGN and text.")


@dataclass
class ModelArguments:
    _argument_group_name: ClassVar[str] = "model"

    model_name_or_path: str | None = arg(None, "Hub id or folder of a pretrained model.")
    model_config_path: str | None = arg(None, "config.json (or its folder) of a model to start from random weights.")
    init: Literal["meta", "device"] = arg(
        "meta",
        "Random weights: meta, each process draws its own shards, equal for any number of processes; device: the whole "
        "model on each device.",
    )
    config_overrides: str | None = arg(
        None, "Changes to the model's config: key=value,key=value; dropout=0.1 sets all three of GPT-2."
    )
    tokenizer_name_or_path: str | None = arg(None, "Hub id or folder of the tokenizer (default: the model's).")
    attn_implementation: str | None = arg(
        None,
        "Attention kernel: eager, sdpa, flex_attention, ... (default: the model's; on GPUs bias_attention for T5, "
        "packed_attention for packed sequences).",
    )


@dataclass
class RefinementArguments:
    _argument_group_name: ClassVar[str] = "refinements that the accelerate YAML cannot say"

    param_dtype: Literal["float32", "bfloat16", "float64", "fp32", "bf16"] = arg(
        "float32", "Type of the parameters that the optimizer updates; bfloat16: no float32 copy (bf16-true)."
    )
    reduce_dtype: Literal["float32", "bfloat16", "fp32", "bf16"] | None = arg(
        None, "Type in which FSDP sums gradients over processes (default: float32; float64 parameters: float64)."
    )
    buffer_dtype: Literal["float32", "bfloat16", "fp32", "bf16"] | None = arg(
        None, "Type of buffers under FSDP1 (default: as they are); FSDP2 leaves buffers alone."
    )
    limit_all_gathers: bool | None = arg(None, "FSDP1: let at most two units be gathered at a time (default: true).")
    prefetch_depth: int | None = arg(
        None, "FSDP2: how many units the YAML's forward and backward prefetch gather ahead (default: 1)."
    )
    peer_copies: bool | None = arg(
        None,
        "FSDP2: gather units and exchange gradients by the GPUs' copy engines instead of NCCL's kernels (default: in "
        "bf16, fp16 and fp8, where the GPUs of each sharded copy of the model reach each other's memory).",
    )
    blocks_per_unit: int | None = arg(None, "FSDP2: consecutive blocks that are gathered together (default: 1).")
    gradient_checkpointing: bool = arg(
        False,
        "Recompute activations in the backward pass; under FSDP the YAML's fsdp_activation_checkpointing says so.",
    )
    recompute_matmuls: int | None = arg(
        None,
        "With activation checkpointing: recompute every so many-th matrix product and keep the others' outputs and "
        "attention's; 0: none of them (default: recompute whole blocks).",
    )
    fp8_recipe: Literal["tensorwise_e4m3", "tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = arg(
        None,
        "With mixed_precision fp8: one scale a tensor (default: tensorwise_e4m3; tensorwise: gradients in e5m2) or a "
        "row; gw_hp: weights' gradients in bf16.",
    )
    loss_chunk_tokens: int | None = arg(
        None, "Compute the training loss over so many positions at a time, which bounds the memory of the logits."
    )


@dataclass
class TrainArguments(
    RunArguments,
    BatchArguments,
    OptimizerArguments,
    CadenceArguments,
    DataArguments,
    ModelArguments,
    RefinementArguments,
):
    """Arguments that all recipes share; a recipe adds its own in a subclass and names its presets."""

    presets: ClassVar[tuple[str, str]]
    """Presets taken without --config: (where there are no GPUs, where there are GPUs)."""

    def no_slices(self) -> str | None:
        """Why batches and metrics cannot be cut along the sequence (context parallelism); None: they can."""
        return (
            "this recipe does not train on slices of sequences (context parallelism); the recipes llama_pretrain and "
            "gpt_shakespeare do. Take another YAML"
        )

    @property
    def evaluates(self) -> bool:
        return self.eval_strategy != "no" or self.eval_on_start or self.max_steps == 0

    def acting(self) -> dict[tuple[str, str], bool]:
        """(flag, another setting that it waits for): whether it has an effect. Recipes add theirs."""
        is_adamw, reports_to_wandb = self.optim == "adamw", "wandb" in tracker_names(self.report_to)
        saves = self.save_strategy != "no"
        return {
            ("eval_steps", "eval_strategy"): self.eval_strategy == "steps",
            ("evals_per_epoch", "eval_strategy"): self.eval_strategy == "epoch",
            ("per_device_eval_batch_size", "eval_strategy"): self.evaluates,
            ("max_eval_batches", "eval_strategy"): self.evaluates,
            ("metric_for_best_model", "eval_strategy"): self.evaluates,
            ("save_steps", "save_strategy"): self.save_strategy == "steps",
            ("async_save", "save_strategy"): saves,
            ("save_only_model", "save_strategy"): saves,
            ("spike_action", "spike_factor"): self.spike_factor is not None,
            ("allow_changed", "resume_from_checkpoint"): self.resume_from_checkpoint is not None,
            # 0 may be put after a run's own flags, to evaluate it.
            ("num_train_epochs", "max_steps"): self.max_steps <= 0,
            ("lr_gamma", "lr_scheduler_type"): self.lr_scheduler_type == "step",
            ("min_learning_rate", "lr_scheduler_type"): self.lr_scheduler_type != "constant",
            ("adam_beta1", "optim"): is_adamw,
            ("adam_beta2", "optim"): is_adamw,
            ("adam_epsilon", "optim"): is_adamw,
            ("wandb_project", "report_to"): reports_to_wandb,
            ("wandb_entity", "report_to"): reports_to_wandb,
            ("run_name", "report_to"): reports_to_wandb,
        }

    def __post_init__(self) -> None:
        self.preset: str | None = None  # path of the preset in effect, and why; parse_args sets both
        self.preset_reason = ""
        aliases = {"fp32": "float32", "bf16": "bfloat16"}
        self.param_dtype = aliases.get(self.param_dtype, self.param_dtype)  # type: ignore[assignment]
        if self.reduce_dtype is not None:
            self.reduce_dtype = aliases.get(self.reduce_dtype, self.reduce_dtype)  # type: ignore[assignment]
        if self.buffer_dtype is not None:
            self.buffer_dtype = aliases.get(self.buffer_dtype, self.buffer_dtype)  # type: ignore[assignment]
        for name, value in self.to_dict().items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"--{name} is {value}; it must be a finite number.")
        positive = "total_batch_size per_device_train_batch_size gradient_accumulation_steps max_train_samples " \
            "per_device_eval_batch_size logging_steps eval_steps evals_per_epoch max_eval_batches max_eval_samples " \
            "preprocessing_num_workers num_train_epochs save_steps save_total_limit ddp_timeout lr_gamma " \
            "adam_epsilon max_run_seconds prefetch_depth blocks_per_unit loss_chunk_tokens spike_factor"  # fmt: skip
        for name in positive.split():
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"--{name} is {value}; it must be greater than 0.")
        for name in ("dataloader_num_workers", "learning_rate", "min_learning_rate", "warmup_steps", "weight_decay",
                     "max_grad_norm", "max_skipped_steps", "show_samples", "recompute_matmuls"):  # fmt: skip
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"--{name} is {getattr(self, name)}; it must not be negative.")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be at least 0 and below 1.")
        if self.ddp_timeout > MAX_TIMEOUT_SECONDS:
            raise UserError(f"--ddp_timeout is {self.ddp_timeout}; it must be at most {MAX_TIMEOUT_SECONDS} seconds.")
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise UserError(f"--spike_factor is {self.spike_factor}; it must be above 1: a step at the median is none.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed is {self.seed}; it must be at least 0 and below 2**32.")
        if self.learning_rate == 0:
            raise UserError("--learning_rate is 0; nothing would be learned (--max_steps 0 evaluates only).")
        if self.max_steps < -1:
            raise UserError(f"--max_steps is {self.max_steps}; give a number of steps, 0 to evaluate only, or -1.")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            raise UserError("--eval_strategy steps needs --eval_steps N.")
        if self.save_strategy == "steps" and self.save_steps is None:
            raise UserError("--save_strategy steps needs --save_steps N.")
        if self.min_learning_rate > self.learning_rate:
            raise UserError(
                f"--min_learning_rate {self.min_learning_rate} is above --learning_rate {self.learning_rate}."
            )
        for name, text in self.to_dict().items():
            is_source = name in ("resume_from_checkpoint", "accelerate_config", "dataset_name")
            if isinstance(text, str) and not text.strip() and (is_source or name.endswith(("_file", "_path", "_dir"))):
                raise UserError(
                    f"--{name} is empty (a shell variable that is not set?): give a path, or drop the flag."
                )
        if self.resume_from_checkpoint and self.overwrite_output_dir:
            raise UserError(
                "--resume_from_checkpoint goes on and --overwrite_output_dir starts afresh: drop one of them."
            )
        trackers = tracker_names(self.report_to)
        if self.wandb_log_model and "wandb" not in trackers:
            raise UserError("--wandb_log_model uploads to wandb: add --report_to wandb, or drop the flag.")
        if self.model_name_or_path and self.model_config_path:
            raise UserError(
                "--model_name_or_path loads weights and --model_config_path starts from random ones: give one of them."
            )
        if self.model_name_or_path and self.init == "device":
            raise UserError(
                "--init device draws random weights, but --model_name_or_path loads them: drop one of them."
            )

    def to_dict(self) -> dict[str, Any]:
        """Every argument by name, as written to config.yaml."""
        return dataclasses.asdict(self)


Arguments = TypeVar("Arguments", bound=TrainArguments)
REPOSITORY = Path(__file__).resolve().parent.parent
PATH_ENDINGS = ("_file", "_path", "_dir", "_checkpoint", "_config")
MAX_TIMEOUT_SECONDS = 2**31
CONFIG_FOLDER = REPOSITORY / "recipes" / "configs"
# Packages of each tracker, one of which it needs.
TRACKERS = {"wandb": ["wandb"], "tensorboard": ["tensorboard", "tensorboardX"]}

show_tracebacks = False
"""Whether --debug was given, set by `parse_args`: user errors are then shown with their tracebacks."""


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        # No "(default: None)": where there is no default value, the text says what happens.
        return action.help if action.default is None else super()._get_help_string(action)


class _Parser(HfArgumentParser):
    """HfArgumentParser that takes whole flag names only and reports a mistake as `UserError`."""

    source: str | None = None  # preset and key that are being parsed, for the message

    def __init__(self, groups: list[type]) -> None:
        usage = "%(prog)s [--config PRESET] [--flag value ...]"
        super().__init__(groups, allow_abbrev=False, usage=usage, formatter_class=_HelpFormatter)
        self.add_argument("--config", help="Preset: a YAML file of these settings, or a name in recipes/configs.")
        for action in self._actions:  # --learning-rate is taken too, but not shown beside --learning_rate
            action.option_strings = [flag for flag in action.option_strings if "-" not in flag[2:]]

    def error(self, message: str) -> NoReturn:
        if self.source is not None:
            raise UserError(self.source + message.partition(": ")[2])
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            flags = [flag for flag in self._option_string_actions if flag not in ("-h", "--help")]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
            message = f"unknown flag {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ".")
        raise UserError(f"{message} (--help lists all flags)")

    def print_help(self, file: Any = None) -> None:
        if is_first_process():
            super().print_help(file)


def parse_args(recipe: type[Arguments], argv: Sequence[str] | None = None) -> Arguments:
    """Arguments of a recipe from its defaults, a preset and the flags, the later ones winning.

    Raises `UserError` for an unknown flag or preset key and for a value of the wrong type, naming file and key.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser(recipe)
    namespace = parser.parse_args(argv)
    preset, reason = _find_preset(recipe, namespace.config)
    if preset is not None:
        defaults = _read_preset(parser, preset)
        if (
            namespace.model_config_path or namespace.model_name_or_path
        ):  # a flag replaces the preset's model, of either kind
            defaults.pop("model_config_path", None)
            defaults.pop("model_name_or_path", None)
            defaults.pop("config_overrides", None)  # they are the preset's model's
        if namespace.model_name_or_path:  # which has its own tokenizer
            defaults.pop("tokenizer_name_or_path", None)
        given = vars(namespace)
        if given.get("train_file") or given.get("dataset_name"):  # and the preset's data, of either kind
            for name in ("train_file", "dataset_name", "dataset_config_name"):
                defaults.pop(name, None)
        parser.set_defaults(**defaults)
        namespace = parser.parse_args(argv)
    values = vars(namespace)
    del values["config"]
    global show_tracebacks
    show_tracebacks = values["debug"]
    args = recipe(**values)
    args.preset, args.preset_reason = (None, reason) if preset is None else (str(preset), reason)
    _refuse_idle(args, _given(parser, argv))
    if args.output_dir is None:
        args.output_dir = str(Path("runs") / (preset.stem if preset else Path(sys.argv[0]).stem))
    for name, value in args.to_dict().items():  # a shell leaves the ~ of --output_dir=~/run as it is
        if isinstance(value, str) and name.endswith(PATH_ENDINGS):
            setattr(args, name, os.path.expanduser(value))
    return args


def _given(parser: _Parser, argv: Sequence[str]) -> set[str]:
    """Names of the arguments that the flags set, without those of the preset."""
    unset = object()
    namespace = argparse.Namespace(**{action.dest: unset for action in parser._actions})
    return {name for name, value in vars(parser.parse_args(argv, namespace)).items() if value is not unset}


def _refuse_idle(args: TrainArguments, given: set[str]) -> None:
    """Raise `UserError` for a flag that another setting leaves without effect.

    A preset may hold what waits for another choice, and a flag may bring back the default.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(args)}
    for (name, other), is_acting in args.acting().items():
        value, setting = getattr(args, name), getattr(args, other)
        if name in given and value != defaults[name] and not is_acting:
            where = f"without --{other}" if setting is None else f"with --{other} {setting}"
            if other not in given and setting != defaults[other]:
                where += " of the preset"
            raise UserError(f"--{name} {value} does nothing {where}: drop it, or change --{other}.")


def _build_parser(recipe: type[TrainArguments]) -> _Parser:
    """One argument group per dataclass, the recipe's own first."""
    groups = []
    for base in recipe.__mro__:
        own = [f for f in dataclasses.fields(base) if f.name in base.__annotations__] if base is not object else []
        if own:
            title = str(vars(base)["_argument_group_name"]) if base.__bases__ == (object,) else "recipe"
            # A dataclass with the base's own fields alone, because HfArgumentParser adds inherited ones again.
            group = dataclasses.make_dataclass(
                base.__name__, [(f.name, f.type, field(default=f.default, metadata=f.metadata)) for f in own]
            )
            group._argument_group_name = title  # type: ignore[attr-defined]
            groups.append(group)
    return _Parser(groups)


def _preset_file(name: str) -> Path | None:
    """The file of that path, or the preset of that name."""
    paths = (Path(name), CONFIG_FOLDER / name, CONFIG_FOLDER / f"{name}.yaml")
    return next((path for path in paths if path.is_file()), None)


def load_preset(name: str) -> dict[str, Any]:
    """Values of a preset of any recipe, as YAML reads them, for tools that need a few; raises `UserError` for none."""
    path = _preset_file(name)
    if path is None:
        known = ", ".join(sorted(file.stem for file in CONFIG_FOLDER.glob("*.yaml")))
        raise UserError(f"--config {name}: no such preset; there are {known}.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not a readable YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: expected lines of `key: value`, found {type(content).__name__}.")
    return {key: _from_repository(key, value) for key, value in content.items()}


def _from_repository(key: str, value: Any) -> Any:
    """A preset's value; paths of files of the repository are right wherever one stands."""
    is_path = isinstance(value, str) and key.endswith(("_path", "_file", "_dataset"))
    if is_path and not Path(value).exists() and (REPOSITORY / value).exists():
        return str(REPOSITORY / value)
    return value


def _find_preset(recipe: type[TrainArguments], asked: str | None) -> tuple[Path | None, str]:
    if asked is None:
        import torch  # only here: --help and wrong flags need not wait for it

        has_gpu = torch.cuda.is_available()
        reason = "no --config given; " + (
            "this machine has GPUs, so the full size" if has_gpu else "no GPU here, so the demo preset"
        )
        return CONFIG_FOLDER / f"{recipe.presets[has_gpu]}.yaml", reason
    if (path := _preset_file(asked)) is not None:
        return path, "--config"
    recipe_name = recipe.presets[0].rpartition("_")[0]
    known = ", ".join(sorted(p.stem for p in CONFIG_FOLDER.glob(f"{recipe_name}*.yaml")))
    raise UserError(f"--config {asked}: no such file, and no preset of that name; presets: {known}.")


def _read_preset(parser: _Parser, path: Path) -> dict[str, Any]:
    try:
        # The words as they stand and not YAML's reading of them, in which `no` is false and 3e-4 is text.
        content = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = bad_utf8_line(path)
        raise UserError(f"--config {path} line {line}: not UTF-8 text ({error.reason}); save it as UTF-8.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not a readable YAML file: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, yaml.MappingNode):
        raise UserError(f"{path}: expected lines of `key: value`, found a {content.tag.rpartition(':')[2]}.")
    optional = {action.dest: action.default is None for action in parser._actions}
    known = optional.keys() - {"help", "config"}
    values: dict[str, Any] = {}
    for key_node, node in content.value:
        key = str(key_node.value)
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise UserError(f"{path}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "."))
        if key in values:
            raise UserError(f"{path}: key {key!r} is there twice, again in line {key_node.start_mark.line + 1}.")
        if not isinstance(node, yaml.ScalarNode):
            raise UserError(f"{path}: key {key!r}: expected a single value, found a {node.id}.")
        if node.tag == "tag:yaml.org,2002:null":
            if not optional[key]:
                raise UserError(f"{path}: key {key!r} has no value; give one or remove the line.")
            values[key] = None
            continue
        # Through the parser, so that types and choices are checked as for flags.
        parser.source = f"{path}: key {key!r}: "
        values[key] = _from_repository(key, getattr(parser.parse_args([f"--{key}={node.value}"]), key))
        parser.source = None
    return values


@dataclass(frozen=True)
class BatchPlan:
    """Batch arithmetic of one optimizer step: total = per_device x num_micro_batches x num_processes (sequences)."""

    total: int
    per_device: int
    num_micro_batches: int
    num_processes: int
    """That have sequences of their own; with context parallelism groups of processes, each of which counts as one."""
    context_size: int = 1
    """Processes of such a group."""

    def __str__(self) -> str:
        return (
            f"{self.total} sequences a step = {self.per_device} per {'device' if self.context_size == 1 else 'group'} "
            f"x {self.num_micro_batches} micro-batches x {_sharers(self.num_processes, self.context_size)}"
        )


def _sharers(number: int, context_size: int) -> str:
    return f"{number} processes" if context_size == 1 else f"{number} groups of {context_size} processes"


def plan_batch(args: BatchArguments, num_processes: int, context_size: int = 1) -> BatchPlan:
    """Complete the batch settings from the given ones; the total batch size rules.

    context_size: so many processes share a sequence, and what is said for each device is for each group of them.
    Raises `UserError` that names the nearest working values when they do not fit together.
    """
    num_processes //= context_size
    processes = _sharers(num_processes, context_size)
    total, per_device = args.total_batch_size, args.per_device_train_batch_size
    accumulation = args.gradient_accumulation_steps
    if total is None:
        per_device, accumulation = per_device or 8, accumulation or 1
        return BatchPlan(
            per_device * accumulation * num_processes, per_device, accumulation, num_processes, context_size
        )
    if per_device is None:
        unit, what = num_processes * (accumulation or 1), processes
        if accumulation:
            what += f" x {accumulation} micro-batches"
    elif accumulation is None:
        unit, what = num_processes * per_device, f"{processes} x {per_device} sequences per device"
    else:
        unit = num_processes * per_device * accumulation
        if total != unit:
            raise UserError(
                f"--total_batch_size {total} disagrees with {processes} x "
                f"--per_device_train_batch_size {per_device} x --gradient_accumulation_steps {accumulation} = {unit}; "
                "leave one of the three out."
            )
        what = ""
    if total % unit:
        below, above = total // unit * unit, (total // unit + 1) * unit
        works = f"{below} or {above}" if below else f"{above}"
        hint = ""
        if per_device is not None and total % num_processes == 0:
            share, wanted = total // num_processes, per_device
            nearest = min((d for d in range(1, share + 1) if share % d == 0), key=lambda d: (abs(d - wanted), d))
            hint = f", or --per_device_train_batch_size {nearest}"
        raise UserError(
            f"--total_batch_size {total} is not a multiple of {what} = {unit}; nearest that work: "
            f"--total_batch_size {works}{hint}."
        )
    if per_device is None:
        per_device = total // unit
    return BatchPlan(total, per_device, total // (num_processes * per_device), num_processes, context_size)


def num_training_steps(args: RunArguments, num_examples: int, total_batch_size: int) -> int:
    """Optimizer steps of the run: --max_steps, or enough for --num_train_epochs passes over the examples."""
    if args.max_steps >= 0:
        return args.max_steps
    # Less the rounding of a product such as 1.1 x 10 examples, which would be a step of its own.
    return max(1, math.ceil(args.num_train_epochs * num_examples / total_batch_size - 1e-9))


def tracker_names(report_to: str) -> list[str]:
    """Names of the trackers in --report_to ("none", or names with commas).

    Raises `UserError` for an unknown name or one whose package is missing.
    """
    names = list(dict.fromkeys(name.strip() for name in report_to.split(",")))
    if names == ["none"]:
        return []
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--report_to: unknown tracker {name!r}; choose none, {', '.join(TRACKERS)} or a,b.")
        if not any(importlib.util.find_spec(package) for package in TRACKERS[name]):
            raise UserError(f"--report_to {name}: the package is not installed; pip install {name}, or drop the flag.")
    return names


def is_first_process() -> bool:
    """Whether this is global rank 0 by the launcher's environment (before any process group exists)."""
    ranks = [os.environ.get(name) for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")]
    return next(filter(None, ranks), "0") == "0"
