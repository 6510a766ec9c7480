"""The only module that reads a clock, so that a simulation can supply its own.

`now` is for people and records. `monotonic` is for every duration, because wall clocks jump.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The two readings of a clock."""

    def now(self) -> float:
        """Seconds since 1970 according to this machine. May jump in both directions."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary start. Never goes back."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class BootClock(SystemClock):
    """The machine's clocks, with a `monotonic` that also counts the time while the machine was suspended.

    Leases use it: a laptop that slept through its fence must notice that when it wakes.
    """

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
