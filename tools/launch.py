"""`accelerate launch` with the worker's exit code and without the launcher's traceback; same arguments.

    python tools/launch.py --config_file accelerate_configs/fsdp_full_shard.yaml recipes/t5_summarize.py --max_steps 10

Exit code: that of the worker that failed first (2, 75 and 1 before others), 128 + n if it was killed by signal n.
SIGTERM, SIGINT and SIGHUP reach every worker once, as SIGTERM; then the launcher waits for the workers' save, at most
`LAUNCH_GRACE_SECONDS` (default 600), before it kills them. A second signal kills at once. SIGUSR1 is ignored here:
batch systems send it to every process of a job, so the workers have theirs already, and its default action would end
the launcher. When the launcher itself is killed, Linux sends the recipes SIGTERM: they save and stop.
"""

import argparse
import contextlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

# torch and accelerate take seconds to import: `main` imports them after the signal handlers are in place.
if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75
DEFAULT_GRACE_SECONDS = 600.0
HANDLER_SECONDS = 1.0  # in which Python runs a signal's handler, unless the main thread is inside a library

Codes = dict[int, int | None]
"""Exit code by rank as `subprocess` counts: negative when killed by a signal, None while it runs."""


def exit_code(codes: Codes) -> int:
    """The launcher's exit code out of the workers' codes at the moment of the first failure."""
    failed = [code for code in codes.values() if code]
    expected = [code for code in (EXIT_USAGE, EXIT_STOPPED, EXIT_ERROR) if code in failed]
    others = [code if code > 0 else 128 - code for code in failed]
    return (expected or others or [EXIT_ERROR])[0]


class Workers:
    """The worker processes on this machine: passes signals on to them and remembers how they ended."""

    def __init__(self) -> None:
        self.grace_seconds = DEFAULT_GRACE_SECONDS
        self.codes: Codes = {}
        self.context: object = None
        self.first_signal_at: float | None = None
        self.killed_here = False

    def hand_on(self, signum: int, _frame: object) -> None:
        """Signal handler: the first signal asks the workers to stop, the second kills them."""
        workers = psutil.Process().children()
        now = time.monotonic()
        if not workers:  # still starting, nothing to save: what this signal does by default
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif self.first_signal_at is None:
            self.first_signal_at = now
            for worker in workers:
                worker.terminate()  # the worker alone: its data-loading children must live until it has stopped
            timer = threading.Timer(self.grace_seconds, self.kill)
            timer.daemon = True
            timer.start()
        elif now - self.first_signal_at > 1.0:  # make and the terminal may both deliver the same one
            self.kill()

    def watch(self) -> None:
        """Makes signals act while the main thread waits inside torch for other machines, where no handler runs."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def leave() -> None:
            while number := os.read(reader, 1):
                time.sleep(HANDLER_SECONDS)
                if self.first_signal_at is None and not psutil.Process().children():
                    os._exit(128 + number[0])

        threading.Thread(target=leave, daemon=True).start()

    def kill(self) -> None:
        self.killed_here = True
        for worker in psutil.Process().children():
            with contextlib.suppress(ProcessLookupError):  # it has just left
                os.killpg(worker.pid, signal.SIGKILL)  # a worker leads its own process group

    def run_single(self, args: argparse.Namespace) -> None:
        """Stands in for accelerate's launcher of a single process, which starts it in the launcher's own process group:
        there Ctrl-C would reach the worker twice, from the terminal and from here."""
        from accelerate.utils import prepare_simple_launcher_cmd_env

        command, env = prepare_simple_launcher_cmd_env(args)
        self.codes = {0: subprocess.Popen(command, env=env, start_new_session=True).wait()}

    def follow(self) -> None:
        """Makes torch's agent wait for all workers when they stop after a save, and notes what they exited with.

        The agent closes its workers (SIGTERM, and SIGKILL 30 s later) as soon as one has exited with another code than
        0, also with 75: a worker that leaves first would take the others out of their last writes. Seen with torch 2.11
        and 2.13: `SubprocessContext.close` is the one place where this happens; afterwards the exit codes are no longer
        those of the first failure.
        """
        from torch.distributed.elastic.multiprocessing.api import SubprocessContext

        close_now = SubprocessContext.close

        def close(context: SubprocessContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            if context is not self.context:  # the agent closes the same group of workers more than once
                self.context = context
                self.codes = self._wait_for_stop(context)
            close_now(context, death_sig, timeout)

        SubprocessContext.close = close  # type: ignore[method-assign,assignment]

    def _wait_for_stop(self, context: "SubprocessContext") -> Codes:
        deadline = time.monotonic() + self.grace_seconds
        while True:
            codes = {
                int(context.envs[local_rank]["RANK"]): handler.proc.poll()
                for local_rank, handler in context.subprocess_handlers.items()
            }
            stopping = {code for code in codes.values() if code} == {EXIT_STOPPED}
            if not stopping or None not in codes.values() or time.monotonic() > deadline:
                return codes
            time.sleep(0.1)

    def report_killed(self) -> None:
        for rank, code in self.codes.items():
            if code is not None and code < 0:
                hint = " (out of memory?)" if code == -signal.SIGKILL and not self.killed_here else ""
                print(
                    f"worker {rank} was killed by signal {-code} ({signal.Signals(-code).name}){hint}", file=sys.stderr
                )


def grace_seconds() -> float:
    text = os.environ.get("LAUNCH_GRACE_SECONDS", str(DEFAULT_GRACE_SECONDS))
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"LAUNCH_GRACE_SECONDS={text}: expected a number of seconds") from error


def check(args: argparse.Namespace) -> None:
    """Refuses what cannot run; raises `ValueError` with a message for the user.

    Chooses a port where none is given, and says so where other machines are waited for.
    """
    from common.accelerate_config import check_environment, known_files, launcher_flags, problems_in_words, read_config

    if not (args.module or args.no_python or os.path.isfile(args.training_script)):
        raise ValueError(f"{args.training_script}: no such script")
    if args.config_file is None:
        raise ValueError("--config_file is missing: name a YAML of accelerate_configs/")
    path = Path(args.config_file)
    if not path.is_file():
        raise ValueError(f"--config_file {path}: no such file; {known_files(path)}")
    if problems := problems_in_words(path, launcher_flags(args)):
        raise ValueError(problems)
    check_environment(path)
    config = read_config(path)
    if (args.mixed_precision or config.get("mixed_precision")) == "fp8" and not importlib.util.find_spec("torchao"):
        raise ValueError(
            f"{path}: mixed_precision fp8 needs the package torchao (pip install torchao) and a GPU with fp8"
        )
    num_machines = args.num_machines or config.get("num_machines", 1)
    missing = [
        name
        for name in ("main_process_ip", "main_process_port")
        if getattr(args, name) is None and config.get(name) is None
    ]
    if num_machines > 1 and missing and args.rdzv_backend in (None, "static"):
        raise ValueError(f"{num_machines} machines need --{' and --'.join(missing)}: where process 0 is reached")
    if num_machines > 1:
        rank = config.get("machine_rank", 0) if args.machine_rank is None else args.machine_rank
        print(f"machine {rank} of {num_machines}: waiting for the others", file=sys.stderr, flush=True)
    elif "main_process_port" in missing:
        args.main_process_port = 0  # any that is free: runs that start together would all find 29500 free, and take it


def main() -> int:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    workers = Workers()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, workers.hand_on)
    workers.watch()

    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = launch.launch_command_parser().parse_args()
    try:
        workers.grace_seconds = grace_seconds()
        check(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE

    os.environ["LAUNCHER_PID"] = str(os.getpid())  # by which a recipe notices that the launcher has gone
    args.signals_to_handle = "SIGQUIT"  # torchrun's option; the other signals are handled above
    workers.follow()
    launch.simple_launcher = workers.run_single
    agent_log = logging.getLogger("torch.distributed.elastic")  # announces each worker's end, which the worker has done
    agent_log.addHandler(logging.NullHandler())
    agent_log.propagate = False
    try:
        launch.launch_command(args)
    except ChildFailedError:
        pass  # the workers have said why; the code is in workers.codes
    except SignalException as error:
        return 128 + error.sigval
    except ConnectionError as error:  # accelerate's, of a port in use on the first of several machines
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE
    workers.report_killed()
    return exit_code(workers.codes) if any(code != 0 for code in workers.codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
