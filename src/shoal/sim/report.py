"""An outcome in numbers: for all jobs, and for each project."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.errors import SpecError
from shoal.sim.fairness import Fairness, fairness
from shoal.sim.measure import Distribution, bounded_slowdowns
from shoal.sim.outcome import Outcome
from shoal.sim.workload import Device, devices_of_node

Floats = NDArray[np.float64]


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of jobs got. Refused jobs got nothing and are only counted."""

    num_jobs: int
    wait_s: Distribution
    """From submission to the first start."""
    slowdown: Distribution
    """Bounded: completion / max(run, 10 s), at least 1."""
    completion_s: Distribution
    """From submission to end, with everything that was lost and done again."""
    device_hours: float
    """Held, whether it was of use or not."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`msgspec.json.encode` makes it JSON. Shares are of the capacity, from first submission to last end."""

    device: Device
    capacity: float
    span_s: float
    overall: Waits
    projects: dict[str, Waits]
    num_refused: int
    """Jobs that the nodes could never hold."""
    utilisation: float
    """Devices held."""
    goodput: float
    """Devices held for work that was not lost: utilisation less lost work, checkpoints and restarts."""
    lost_hours: float
    """Device-hours of work gone since the last checkpoint."""
    overhead_hours: float
    """Device-hours of writing and reading checkpoints."""
    num_interrupted: int
    num_failures: int
    user_fairness: Fairness
    project_fairness: Fairness


def report(outcome: Outcome) -> Report:
    """Projects are entitled by their own weights, whatever is above them. `SpecError`: no job could run."""
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
    return Report(
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


def capacity_seconds(outcome: Outcome, begin: float, end: float) -> float:
    """Device-seconds of all nodes that there were, open or not, between two moments."""
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
    """The columns of an outcome, one row a job."""

    def __init__(self, outcome: Outcome) -> None:
        jobs, stays = outcome.workload.jobs, outcome.stays
        submitted = np.array([job.submitted_at for job in jobs], dtype=float)
        run = np.array([job.run_s for job in jobs], dtype=float)
        self.ends: Floats = np.array(outcome.ends)
        self.waits: Floats = np.array(outcome.starts) - submitted
        self.completions: Floats = self.ends - submitted
        self.slowdowns = bounded_slowdowns(self.completions, run)
        seconds = np.array(stays.devices) * (np.array(stays.end) - np.array(stays.begin))
        self.held: Floats = np.zeros(len(jobs))
        np.add.at(self.held, np.array(stays.job), seconds)

    def of(self, chosen: NDArray[np.bool_]) -> Waits:
        return Waits(
            num_jobs=int(chosen.sum()),
            wait_s=Distribution.of(self.waits[chosen]),
            slowdown=Distribution.of(self.slowdowns[chosen]),
            completion_s=Distribution.of(self.completions[chosen]),
            device_hours=float(self.held[chosen].sum()) / 3600,
        )
