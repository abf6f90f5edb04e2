"""A run, or several side by side, as one page: what was reached, the curves, the settings. It needs no network."""

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import yaml

from common.arguments import UserError
from common.files import write_text

FILE = "report.html"
MAX_POINTS = 4000  # of a curve; of longer ones the extremes of equal parts are shown
# Charts by the names of their metrics; what is in none of them has a chart of its own.
CHARTS = (
    ("Loss", r"loss|eval_(\w+_)?loss"),
    ("Gradient norm, before clipping", r"grad_norm"),
    ("ROUGE", r"eval_rouge(1|2|L|Lsum)"),
    ("Legal moves, the likeliest", r"eval_legal_move_rate(_\w+)?"),
    ("Legal moves, drawn", r"eval_sampled_legal_move_rate(_\w+)?"),
    ("Illegal and unparsable moves", r"eval_(\w+_)?(illegal|unparsable)_move_rate(_\w+)?"),
    ("Next-move accuracy", r"eval_move_accuracy(_\w+)?"),
    ("Loss per move", r"eval_loss_per_move(_\w+)?"),
    ("Token accuracy", r"eval_(\w+_)?token_accuracy"),
    ("Perplexity", r"eval_(\w+_)?perplexity"),
    ("Bits per byte", r"eval_(\w+_)?bits_per_byte"),
    ("Forgetting", r"eval_(\w+_)?forgetting"),
    ("Learning rate", r"learning_rate"),
    ("Tokens per second and device", r"tokens_per_second_per_device"),
    ("Model FLOPs utilization", r"mfu"),
    ("Device memory, GiB", r"peak_(memory|reserved)_gib"),
    ("Seconds a step", r"step_seconds|data_wait_seconds"),
)
NO_CURVES = re.compile(r"step|num_tokens|seconds_left|eval_\w*examples|eval_engine_games")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1240px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .15em 1.2em .15em 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
pre { background: #f5f5f5; padding: .8em; overflow-x: auto; font-size: .85em; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(520px, 1fr)); }
"""


@dataclass(frozen=True)
class Run:
    """What a run has written so far."""

    name: str
    rows: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    settings: dict[str, Any]
    launch: str
    """How it was launched, in words: the comment that config.yaml begins with."""
    best: dict[str, Any] | None
    """`step` and `value` of the model in best/."""

    def values(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if isinstance(row.get(key), (int, float))]


def read_run(folder: Path) -> Run:
    """Raises `UserError` where there is no run, or not one that can be read."""
    metrics, config, best = (folder / name for name in ("metrics.jsonl", "config.yaml", "best/best_step.json"))
    if not metrics.is_file():
        raise UserError(f"{folder}: no metrics.jsonl in it; give the output folder of a run.")
    rows = []
    for number, line in enumerate(_read(metrics).splitlines(keepends=True), start=1):
        if not line.endswith("\n"):  # is being written, or was when the run was killed
            continue
        try:
            row = json.loads(line)
            is_row = isinstance(row, dict) and isinstance(row.get("step"), int)
        except ValueError:
            is_row = False
        if not is_row:
            raise UserError(f"{metrics}, line {number}: expected a JSON object with a step: {line[:60]!r}")
        rows.append(row)
    text = _read(config) if config.is_file() else ""
    try:
        settings = yaml.safe_load(text) or {}
        chosen = json.loads(_read(best)) if best.is_file() else None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{folder}: its config.yaml or best_step.json cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{config}: expected lines of `key: value`, found {type(settings).__name__}.")
    launch = re.match(r"(# .*\n)*", text)
    assert launch is not None
    return Run(folder.resolve().name, rows, settings, re.sub(r"(?m)^# ", "", launch.group()), chosen)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error.reason}).") from error


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write the page of these runs to `output`, at once. Raises `UserError` as `read_run`, and for another ending."""
    if output.suffix != ".html" or output.is_dir():
        raise UserError(f"--output {output}: give the name of a page, which ends in .html.")
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=str(path)) for path, run in zip(folders, runs, strict=True)]
    title = ", ".join(run.name for run in runs)
    launches = "".join(
        f"<h2>{escape(run.name)}: how it ran</h2><pre>{escape(run.launch)}</pre>" for run in runs if run.launch
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(
        output,
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f"{_table(runs, [_summary(run) for run in runs])}\n"
        f"<h2>Curves</h2>\n<div class=charts>{''.join(_charts(runs))}</div>\n"
        f"{launches}\n{_settings(runs)}\n</body></html>\n",
    )


def _settings(runs: Sequence[Run]) -> str:
    """Those that differ between the runs, then all."""
    columns = [{key: str(value) for key, value in run.settings.items() if value is not None} for run in runs]
    keys = dict.fromkeys(key for column in columns for key in column)
    other = [key for key in keys if len({column.get(key) for column in columns}) > 1]
    differing = [{key: column.get(key, "") for key in other} for column in columns]
    first = f"<h2>Settings that differ</h2>\n{_table(runs, differing)}\n" if other else ""
    return f"{first}<h2>Settings</h2>\n{_table(runs, columns)}"


def _table(runs: Sequence[Run], columns: Sequence[Mapping[str, str]]) -> str:
    """A row a key, a column a run."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [f"<tr><th>{escape(key)}</th>{_cells('td', (each.get(key, '') for each in columns))}</tr>" for key in keys]
    names = f"<tr><th></th>{_cells('th', (run.name for run in runs))}</tr>" if len(runs) > 1 else ""
    return f"<table>{names}{''.join(rows)}</table>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _summary(run: Run) -> dict[str, str]:
    result = {"steps": f"{max((row['step'] for row in run.rows), default=0):,}"}
    if tokens := run.values("num_tokens"):
        result["tokens"] = f"{tokens[-1]:,.0f}"
    if losses := run.values("loss"):
        result["training loss, first to last"] = f"{losses[0]:.4f} → {losses[-1]:.4f}"
    if losses := run.values("eval_loss"):
        result["validation loss, first to last"] = f"{losses[0]:.4f} → {losses[-1]:.4f}"
    if run.best:
        name = run.settings.get("metric_for_best_model", "metric")
        result["best model"] = f"{name} {run.best['value']:.4f} at step {run.best['step']:,}"
    for key, label, form in (
        ("tokens_per_second_per_device", "tokens per second and device", ",.0f"),
        ("mfu", "model FLOPs utilization", ".1%"),
        ("step_seconds", "seconds a step", ".3g"),
    ):
        if values := run.values(key):
            result[f"{label} (median of the second half)"] = f"{statistics.median(values[len(values) // 2 :]):{form}}"
    if memory := run.values("peak_reserved_gib"):
        result["device memory, at most"] = f"{max(memory):.1f} GiB"
    return result


def _charts(runs: Sequence[Run]) -> Iterable[str]:
    found = dict.fromkeys(
        key
        for run in runs
        for row in run.rows
        for key, value in row.items()
        if isinstance(value, (int, float)) and not NO_CURVES.fullmatch(key)
    )
    keys = sorted(found, key=lambda key: key.startswith("eval_"))  # training's own first
    charts = {title: [key for key in keys if re.fullmatch(pattern, key)] for title, pattern in CHARTS}
    known = {key for listed in charts.values() for key in listed}
    charts |= {key: [key] for key in keys if key not in known}
    shown = [title for title in charts if charts[title]]
    for number, title in enumerate(shown):
        figure = go.Figure(layout={"title": title, "height": 340, "template": "plotly_white", "hovermode": "x"})
        figure.update_layout(margin={"l": 50, "r": 20, "t": 50, "b": 40}, legend={"orientation": "h"}, showlegend=True)
        for run in runs:
            for key in charts[title]:
                points = _thinned([(row["step"], row[key]) for row in run.rows if row.get(key) is not None])
                steps, values = zip(*points, strict=True) if points else ((), ())
                mode = "lines+markers" if key.startswith("eval_") else "lines"
                name = key if len(runs) == 1 else f"{run.name}: {key}"
                figure.add_scatter(x=steps, y=values, mode=mode, name=name)
        yield figure.to_html(
            full_html=False,
            include_plotlyjs=number == 0,
            div_id=f"chart{number}",
            config={"displayModeBar": False, "responsive": True},
        )


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most about MAX_POINTS of them: the least and the greatest value of each part, so that no spike is lost."""
    size = math.ceil(2 * len(points) / MAX_POINTS)
    if size <= 2:
        return points
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept
