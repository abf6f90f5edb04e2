"""Where metrics go: metrics.jsonl always; wandb and tensorboard through accelerate's trackers, which may fail."""

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from datetime import timedelta
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from common.arguments import TrainArguments, UserError, tracker_names
from common.files import write_text
from common.launch import RunFailed

Metrics = Mapping[str, float | int | str]

# The other processes wait in their next collective while the main one connects.
WANDB_TIMEOUT_SECONDS = 60


class MetricsLog:
    """metrics.jsonl: one JSON object a line, written by the main process only.

    Each line is on disk before `log` returns, so a run that is killed loses at most the line being written. Numbers
    keep their full precision; NaN and infinities, which JSON lacks, become null.
    """

    def __init__(self, output_dir: str | Path, is_main_process: bool) -> None:
        self.path = Path(output_dir) / "metrics.jsonl"
        self.is_main_process = is_main_process
        if is_main_process:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--output_dir {output_dir}: cannot be made: {error.strerror}.") from error

    def log(self, step: int, metrics: Metrics) -> None:
        """Append a line with `step` and the metrics."""
        if not self.is_main_process:
            return
        values = {key: None if _is_non_finite(value) else value for key, value in metrics.items()}
        line = json.dumps({"step": step, **values}, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise RunFailed(f"{self.path}: cannot be written ({error.strerror}); was the folder moved?") from error

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, and a last line that a killed run left incomplete, before going on at `step`.

        The file is replaced at once: a kill leaves the old one or the new one.
        """
        if not self.is_main_process or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            del lines[-1]
        kept = []
        for number, line in enumerate(lines, start=1):
            try:
                line_step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self.path}, line {number}: expected a JSON object with a step, found {line.strip()[:60]!r}; "
                    "repair or remove the line."
                ) from error
            if line_step <= step:
                kept.append(line)
        write_text(self.path, "".join(kept))


def _is_non_finite(value: float | int | str) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class Trackers:
    """wandb and tensorboard runs of a training, one for all processes.

    All processes may call the methods; only the main process acts, and nothing here is collective. A tracker that
    fails, at the start or later, is dropped with one warning, and training goes on.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        report_to: list[str],
        *,
        output_dir: str | Path,
        project: str,
        run_name: str,
        entity: str | None = None,
        run_id: str | None = None,
        resumed_step: int | None = None,
        config: Mapping[str, Any],
    ) -> None:
        self._print = accelerator.print
        self._trackers: list[GeneralTracker] = []
        if not accelerator.is_main_process:
            return
        simple = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in config.items()}

        def start(name: str) -> None:
            if name == "wandb":
                tracker: GeneralTracker = _wandb_tracker(
                    accelerator, Path(output_dir), project, run_name, entity, run_id
                )
            else:
                # What a killed run logged beyond its checkpoint is not shown any more: those steps come again.
                purge_step = None if resumed_step is None else resumed_step + 1
                tracker = TensorBoardTracker("tensorboard", output_dir, purge_step=purge_step)
            tracker.start()
            self._trackers.append(tracker)
            tracker.store_init_configuration(simple)

        for name in report_to:
            # One by one and not by accelerator.init_trackers, which would take the others along when one fails.
            self._guard(name, start, name)

    def log(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of a step."""
        for tracker in list(self._trackers):
            self._guard(tracker.name, tracker.log, dict(metrics), step=step)

    @property
    def run_id(self) -> str | None:
        """Identity of the wandb run, to go on with it after a resume; None without wandb and on other processes."""
        return next((tracker.tracker.id for tracker in self._trackers if tracker.name == "wandb"), None)

    def upload_model(self, folder: Path) -> None:
        """Send an exported model to wandb as an artifact."""
        for tracker in [tracker for tracker in self._trackers if tracker.name == "wandb"]:
            run = tracker.tracker
            name = re.sub(r"[^\w.-]", "-", folder.parent.name)  # wandb takes no other characters
            self._guard("wandb", run.log_artifact, str(folder), name=name, type="model")

    def finish(self, has_failed: bool = False) -> None:
        """Close the runs; call it once, at the end."""
        for tracker in list(self._trackers):
            if has_failed and tracker.name == "wandb":
                self._guard("wandb", tracker.tracker.finish, exit_code=1)
            else:
                self._guard(tracker.name, tracker.finish)
        self._trackers.clear()

    def _guard(self, name: str, action: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        try:
            action(*args, **kwargs)
        except Exception as error:  # whatever it is, it is no reason to lose a training run
            self._trackers = [tracker for tracker in self._trackers if tracker.name != name]
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._print(f"warning: {name} failed ({reason}); training goes on without it, metrics.jsonl has it all.")


class RunLog:
    """Where a run's metrics go: metrics.jsonl, and the trackers of --report_to."""

    def __init__(self, args: TrainArguments, accelerator: Accelerator, project: str, run_id: str | None = None) -> None:
        """run_id: of the wandb run to go on with."""
        self.folder = Path(str(args.output_dir))
        self.file = MetricsLog(self.folder, accelerator.is_main_process)
        self.trackers: Trackers | None = None
        self._args, self._accelerator, self._project, self._run_id = args, accelerator, project, run_id

    def start(self, resumed_step: int | None = None) -> None:
        """Start the trackers; once the output folder is the run's, and nothing is left that would refuse the run.

        resumed_step: of the checkpoint that the run goes on from.
        """
        args = self._args
        self.trackers = Trackers(
            self._accelerator,
            tracker_names(args.report_to),
            output_dir=self.folder,
            project=args.wandb_project or self._project,
            run_name=args.run_name or self.folder.name,
            entity=args.wandb_entity,
            run_id=self._run_id,
            resumed_step=resumed_step,
            config=args.to_dict(),
        )

    @property
    def run_id(self) -> str | None:
        """Identity of the wandb run on the main process, if there is one."""
        return self.trackers.run_id if self.trackers else None

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step; the main process acts, all may call it."""
        self.file.log(step, metrics)
        if self.trackers:
            self.trackers.log(step, metrics)

    def finish(self, model_folder: Path | None = None, has_failed: bool = False) -> None:
        """Write report.html and close the trackers, after uploading the exported model to wandb where it is given."""
        if self.trackers:
            if model_folder is not None:
                self.trackers.upload_model(model_folder)
            self.trackers.finish(has_failed)
        self._write_report()

    def _write_report(self) -> None:
        if not (self.file.is_main_process and self.file.path.is_file()):  # another process, or nothing was logged
            return
        try:
            from common.report import FILE, write_report  # plotly: not for processes that write none

            write_report([self.folder], self.folder / FILE)
        except Exception as error:  # the run is done, and tools/report.py makes the page as well
            reason = " ".join(str(error).split())
            print(f"warning: no report.html ({reason}); `python tools/report.py {self.folder}` makes it.")


def _wandb_tracker(
    accelerator: Accelerator, output_dir: Path, project: str, run_name: str, entity: str | None, run_id: str | None
) -> WandBTracker:
    import wandb

    mode = wandb_mode()
    if mode == "offline":
        accelerator.print(
            f"wandb: offline; upload the run with `wandb sync {shlex.quote(str(output_dir))}/wandb/offline-run-*`, "
            "or log in first (`wandb login`, or WANDB_API_KEY)."
        )
    settings = wandb.Settings(init_timeout=WANDB_TIMEOUT_SECONDS)
    resume: dict[str, Any] = {"id": run_id, "resume": "allow"} if run_id else {}
    return WandBTracker(
        project, name=run_name, entity=entity, dir=str(output_dir), mode=mode, settings=settings, **resume
    )


def wandb_mode() -> str:
    """WANDB_MODE when it is set; else online with a key or a login, and offline without. Never asks, never connects."""
    import wandb

    if mode := os.environ.get("WANDB_MODE"):
        return mode
    # Not wandb.login, which starts a query that keeps a process without a network from ending.
    settings = wandb.setup().settings
    hosts = {urlsplit(settings.base_url).netloc}
    if settings.base_url == wandb.Settings().base_url:
        hosts.add("api.wandb.ai")  # the default server has had two names
    has_login = settings.api_key or settings.identity_token_file or any(map(_netrc_has, hosts))
    return "online" if has_login else "offline"


def _netrc_has(host: str) -> bool:
    """Whether `wandb login` has left a key for the host."""
    default = Path.home() / ("_netrc" if os.name == "nt" else ".netrc")
    try:
        return netrc(os.environ.get("NETRC", default)).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


_UNITS: dict[str, Callable[[float], str]] = {
    "learning_rate": lambda value: f"lr {value:.2e}",
    "num_tokens": lambda value: f"{value:,.0f} tokens",
    "tokens_per_second_per_device": lambda value: f"{value:,.0f} tok/s/device",
    "mfu": lambda value: f"mfu {value:.1%}",
    "peak_memory_gib": lambda value: f"{value:.1f} GiB",
    "peak_reserved_gib": lambda value: f"{value:.1f} GiB reserved",
    "loss_scale": lambda value: f"loss scale {value:,.15g}",
    "step_seconds": lambda value: f"{value:.3g} s/step",
    "data_wait_seconds": lambda value: f"data {value:.2g} s",
    "seconds_left": lambda value: f"{timedelta(seconds=round(value))} left",
    "eval_examples": lambda value: f"{value:,} examples",
}


def format_metrics(metrics: Metrics) -> str:
    """One short line for people: `loss 3.214 | lr 2.00e-05 | 1,234 tok/s/device`."""
    parts = []
    for key, value in metrics.items():
        if key in _UNITS and not isinstance(value, str):
            parts.append(_UNITS[key](value))
        else:
            parts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return " | ".join(parts)
