"""Turn a checkpoint of any layout into a Hugging Face folder, on one CPU process and without loading it whole.

    python tools/export.py runs/t5_summarize_3b exported --dtype bfloat16
    python tools/export.py runs/t5_summarize_3b/checkpoints/step_00001000 exported

A run's folder stands for its newest complete checkpoint. The new folder has weights (safetensors, in files of
--max_shard_size), config, generation config and tokenizer; transformers has loaded it once when the command ends.
"""

import argparse
import sys

from common.files import user_path

EXIT_ERROR = 1
EXIT_USAGE = 2


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=user_path, help="folder of a checkpoint, or of a run")
    parser.add_argument("output", type=user_path, help="new folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="default: as saved")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file of weights, which is held in memory")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)  # before the imports, so that --help is quick

    import torch

    from common.arguments import UserError
    from common.checkpoint import find_checkpoint
    from common.export import export_checkpoint
    from common.launch import RunFailed

    try:
        if args.output.exists():
            raise UserError(f"{args.output} exists already: name a new folder.")
        checkpoint = find_checkpoint(args.checkpoint)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        export_checkpoint(
            checkpoint, args.output, getattr(torch, args.dtype) if args.dtype else None, args.max_shard_size
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (RunFailed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(f"{args.output}: step {checkpoint.step} of {checkpoint.folder}, checked with from_pretrained")
    return 0


if __name__ == "__main__":
    sys.exit(main())
