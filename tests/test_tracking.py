import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker, WandBTracker

from common.arguments import TrainArguments, UserError
from common.launch import RunFailed
from common.tracking import MetricsLog, RunLog, Trackers, format_metrics, wandb_mode
from tests.forked import ForkedParent


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_complete_after_each_call_and_numbers_exact(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "new" / "run", is_main_process=True)
    values = {"loss": 0.1 + 0.2, "learning_rate": 1e-5 / 3, "num_tokens": 2**40 + 1}
    log.log(7, values)
    assert log.path == tmp_path / "new" / "run" / "metrics.jsonl"
    assert read(log.path) == [{"step": 7, **values}]
    log.log(8, {"loss": 1.0})
    assert [line["step"] for line in read(log.path)] == [7, 8]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, is_main_process=True)
    log.log(1, {"loss": math.nan, "grad_norm": math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = json.loads(log.path.read_text(), parse_constant=refuse)
    assert line == {"step": 1, "loss": None, "grad_norm": None}


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run", is_main_process=False)
    log.log(1, {"loss": 1.0})
    log.truncate_after(0)
    assert list(tmp_path.iterdir()) == []


def test_truncate_after_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, is_main_process=True)
    log.truncate_after(5)  # nothing there yet
    for step in range(1, 6):
        log.log(step, {"loss": step / 3})
    log.log(4, {"eval_loss": 1.5})  # evaluation lines come after the step's own
    before = log.path.read_text()
    with log.path.open("a") as file:
        file.write('{"step": 6, "los')
    log.truncate_after(3)
    assert log.path.read_text() == "".join(before.splitlines(keepends=True)[:3])
    log.log(4, {"loss": 0.5})
    assert [line["step"] for line in read(log.path)] == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncate_after_names_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: .*'hello'"):
        MetricsLog(tmp_path, is_main_process=True).truncate_after(1)


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run", is_main_process=True)
    (tmp_path / "run").rmdir()
    with pytest.raises(RunFailed, match=r"run/metrics.jsonl: cannot be written \(No such file or directory\)"):
        log.log(1, {"loss": 1.0})


def test_format_metrics() -> None:
    metrics = {
        "step": 100,
        "loss": 3.21449,
        "learning_rate": 2e-5,
        "tokens_per_second_per_device": 1234.4,
        "mfu": 0.484,
    }
    assert format_metrics(metrics) == "step 100 | loss 3.214 | lr 2.00e-05 | 1,234 tok/s/device | mfu 48.4%"
    assert format_metrics({"eval_rouge1": 0.385531, "eval_examples": 5577}) == "eval_rouge1 0.3855 | 5,577 examples"


def make_trackers(
    accelerator: Accelerator, report_to: list[str], output_dir: Path, resumed_step: int | None = None
) -> Trackers:
    return Trackers(
        accelerator, report_to, output_dir=output_dir, project="recipes", run_name="a run", resumed_step=resumed_step,
        config={"learning_rate": 1e-3, "run_name": None, "betas": (0.9, 0.99)},
    )  # fmt: skip


def test_tensorboard_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    trackers = make_trackers(Accelerator(cpu=True), ["tensorboard"], tmp_path)
    trackers.log(3, {"loss": 0.5})
    trackers.log(4, {"loss": 0.25})
    trackers.finish()

    def points() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("loss")]

    assert points() == [(3, 0.5), (4, 0.25)]
    trackers = make_trackers(Accelerator(cpu=True), ["tensorboard"], tmp_path, resumed_step=3)
    trackers.log(4, {"loss": 0.125})
    trackers.finish()
    assert points() == [(3, 0.5), (4, 0.125)], "a step that is made once more is shown once"


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = TrainArguments(output_dir=str(tmp_path), report_to="none")
    log = RunLog(args, Accelerator(cpu=True), project="p")
    log.finish()
    assert not (tmp_path / "report.html").exists(), "nothing was logged"
    log.log(1, {"loss": 2.0})
    (tmp_path / "report.html").mkdir()
    log.finish()
    assert "warning: no report.html (" in (printed := capsys.readouterr().out) and "Traceback" not in printed
    (tmp_path / "report.html").rmdir()
    log.finish()
    assert capsys.readouterr().out == "" and (tmp_path / "report.html").is_file()


def test_a_run_that_failed_is_marked_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Run:
        def finish(self, exit_code: int = 0) -> None:
            calls.append(exit_code)

    for name in ("start", "store_init_configuration"):
        monkeypatch.setattr(WandBTracker, name, lambda *args: None)
    monkeypatch.setattr(WandBTracker, "tracker", Run())
    monkeypatch.setattr(WandBTracker, "run", Run(), raising=False)  # accelerate's own finish
    for has_failed in (True, False):
        make_trackers(Accelerator(cpu=True), ["wandb", "tensorboard"], tmp_path).finish(has_failed)
    assert calls == [1, 0]


def test_model_goes_to_wandb_as_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def log_artifact(self, *args: Any, **kwargs: Any) -> None:
            calls.append((args, kwargs))

    for name in ("start", "store_init_configuration"):
        monkeypatch.setattr(WandBTracker, name, lambda *args: None)
    monkeypatch.setattr(WandBTracker, "tracker", Run())
    trackers = make_trackers(Accelerator(cpu=True), ["wandb", "tensorboard"], tmp_path)
    folder = tmp_path / "run lr=1e-3" / "model"
    trackers.upload_model(folder)
    assert calls == [((str(folder),), {"name": "run-lr-1e-3", "type": "model"})]


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "finish"])
def test_a_failing_tracker_is_dropped_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    calls = []

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no route\nto host")

    for name in ("start", "store_init_configuration", "log", "finish"):
        monkeypatch.setattr(WandBTracker, name, fail if name == method else lambda *args, **kwargs: None)
    monkeypatch.setattr(TensorBoardTracker, "log", lambda self, values, step: calls.append(step))
    trackers = make_trackers(Accelerator(cpu=True), ["wandb", "tensorboard"], tmp_path)
    trackers.log(1, {"loss": 1.0})
    trackers.log(2, {"loss": 1.0})
    trackers.finish()
    assert calls == [1, 2]
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warnings == [
        "warning: wandb failed (RuntimeError: no route to host); training goes on without it, metrics.jsonl has it all."
    ]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "0" * 40}, "disabled"),
        ({"WANDB_API_KEY": "0" * 40}, "online"),
        ({}, "offline"),
    ],
)
def test_wandb_mode(
    tmp_path: Path, forked: ForkedParent, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: str
) -> None:
    assert find_wandb_mode(tmp_path, forked, monkeypatch, env) == expected


@pytest.mark.parametrize(("host", "expected"), [("api.wandb.ai", "online"), ("elsewhere.example", "offline")])
def test_wandb_mode_with_a_login(
    tmp_path: Path, forked: ForkedParent, monkeypatch: pytest.MonkeyPatch, host: str, expected: str
) -> None:
    (tmp_path / ".netrc").write_text(f"machine {host}\n  login user\n  password {'0' * 40}\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert find_wandb_mode(tmp_path, forked, monkeypatch, {}) == expected


def find_wandb_mode(home: Path, forked: ForkedParent, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> str:
    """In a process of its own, because wandb reads its settings once."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    result = forked.run(__file__, config="single_device", timeout=60, env={"HOME": str(home), **env})
    assert result.exit_code == 0, result.output
    return result.output.split("mode ")[1].strip()


def test_one_run_for_all_processes(tmp_path: Path, forked: ForkedParent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    env = {"HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "none")}
    result = forked.run(__file__, str(tmp_path), config="ddp", num_processes=3, timeout=60, env=env)
    assert result.exit_codes == [0, 0, 0], result.output
    assert len(list(tmp_path.glob("**/offline-run-*"))) == 1, result.output
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    assert result.output.count("wandb: offline; upload the run with `wandb sync") == 1, result.output
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]


def rank_main(output_dir: Path) -> None:
    """One process of a training that reports to wandb."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)
    log = MetricsLog(output_dir, accelerator.is_main_process)
    trackers = make_trackers(accelerator, ["wandb"], output_dir)
    for step in (1, 2):
        log.log(step, {"loss": 1 / step})
        trackers.log(step, {"loss": 1 / step})
    trackers.finish()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print("mode", wandb_mode())
    else:
        rank_main(Path(sys.argv[1]))
