"""report.html: what a run has written, as one page that needs no network."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.arguments import UserError
from common.report import MAX_POINTS, _thinned, read_run, write_report
from tools import report

ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval_loss": 4.0, "eval_examples": 7, "eval_legal_move_rate": 0.0},
    {"step": 10, "loss": 3.5, "grad_norm": 1.0, "num_tokens": 1000, "mfu": 0.1, "tokens_per_second_per_device": 10.0},
    {"step": 20, "loss": None, "grad_norm": 2.0, "num_tokens": 2000, "mfu": 0.3, "tokens_per_second_per_device": 30.0},
    {"step": 30, "loss": 2.5, "grad_norm": 1.5, "num_tokens": 3000, "mfu": 0.5, "tokens_per_second_per_device": 50.0},
    {"step": 30, "eval_loss": 2.25, "eval_examples": 7, "eval_legal_move_rate": 0.5, "eval_new_kind": 8.0},
]


def run_folder(folder: Path, **settings: Any) -> Path:
    (folder / "best").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = yaml.safe_dump({"learning_rate": 0.1, "metric_for_best_model": "eval_loss", "seed": None} | settings)
    (folder / "config.yaml").write_text(f"# == recipe ===\n#   strategy     FSDP2 & <more>\n{text}")
    (folder / "best" / "best_step.json").write_text('{"step": 30, "value": 2.25}')
    return folder


class Page(HTMLParser):
    """Cells of the tables by rows, the texts of headings, and the curves: by chart (name, steps, values)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.pre = ""
        self.fetched: list[str | None] = []
        self.charts: dict[str, list[tuple[str, list[int], list[float]]]] = {}
        self.tag = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tag = tag
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.tag = ""

    def handle_data(self, data: str) -> None:
        if self.tag in ("th", "td"):
            self.rows[-1][-1] += data
        elif self.tag in ("h1", "h2"):
            self.headings.append(data)
        elif self.tag == "pre":
            self.pre += data
        elif self.tag == "script" and (
            call := re.search(r'newPlot\(\s*"chart\d+",\s*(\[.*?\]),\s*(\{.*?\}),\s*\{', data)
        ):
            traces, layout = map(json.loads, call.groups())
            title = layout["title"]["text"]
            self.charts[title] = [(trace["name"], trace["x"], trace["y"]) for trace in traces]


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "my & run")
    assert report.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"written to {folder / 'report.html'}\n"
    page = Page(folder / "report.html")
    assert page.headings == ["my & run", "Curves", "my & run: how it ran", "Settings"]
    assert page.pre == "== recipe ===\n  strategy     FSDP2 & <more>\n"
    assert page.rows[:7] == [
        ["steps", "30"],
        ["tokens", "3,000"],
        ["training loss, first to last", "3.5000 → 2.5000"],
        ["validation loss, first to last", "4.0000 → 2.2500"],
        ["best model", "eval_loss 2.2500 at step 30"],
        ["tokens per second and device (median of the second half)", "40"],
        ["model FLOPs utilization (median of the second half)", "40.0%"],
    ]
    assert page.rows[7:] == [["learning_rate", "0.1"], ["metric_for_best_model", "eval_loss"]]
    assert page.charts["Loss"] == [("loss", [10, 30], [3.5, 2.5]), ("eval_loss", [0, 30], [4.0, 2.25])]
    assert page.charts["Legal moves, the likeliest"] == [("eval_legal_move_rate", [0, 30], [0.0, 0.5])]
    assert page.charts["eval_new_kind"] == [("eval_new_kind", [30], [8.0])]
    assert list(page.charts) == [
        "Loss", "Gradient norm, before clipping", "Legal moves, the likeliest", "Tokens per second and device",
        "Model FLOPs utilization", "eval_new_kind",
    ]  # fmt: skip
    assert page.fetched == []


def test_runs_side_by_side(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / "a" / "run"), run_folder(tmp_path / "b" / "run", learning_rate=0.2)]
    output = tmp_path / "both.html"
    assert report.main([*map(str, folders), "--output", str(output)]) == 0
    page = Page(output)
    names = list(map(str, folders))
    assert page.rows[:2] == [["", *names], ["steps", "30", "30"]]
    assert "Settings that differ" in page.headings
    assert page.rows.count(["learning_rate", "0.1", "0.2"]) == 2  # among those that differ, and all
    assert [name for name, *_ in page.charts["Gradient norm, before clipping"]] == [
        f"{name}: grad_norm" for name in names
    ]
    assert not (folders[0] / "report.html").exists()


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    (folder / "config.yaml").unlink()
    (folder / "best" / "best_step.json").unlink()
    run = read_run(folder)
    assert len(run.rows) == len(ROWS) and run.settings == {} and run.launch == "" and run.best is None
    write_report([folder], folder / "report.html")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/nothing"], "error: {folder}/nothing: no metrics.jsonl in it; give the output folder of a run.\n"),
        (
            ["{folder}/run", "{folder}/run"],
            "error: several runs: say with --output where their page is to be written.\n",
        ),
        (
            ["{folder}/run", "--output", "{folder}/x"],
            "error: --output {folder}/x: give the name of a page, which ends in .html.\n",
        ),
        (["{folder}/bad"], "error: {folder}/bad/metrics.jsonl, line 2: expected a JSON object with a step: '[1]\\n'\n"),
    ],
)
def test_errors(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder(tmp_path / "run")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "metrics.jsonl").write_text('{"step": 1}\n[1]\n')
    assert report.main([argument.format(folder=tmp_path) for argument in arguments]) == 2
    assert capsys.readouterr().err == message.format(folder=tmp_path)
    assert not list(tmp_path.rglob("report.html"))
    with pytest.raises(UserError):
        read_run(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", b"a: [1\n", "its config.yaml or best_step.json cannot be read"),
        ("config.yaml", b"a: \xff\n", "config.yaml: not UTF-8 text"),
        ("config.yaml", b"- a\n", "config.yaml: expected lines of `key: value`, found list"),
        ("best/best_step.json", b"", "its config.yaml or best_step.json cannot be read"),
        ("metrics.jsonl", b'{"step": "3"}\n', "metrics.jsonl, line 1: expected a JSON object with a step"),
        ("metrics.jsonl", b"\xff\n", "metrics.jsonl: not UTF-8 text"),
    ],
)
def test_broken_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        write_report([folder], folder / "report.html")


def test_long_curves_keep_their_spikes() -> None:
    points = [(step, 100.0 if step == 12_345 else -5.0 if step == 777 else 1.0 + step % 2) for step in range(50_001)]
    kept = _thinned(points)
    assert len(kept) <= MAX_POINTS + 2
    assert (12_345, 100.0) in kept and (777, -5.0) in kept
    assert kept == sorted(kept)
    assert _thinned(points[:MAX_POINTS]) == points[:MAX_POINTS]
