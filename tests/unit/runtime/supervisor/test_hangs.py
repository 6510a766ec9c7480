"""When a silence of the ranks is a hang."""

from __future__ import annotations

import pytest

from shoal.runtime.supervisor.step_pace import (
    MIN_SILENCE_AT_FIRST_S,
    MIN_SILENCE_S,
    MIN_STEPS,
    RankActivity,
    StepPace,
)

IDLE_S, BUSY_S = MIN_SILENCE_S[RankActivity.NOTHING], MIN_SILENCE_S[RankActivity.WORK]


def paced(steps: int, step_s: float, work: float = 1.0) -> StepPace:
    pace = StepPace()
    for step in range(steps):
        pace.record(step * step_s, step, step * step_s * work)
    return pace


def verdict(
    pace: StepPace, silent_s: float, work: float = 0.0, *, is_stopped: bool = False
) -> RankActivity | None:
    """Return the verdict after a silence in which that share of a processor was used."""
    worked_s = pace._worked_s + work * silent_s
    return pace.verdict(pace.since + silent_s, worked_s, is_stopped=is_stopped)


def test_silence_without_work_is_a_hang_after_the_idle_limit() -> None:
    pace = paced(50, 0.1)
    assert verdict(pace, IDLE_S - 1) is None, "data that come late, or a slow disk, take seconds"
    assert verdict(pace, IDLE_S + 1) is RankActivity.NOTHING


def test_stopped_rank_is_a_hang_after_a_second() -> None:
    pace = paced(50, 0.1)
    assert verdict(pace, 0.9, is_stopped=True) is None
    assert verdict(pace, 1.2, is_stopped=True) is RankActivity.STOPPED
    assert verdict(pace, 1.2, work=4.0, is_stopped=True) is RankActivity.STOPPED, (
        "the others wait in a busy loop"
    )


def test_slow_steps_extend_the_limit() -> None:
    pace = paced(50, 3.0)
    assert verdict(pace, 23.0) is None
    assert verdict(pace, 25.0) is RankActivity.NOTHING
    assert verdict(pace, 23.0, is_stopped=True) is None
    assert verdict(pace, 25.0, is_stopped=True) is RankActivity.STOPPED


def test_one_long_step_among_short_ones_counts() -> None:
    pace = paced(50, 0.1)
    pace.record(20.0, 50, 5.0)
    assert verdict(pace, 60.0) is None


def test_working_rank_does_not_hang_for_half_an_hour() -> None:
    pace = paced(50, 0.1)
    assert verdict(pace, 600.0, work=1.0) is None
    assert verdict(pace, BUSY_S - 1, work=1.0) is None
    assert verdict(pace, BUSY_S + 1, work=1.0) is RankActivity.WORK


def test_no_verdict_before_the_first_steps() -> None:
    assert verdict(StepPace(), 3600.0, is_stopped=True) is None


def test_waiting_rank_in_its_second_step_has_the_limit_of_a_working_one() -> None:
    """The first step may have taken as long, but it was not timed."""
    pace = paced(1, 0.0)
    assert verdict(pace, BUSY_S - 1) is None
    assert verdict(pace, BUSY_S + 1) is RankActivity.WORK
    assert (
        verdict(pace, MIN_SILENCE_AT_FIRST_S[RankActivity.STOPPED] + 1, is_stopped=True)
        is RankActivity.STOPPED
    )


def test_message_does_not_give_a_length_for_steps_that_were_not_timed() -> None:
    assert paced(1, 0.0).describe_silence(1800.0).endswith("; none was timed")
    assert paced(2, 3.0).describe_silence(60.0).endswith("; the longest before took 3.0 s")


@pytest.mark.parametrize("doing", list(RankActivity))
def test_verdict_on_long_steps_extends_the_limit_too(doing: RankActivity) -> None:
    pace = paced(MIN_STEPS, 500.0)
    first_s = pace.limit_s(doing)
    pace.extend_limit(doing, first_s)
    doubted_s = pace.limit_s(doing)
    assert doubted_s == 2 * first_s
    pace.extend_limit(doing, doubted_s)
    assert pace.limit_s(doing) == doubted_s, "the limit has a bound"


def test_group_with_few_steps_can_hang() -> None:
    pace = paced(MIN_STEPS - 1, 0.1)
    least = MIN_SILENCE_AT_FIRST_S
    assert verdict(pace, least[RankActivity.NOTHING] - 1) is None
    assert verdict(pace, least[RankActivity.NOTHING] + 1) is RankActivity.NOTHING
    assert verdict(pace, least[RankActivity.STOPPED] - 1, is_stopped=True) is None
    assert verdict(pace, least[RankActivity.STOPPED] + 1, is_stopped=True) is RankActivity.STOPPED
    assert verdict(pace, BUSY_S - 1, work=1.0) is None


def test_pace_is_remembered_in_the_next_group() -> None:
    pace = paced(50, 0.1)
    pace.begin()
    assert verdict(pace, 3600.0) is None, "it has made no step so far"
    pace.record(3600.0, 49, 5.0)
    pace.record(3600.1, 50, 5.1)
    assert pace.longest_s < 1.0, "the time between two groups is no step"
    assert verdict(pace, IDLE_S + 1) is RankActivity.NOTHING


@pytest.mark.parametrize(
    ("work", "is_stopped", "doing"),
    [(0.0, True, RankActivity.STOPPED), (0.0, False, RankActivity.NOTHING), (1.0, False, RankActivity.WORK)],
)
def test_silence_that_was_called_a_hang_is_no_hang_the_next_time(
    work: float, is_stopped: bool, doing: RankActivity
) -> None:
    pace = paced(50, 0.1)
    limit_s = pace.limit_s(doing)
    assert verdict(pace, limit_s + 1, work, is_stopped=is_stopped) is doing
    pace.extend_limit(doing, limit_s)
    pace.begin()
    pace.record(5000.0, 49, 5.0)
    pace.record(5000.1, 50, 5.1)
    assert verdict(pace, 2 * limit_s - 0.1, work, is_stopped=is_stopped) is None
    assert verdict(pace, 2 * limit_s + 0.1, work, is_stopped=is_stopped) is doing


@pytest.mark.parametrize("doing", list(RankActivity))
def test_extended_limit_has_a_bound(doing: RankActivity) -> None:
    pace = paced(50, 0.1)
    for _ in range(20):
        pace.extend_limit(doing, pace.limit_s(doing))
    assert pace.limit_s(doing) == max(BUSY_S, 4 * MIN_SILENCE_S[doing])


def test_rank_with_long_steps_has_longer_to_leave_a_group() -> None:
    def leave_s(steps: int, step_s: float, *, is_hang: bool = False) -> float:
        return paced(steps, step_s).leave_s(RankActivity.NOTHING, is_hang=is_hang)

    assert leave_s(50, 0.1) == IDLE_S
    assert leave_s(50, 8.0) == 64.0
    assert leave_s(2, 0.1) > IDLE_S, "its first steps may be the long ones"
    assert leave_s(2, 0.1, is_hang=True) == IDLE_S, "there was a silence before"


def test_time_without_checks_is_neither_silence_nor_a_step() -> None:
    pace = paced(50, 0.1)
    pace.restart_clock(8000.0, 4.9)
    assert verdict(pace, IDLE_S - 1) is None
    assert verdict(pace, IDLE_S + 1) is RankActivity.NOTHING
    pace.record(8000.1, 50, 5.0)
    assert pace.longest_s < 1.0


def test_work_of_other_processes_is_ignored() -> None:
    pace = paced(50, 0.1)
    last, worked_s = 49 * 0.1, 49 * 0.1
    assert pace.verdict(last + 30, worked_s + 25, is_stopped=False) is None, "a process works"
    pace.ignore_work(last + 30, worked_s + 25)
    assert pace.verdict(last + 45, worked_s + 25, is_stopped=False) is None, "too short to call it idle"
    assert pace.verdict(last + 51, worked_s + 25, is_stopped=False) is RankActivity.NOTHING
    assert pace.verdict(last + 51, worked_s + 35, is_stopped=False) is None, "they went on working"


def test_steps_between_two_checks_count_one_by_one() -> None:
    pace = StepPace()
    for look in range(3):
        pace.record(look * 0.25, look * 8, look * 0.25)
    assert verdict(pace, 2.5, is_stopped=True) is RankActivity.STOPPED


def test_step_that_was_called_a_hang_counts_when_it_is_repeated() -> None:
    pace = paced(50, 0.1)
    pace.begin(is_after_hang=True)
    pace.record(100.0, 49, 5.0, has_stepped=False)
    pace.record(160.0, 50, 65.0, has_stepped=True)
    assert pace.longest_s == 60.0
    pace.begin()
    pace.record(200.0, 50, 65.0, has_stepped=False)
    pace.record(300.0, 51, 65.0, has_stepped=True)
    assert pace.longest_s == 60.0, "any other first step may have waited for a model"


def test_group_with_a_new_rank_can_hang_before_its_first_step() -> None:
    pace = paced(50, 0.1)
    pace.begin()
    pace.record(100.0, -1, 5.0, has_stepped=False)
    assert verdict(pace, BUSY_S - 1) is None
    assert verdict(pace, BUSY_S + 1) is RankActivity.WORK
    assert (
        verdict(pace, MIN_SILENCE_AT_FIRST_S[RankActivity.STOPPED] + 1, is_stopped=True)
        is RankActivity.STOPPED
    )
