"""A limit of CPU time for one piece of work, such as the search for a pattern that another user wrote."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

AGAIN_S = 0.01
"""How much later the work is interrupted again if the first time had no effect."""


class OutOfCpuTime(Exception):
    """The work used more CPU time than its limit."""


def run_limited(work: Callable[[], T], limit_s: float) -> T:
    """Run the work and return its result. `OutOfCpuTime`: it used `limit_s`, and was left where it was.

    Main thread only: uses SIGPROF. The work is interrupted again and again, because Python drops an exception
    that a signal handler raises while a finalizer or a callback of the garbage collector runs.
    """
    signal.signal(signal.SIGPROF, _interrupt)
    try:
        signal.setitimer(signal.ITIMER_PROF, limit_s, AGAIN_S)
        return _interruptible(work)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # the default would kill us if one comes late


def _interruptible(work: Callable[[], T]) -> T:
    return work()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise, but only inside the work: an exception during the clean-up would leave the timer running."""
    while frame is not None:
        if frame.f_code is _interruptible.__code__:
            raise OutOfCpuTime
        frame = frame.f_back
