"""How often to save: where what saving costs and what a failure loses are the least together. Pure.

When the next save is due, from what saves cost and how often the job fails.
"""

from __future__ import annotations

import math
import os
import time

from msgspec.structs import replace

from shoal.runtime.rank.checkpoint.manifest import IntervalDecision, IntervalReason

FAILURES_PER_NODE_DAY = 6.5e-3
"""Of a node with eight A100s, over eleven months of a large research cluster: arXiv:2410.21680."""
DAY_S = 86400.0


def young_daly_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that each hold it up for `cost_s`, with so long between failures.

    Young's first order: losing half an interval for each failure costs as much as saving does. Exact enough
    while the cost is far below the time between failures.
    """
    return math.sqrt(2.0 * cost_s * mtbf_s)


def expected_mtbf_s(*, num_nodes: int, failures: int, run_s: float) -> float:
    """Expected seconds between failures: the field's rate, weighed as one failure seen, and the job's own."""
    expected_s = DAY_S / (FAILURES_PER_NODE_DAY * num_nodes)
    return (expected_s + run_s) / (1 + failures)


def steps_between(*, cost_s: float, written_s: float, mtbf_s: float, step_s: float) -> int:
    """Whole steps from one save to the next, at least one.

    `written_s`: how long a save goes on in the background; the next one does not begin before it is done.
    """
    wanted_s = max(young_daly_s(cost_s, mtbf_s), written_s)
    return max(1, math.ceil(wanted_s / max(step_s, 1e-6)))


INTERVAL = "SHOAL_CHECKPOINT_INTERVAL_S"
"""The job's `checkpoint.interval`, which overrides the program's own setting."""

FIRST_STEPS = 10
"""From one save to the next while nothing is known of what they cost."""


class SaveSchedule:
    """Kept by every rank; rank 0 alone decides `next`, and tells the others. `every`: a fixed pace."""

    def __init__(self, every: int | None) -> None:
        self._interval_s = float(os.environ.get(INTERVAL) or 0.0)
        self._every = every if not self._interval_s else None
        self._due = 1
        self._run_s = 0.0
        self._began_s = self._last_s = time.monotonic()
        self._last_step = 0
        self.cost_s: float | None = None
        """How long the last save held training up."""
        self.written_s = 0.0
        """How long it then took in the background."""
        self.decision: IntervalDecision | None = None
        """What `next` last rested on."""

    def begin(self, step: int, run_s: float) -> None:
        """Start or continue training at this step, after this many seconds in total. The first save comes
        soon.
        """
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

    def plan_next(self, step: int) -> int:
        """The step of the save after this one. Called once for each save."""
        now = time.monotonic()
        step_s = (now - self._last_s) / max(step - self._last_step, 1)
        self._last_s, self._last_step = now, step
        self.decision = self._decide(step_s)
        return step + self.decision.steps

    def _decide(self, step_s: float) -> IntervalDecision:
        decision = IntervalDecision(
            reason=IntervalReason.FIRST,
            steps=FIRST_STEPS,
            step_s=step_s,
            cost_s=self.cost_s,
            written_s=self.written_s,
        )
        if self._every is not None:
            return replace(decision, reason=IntervalReason.EVERY, steps=self._every)
        if self._interval_s:
            wanted_s = max(self._interval_s, self.written_s)
            steps = max(1, round(wanted_s / max(step_s, 1e-6)))
            return replace(decision, reason=IntervalReason.INTERVAL, steps=steps, interval_s=self._interval_s)
        if self.cost_s is None:
            return decision
        between = expected_mtbf_s(num_nodes=_num_nodes(), failures=_failures(), run_s=self.run_s)
        steps = steps_between(cost_s=self.cost_s, written_s=self.written_s, mtbf_s=between, step_s=step_s)
        return replace(decision, reason=IntervalReason.COST, steps=steps, mtbf_s=between)


def _num_nodes() -> int:
    return max(1, int(os.environ.get("GROUP_WORLD_SIZE", "1")))


def _failures() -> int:
    """Groups that were lost before this one."""
    return max(0, int(os.environ.get("SHOAL_EPOCH", "1")) - 1) + int(
        os.environ.get("SHOAL_RENDEZVOUS_ROUND", "0")
    )
