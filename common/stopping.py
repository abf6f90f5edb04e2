"""Asking a run to stop: signals and the time limit are noticed at once and acted on at a step boundary."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from types import TracebackType

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A batch system reaches a worker directly and through the launcher, a terminal with SIGINT and the launcher's SIGTERM.
SAME_REQUEST_SECONDS = 2.0

_received: signal.Signals | None = None
_is_announced = False  # by SIGUSR1 before there was a `StopRequest`


def await_announcement() -> None:
    """From now on SIGUSR1 ends nothing, and a `StopRequest` that is opened later begins with it.

    A batch system may announce its time limit while data are prepared or a model is loaded.
    """

    def remember(signum: int, frame: object) -> None:
        global _is_announced
        _is_announced = True

    signal.signal(signal.SIGUSR1, remember)


def received_signal() -> signal.Signals | None:
    """The signal that asked this process to stop, if one has."""
    return _received


class StopRequest:
    """Whether this process has been asked to stop, by SIGTERM, SIGUSR1 or SIGINT or by the time limit.

    Signals within 2 seconds of the first are the same request. A later one ends the process at once, also while it
    waits in a collective; only SIGTERM after SIGUSR1 does not, because batch systems announce the one by the other.
    Open it in the main thread; what the signals did before comes back at the end.
    """

    def __init__(self, max_run_seconds: float | None = None) -> None:
        self._deadline = None if max_run_seconds is None else psutil.Process().create_time() + max_run_seconds
        self._signal: signal.Signals | None = None
        self._signal_at = 0.0

    def __enter__(self) -> "StopRequest":
        # Python runs a handler between two instructions of the main thread, which may be minutes inside a collective.
        # The byte that stands for a signal is written at once, and a thread of its own reads it.
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous = {signum: signal.signal(signum, _do_nothing) for signum in SIGNALS}
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # Data-loading processes get the job's signals too: they live on without telling, until this process has saved.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=self._watch, args=[reader], name="stop_request", daemon=True).start()
        if _is_announced:
            self._receive(signal.SIGUSR1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        os.close(self._writer)  # which ends the thread

    @property
    def is_requested(self) -> bool:
        """Whether to stop at the next step boundary; to be agreed on with the other processes."""
        return self._signal is not None or (self._deadline is not None and time.time() > self._deadline)

    @property
    def reason(self) -> str:
        """What asked for the stop, in words; another process may have been asked alone."""
        if self._signal is not None:
            return self._signal.name
        return "--max_run_seconds" if self.is_requested else "a signal to another process"

    def _watch(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._receive(signal.Signals(number))
        os.close(reader)

    def _receive(self, signum: signal.Signals) -> None:
        global _received
        now = time.monotonic()
        was_announced = self._signal == signal.SIGUSR1 and signum == signal.SIGTERM
        if self._signal is None or was_announced:
            self._signal, self._signal_at = signum, now
            _received = signum
        elif now - self._signal_at > SAME_REQUEST_SECONDS:
            os.write(2, b"second signal: leaving at once; the last complete checkpoint is the one to resume from\n")
            os._exit(128 + signum)


def _do_nothing(signum: int, frame: object) -> None:
    """A handler has to be there, or the signal's default action ends the process."""


def signal_with_parent(signum: signal.Signals) -> None:
    """Have Linux send this process the signal when the one that started it ends, however that is."""
    parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(parent_death_signal, signum)


def end_forks_with_this_process() -> None:
    """Have Linux kill whatever this process forks from now on when it ends, in whatever way.

    The pools of `datasets` wait for ever for a process that was killed.
    """
    if sys.platform != "linux":
        return
    parent = os.getpid()

    def note_parent() -> None:
        nonlocal parent
        parent = os.getpid()

    def die_with_parent() -> None:
        signal_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # gone already, which sends nothing
            os._exit(1)

    os.register_at_fork(before=note_parent, after_in_child=die_with_parent)


def leave_with_parent() -> None:
    """End this process, of a pool, when the one that started it has ended, in whatever way."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
