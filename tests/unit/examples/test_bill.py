"""What a kill costs is computed from the times of steps alone."""

from __future__ import annotations

import pytest

from examples.demo.bill import Kill, Step, cost_of, steps_of, usual_step_s

FIRST = [Step(float(number), number, 1) for number in range(1, 28)]
"""One step a second; steps 21 to 27 are made in vain."""
SECOND = [Step(30.0 + number, number + 20, 2) for number in range(1, 10)]


def test_steps_are_read_from_log_lines() -> None:
    lines = [
        {"at": 1.5, "text": "rank 0 of 2 starts after step 20"},
        {"at": 2.5, "text": "step  21 of 120  loss"},
    ]
    assert steps_of(lines, 2) == [Step(2.5, 21, 2)]


def test_a_restart_costs_the_steps_since_the_checkpoint_and_the_time_until_the_next() -> None:
    cost = cost_of(Kill("rank", 7, at=27.5, attempt=1), FIRST + SECOND)
    assert (cost.num_attempts, cost.num_repeated) == (1, 7)
    assert cost.pause_s == pytest.approx(31.0 - 27.5)
    assert cost.lost_s == pytest.approx(30.0 - 20.0), "step 20 ended at 20, step 21 began anew at 30"


def test_a_restart_from_the_very_beginning_loses_everything() -> None:
    cost = cost_of(Kill("rank", 7, at=3.5, attempt=1), [*FIRST[:3], Step(11.0, 1, 2), Step(12.0, 2, 2)])
    assert cost.num_repeated == 3
    assert cost.lost_s == pytest.approx(10.0)


def test_attempts_that_made_no_step_are_counted() -> None:
    third = [Step(step.at, step.number, 3) for step in SECOND]
    assert cost_of(Kill("rank", 7, at=27.5, attempt=1), FIRST + third).num_attempts == 2


def test_an_absence_nobody_noticed_costs_nothing() -> None:
    cost = cost_of(Kill("control plane", 7, at=10.2, attempt=1, back_at=14.9), FIRST)
    assert (cost.num_attempts, cost.num_repeated) == (0, 0)
    assert cost.pause_s == pytest.approx(0.8)
    assert cost.lost_s == pytest.approx(0.0)


def test_the_usual_step_does_not_count_restarts() -> None:
    assert usual_step_s(FIRST + SECOND) == pytest.approx(1.0)
