"""Only work counts, in whatever thread it is done."""

from __future__ import annotations

import pytest

from shoal.control.loops.place import Stopwatch
from shoal.engines.fake import VirtualClock


def test_time_between_two_pieces_of_work_is_not_counted() -> None:
    clock = VirtualClock()
    watch = Stopwatch(clock)
    with watch:
        clock.advance(2.0)
    clock.advance(100.0)
    watch.wrap(clock.advance)(3.0)
    assert watch.spent_s == 5.0


def test_work_that_fails_counts_as_well() -> None:
    clock = VirtualClock()
    watch = Stopwatch(clock)

    def fail(seconds: float) -> None:
        clock.advance(seconds)
        raise KeyError("away")

    with pytest.raises(KeyError):
        watch.wrap(fail)(1.5)
    assert watch.spent_s == 1.5
