"""What a job is given at submission, and keeps: how long it is expected to run, and when it is due.

Learned from jobs that have ended, as the log goes; never from the run time of the job itself.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from shoal.model.request import Request
from shoal.scheduler.due import due_at
from shoal.scheduler.forecast import Ask, Forecast
from shoal.sim.workload import Device, WorkJob, Workload


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


class ForecastStamper:
    """As the control plane does it: what the forecast expects, and when that makes the job due."""

    def __init__(self, workload: Workload) -> None:
        self._forecast = Forecast()
        self._device = workload.device
        self._capacity = workload.capacity or 1.0

    def stamp(self, job: WorkJob, now: float) -> Stamp:
        expectation = self._forecast.expect(_ask(job))
        share = devices_asked(job.request, self._device) / self._capacity
        return Stamp(expectation.expected_s, due_at(job.submitted_at, expectation, share))

    def ended(self, job: WorkJob, now: float) -> None:
        self._forecast.note(_ask(job), job.run_s)


def devices_asked(request: Request, device: Device) -> float:
    """The least it can start with."""
    if device is Device.CPU:
        return request.min_nodes * request.cpus
    return request.min_nodes * request.gpus.count if request.gpus else 0.0


def _ask(job: WorkJob) -> Ask:
    request = job.request
    gpus = request.gpus.count if request.gpus else 0
    return Ask(
        user=job.user or None,
        project=job.project,
        name=job.name or None,
        shape=(request.min_nodes, request.cpus, gpus),
        limit_s=request.time_limit_s,
    )
