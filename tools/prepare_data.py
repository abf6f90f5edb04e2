"""Tokenize and pack text ahead of training, in several processes, into a folder that loads in seconds.

    python tools/prepare_data.py news/*.jsonl --tokenizer meta-llama/Meta-Llama-3-8B --max_seq_length 8192 \
        --validation_size 0.001 --output data/pretrain

Reads text, JSON lines, CSV, parquet and Arrow files (a text file is one document); give the folder to the recipe with
--train_file. A preparation that was killed goes on where it was with the same command, and the files come out the same.
Exit code 0 when the folder is complete, 2 when the input or the arguments are wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from common.arguments import ModelArguments, UserError
from common.files import user_path

EXIT_ERROR = 1
EXIT_USER_ERROR = 2


@dataclass
class Arguments:
    files: list[str]
    output: Path
    tokenizer: str
    max_seq_length: int
    text_column: str
    validation_file: str | None
    validation_size: float
    seed: int
    num_workers: int


def parse(argv: Sequence[str] | None) -> Arguments:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="file, folder or pattern")
    parser.add_argument("--output", required=True, type=user_path, help="folder to write")
    parser.add_argument(
        "--tokenizer", required=True, type=os.path.expanduser, help="hub id or folder of the model's tokenizer"
    )
    parser.add_argument("--max_seq_length", type=int, default=8192, help="tokens of a sequence (default: 8192)")
    parser.add_argument("--text_column", default="text", help="column of the text (default: text)")
    parser.add_argument("--validation_file", help="held-out text: files, folders, patterns, with commas")
    parser.add_argument("--validation_size", type=float, default=0.0, help="fraction of the documents to set aside")
    parser.add_argument("--seed", type=int, default=42, help="of which documents these are (default: 42)")
    parser.add_argument("--num_workers", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    args = Arguments(**vars(parser.parse_args(argv)))
    if args.max_seq_length < 2 or args.num_workers < 1 or not 0 <= args.validation_size < 1:
        parser.error("--max_seq_length from 2, --num_workers from 1, --validation_size from 0 to below 1 are expected")
    if args.validation_file and args.validation_size:
        parser.error("--validation_file and --validation_size: give one of them")
    return args


def prepare(args: Arguments) -> None:
    """Write the folder and print what became of the text."""
    from common.documents import list_documents
    from common.models import load_tokenizer
    from common.prepare import Settings, prepare

    started = time.monotonic()
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output {args.output}: it is a file; give a folder.")
    for path in map(Path, args.files):
        if path.is_dir() and path.resolve() in args.output.resolve().parents:
            raise UserError(f"--output {args.output}: it lies in {path}, whose files are read; give another folder.")
    splits = {"train": list_documents(args.files, "FILE", args.text_column)}
    if args.validation_file:
        splits["validation"] = list_documents(args.validation_file, "--validation_file", args.text_column)
    tokenizer = load_tokenizer(ModelArguments(tokenizer_name_or_path=args.tokenizer), "--tokenizer")
    settings = Settings(args.text_column, args.max_seq_length, args.validation_size, args.seed)
    reports = prepare(splits, args.output, tokenizer, settings, args.num_workers)
    seconds = time.monotonic() - started
    for split, report in reports.items():
        print(f"{split}: {report}")
    megabytes = sum(report.bytes for report in reports.values()) / 1e6
    tokens = sum(report.tokens for report in reports.values())
    print(f"{megabytes:,.1f} MB in {seconds:,.1f} s: {megabytes / seconds:,.2f} MB/s, {tokens / seconds:,.0f} tokens/s")
    print(f"written to {args.output}; the recipe takes it as --train_file {args.output}")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        prepare(parse(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except (OSError, EOFError, BrokenProcessPool) as error:
        problem = str(error)
        if not isinstance(error, OSError):
            problem = "a worker was killed (out of memory? fewer --num_workers need less)"
        print(f"error: {problem}. Finished parts stay: the same command goes on from them.", file=sys.stderr)
        return EXIT_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
