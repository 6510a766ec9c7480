"""The queue before the writer: the order in which changes are served."""

from __future__ import annotations

import pytest

from shoal.engines.fake import VirtualClock
from shoal.errors import StoreUnavailable
from shoal.store.threads import ChangeQueue, QueuedChange


def change(name: str, patience_s: float = 0.0) -> QueuedChange:
    return QueuedChange(lambda _: name, None, None, patience_s)  # type: ignore[arg-type]


def names(line: ChangeQueue) -> list[str]:
    taken = []
    while (one := line.take()) is not None:
        taken.append(one.fn(None))  # type: ignore[arg-type]
    return taken


def test_changes_are_served_in_the_order_they_came() -> None:
    line = ChangeQueue(VirtualClock())
    for name in ("first", "second", "third"):
        line.put(change(name))
    assert names(line) == ["first", "second", "third"]


def test_a_change_with_patience_lets_later_changes_pass() -> None:
    line = ChangeQueue(VirtualClock())
    line.put(change("submission", 0.1))
    line.put(change("start", 0.05))
    line.put(change("end", 0.0))
    assert names(line) == ["end", "start", "submission"]


def test_patience_ends_so_that_no_change_waits_for_ever() -> None:
    clock = VirtualClock()
    line = ChangeQueue(clock)
    line.put(change("submission", 0.1))
    clock.advance(0.2)
    line.put(change("end", 0.0))
    assert names(line) == ["submission", "end"]


def test_a_closed_queue_takes_no_changes_and_gives_out_what_it_has() -> None:
    line = ChangeQueue(VirtualClock())
    line.put(change("last", 0.1))
    line.close()
    with pytest.raises(StoreUnavailable):
        line.put(change("late", 0.0))
    states = [line.is_finished, line.wait(None) is not None, line.is_finished, line.wait(None)]
    assert states == [False, True, True, None]


def test_a_change_with_patience_left_is_not_taken_with_changes_without() -> None:
    clock = VirtualClock()
    line = ChangeQueue(clock)
    line.put(change("submission", 0.1))
    line.put(change("end"))
    now = clock.monotonic()
    assert line.take(now) is not None
    assert line.take(now) is None
    clock.advance(0.2)
    assert line.take(clock.monotonic()) is not None
