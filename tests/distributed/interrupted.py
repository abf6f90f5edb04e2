"""Runs a script and does something to it at a chosen moment: `interrupted.py MOMENT ACTION SCRIPT FLAGS...`.

MOMENT is `kind:number:rank`: the number-th event of that kind in the process of that rank. Kinds:

- `step`: a forward pass in training begins;
- `file`: Python is about to open, flush, rename or remove something in the checkpoints' folder;
- `prune`: the same, but of an older checkpoint that is being removed;
- `evaluation`: an evaluation asks for its next batch.

ACTION is `kill` (SIGKILL to all ranks and their children), a signal's name (to all ranks; `NAME!` to this one alone),
or `raise` (an exception in this rank). `after=SECONDS` may follow the rank: so long after the event.
"""

import os
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import psutil
from torch import nn

from common.data import EvalBatches

LAUNCHER = os.getppid()
moment, action, *sys.argv = sys.argv[1:]
wanted_kind, wanted_number, wanted_rank, *delay = moment.split(":")
counts: Counter[str] = Counter()


def act() -> None:
    if os.getppid() != LAUNCHER:  # it has gone, and its ranks are going
        return
    ranks = [process.pid for process in psutil.Process(LAUNCHER).children()]
    if action == "kill":
        for pid in sorted(ranks, key=lambda pid: pid == os.getpid()):  # this one last
            os.killpg(pid, signal.SIGKILL)
    elif action == "raise":
        raise RuntimeError("raised on purpose")
    else:
        signum = getattr(signal, action.rstrip("!"))
        for pid in [os.getpid()] if action.endswith("!") else ranks:
            os.kill(pid, signum)
        time.sleep(0.1)  # the other ranks have theirs before this one goes on


def event(kind: str) -> None:
    counts[kind] += 1
    if kind == wanted_kind and counts[kind] == int(wanted_number):
        if delay:
            threading.Timer(float(delay[0].removeprefix("after=")), act).start()
        else:
            act()


def watch_files(name: str, args: tuple[Any, ...]) -> None:
    if name in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        path = str(args[0])
        if "/checkpoints/" in path:
            event("prune" if ".old.tmp" in path else "file")


def watch_flushes(descriptor: int, flush: Any = os.fsync) -> None:
    event("file")
    flush(descriptor)


def watch_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if self.training and "ForConditionalGeneration" in type(self).__name__:
        event("step")
    return call(self, *args, **kwargs)


def watch_evaluation(self: EvalBatches) -> Any:
    for batch in batches(self):
        event("evaluation")
        yield batch


if wanted_rank == os.environ.get("RANK", "0"):
    call, batches = nn.Module.__call__, EvalBatches.__iter__
    sys.addaudithook(watch_files)
    os.fsync = watch_flushes  # type: ignore[assignment]
    nn.Module.__call__ = watch_forward  # type: ignore[method-assign]
    EvalBatches.__iter__ = watch_evaluation  # type: ignore[method-assign]
runpy.run_path(sys.argv[0], run_name="__main__")
