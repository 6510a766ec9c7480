"""Callers share threads: a caller that submits without end leaves threads for the others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Event
from typing import Any

import pytest

from shoal import fair_threads
from shoal.errors import LimitReached
from shoal.fair_threads import CALLER, CONTROL_PLANE, FairThreads


def submit(shared: FairThreads, caller: str, fn: Callable[[], Any]) -> Future[Any]:
    before = CALLER.set(caller)
    try:
        return shared.submit(fn)
    finally:
        CALLER.reset(before)


def test_one_caller_never_takes_all_threads() -> None:
    shared, is_over = FairThreads(4, "test"), Event()
    slow = [submit(shared, "user ben", is_over.wait) for _ in range(50)]
    assert submit(shared, "user ana", lambda: "answered").result(timeout=10) == "answered"
    assert submit(shared, CONTROL_PLANE, lambda: "answered").result(timeout=10) == "answered"
    assert sum(one.running() for one in slow) == 2
    is_over.set()
    assert all(one.result(timeout=10) for one in slow)
    shared.close()


def test_callers_are_served_in_rotation() -> None:
    shared, is_over, order = FairThreads(2, "test"), Event(), list[str]()
    both = [submit(shared, CONTROL_PLANE, is_over.wait) for _ in range(2)]
    names = ["ben", "ben", "ben", "ana", "ana", "cy"]
    waiting = [submit(shared, name, partial(order.append, name)) for name in names]
    is_over.set()
    assert all(one.result(timeout=10) for one in both)
    for one in waiting:
        one.result(timeout=10)
    assert sorted(order[:3]) == ["ana", "ben", "cy"]
    shared.close()


def test_what_was_cancelled_does_not_run_and_an_error_reaches_its_caller() -> None:
    shared, is_over, ran = FairThreads(2, "test"), Event(), list[str]()
    slow = submit(shared, "user ben", is_over.wait)
    assert submit(shared, "user ben", lambda: ran.append("cancelled")).cancel()
    failed = submit(shared, "user ben", lambda: 1 // 0)
    is_over.set()
    slow.result(timeout=10)
    with pytest.raises(ZeroDivisionError):
        failed.result(timeout=10)
    assert not ran
    shared.close()


def test_reads_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_threads, "MAX_WAITING", 3)
    shared, is_over = FairThreads(2, "test"), Event()
    taken = [submit(shared, "user ben", is_over.wait) for _ in range(4)]
    with pytest.raises(LimitReached, match="wait for a thread"):
        submit(shared, "user ben", is_over.wait)
    is_over.set()
    shared.close()
    assert all(one.result(timeout=10) for one in taken)
