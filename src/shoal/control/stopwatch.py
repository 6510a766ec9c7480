"""How long something worked, without the time it waited for a thread or a disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVar

from shoal.clock import Clock

Given = TypeVar("Given")
Made = TypeVar("Made")


class Stopwatch:
    """Runs inside its `with` blocks, one at a time, in whatever thread they are."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = 0.0
        self.spent_s = 0.0

    def __enter__(self) -> Self:
        self._began = self._clock.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.spent_s += self._clock.monotonic() - self._began

    def of(self, work: Callable[[Given], Made]) -> Callable[[Given], Made]:
        """`work`, timed whenever it runs."""

        def timed(given: Given) -> Made:
            with self:
                return work(given)

        return timed
