"""A loop that moves the clock from event to event, and asks a decider at each which jobs start.

A decider sees the `SimulationState` and names starts. It is the only difference between a reference policy
and the production scheduler. The loop knows run times; the decider sees only expected ends. A machine holds
what running jobs use, and refuses to be over-committed, whatever the decider says.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from shoal.errors import Bug
from shoal.sim.traces.trace import TraceJob


class SimulatedMachine(Protocol):
    """A `place` is where a job runs, in the machine's own terms: the decider names it, the loop gives it
    back.
    """

    def take(self, job: TraceJob, place: Any) -> None: ...

    def give(self, job: TraceJob, place: Any) -> None: ...


class Processors:
    """A count of equal processors: the machine of the Parallel Workloads Archive."""

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


M = TypeVar("M", bound=SimulatedMachine)


class EventBatching(StrEnum):
    """How many events a decider sees at once."""

    BY_INSTANT = "by instant"  # everything that happens at one moment, then one decision
    ONE_BY_ONE = "one by one"  # an arrival before an end of the same moment, a decision after each


class SimulationState(Generic[M]):
    """What is known now. Jobs are named by their index in `jobs`, which is the order of arrival."""

    def __init__(self, jobs: Sequence[TraceJob], machine: M) -> None:
        self.jobs = jobs
        self.machine = machine
        self.now = -math.inf
        self.waiting: dict[int, TraceJob] = {}
        """In order of arrival."""
        self.releases: list[tuple[float, int]] = []
        """The expected end of every running job, the earliest first."""
        self.arrived: list[int] = []
        """Arrivals since the last decision, like `ended`: for deciders that keep a queue of their own."""
        self.ended: list[int] = []


class Decider(Protocol[M]):
    def decide(self, state: SimulationState[M]) -> Iterable[tuple[int, Any]]:
        """The jobs that start now, and the place of each on the machine.

        The loop applies each start before it asks for the next, so a generator sees its own starts in the
        state.
        """


class Schedule(msgspec.Struct, frozen=True):
    jobs: Sequence[TraceJob]
    starts: Sequence[float]
    """When each job started, by index."""


def planned(job: TraceJob) -> float:
    return job.planned_s


def true_run(job: TraceJob) -> float:
    return job.run_s


def simulate(
    jobs: Sequence[TraceJob],
    machine: M,
    decider: Decider[M],
    *,
    expect: Callable[[TraceJob], float] = planned,
    events: EventBatching = EventBatching.BY_INSTANT,
) -> Schedule:
    """Run every job to its end on an empty machine. Jobs must be in order of submission.

    `Bug`: the decider starts a job that does not wait or does not fit, or leaves a job for ever.
    """
    run = _Run(jobs, machine, expect)
    advance = run.one_event if events is EventBatching.ONE_BY_ONE else run.one_instant
    while advance():
        for index, place in decider.decide(run.state):
            run.start(index, place)
        run.state.arrived.clear()
        run.state.ended.clear()
    if run.state.waiting:
        index, job = next(iter(run.state.waiting.items()))
        raise Bug(f"{len(run.state.waiting)} jobs never start, the first is {job.job_id}", index=index)
    return Schedule(jobs, run.starts)


class _Run(Generic[M]):
    """The clock, the calendar of true ends, and the changes to the state."""

    def __init__(self, jobs: Sequence[TraceJob], machine: M, expect: Callable[[TraceJob], float]) -> None:
        self.state = SimulationState(jobs, machine)
        self.starts = [math.nan] * len(jobs)
        self._expect = expect
        self._num_arrived = 0
        self._num_started = 0
        self._ends: list[tuple[float, int, int, Any]] = []
        """(end, number of the start, index, place). If two end together, the earlier start goes first."""
        self._expected_ends: dict[int, float] = {}

    def one_event(self) -> bool:
        """Process the next arrival or end. False if none is left."""
        arrival, end = self._next_arrival(), self._next_end()
        if arrival == end == math.inf:
            return False
        self.state.now = min(arrival, end)
        if arrival <= end:
            self._arrive()
        else:
            self._end()
        return True

    def one_instant(self) -> bool:
        """Process everything at the next moment with an event. False if none is left."""
        now = min(self._next_arrival(), self._next_end())
        if now == math.inf:
            return False
        self.state.now = now
        while self._next_end() == now:
            self._end()
        while self._next_arrival() == now:
            self._arrive()
        return True

    def start(self, index: int, place: Any) -> None:
        state = self.state
        job = state.waiting.pop(index, None)
        if job is None:
            raise Bug(f"job {index} was started and does not wait", now=state.now)
        state.machine.take(job, place)
        self.starts[index] = state.now
        self._num_started += 1
        heappush(self._ends, (state.now + job.run_s, self._num_started, index, place))
        expected = self._expected_ends[index] = state.now + self._expect(job)
        insort(state.releases, (expected, index))

    def _next_arrival(self) -> float:
        jobs = self.state.jobs
        return jobs[self._num_arrived].submitted_at if self._num_arrived < len(jobs) else math.inf

    def _next_end(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def _arrive(self) -> None:
        index = self._num_arrived
        if index and self.state.jobs[index].submitted_at < self.state.jobs[index - 1].submitted_at:
            raise Bug(f"job {index} was submitted before the one ahead of it: sort the trace first")
        self.state.waiting[index] = self.state.jobs[index]
        self.state.arrived.append(index)
        self._num_arrived += 1

    def _end(self) -> None:
        state = self.state
        _, _, index, place = heappop(self._ends)
        state.machine.give(state.jobs[index], place)
        del state.releases[bisect_left(state.releases, (self._expected_ends.pop(index), index))]
        state.ended.append(index)
