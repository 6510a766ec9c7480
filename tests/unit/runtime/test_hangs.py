"""When a silence is a hang."""

from __future__ import annotations

import pytest

from shoal.runtime.hangs import LEAST_S, MIN_STEPS, UNKNOWN_LEAST_S, Doing, Pace

IDLE_S, BUSY_S = LEAST_S[Doing.NOTHING], LEAST_S[Doing.WORK]


def paced(steps: int, step_s: float, work: float = 1.0) -> Pace:
    pace = Pace()
    for step in range(steps):
        pace.look(step * step_s, step, step * step_s * work)
    return pace


def verdict(pace: Pace, silent_s: float, work: float = 0.0, *, is_stopped: bool = False) -> Doing | None:
    """After a silence in which somebody used that share of a processor."""
    worked_s = pace._worked_s + work * silent_s
    return pace.verdict(pace.since + silent_s, worked_s, is_stopped=is_stopped)


def test_silence_with_nobody_at_work_is_a_hang_after_a_while() -> None:
    pace = paced(50, 0.1)
    assert verdict(pace, IDLE_S - 1) is None, "data that come late, or a disk that is slow, take seconds"
    assert verdict(pace, IDLE_S + 1) is Doing.NOTHING


def test_who_is_stopped_makes_no_step_and_is_not_waited_for() -> None:
    pace = paced(50, 0.1)
    assert verdict(pace, 0.9, is_stopped=True) is None
    assert verdict(pace, 1.2, is_stopped=True) is Doing.STOPPED
    assert verdict(pace, 1.2, work=4.0, is_stopped=True) is Doing.STOPPED, "the others wait in a loop"


def test_slow_steps_make_for_patience() -> None:
    pace = paced(50, 3.0)
    assert verdict(pace, 23.0) is None
    assert verdict(pace, 25.0) is Doing.NOTHING
    assert verdict(pace, 23.0, is_stopped=True) is None
    assert verdict(pace, 25.0, is_stopped=True) is Doing.STOPPED


def test_one_long_step_among_short_ones_counts() -> None:
    pace = paced(50, 0.1)
    pace.look(20.0, 50, 5.0)
    assert verdict(pace, 60.0) is None


def test_who_works_is_not_said_to_hang_for_half_an_hour() -> None:
    pace = paced(50, 0.1)
    assert verdict(pace, 600.0, work=1.0) is None
    assert verdict(pace, BUSY_S - 1, work=1.0) is None
    assert verdict(pace, BUSY_S + 1, work=1.0) is Doing.WORK


def test_nothing_is_known_before_the_first_steps() -> None:
    assert verdict(Pace(), 3600.0, is_stopped=True) is None


def test_who_waits_in_the_second_step_has_the_time_of_who_works() -> None:
    """The first may have taken as long, and nobody has timed it."""
    pace = paced(1, 0.0)
    assert verdict(pace, BUSY_S - 1) is None
    assert verdict(pace, BUSY_S + 1) is Doing.WORK
    assert verdict(pace, UNKNOWN_LEAST_S[Doing.STOPPED] + 1, is_stopped=True) is Doing.STOPPED


def test_what_was_never_timed_is_not_said_to_have_taken_no_time() -> None:
    assert paced(1, 0.0).told(1800.0).endswith("; none was timed")
    assert paced(2, 3.0).told(60.0).endswith("; the longest before took 3.0 s")


@pytest.mark.parametrize("doing", list(Doing))
def test_a_verdict_on_long_steps_is_doubted_too(doing: Doing) -> None:
    pace = paced(MIN_STEPS, 500.0)
    first_s = pace.limit_s(doing)
    pace.doubt(doing, first_s)
    doubted_s = pace.limit_s(doing)
    assert doubted_s == 2 * first_s
    pace.doubt(doing, doubted_s)
    assert pace.limit_s(doing) == doubted_s, "not without end"


def test_group_that_has_made_few_steps_may_hang_all_the_same() -> None:
    pace = paced(MIN_STEPS - 1, 0.1)
    least = UNKNOWN_LEAST_S
    assert verdict(pace, least[Doing.NOTHING] - 1) is None
    assert verdict(pace, least[Doing.NOTHING] + 1) is Doing.NOTHING
    assert verdict(pace, least[Doing.STOPPED] - 1, is_stopped=True) is None
    assert verdict(pace, least[Doing.STOPPED] + 1, is_stopped=True) is Doing.STOPPED
    assert verdict(pace, BUSY_S - 1, work=1.0) is None


def test_what_is_known_of_the_steps_stays_known_in_the_next_group() -> None:
    pace = paced(50, 0.1)
    pace.begin()
    assert verdict(pace, 3600.0) is None, "it has made no step yet"
    pace.look(3600.0, 49, 5.0)
    pace.look(3600.1, 50, 5.1)
    assert pace.longest_s < 1.0, "the time between two groups is no step"
    assert verdict(pace, IDLE_S + 1) is Doing.NOTHING


@pytest.mark.parametrize(
    ("work", "is_stopped", "doing"),
    [(0.0, True, Doing.STOPPED), (0.0, False, Doing.NOTHING), (1.0, False, Doing.WORK)],
)
def test_silence_that_was_called_a_hang_is_none_the_next_time(
    work: float, is_stopped: bool, doing: Doing
) -> None:
    pace = paced(50, 0.1)
    limit_s = pace.limit_s(doing)
    assert verdict(pace, limit_s + 1, work, is_stopped=is_stopped) is doing
    pace.doubt(doing, limit_s)
    pace.begin()
    pace.look(5000.0, 49, 5.0)
    pace.look(5000.1, 50, 5.1)
    assert verdict(pace, 2 * limit_s - 0.1, work, is_stopped=is_stopped) is None
    assert verdict(pace, 2 * limit_s + 0.1, work, is_stopped=is_stopped) is doing


@pytest.mark.parametrize("doing", list(Doing))
def test_doubt_has_an_end(doing: Doing) -> None:
    pace = paced(50, 0.1)
    for _ in range(20):
        pace.doubt(doing, pace.limit_s(doing))
    assert pace.limit_s(doing) == max(BUSY_S, 4 * LEAST_S[doing])


def test_who_makes_long_steps_has_long_to_come_out_of_one() -> None:
    def leave_s(steps: int, step_s: float, *, is_hang: bool = False) -> float:
        return paced(steps, step_s).leave_s(Doing.NOTHING, is_hang=is_hang)

    assert leave_s(50, 0.1) == IDLE_S
    assert leave_s(50, 8.0) == 64.0
    assert leave_s(2, 0.1) > IDLE_S, "its first steps may be the long ones"
    assert leave_s(2, 0.1, is_hang=True) == IDLE_S, "there was a silence before"


def test_time_in_which_nobody_looked_is_neither_silence_nor_a_step() -> None:
    pace = paced(50, 0.1)
    pace.rest(8000.0, 4.9)
    assert verdict(pace, IDLE_S - 1) is None
    assert verdict(pace, IDLE_S + 1) is Doing.NOTHING
    pace.look(8000.1, 50, 5.0)
    assert pace.longest_s < 1.0


def test_work_that_is_not_the_ranks_own_is_left_out() -> None:
    pace = paced(50, 0.1)
    last, worked_s = 49 * 0.1, 49 * 0.1
    assert pace.verdict(last + 30, worked_s + 25, is_stopped=False) is None, "somebody works"
    pace.disregard(last + 30, worked_s + 25)
    assert pace.verdict(last + 45, worked_s + 25, is_stopped=False) is None, (
        "too short to say that nobody does"
    )
    assert pace.verdict(last + 51, worked_s + 25, is_stopped=False) is Doing.NOTHING
    assert pace.verdict(last + 51, worked_s + 35, is_stopped=False) is None, "they went on working"


def test_steps_between_two_looks_count_one_by_one() -> None:
    pace = Pace()
    for look in range(3):
        pace.look(look * 0.25, look * 8, look * 0.25)
    assert verdict(pace, 2.5, is_stopped=True) is Doing.STOPPED


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
    assert verdict(pace, BUSY_S - 1) is None
    assert verdict(pace, BUSY_S + 1) is Doing.WORK
    assert verdict(pace, UNKNOWN_LEAST_S[Doing.STOPPED] + 1, is_stopped=True) is Doing.STOPPED
