"""EASY backfilling: the head of the queue has a reservation, others may pass it if they do not delay it.

Lifka's rule (1995): a job may start now if it is expected to end by the head's reservation, or if it leaves
enough processors for the head at that moment. With `first_come` for both orders this is the scheduler of the
SP2s.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from shoal.sim.loop import State, planned
from shoal.sim.machine import Processors
from shoal.sim.references.order import Order, first_come
from shoal.sim.traces.job import TraceJob


class Queue:
    """Waiting jobs in an order, as (what the order says, index)."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.entries: list[tuple[float, int]] = []

    def add(self, job: TraceJob, index: int) -> None:
        insort(self.entries, (self._order(job), index))

    def remove(self, job: TraceJob, index: int) -> None:
        del self.entries[bisect_left(self.entries, (self._order(job), index))]


class Easy:
    """Start in `order` while the head fits, then try the others in the order of `backfill`.

    `expect` is what the loop was told to expect of a run time, and never below the truth.
    """

    def __init__(
        self,
        order: Order = first_come,
        backfill: Order = first_come,
        *,
        expect: Callable[[TraceJob], float] = planned,
    ) -> None:
        self._heads = Queue(order)
        self._others = Queue(backfill)
        self._expect = expect

    def decide(self, state: State[Processors]) -> Iterator[tuple[int, None]]:
        jobs, machine = state.jobs, state.machine
        for index in state.arrived:
            self._heads.add(jobs[index], index)
            self._others.add(jobs[index], index)
        heads = self._heads.entries
        while heads and jobs[heads[0][1]].num_processors <= machine.free:
            yield from self._start(state, heads[0][1])
        if heads and machine.free:
            yield from self._pass(state, heads[0][1])

    def _pass(self, state: State[Processors], head: int) -> Iterator[tuple[int, None]]:
        """Those that may pass the head, which does not fit."""
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

    def _start(self, state: State[Processors], index: int) -> Iterator[tuple[int, None]]:
        self._heads.remove(state.jobs[index], index)
        self._others.remove(state.jobs[index], index)
        yield index, None


def reservation(state: State[Processors], size: int) -> tuple[float, int]:
    """When `size` processors are expected to be free together, and how many more are free then."""
    free = state.machine.free
    reserved_at = state.now
    for expected, index in state.releases:
        if free >= size and expected > reserved_at:
            break
        free += state.jobs[index].num_processors
        reserved_at = expected
    return reserved_at, free - size
