"""The line before the writer: who is served next."""

from __future__ import annotations

import pytest

from shoal.engines.fake import VirtualClock
from shoal.errors import StoreUnavailable
from shoal.store.line import Change, Line


def change(name: str, patience_s: float = 0.0) -> Change:
    return Change(lambda _: name, None, None, patience_s)  # type: ignore[arg-type]


def names(line: Line) -> list[str]:
    found = []
    while (one := line.take()) is not None:
        found.append(one.fn(None))  # type: ignore[arg-type]
    return found


def test_changes_are_served_in_the_order_they_came() -> None:
    line = Line(VirtualClock())
    for name in ("first", "second", "third"):
        line.put(change(name))
    assert names(line) == ["first", "second", "third"]


def test_who_has_patience_lets_those_pass_who_come_later() -> None:
    line = Line(VirtualClock())
    line.put(change("submission", 0.1))
    line.put(change("start", 0.05))
    line.put(change("end", 0.0))
    assert names(line) == ["end", "start", "submission"]


def test_patience_ends_so_that_nobody_waits_for_ever() -> None:
    clock = VirtualClock()
    line = Line(clock)
    line.put(change("submission", 0.1))
    clock.advance(0.2)
    line.put(change("end", 0.0))
    assert names(line) == ["submission", "end"]


def test_a_closed_line_takes_nothing_in_and_gives_out_what_it_has() -> None:
    line = Line(VirtualClock())
    line.put(change("last", 0.1))
    line.close()
    with pytest.raises(StoreUnavailable):
        line.put(change("late", 0.0))
    told = [line.is_over, line.wait(None) is not None, line.is_over, line.wait(None)]
    assert told == [False, True, True, None]


def test_who_has_patience_left_is_not_taken_with_those_who_have_none() -> None:
    clock = VirtualClock()
    line = Line(clock)
    line.put(change("submission", 0.1))
    line.put(change("end"))
    now = clock.monotonic()
    assert line.take(now) is not None
    assert line.take(now) is None
    clock.advance(0.2)
    assert line.take(clock.monotonic()) is not None
