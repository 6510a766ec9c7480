"""A limit of CPU time ends work that would never end, whatever else runs at that moment."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from shoal.runtime.process.cpu_limit import OutOfCpuTime, run_limited

LIMIT_S = 0.02
MUCH_S = 5.0
"""Work that no limit ends stops after this much CPU time, so that a broken limit fails the test."""


def spin() -> None:
    until = time.process_time() + MUCH_S
    while time.process_time() < until:
        pass


class SlowFinalizer:
    def __del__(self) -> None:
        spin()


def spin_after_finalizer() -> None:
    SlowFinalizer()
    spin()


def spin_after_collection() -> None:
    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            spin()

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)
    spin()


def test_work_within_its_limit_returns_its_result() -> None:
    assert run_limited(lambda: 42, LIMIT_S) == 42


def test_work_that_never_ends_is_left() -> None:
    with pytest.raises(OutOfCpuTime):
        run_limited(spin, LIMIT_S)


@pytest.mark.parametrize("work", [spin_after_finalizer, spin_after_collection])
def test_work_is_left_although_python_dropped_the_first_interruption(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]
) -> None:
    dropped = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: dropped.append(unraisable.exc_type))
    with pytest.raises(OutOfCpuTime):
        run_limited(work, LIMIT_S)
    assert set(dropped) == {OutOfCpuTime}, "the first one was dropped"


def test_signal_that_comes_late_interrupts_nothing() -> None:
    with pytest.raises(OutOfCpuTime):
        run_limited(spin, LIMIT_S)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    signal.raise_signal(signal.SIGPROF)
