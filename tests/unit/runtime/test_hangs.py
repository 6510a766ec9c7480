"""When a silence is a hang."""

from __future__ import annotations

from shoal.runtime.hangs import BUSY_S, LEAVE_S, MIN_STEPS, Pace


def paced(steps: int, step_s: float, cpu_share: float = 1.0) -> Pace:
    pace = Pace()
    for step in range(steps):
        pace.look(step * step_s, step, step * step_s * cpu_share)
    return pace


def test_silence_of_many_steps_with_nobody_at_work_is_a_hang() -> None:
    pace = paced(50, 0.1)
    last = 49 * 0.1
    assert pace.silent_s(last + 0.9, last) is None
    assert pace.silent_s(last + 1.2, last) is not None


def test_slow_steps_make_for_patience() -> None:
    pace = paced(50, 3.0)
    last = 49 * 3.0
    assert pace.silent_s(last + 20, last) is None
    assert pace.silent_s(last + 25, last) is not None


def test_one_long_step_among_short_ones_counts() -> None:
    pace = paced(50, 0.1)
    pace.look(20.0, 50, 5.0)
    assert pace.silent_s(20.0 + 60, 5.0) is None


def test_who_works_is_not_said_to_hang_for_minutes() -> None:
    pace = paced(50, 0.1)
    last = 49 * 0.1
    assert pace.silent_s(last + 60, last + 60) is None
    assert pace.silent_s(last + BUSY_S + 1, last + BUSY_S + 1) is not None


def test_nothing_is_known_before_the_first_steps() -> None:
    pace = paced(MIN_STEPS - 1, 0.1)
    assert pace.silent_s(3600.0, 0.0) is None


def test_what_is_known_of_the_steps_stays_known_in_the_next_group() -> None:
    pace = paced(50, 0.1)
    pace.begin()
    assert pace.silent_s(3600.0, 5.0) is None, "it has made no step yet"
    pace.look(3600.0, 49, 5.0)
    pace.look(3600.1, 50, 5.1)
    assert pace.longest_s < 1.0, "the time between two groups is no step"
    assert pace.silent_s(3600.1 + 1.2, 5.1) is not None


def test_who_makes_long_steps_has_long_to_come_out_of_one() -> None:
    assert paced(50, 0.1).leave_s() == LEAVE_S
    assert paced(50, 8.0).leave_s() > 60
    assert paced(2, 0.1).leave_s() > LEAVE_S, "its first steps may be the long ones"


def test_half_of_the_silence_of_a_hang_is_seen_too() -> None:
    pace = paced(50, 0.1)
    last = 49 * 0.1
    assert pace.silent_s(last + 0.4, last, 0.5) is None
    assert pace.silent_s(last + 0.6, last, 0.5) is not None
    assert pace.silent_s(last + 0.6, last) is None


def test_processor_time_that_is_not_the_ranks_own_is_left_out() -> None:
    pace = paced(50, 0.1)
    last = 49 * 0.1
    assert pace.silent_s(last + 3, last + 2.5) is None, "somebody works"
    pace.disregard(last + 3, last + 2.5)
    assert pace.silent_s(last + 3.5, last + 2.5) is None, "too short a time to say that nobody does"
    assert pace.silent_s(last + 4.1, last + 2.5) is not None
    assert pace.silent_s(last + 4.1, last + 3.5) is None, "they went on working"


def test_steps_between_two_looks_count_one_by_one() -> None:
    pace = Pace()
    for look in range(3):
        pace.look(look * 0.25, look * 8, look * 0.25)
    assert pace.silent_s(0.5 + 2.5, 0.5) is not None


def test_a_short_rest_after_long_work_is_no_hang_when_a_spare_came_meanwhile() -> None:
    pace = paced(50, 0.5)
    last = 49 * 0.5
    pace.disregard(last + 20, last + 20)
    assert pace.silent_s(last + 21.5, last + 20) is None
    assert pace.silent_s(last + 24.5, last + 20) is not None


def test_step_that_was_called_a_hang_is_learned_from_when_it_is_made_again() -> None:
    pace = paced(50, 0.1)
    pace.begin(is_after_hang=True)
    pace.look(100.0, 49, 5.0, has_stepped=False)
    pace.look(160.0, 50, 65.0, has_stepped=True)
    assert pace.longest_s == 60.0
    pace.begin()
    pace.look(200.0, 50, 65.0, has_stepped=False)
    pace.look(300.0, 51, 65.0, has_stepped=True)
    assert pace.longest_s == 60.0, "any other first step may have waited for a model"


def test_group_with_one_that_is_new_to_it_may_hang_before_its_first_step() -> None:
    pace = paced(50, 0.1)
    pace.begin()
    pace.look(100.0, -1, 5.0, has_stepped=False)
    assert pace.silent_s(100.0 + BUSY_S - 1, 5.0) is None
    assert pace.silent_s(100.0 + BUSY_S + 1, 5.0) is not None
