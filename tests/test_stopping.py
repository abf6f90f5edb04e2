"""Signals and the time limit: what counts as one request, and what a second one does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from common.stopping import SIGNALS, StopRequest
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_asks_for_a_stop(signum: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.is_requested
        os.kill(os.getpid(), signum)
        wait_for(lambda: stop.is_requested)
        assert stop.reason == signum.name


def test_signals_work_as_before_afterwards() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with StopRequest():
        assert [signal.getsignal(signum) for signum in SIGNALS] != before
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_a_signal_that_was_ignored_by_the_launcher_is_taken() -> None:
    previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(lambda: stop.is_requested)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_time_limit_counts_from_the_start_of_the_process() -> None:
    age = time.time() - psutil.Process().create_time()
    with StopRequest(age + 3600) as stop:
        assert not stop.is_requested
    with StopRequest(age / 2) as stop:
        assert stop.is_requested
        assert stop.reason == "--max_run_seconds"


def test_a_process_that_was_not_asked_says_so() -> None:
    with StopRequest() as stop:
        assert stop.reason == "a signal to another process"


def test_a_forked_child_neither_dies_nor_tells() -> None:
    """As data-loading processes do when the batch system signals every process of the job."""
    with StopRequest() as stop:
        pid = os.fork()
        if pid == 0:
            time.sleep(0.5)
            os._exit(7)
        time.sleep(0.1)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert not stop.is_requested


SCRIPT = """
import os, signal, sys, time
from common import stopping
stopping.SAME_REQUEST_SECONDS = 0.3
first, second, pause, blocked = sys.argv[1:]
with stopping.StopRequest() as stop:
    if os.fork() == 0:  # sends the signals from outside, and unblocks the parent at last
        parent = os.getppid()
        time.sleep(0.1)
        os.kill(parent, getattr(signal, first))
        time.sleep(float(pause))
        os.kill(parent, getattr(signal, second))
        os._exit(0)
    if blocked == "blocked":
        import ctypes
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        for _ in range(2):  # the second time for ever, as in a collective that another process never joins
            libc.pthread_mutex_lock(mutex)
    time.sleep(0.9)
    print(stop.reason)
"""


def run_script(first: str, second: str, pause: float, blocked: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, first, second, str(pause), blocked]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGUSR1", "SIGUSR1")])
def test_signals_close_together_are_one_request(first: str, second: str) -> None:
    result = run_script(first, second, pause=0.05)
    assert (result.returncode, result.stdout) == (0, f"{first}\n"), result.stderr


def test_sigterm_that_sigusr1_announced_is_not_a_second_request() -> None:
    result = run_script("SIGUSR1", "SIGTERM", pause=0.5)
    assert (result.returncode, result.stdout) == (0, "SIGTERM\n"), result.stderr


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGTERM", "SIGINT"), ("SIGUSR1", "SIGUSR1")])
def test_a_second_request_leaves_at_once(first: str, second: str) -> None:
    result = run_script(first, second, pause=0.5)
    assert result.returncode == 128 + getattr(signal, second)
    assert result.stdout == ""
    assert "second signal" in result.stderr and "Traceback" not in result.stderr


def test_a_second_request_is_heard_inside_a_call_that_does_not_return() -> None:
    started = time.monotonic()
    result = run_script("SIGTERM", "SIGTERM", pause=0.5, blocked="blocked")
    assert result.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - started < 4
