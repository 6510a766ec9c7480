"""The replay that coverage is counted in: on a line of jobs whose waits anybody can work out."""

from __future__ import annotations

from benchmarks.yardsticks.coverage import LOGS, Replay, row
from shoal.sim.traces.trace import TraceJob


def line_of(count: int) -> list[TraceJob]:
    """One processor; each job takes 100 s, says so, and comes 90 s after the last: job n waits 10 n s."""
    return [
        TraceJob(
            job_id=str(number),
            submitted_at=90.0 * number,
            run_s=100.0,
            limit_s=100.0,
            num_processors=1,
            user="ana",
        )
        for number in range(count)
    ]


def test_waits_are_those_of_the_planner_and_lie_inside_what_was_said() -> None:
    tally = Replay(line_of(60), capacity=1, every=1).run()
    assert tally.waits == [10.0 * number for number in range(1, 60)]
    assert (tally.num_before, tally.num_unanswered) == (0, 0)
    assert tally.coverage >= 0.87


def test_only_every_so_many_th_of_those_that_wait_is_asked_about() -> None:
    tally = Replay(line_of(61), capacity=1, every=4).run()
    assert len(tally.waits) == 15
    assert row(LOGS[0], tally)[1] == "15"
