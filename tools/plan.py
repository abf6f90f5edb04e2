"""Say how much device memory a model's training takes under every YAML, before a GPU is asked for.

    python tools/plan.py --config chess_finetune_7b --device_memory_gib 80
    python tools/plan.py --model_config_path recipes/configs/models/t5_3b --num_processes 1 4 16

State on each device: parameters, gradients, optimizer and what is gathered for computing (common/memory.py).
Activations of one sequence, the loss included, with and without activation checkpointing (common/activations.py, some
seconds). With --device_memory_gib: how many sequences fit beside the state. All are estimates.
"""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from common.accelerate_config import SHIPPED, read_config
from common.activations import meta_batch, peak_bytes
from common.arguments import ModelArguments, UserError, load_preset
from common.memory import (
    GIB,
    RESERVED_FRACTION,
    Activations,
    Estimate,
    Layout,
    ModelSize,
    Types,
    estimate,
    largest_batch,
)
from common.models import check_positions, load_config, meta_model

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}  # fmt: skip
LENGTHS = {"max_seq_length": 1024, "max_source_length": 512, "max_target_length": 150}  # where nothing says them
EXIT_USER_ERROR = 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="PRESET", help="a recipe's preset: a file, or a name in recipes/configs/")
    for name in ("model_name_or_path", "model_config_path", "config_overrides"):
        parser.add_argument(f"--{name}", help="as the recipes take it; wins over the preset")
    for name, length in LENGTHS.items():
        parser.add_argument(f"--{name}", type=int, help=f"default: the preset's, or {length}")
    parser.add_argument("--loss_chunk_tokens", type=int, help="default: the preset's, or none")
    parser.add_argument("--optim", choices=("adamw", "adafactor", "adadelta"), help="default: the preset's, or adamw")
    parser.add_argument("--param_dtype", choices=sorted(DTYPES), help="default: the preset's, or float32")
    parser.add_argument("--num_processes", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="devices in all")
    parser.add_argument("--num_gpus", type=int, default=8, help="devices of a machine, for FSDP1's hybrids")
    parser.add_argument("--device_memory_gib", type=float, help="says the largest batch that fits")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        print(plan(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def plan(args: argparse.Namespace) -> str:
    """The table; raises UserError where there is no such preset or model."""
    numbers = [*args.num_processes, args.num_gpus, *(getattr(args, name) for name in (*LENGTHS, "loss_chunk_tokens"))]
    if min(number for number in numbers if number is not None) < 1:
        raise UserError("--num_processes, --num_gpus, lengths and --loss_chunk_tokens: expected numbers of 1 or more.")
    if args.device_memory_gib is not None and not 0 < args.device_memory_gib < 1e6:
        raise UserError(f"--device_memory_gib {args.device_memory_gib}: expected GiB, such as 80.")
    settings = load_preset(args.config) if args.config else {}
    names = {field.name for field in dataclasses.fields(ModelArguments)}
    asked = {name: value for name, value in vars(args).items() if value is not None}
    asked |= {name: os.path.expanduser(asked[name]) for name in asked if name.startswith("model_")}
    if asked.keys() & {"model_name_or_path", "model_config_path"}:  # of another model than the preset's
        of_model = ("model_name_or_path", "model_config_path", "config_overrides")
        settings = {k: v for k, v in settings.items() if k not in of_model}
    settings = LENGTHS | settings | asked
    model_args = ModelArguments(**{k: v for k, v in settings.items() if k in names})
    config = load_config(model_args)

    def build(dtype: torch.dtype) -> PreTrainedModel:
        auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = meta_model(model_args, config, auto_class)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model

    names_of_lengths = ["max_source_length", "max_target_length"] if config.is_encoder_decoder else ["max_seq_length"]
    for name in names_of_lengths:
        check_positions(config, name, settings[name])
    lengths = [*(settings[name] for name in names_of_lengths), 0][:2]
    dtype_name = settings.get("param_dtype", "float32")
    dtype = DTYPES[dtype_name]

    chunk = settings.get("loss_chunk_tokens")

    @functools.cache
    def count(compute: torch.dtype, is_fsdp: bool, recomputes: bool) -> Activations:
        def peak(num_sequences: int) -> int:
            return peak_bytes(
                build(compute if is_fsdp else dtype),
                meta_batch(config, num_sequences, *lengths),
                autocast=None if is_fsdp or compute == dtype else compute,
                recomputes=recomputes,
                loss_chunk_tokens=chunk,
            )

        try:
            return Activations.count(peak, lengths[1] or lengths[0], chunk)
        except RuntimeError as error:  # code that asks for contents, or types of autocast's own
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{type(model).__name__}: its activations cannot be counted on the meta device: {reason}"
            ) from error

    model = build(dtype)
    classes = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in classes]
    size = ModelSize.of(model, blocks, settings.get("blocks_per_unit") or 1)
    optim = settings.get("optim", "adamw")
    rows: dict[str, list[Estimate | None]] = {}
    activations: dict[str, list[Activations]] = {}
    for file in sorted(SHIPPED.glob("*.yaml")):
        content = read_config(file)
        compute = dtype if content["mixed_precision"] == "no" or dtype.itemsize <= 2 else torch.bfloat16
        types = Types(dtype.itemsize, compute.itemsize, max(4, dtype.itemsize), optim)
        rows[file.stem] = []
        sizes = content.get("parallelism_config", {})
        replicas, context = (sizes.get(f"parallelism_config_{key}_size", 1) for key in ("dp_replicate", "cp"))
        for number in args.num_processes:
            is_possible = number % (replicas * context) == 0 and (content["distributed_type"] != "NO" or number == 1)
            layout = Layout.of_yaml(content, number, min(number, args.num_gpus))
            rows[file.stem].append(estimate(size, layout, types) if is_possible else None)
        is_fsdp = content["distributed_type"] == "FSDP"
        activations[file.stem] = [count(compute, is_fsdp, recomputes).divided(context) for recomputes in (False, True)]

    largest = max(state.total for row in rows.values() for state in row if state is not None)
    divisor, unit = (GIB, "GiB") if largest >= GIB else (2**20, "MiB")

    def show(num_bytes: int) -> str:
        value = num_bytes / divisor
        return f"{value:,.1f}" if value >= 1 else f"{value:.2f}"

    def cell(state: Estimate | None, activations: list[Activations]) -> str:
        if state is None:
            return "-"
        if args.device_memory_gib is None:
            return show(state.total)
        fitting = [largest_batch(state, each, int(args.device_memory_gib * GIB)) for each in activations]
        return f"{show(state.total)} ({fitting[0]:,}, {fitting[1]:,})"

    table = [["", *(f"{number:,}" for number in args.num_processes), "one sequence"]]
    table += [
        [
            name,
            *(cell(state, activations[name]) for state in row),
            ", ".join(show(each.one) for each in activations[name]),
        ]
        for name, row in rows.items()
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    tokens = " + ".join(f"{length:,}" for length in lengths if length)
    text = (
        f"{type(model).__name__}, {size.num_parameters / 1e6:,.1f}M parameters in {dtype_name}, {optim}. "
        f"Estimates in {unit}: state on each of so many devices;\nactivations of one sequence of {tokens} tokens, "
        "without checkpointing and with it (blocks that are compiled keep less).\n"
    )
    if args.device_memory_gib is not None:
        text += (
            f"In brackets, also without and with checkpointing: the largest --per_device_train_batch_size that fits in "
            f"{args.device_memory_gib:g} GiB,\nof which {RESERVED_FRACTION:.0%} are kept free.\n"
        )
    return text + "\n".join(
        f"{name:<{widths[0]}}  " + "  ".join(f"{text:>{width}}" for text, width in zip(cells, widths[1:], strict=True))
        for name, *cells in table
    )


if __name__ == "__main__":
    sys.exit(main())
