"""A run's metrics over its steps as a picture: training loss on the left axis, one evaluated number on the right.

    python benchmarks/curve.py RUN/metrics.jsonl --metric eval_legal_move_rate --output curve.svg

Needs matplotlib, which is no dependency of this repository.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--metric", nargs="+", required=True, help="keys of the evaluations' lines")
    parser.add_argument("--title", default="")
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.metrics.read_text().splitlines()]

    import matplotlib.pyplot as plt  # type: ignore[import-not-found]

    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    left.plot(*zip(*steps, strict=True), color="0.6", label="training loss")
    left.set(xlabel="step", ylabel="training loss", title=args.title)
    right = left.twinx()
    for metric in args.metric:
        points = [(row["step"], row[metric]) for row in rows if metric in row]
        right.plot(*zip(*points, strict=True), marker="o", label=metric)
    right.set_ylim(0, 1.02)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(args.output)


if __name__ == "__main__":
    main()
