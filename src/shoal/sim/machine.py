"""What jobs hold while they run. A machine refuses to be over-committed, whoever decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shoal.errors import Bug
from shoal.sim.traces.job import TraceJob


class Machine(Protocol):
    """A `place` is where a job runs, in the machine's words: the decider names it, the loop gives it back."""

    def take(self, job: TraceJob, place: Any) -> None: ...

    def give(self, job: TraceJob, place: Any) -> None: ...


class Processors:
    """A count of processors, all alike: the machine of the Parallel Workloads Archive."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity

    def take(self, job: TraceJob, place: None) -> None:
        if job.num_processors > self.free:
            raise Bug(
                f"job {job.job_id} was started on {job.num_processors} processors; {self.free} are free"
            )
        self.free -= job.num_processors

    def give(self, job: TraceJob, place: None) -> None:
        self.free += job.num_processors


Slots = Sequence[tuple[int, int]]
"""Nodes by index, and how many GPUs of each."""


class GpuNodes:
    """Nodes with whole GPUs."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self.gpus = tuple(gpus)
        self.free = list(gpus)

    def take(self, job: TraceJob, place: Slots) -> None:
        if sum(count for _, count in place) != job.num_gpus:
            raise Bug(f"job {job.job_id} asks for {job.num_gpus:g} GPUs and was given {place}")
        for node, count in place:
            if count > self.free[node]:
                raise Bug(
                    f"job {job.job_id} was given {count} GPUs of node {node}; {self.free[node]} are free"
                )
            self.free[node] -= count

    def give(self, job: TraceJob, place: Slots) -> None:
        for node, count in place:
            self.free[node] += count
