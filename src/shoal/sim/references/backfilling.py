"""Backfilling, and orders of a queue: the smaller key goes first, and of two equal keys the earlier job.

EASY: the head of the queue has a reservation, and other jobs may pass it if they do not delay it. Lifka's
rule (1995): a job may start now if it is expected to end by the head's reservation, or if it leaves enough
processors for the head at that moment. With `first_come` for both orders this is the scheduler of the SP2s.

The scheduler inside RLScheduler's environment (Zhang et al., SC'20) has its own rules. The head is chosen
from the jobs that wait at that moment and kept until it starts, whatever arrives. Its reservation is computed
once, when it first does not fit. Other jobs pass it in order of arrival if they end *before* it, and there is
no rule of spare processors. Run it with `EventBatching.ONE_BY_ONE`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from math import log10

from shoal.sim.loop import Processors, SimulationState, planned
from shoal.sim.traces.trace import TraceJob

Order = Callable[[TraceJob], float]


def first_come(job: TraceJob) -> float:
    return job.submitted_at


def shortest(job: TraceJob) -> float:
    """By the requested time."""
    return job.planned_s


def shortest_in_truth(job: TraceJob) -> float:
    """By the true run time, which no scheduler knows: a bound."""
    return job.run_s


def smallest_area(job: TraceJob) -> float:
    return job.planned_s * job.num_processors


def f1(job: TraceJob) -> float:
    """Carastan-Santos and de Camargo's first function (SC'17), a regression over simulated schedules.

    Its submit term is so heavy that late jobs mostly wait behind early ones. Times below 1 s count as 0.1.
    """
    return log10(job.planned_s or 0.1) * job.num_processors + 870 * log10(job.submitted_at or 0.1)


class OrderedQueue:
    """Waiting jobs in order, as (sort key, index)."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.entries: list[tuple[float, int]] = []

    def add(self, job: TraceJob, index: int) -> None:
        insort(self.entries, (self._order(job), index))

    def remove(self, job: TraceJob, index: int) -> None:
        del self.entries[bisect_left(self.entries, (self._order(job), index))]


class Easy:
    """Start in `order` while the head fits, then try the other jobs in the order of `backfill`.

    `expect` is the expected run time that the loop uses, and never below the truth.
    """

    def __init__(
        self,
        order: Order = first_come,
        backfill: Order = first_come,
        *,
        expect: Callable[[TraceJob], float] = planned,
    ) -> None:
        self._heads = OrderedQueue(order)
        self._others = OrderedQueue(backfill)
        self._expect = expect

    def decide(self, state: SimulationState[Processors]) -> Iterator[tuple[int, None]]:
        jobs, machine = state.jobs, state.machine
        for index in state.arrived:
            self._heads.add(jobs[index], index)
            self._others.add(jobs[index], index)
        heads = self._heads.entries
        while heads and jobs[heads[0][1]].num_processors <= machine.free:
            yield from self._start(state, heads[0][1])
        if heads and machine.free:
            yield from self._pass(state, heads[0][1])

    def _pass(self, state: SimulationState[Processors], head: int) -> Iterator[tuple[int, None]]:
        """The jobs that may pass the head, which does not fit."""
        jobs, machine, now, expect = state.jobs, state.machine, state.now, self._expect
        reserved_at, spare = reservation(state, jobs[head].num_processors)
        for _, index in self._others.entries.copy():
            job = jobs[index]
            size = job.num_processors
            if size > machine.free or index == head:
                continue
            if now + expect(job) > reserved_at:
                if size > spare:
                    continue
                spare -= size
            yield from self._start(state, index)
            if not machine.free:
                return

    def _start(self, state: SimulationState[Processors], index: int) -> Iterator[tuple[int, None]]:
        self._heads.remove(state.jobs[index], index)
        self._others.remove(state.jobs[index], index)
        yield index, None


def reservation(state: SimulationState[Processors], size: int) -> tuple[float, int]:
    """When `size` processors are expected to be free together, and how many more are free then."""
    free = state.machine.free
    reserved_at = state.now
    for expected, index in state.releases:
        if free >= size and expected > reserved_at:
            break
        free += state.jobs[index].num_processors
        reserved_at = expected
    return reserved_at, free - size


class FixedHead:
    def __init__(self, order: Order, *, is_backfilling: bool) -> None:
        self._order = order
        self._is_backfilling = is_backfilling
        self._head: int | None = None
        self._reserved_at: float | None = None

    def decide(self, state: SimulationState[Processors]) -> Iterator[tuple[int, None]]:
        jobs, machine = state.jobs, state.machine
        while state.waiting:
            if self._head is None:
                self._head = min(state.waiting, key=lambda index: (self._order(jobs[index]), index))
            size = jobs[self._head].num_processors
            if size > machine.free:
                if self._is_backfilling:
                    yield from self._pass(state, self._head, size)
                return
            yield self._head, None
            self._head = self._reserved_at = None

    def _pass(self, state: SimulationState[Processors], head: int, size: int) -> Iterator[tuple[int, None]]:
        if self._reserved_at is None:
            self._reserved_at, _ = reservation(state, size)
        for index, job in list(state.waiting.items()):
            ends_before = state.now + job.planned_s < self._reserved_at
            if index != head and ends_before and job.num_processors <= state.machine.free:
                yield index, None
