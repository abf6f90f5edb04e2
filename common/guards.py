"""What is watched while training goes on."""

import statistics
from collections import deque

NUM_STEPS = 50
MIN_STEPS = 10


class SpikeGuard:
    """Compares each step's loss and gradient norm with the median of up to NUM_STEPS steps before, from MIN_STEPS on.

    Steps without a target, whose loss and gradient are 0, are not among them. It begins anew with each start of a run.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._history: dict[str, deque[float]] = {
            "loss": deque(maxlen=NUM_STEPS),
            "gradient norm": deque(maxlen=NUM_STEPS),
        }

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Take note of a step; says what is a spike in it, if anything."""
        found = []
        for (name, history), value in zip(self._history.items(), (loss, grad_norm), strict=True):
            if len(history) >= MIN_STEPS and value > self.factor * (median := statistics.median(history)):
                found.append(
                    f"{name} {value:.4g} is {value / median:.1f} times the median of {len(history)} steps before"
                )
            if value > 0:
                history.append(value)
        return " and ".join(found) or None
