"""Say how much device memory a model's training state takes under every YAML, before a GPU is asked for.

    python tools/plan.py --config chess_finetune_7b --device_memory_gib 80
    python tools/plan.py --model_config_path recipes/configs/models/t5_3b --num_processes 1 4 16

GiB on each device: parameters, gradients, optimizer and what is gathered for computing (common/memory.py). Activations
come on top: they grow with the batch and the sequence length, and a fifth of the device is kept for them here.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from common.accelerate_config import SHIPPED, read_config
from common.arguments import ModelArguments, UserError, load_preset
from common.memory import FITTING_FRACTION, GIB, Layout, ModelSize, Types, estimate, fits
from common.models import load_config, meta_model

BYTES = {"float64": 8, "float32": 4, "bf16": 2, "bfloat16": 2}
EXIT_USER_ERROR = 2


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="PRESET", help="a recipe's preset: a file, or a name in recipes/configs/")
    for name in ("model_name_or_path", "model_config_path", "config_overrides"):
        parser.add_argument(f"--{name}", help="as the recipes take it; wins over the preset")
    parser.add_argument("--optim", choices=("adamw", "adafactor", "adadelta"), help="default: the preset's, or adamw")
    parser.add_argument("--param_dtype", choices=sorted(BYTES), help="default: the preset's, or float32")
    parser.add_argument("--num_processes", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="devices in all")
    parser.add_argument("--num_gpus", type=int, default=8, help="devices of a machine, for FSDP1's hybrids")
    parser.add_argument("--device_memory_gib", type=float, help="marks what fits")
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
    if min(args.num_processes) < 1 or args.num_gpus < 1:
        raise UserError("--num_processes and --num_gpus: expected numbers of devices, 1 or more.")
    settings = load_preset(args.config) if args.config else {}
    names = {field.name for field in dataclasses.fields(ModelArguments)}
    asked = {name: value for name, value in vars(args).items() if value is not None}
    if asked.keys() & {"model_name_or_path", "model_config_path"}:  # of another model than the preset's
        settings = {k: v for k, v in settings.items() if k not in ("model_name_or_path", "model_config_path")}
    settings |= {name: value for name, value in asked.items() if name in names | {"optim", "param_dtype"}}
    model_args = ModelArguments(**{k: v for k, v in settings.items() if k in names})
    config = load_config(model_args)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = meta_model(model_args, config, auto_class)
    classes = set(model._no_split_modules or ())
    size = ModelSize.of(model, [module for module in model.modules() if type(module).__name__ in classes])
    optim, dtype = settings.get("optim", "adamw"), settings.get("param_dtype", "float32")
    width = max(len(file.stem) for file in SHIPPED.glob("*.yaml"))
    lines = [
        f"{type(model).__name__}, {size.num_parameters / 1e6:,.1f}M parameters in {dtype}, {optim}. "
        "GiB on each device, activations on top:",
        f"{'':<{width}}" + "".join(f"{number:>10}" for number in args.num_processes) + "  devices",
    ]
    for file in sorted(SHIPPED.glob("*.yaml")):
        content = read_config(file)
        compute = BYTES[dtype] if content["mixed_precision"] == "no" else min(2, BYTES[dtype])
        types = Types(BYTES[dtype], compute, max(4, BYTES[dtype]), optim)
        cells = []
        for number in args.num_processes:
            replicas = content.get("parallelism_config", {}).get("parallelism_config_dp_replicate_size", 1)
            if number % replicas or (content["distributed_type"] == "NO" and number > 1):
                cells.append("-")
                continue
            state = estimate(size, Layout.of_yaml(content, number, min(number, args.num_gpus)), types)
            is_fine = args.device_memory_gib is not None and fits(state, int(args.device_memory_gib * GIB))
            cells.append(f"{state.total / GIB:,.1f}{'*' if is_fine else ' '}")
        lines.append(f"{file.stem:<{width}}" + "".join(f"{cell:>10}" for cell in cells))
    if args.device_memory_gib is not None:
        lines.append(f"* at most {FITTING_FRACTION:.0%} of {args.device_memory_gib:g} GiB")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
