"""Runs a recipe as `accelerate launch` would, on ranks forked from a process that has imported everything already.

A real launch spends 6 to 15 seconds on imports, a forked one less than a second. Each rank gets the environment that
accelerate's launcher and torch's agent would give it for the YAML, and runs the same file as `__main__`. Three kinds of
process take part besides the ranks:

- the test's process, which has a `ForkedParent` and asks it over a Unix socket for runs;
- the parent, started once a session, which imports and forks and never runs an operator of torch;
- one supervisor per run, forked from the parent, which stands for the launcher: it forks the ranks, holds their TCP
  store, and ends them all when one fails.

No rank outlives the tests: a supervisor kills its ranks when the test's side of the connection is gone, and Linux kills
each process here with the one that forked it.

Limits: what libraries read from the environment while they are imported (`HF_HOME`, `HF_HUB_OFFLINE`,
`OMP_NUM_THREADS`) is the parent's, whatever `env` says.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the test's process does not import torch for this
    from torch.distributed import TCPStore

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "accelerate_configs"

PRELOADED = [
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "accelerate",
    "accelerate.commands.launch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.models.t5.tokenization_t5",
    "datasets",
    "datasets.packaged_modules.generator.generator",
    "evaluate",
    "rouge_score.rouge_scorer",
    "wandb",
    "yaml",
]


# The test's side.


@dataclass
class Result:
    exit_codes: list[int]
    """By rank; negative: killed by that signal. A rank that the supervisor ended has -15 or -9."""
    exit_code: int
    """What `tools/launch.py` would exit with."""
    output: str
    """Standard output and error of all ranks."""
    seconds: float
    timed_out: bool = False


class Request(NamedTuple):
    """What the test's process sends to a supervisor. The answers: the ranks' pids or a refusal, then the exit codes."""

    launch: list[str]
    env: dict[str, str]
    cwd: str
    output: str


class Handle:
    """A run that has been started."""

    def __init__(self, connection: Connection, output: Path, pids: list[int], started: float) -> None:
        self.pids = pids
        self._connection = connection
        self._output = output
        self._started = started

    @property
    def output(self) -> str:
        """What the ranks have written until now."""
        return self._output.read_text(errors="replace")

    def send_signal(self, signum: int) -> None:
        """Sends a signal to each rank that still runs."""
        with contextlib.suppress(BrokenPipeError):  # all ranks have left
            self._connection.send(int(signum))

    def kill(self) -> None:
        """SIGKILL to all ranks and their children."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 240) -> Result:
        """Waits for the end of all ranks; kills them after `timeout` seconds."""
        timed_out = not self._connection.poll(timeout)
        if timed_out:
            self.kill()
            assert self._connection.poll(30), "the ranks could not be killed"
        exit_codes, exit_code = self._connection.recv()
        self._connection.close()
        return Result(exit_codes, exit_code, self.output, time.monotonic() - self._started, timed_out)


def patched(recipe: Path, folder: Path, code: str) -> Path:
    """A script in the folder that runs `code`, which may put something in the place of a function, and the recipe."""
    script = folder / "patched.py"
    script.write_text(f"import runpy\n{code}\nrunpy.run_path({str(recipe)!r}, run_name='__main__')\n")
    return script


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ForkedParent:
    """The process with everything imported; stopped by `close` or with this process."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forked_"))
        self._address = str(self._folder / "socket")
        self._num_runs = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the tests, which then close this process
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        assert ready == "ready\n", f"the parent of the forked runs did not start: {ready!r}"

    def start(
        self,
        recipe: str | Path,
        *flags: str,
        config: str | Path = "fsdp_full_shard",
        num_processes: int | None = None,
        launcher_flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> Handle:
        """Starts a run of the script `recipe` with `flags`.

        `config` is a name in accelerate_configs/ or the path of a YAML; `num_processes` and `launcher_flags` override
        it as they do for `accelerate launch`; `env` is added to this process's environment. Raises `ValueError` with
        the launcher's words when it refuses its arguments.
        """
        named = CONFIGS / f"{config}.yaml"
        launcher_args = ["--config_file", str(named if named.is_file() else config), *launcher_flags]
        if num_processes is not None:
            launcher_args += ["--num_processes", str(num_processes)]
        self._num_runs += 1
        output = self._folder / f"output_{self._num_runs}.txt"
        output.touch()
        started = time.monotonic()
        client = socket.socket(socket.AF_UNIX)
        client.connect(self._address)
        connection = Connection(client.detach())
        launch = [*launcher_args, str(Path(recipe).resolve()), *flags]
        request = Request(launch, os.environ | (env or {}), str(cwd or os.getcwd()), str(output))
        connection.send(tuple(request))  # the parent knows this module by another name
        assert connection.poll(60), "the parent of the forked runs does not answer"
        reply = connection.recv()
        if isinstance(reply, str):
            raise ValueError(reply)
        return Handle(connection, output, reply, started)

    def run(self, recipe: str | Path, *flags: str, timeout: float = 240, **options: Any) -> Result:
        """`start` and `wait`: the arguments of `start`, and `timeout` in seconds."""
        return self.start(recipe, *flags, **options).wait(timeout)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)
        shutil.rmtree(self._folder)


# The parent's side. `_serve` returns in the process at the root, at the end, and in each rank, at its start.


def _die_with_parent() -> None:
    """Linux sends SIGKILL to this process when the one that forked it is gone."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    import common

    for module in pkgutil.iter_modules(common.__path__, "common."):
        # A module that cannot be imported: the recipe that needs it says so itself.
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)
    # A table of all architectures, which each rank would compile for itself when it saves or loads a model.
    get_conversions = importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping
    get_conversions("t5")
    assert threading.active_count() == 1, f"a library has started threads: {threading.enumerate()}"
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page


def _serve(address: str) -> str | None:
    """Answers requests until standard input ends; returns the script to run in a rank and None in this process."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    supervisors: set[int] = set()
    while True:
        readable, _, _ = select.select([sys.stdin, listener], [], [], 1.0)
        supervisors = {pid for pid in supervisors if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if sys.stdin in readable:  # only ever closed
            return None
        if listener in readable:
            client, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                _die_with_parent()
                listener.close()
                return _supervise(Connection(client.detach()))
            client.close()
            supervisors.add(pid)


def _supervise(connection: Connection) -> str:
    """Does one run and exits; returns only in the ranks, with the script that they are to run."""
    request = Request(*connection.recv())
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    try:
        argv, envs = _launcher_environments(request.launch)
    except (ValueError, OSError, RuntimeError) as error:
        connection.send(str(error))
        os._exit(0)
    # Bound here and taken over by the store below: no other process can get the port in between.
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    pids = []
    for env in envs:
        if "MASTER_PORT" in env:
            env["MASTER_PORT"] = str(listening.getsockname()[1])
        pid = os.fork()
        if pid == 0:
            connection.close()
            listening.close()
            _become_rank(env, request.output, argv)
            return argv[0]
        pids.append(pid)
    connection.send(pids)
    store = _host_store(listening, len(pids))
    codes = _wait_for_ranks(pids, connection)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for this run any more
        connection.send(codes)
    del store  # not before: the ranks talk to it
    os._exit(0)


def _launcher_environments(launch: list[str]) -> tuple[list[str], list[dict[str, str]]]:
    """The script with its arguments, and each rank's environment, as accelerate 1.15 and torch 2.13 would make it."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--main_process_port", "0", *launch]))
    argv = [args.training_script, *args.training_script_args]
    # Where recipes look for the YAML when no launcher is among their parents.
    os.environ["ACCELERATE_CONFIG_FILE"] = str(Path(args.config_file).resolve())
    if not (args.use_fsdp or args.multi_gpu):
        return argv, [prepare_simple_launcher_cmd_env(args)[1]]
    shared = prepare_multi_gpu_env(args) | {
        "LOCAL_WORLD_SIZE": args.nproc_per_node,
        "WORLD_SIZE": args.nproc_per_node,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": args.nproc_per_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # the supervisor's
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_ERROR_FILE": "",  # without one, torch records nothing
    }
    ranks = [str(rank) for rank in range(int(args.nproc_per_node))]
    return argv, [shared | {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank} for rank in ranks]


def _host_store(listening: socket.socket, world_size: int) -> "TCPStore":
    """The store that the ranks meet at: torch's agent has it in the launcher's process."""
    from torch.distributed import TCPStore

    host, port = listening.getsockname()
    fd = listening.detach()
    return TCPStore(host, port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _become_rank(env: dict[str, str], output: str, argv: list[str]) -> None:
    _die_with_parent()
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    stream = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    # Whole lines: the ranks share the file.
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    # A new interpreter is seeded by the system; a fork would have its siblings' numbers.
    import random

    import numpy

    random.seed()
    numpy.random.seed()
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)


def _wait_for_ranks(pids: list[int], connection: Connection) -> tuple[list[int], int]:
    """Exit codes of all ranks, and the launcher's.

    When a rank fails, the others get SIGTERM at torch's next look (0.1 s) and SIGKILL 5 s later. As `tools/launch.py`
    has it, ranks that leave with 75 leave the others their time.
    """
    from tools.launch import EXIT_STOPPED, exit_code

    codes: dict[int, int | None] = dict.fromkeys(range(len(pids)))
    final = 0
    terminated_at: float | None = None

    def send(signum: int) -> None:
        for rank, pid in enumerate(pids):
            if codes[rank] is None:
                os.kill(pid, signum)
                if signum == signal.SIGKILL:
                    with contextlib.suppress(ProcessLookupError):  # it has not called setsid yet
                        os.killpg(pid, signum)

    def collect() -> None:
        for rank, pid in enumerate(pids):
            if codes[rank] is None:
                reaped, status = os.waitpid(pid, os.WNOHANG)
                if reaped:
                    codes[rank] = os.waitstatus_to_exitcode(status)

    while None in codes.values():
        if connection.poll(0.01):
            try:
                send(connection.recv())
            except (EOFError, ConnectionResetError):  # nobody waits for this run any more
                send(signal.SIGKILL)
        collect()
        failed = {code for code in codes.values() if code}
        if terminated_at is None and failed - {EXIT_STOPPED}:
            time.sleep(0.1)
            collect()
            final = exit_code(codes)
            terminated_at = time.monotonic()
            send(signal.SIGTERM)
        elif terminated_at is not None and time.monotonic() - terminated_at > 5:
            send(signal.SIGKILL)
    if any(codes.values()) and not final:
        final = exit_code(codes)
    return [code for code in codes.values() if code is not None], final


def _run_as_main(script: str) -> None:
    """Runs the script and leaves as the interpreter would, less the second that it takes to dismantle all modules."""
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads; here and below: what CPython 3.11-3.14 do at exit
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path[0] = str(REPOSITORY)
    _preload()
    if script := _serve(sys.argv[1]):
        _run_as_main(script)
