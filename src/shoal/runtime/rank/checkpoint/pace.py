"""When the next save is due, from what saves cost and how often the job fails."""

from __future__ import annotations

import os
import time

from shoal.runtime.rank.checkpoint.interval import mtbf_s, steps_between

FIRST_STEPS = 10
"""From one save to the next while nothing is known of what they cost."""


class Pace:
    """Kept by every rank; rank 0 alone decides `next`, and tells the others. `every`: a fixed pace."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._due = 1
        self._run_s = 0.0
        self._began_s = self._last_s = time.monotonic()
        self._last_step = 0
        self.cost_s: float | None = None
        """How long the last save held training up."""
        self.written_s = 0.0
        """How long it then took in the background."""

    def begin(self, step: int, run_s: float) -> None:
        """Training starts or goes on from this step, after so many seconds in all. The first save is near."""
        self._due, self._last_step, self._run_s = step + 1, step, run_s
        self._began_s = self._last_s = time.monotonic()

    def resume(self, step: int) -> None:
        """A group goes on from this step with what its ranks have. Each of them must come to the same answer,
        the one that replaces a lost rank too, which knows nothing of the saves before.
        """
        self._due, self._last_step, self._last_s = step + FIRST_STEPS, step, time.monotonic()

    def is_due(self, step: int) -> bool:
        if self._every is not None:
            return step > 0 and step % self._every == 0
        return step >= self._due

    def set_due(self, step: int) -> None:
        self._due = step

    @property
    def run_s(self) -> float:
        """Seconds trained, over all attempts."""
        return self._run_s + time.monotonic() - self._began_s

    def next(self, step: int) -> int:
        """The step of the save after this one. Called once for each save."""
        now = time.monotonic()
        step_s = (now - self._last_s) / max(step - self._last_step, 1)
        self._last_s, self._last_step = now, step
        if self.cost_s is None:
            return step + FIRST_STEPS
        between = mtbf_s(num_nodes=_num_nodes(), failures=_failures(), run_s=self.run_s)
        return step + steps_between(
            cost_s=self.cost_s, written_s=self.written_s, mtbf_s=between, step_s=step_s
        )


def _num_nodes() -> int:
    return max(1, int(os.environ.get("GROUP_WORLD_SIZE", "1")))


def _failures() -> int:
    """Groups that were lost before this one."""
    return max(0, int(os.environ.get("SHOAL_EPOCH", "1")) - 1) + int(os.environ.get("SHOAL_GENERATION", "0"))
