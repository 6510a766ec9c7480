"""What the jobs of a schedule got (waits, slowdowns, completion times), and how busy the machine was."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.sim.loop import Schedule
from shoal.sim.traces.job import TraceJob

TAU_S = 10.0
"""A job shorter than this counts as this long: a wait of a minute is no catastrophe for a job of a second."""


class Distribution(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p95: float
    p99_9: float
    max: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Distribution:
        """Percentiles by nearest rank: each is a value that occurred."""
        p50, p95, p99_9 = np.quantile(values, [0.5, 0.95, 0.999], method="inverted_cdf")
        return cls(float(values.mean()), float(p50), float(p95), float(p99_9), float(values.max()))


class Measures(msgspec.Struct, frozen=True):
    """`msgspec.json.encode` makes it JSON, `rows` a table."""

    num_jobs: int
    wait_s: Distribution
    slowdown: Distribution
    """Bounded: (wait + run) / max(run, 10 s), at least 1."""
    completion_s: Distribution
    """From submission to end."""
    utilisation: float
    """Of the capacity, from the first submission to the last end."""

    def rows(self) -> list[list[str]]:
        """A header, then a line for each distribution."""
        named = {"wait s": self.wait_s, "bounded slowdown": self.slowdown, "completion s": self.completion_s}
        lines = [
            [name, *(f"{value:,.2f}" for value in msgspec.structs.astuple(one))]
            for name, one in named.items()
        ]
        return [["", "mean", "p50", "p95", "p99.9", "max"], *lines]


def processors(job: TraceJob) -> float:
    return job.num_processors


def gpus(job: TraceJob) -> float:
    return job.num_gpus


def slowdowns(schedule: Schedule) -> NDArray[np.float64]:
    """The bounded slowdown of each job."""
    run = np.array([job.run_s for job in schedule.jobs], dtype=float)
    return bounded_slowdowns(_waits(schedule) + run, run)


def bounded_slowdowns(completion_s: NDArray[np.float64], run_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many times its run time a job took from submission to end."""
    bounded: NDArray[np.float64] = np.maximum(1.0, completion_s / np.maximum(run_s, TAU_S))
    return bounded


def measure(
    schedule: Schedule, capacity: float, *, amount: Callable[[TraceJob], float] = processors
) -> Measures:
    """`amount` is what a job holds of the capacity. The schedule has at least one job."""
    run = np.array([job.run_s for job in schedule.jobs], dtype=float)
    held = np.array([amount(job) for job in schedule.jobs], dtype=float)
    waits = _waits(schedule)
    span = float((np.array(schedule.starts) + run).max() - schedule.jobs[0].submitted_at)
    return Measures(
        num_jobs=len(schedule.jobs),
        wait_s=Distribution.of(waits),
        slowdown=Distribution.of(slowdowns(schedule)),
        completion_s=Distribution.of(waits + run),
        utilisation=float(held @ run) / (capacity * span) if span else 0.0,
    )


def _waits(schedule: Schedule) -> NDArray[np.float64]:
    submitted = np.array([job.submitted_at for job in schedule.jobs], dtype=float)
    waits: NDArray[np.float64] = np.array(schedule.starts, dtype=float) - submitted
    return waits
