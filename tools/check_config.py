"""Check accelerate YAML files without starting a run, and say in words what they ask for.

    python tools/check_config.py                                  # all of accelerate_configs/
    python tools/check_config.py my.yaml --num_processes 8 --num_gpus 8
    python tools/check_config.py my.yaml --recipe t5_summarize    # its wrapping with the recipe's model as well

Exit code 0 when every file can be run, 2 otherwise.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import accelerate_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPOSITORY, SHIPPED = accelerate_config.REPOSITORY, accelerate_config.SHIPPED
EXIT_USAGE = 2


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="YAML files, or names in accelerate_configs/ (default: all of them)")
    model = parser.add_argument_group("the model whose blocks are wrapped (takes some seconds)")
    model.add_argument("--recipe", help="name in recipes/; without --config its demo preset")
    model.add_argument("--config", metavar="PRESET", help="a recipe's preset: a file, or a name in recipes/configs/")
    model.add_argument("--model_config_path", help="config.json of a model, or its folder")
    launcher = parser.add_argument_group("what the launcher will be told besides")
    launcher.add_argument("--num_processes", type=int)
    launcher.add_argument("--num_machines", type=int)
    launcher.add_argument("--mixed_precision", choices=("no", "bf16", "fp16", "fp8"))
    parser.add_argument("--num_gpus", type=int, help="GPUs of each machine (default: not compared)")
    args = parser.parse_args(argv)
    for name in ("num_processes", "num_machines", "num_gpus"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    return args


def find(name: str, folder: Path, what: str) -> Path:
    """The file of that path, or of that name in the folder."""
    for path in (Path(name), folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(path.stem for path in sorted(folder.glob("*.yaml")))
    raise ValueError(f"{what} {name}: no such file, and none of that name in {folder.name}/: {known}.")


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a preset says about the model; empty when no model was asked for."""
    if args.model_config_path:
        return {"model_config_path": args.model_config_path}
    if args.recipe and not (REPOSITORY / "recipes" / f"{args.recipe}.py").is_file():
        known = ", ".join(path.stem for path in sorted((REPOSITORY / "recipes").glob("*.py")))
        raise ValueError(f"--recipe {args.recipe}: no such recipe; recipes: {known}.")
    preset = args.config or (f"{args.recipe}_demo" if args.recipe else None)
    if preset is None:
        return {}
    from common.arguments import load_preset

    content = load_preset(preset)
    names = ("model_name_or_path", "model_config_path", "config_overrides", "attn_implementation")
    return {name: content[name] for name in names if name in content}


def model_of(settings: dict[str, Any]) -> "PreTrainedModel":
    """The model on the meta device."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from common.arguments import ModelArguments
    from common.models import load_config, meta_model

    args = ModelArguments(**settings)
    config = load_config(args)
    return meta_model(args, config, AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM)


def no_slices(args: argparse.Namespace) -> str | None:
    """Why context parallelism cannot be used in the recipe with its preset; None: it can, or no recipe is known."""
    names = sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.py"))
    recipe = args.recipe or next((name for name in names if Path(args.config or "").stem.startswith(name)), None)
    if recipe is None:
        return None
    from common.arguments import TrainArguments, parse_args

    content = runpy.run_path(str(REPOSITORY / "recipes" / f"{recipe}.py")).values()
    types = (item for item in content if isinstance(item, type) and issubclass(item, TrainArguments))
    own = next(item for item in types if item is not TrainArguments)
    return parse_args(own, ["--config", args.config or f"{recipe}_demo"]).no_slices()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    names = ("num_processes", "num_machines", "mixed_precision")
    flags = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    try:
        files = [find(name, SHIPPED, "file") for name in args.files] or sorted(SHIPPED.glob("*.yaml"))
        settings = model_settings(args)
        model = model_of(settings) if settings else None
        reason = no_slices(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    exit_code = 0
    for path in files:
        path = Path(os.path.relpath(path)) if path.is_relative_to(Path.cwd()) else path
        problems = accelerate_config.check_config(path, flags, args.num_gpus)
        if not problems:
            config = accelerate_config.read_config(path)
            if model is not None:
                problems = accelerate_config.check_model(accelerate_config.LaunchConfig(path, flags), model, reason)
        if problems:
            exit_code = EXIT_USAGE
            print("\n".join(problems), file=sys.stderr)
        else:
            print(f"{path}: fine\n    " + accelerate_config.describe(config | flags).replace("\n", "\n    "))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
