"""Reports: waits, slowdowns and completion times of the jobs, and how busy the machine was.

For all jobs, and for each project.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import SpecError
from shoal.sim.fairness import Fairness, fairness
from shoal.sim.loop import Schedule
from shoal.sim.traces.trace import TraceJob
from shoal.sim.workload import CountedDevice, SimulationOutcome, devices_of_node

TAU_S = 10.0
"""A shorter job counts as this long: a wait of a minute is no catastrophe for a job of a second."""


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
    """The measures of a schedule. `msgspec.json.encode` makes them JSON, `rows` a table."""

    num_jobs: int
    wait_s: Distribution
    slowdown: Distribution
    """Bounded: (wait + run) / max(run, 10 s), at least 1."""
    completion_s: Distribution
    """From submission to end."""
    utilisation: float
    """Part of the capacity, from the first submission to the last end."""

    def rows(self) -> list[list[str]]:
        """A header, then a row for each distribution."""
        named = {"wait s": self.wait_s, "bounded slowdown": self.slowdown, "completion s": self.completion_s}
        lines = [
            [name, *(f"{value:,.2f}" for value in msgspec.structs.astuple(distribution))]
            for name, distribution in named.items()
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
    """The time from submission to end, divided by the run time."""
    bounded: NDArray[np.float64] = np.maximum(1.0, completion_s / np.maximum(run_s, TAU_S))
    return bounded


def measure(
    schedule: Schedule, capacity: float, *, amount: Callable[[TraceJob], float] = processors
) -> Measures:
    """Measure a schedule with at least one job. `amount` is the part of the capacity that a job holds."""
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


Floats = NDArray[np.float64]


class WaitStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Waits and times of a set of jobs. Refused jobs are only counted."""

    num_jobs: int
    wait_s: Distribution
    """From submission to the first start."""
    slowdown: Distribution
    """Bounded: completion / max(run, 10 s), at least 1."""
    completion_s: Distribution
    """From submission to end, including all work that was lost and repeated."""
    device_hours: float
    """Device-hours held, useful or not."""


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome in numbers. `msgspec.json.encode` makes it JSON. Parts are of the capacity, from first
    submission to last end.
    """

    device: CountedDevice
    capacity: float
    span_s: float
    overall: WaitStatistics
    projects: dict[str, WaitStatistics]
    num_refused: int
    """Jobs that the nodes could never hold."""
    utilisation: float
    """Devices held, as a part of the capacity."""
    goodput: float
    """Devices held for work that was not lost: utilisation without lost work, checkpoints and restarts."""
    lost_hours: float
    """Device-hours of work lost since the last checkpoint."""
    overhead_hours: float
    """Device-hours of writing and reading checkpoints."""
    num_interrupted: int
    num_failures: int
    user_fairness: Fairness
    project_fairness: Fairness


def build_report(outcome: SimulationOutcome) -> SimulationReport:
    """Summarise an outcome. Projects are entitled by their own weights, whatever is above them. `SpecError`:
    no job could run.
    """
    jobs = outcome.workload.jobs
    if len(outcome.refused) == len(jobs):
        devices = f"{outcome.workload.capacity:,} {outcome.workload.device}s in all"
        raise SpecError(
            f"no job fits on these nodes, {devices}",
            hint="take more or larger ones: see `shoal whatif --help`",
        )
    times = _Times(outcome)
    span_s = float(np.nanmax(times.ends) - jobs[0].submitted_at)
    capacity = outcome.workload.capacity
    there = capacity_seconds(outcome, jobs[0].submitted_at, jobs[0].submitted_at + span_s) or 1.0
    projects = [job.project for job in jobs]
    weights = {view.name: view.weight for view in outcome.workload.projects}
    of_project = np.array(projects)
    return SimulationReport(
        device=outcome.workload.device,
        capacity=capacity,
        span_s=span_s,
        overall=times.of(~np.isnan(times.ends)),
        projects={
            name: times.of(chosen)
            for name in sorted(set(projects))
            if (chosen := (of_project == name) & ~np.isnan(times.ends)).any()
        },
        num_refused=len(outcome.refused),
        utilisation=float(times.held.sum()) / there,
        goodput=outcome.useful / there,
        lost_hours=outcome.lost / 3600,
        overhead_hours=outcome.overhead / 3600,
        num_interrupted=outcome.num_interrupted,
        num_failures=outcome.num_failures,
        user_fairness=fairness(outcome, [job.user or job.project for job in jobs]),
        project_fairness=fairness(outcome, projects, weights),
    )


def capacity_seconds(outcome: SimulationOutcome, begin: float, end: float) -> float:
    """Device-seconds of all existing nodes, open or not, between two moments."""
    workload = outcome.workload
    there = {node.name: devices_of_node(node, workload.device) for node in workload.nodes}
    total, since = 0.0, begin
    for change in workload.changes:
        at = min(max(change.at, begin), end)
        total += sum(there.values()) * (at - since)
        since = at
        there[change.name] = 0.0 if change.view is None else devices_of_node(change.view, workload.device)
    return total + sum(there.values()) * (end - since)


class _Times:
    """The columns of an outcome, one row per job."""

    def __init__(self, outcome: SimulationOutcome) -> None:
        jobs, stays = outcome.workload.jobs, outcome.holdings
        submitted = np.array([job.submitted_at for job in jobs], dtype=float)
        run = np.array([job.run_s for job in jobs], dtype=float)
        self.ends: Floats = np.array(outcome.ends)
        self.waits: Floats = np.array(outcome.starts) - submitted
        self.completions: Floats = self.ends - submitted
        self.slowdowns = bounded_slowdowns(self.completions, run)
        seconds = np.array(stays.devices) * (np.array(stays.end) - np.array(stays.begin))
        self.held: Floats = np.zeros(len(jobs))
        np.add.at(self.held, np.array(stays.job), seconds)

    def of(self, chosen: NDArray[np.bool_]) -> WaitStatistics:
        return WaitStatistics(
            num_jobs=int(chosen.sum()),
            wait_s=Distribution.of(self.waits[chosen]),
            slowdown=Distribution.of(self.slowdowns[chosen]),
            completion_s=Distribution.of(self.completions[chosen]),
            device_hours=float(self.held[chosen].sum()) / 3600,
        )
