"""Show a run as a page with its curves and settings, or several runs in the same charts.

    python tools/report.py runs/chess_finetune_100m                         # writes report.html in that folder
    python tools/report.py runs/lr_1e-4 runs/lr_3e-4 --output compare.html  # side by side

A run writes its report.html when it ends; this shows one that still goes on, or was killed. The page is one file.
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
    parser.add_argument("runs", nargs="+", type=user_path, metavar="RUN", help="output folder of a run")
    parser.add_argument(
        "--output", type=user_path, help="page to write; default, for one run: report.html in its folder"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)  # before the imports, so that --help is quick

    from common.arguments import UserError
    from common.report import FILE, write_report

    try:
        if args.output is None and len(args.runs) > 1:
            raise UserError("several runs: say with --output where their page is to be written.")
        output = args.output or args.runs[0] / FILE
        write_report(args.runs, output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
