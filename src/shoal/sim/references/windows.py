"""The scheduler inside RLScheduler's environment (Zhang et al., SC'20), with its own rules.

The head is chosen from those that wait at that moment and kept until it starts, whatever arrives. Its
reservation is computed once, when it first does not fit. Others pass it in order of arrival if they end
*before* it, and there is no rule of spare processors. Run it with `Events.ONE_BY_ONE`.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.sim.loop import State
from shoal.sim.machine import Processors
from shoal.sim.references.easy import reservation
from shoal.sim.references.order import Order


class KeptHead:
    def __init__(self, order: Order, *, is_backfilling: bool) -> None:
        self._order = order
        self._is_backfilling = is_backfilling
        self._head: int | None = None
        self._reserved_at: float | None = None

    def decide(self, state: State[Processors]) -> Iterator[tuple[int, None]]:
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

    def _pass(self, state: State[Processors], head: int, size: int) -> Iterator[tuple[int, None]]:
        if self._reserved_at is None:
            self._reserved_at, _ = reservation(state, size)
        for index, job in list(state.waiting.items()):
            ends_before = state.now + job.planned_s < self._reserved_at
            if index != head and ends_before and job.num_processors <= state.machine.free:
                yield index, None
