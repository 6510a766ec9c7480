"""What a job is given at submission, and keeps: how long it is expected to run, and when it is due.

Learned from jobs that have ended, as the log goes; never from the run time of the job itself.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from shoal.sim.workload import WorkJob


class Stamp(NamedTuple):
    """None: nothing is known, and the scheduler takes what is safe."""

    expected_s: float | None = None
    due_at: float | None = None


class Stamper(Protocol):
    def stamp(self, job: WorkJob, now: float) -> Stamp:
        """Asked once for each job, when it is submitted."""

    def ended(self, job: WorkJob, now: float) -> None:
        """It ran to its end: from now on its `run_s` is known."""


class LimitStamper:
    """Expects the limit and learns nothing: what a cluster knows before anything has ended."""

    def stamp(self, job: WorkJob, now: float) -> Stamp:
        return Stamp(expected_s=job.request.time_limit_s)

    def ended(self, job: WorkJob, now: float) -> None:
        pass
