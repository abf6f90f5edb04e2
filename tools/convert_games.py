"""Convert chess games to JSON lines in the form of laion/strategic_game_chess, keeping the whole, legal ones.

    python tools/convert_games.py games.pgn more_games/ -o games.jsonl

Reads PGN, parquet, JSON lines and text with one game a line. Dropped games are counted by reason with the first few
positions of each. Exit code 0 when games were written, 2 when none was good or the files cannot be read.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from common.arguments import UserError
from common.files import user_path

EXIT_ERROR = 1
EXIT_USER_ERROR = 2


def convert(paths: Sequence[Path], output: Path) -> int:
    """Write the good games of the paths to `output`, which appears only once it is complete; return their number."""
    from common.chess_games import ReadReport, list_files, read_games  # raises UserError where `chess` is missing

    report = ReadReport()
    files = list_files(paths)
    if not output.parent.is_dir():
        raise UserError(f"-o {output}: no folder {output.parent}")
    if output.exists() and not output.is_file():
        raise UserError(f"-o {output}: is no file; name one to write.")
    if any(output.exists() and output.samefile(file) for file in files):
        raise UserError(f"-o {output}: is one of the files to read; name another one.")
    unfinished = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    num_bytes = sum(file.stat().st_size for file in files)
    try:
        with (
            open(unfinished, "w", encoding="utf-8") as file,
            tqdm(desc="reading", total=num_bytes, unit="B", unit_scale=True, delay=2, leave=False, disable=None) as bar,
        ):
            for game in read_games(files, report):
                file.write(json.dumps(game.to_row(), separators=(",", ":")) + "\n")
                bar.update(report.num_bytes_read - bar.n)
        print(report)
        if report.num_games:
            os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)
    return report.num_games


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", type=user_path, metavar="FILE", help="file or folder of games")
    parser.add_argument("-o", "--output", required=True, type=user_path, help="JSON lines file to write, or to replace")
    args = parser.parse_args(argv)
    try:
        if convert(args.files, args.output) == 0:
            raise UserError(f"no good game was found; {args.output} was not written")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except OSError as error:
        print(f"error: {args.output} cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_ERROR
    print(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
