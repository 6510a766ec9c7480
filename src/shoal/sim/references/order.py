"""Orders of a queue: smaller goes first, and of two alike the one that came first."""

from __future__ import annotations

from collections.abc import Callable
from math import log10

from shoal.sim.traces.job import TraceJob

Order = Callable[[TraceJob], float]


def first_come(job: TraceJob) -> float:
    return job.submitted_at


def shortest(job: TraceJob) -> float:
    """By the time asked for."""
    return job.planned_s


def shortest_in_truth(job: TraceJob) -> float:
    """By the run time, which nobody knows: a bound."""
    return job.run_s


def smallest_area(job: TraceJob) -> float:
    return job.planned_s * job.num_processors


def f1(job: TraceJob) -> float:
    """Carastan-Santos and de Camargo's first function (SC'17), a regression over simulated schedules.

    Its submit term is so heavy that late jobs wait behind early ones, mostly; times below 1 s count as 0.1.
    """
    return log10(job.planned_s or 0.1) * job.num_processors + 870 * log10(job.submitted_at or 0.1)
