"""The only place that reads a clock.

`now` is for people and records, `monotonic` for every duration: wall clocks jump.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings; a simulation supplies its own."""

    def now(self) -> float:
        """Seconds since 1970, as the machine believes. May jump either way."""
        ...

    def monotonic(self) -> float:
        """Seconds since some start. Never goes back, says nothing about the date."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class BootClock(SystemClock):
    """The machine's clocks, where `monotonic` also counts the time the machine was suspended.

    For leases: a laptop that slept through its fence must notice when it wakes.
    """

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
