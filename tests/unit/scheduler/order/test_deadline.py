"""Deadlines: which job goes first for its deadline, and what the explanation says about it."""

from __future__ import annotations

import pytest

from shoal.scheduler import Planner, Policy, Stamps
from shoal.scheduler.order.due import due_for_deadline, latest_start
from tests.support.clusters import (
    ALL_GPUS,
    NOW,
    candidate,
    explanation_of,
    holding,
    make_plan,
    nodes,
    placements,
    request,
)

HOUR = 3600.0


def test_latest_start_is_the_deadline_less_the_limit_or_expected_run() -> None:
    assert latest_start(NOW, 2 * HOUR, HOUR) == NOW - 2 * HOUR
    assert latest_start(NOW, None, HOUR) == NOW - HOUR
    assert latest_start(NOW, None, None) == NOW


def test_job_with_a_deadline_is_due_when_half_of_its_slack_is_gone() -> None:
    assert due_for_deadline(NOW, NOW + 4 * HOUR, NOW + 6 * HOUR) == NOW + 2 * HOUR
    assert due_for_deadline(NOW, NOW + 40 * HOUR, NOW + 6 * HOUR) == NOW + 6 * HOUR
    assert due_for_deadline(NOW, NOW - 1, NOW + 10 * HOUR) == NOW + 0.5 * HOUR
    stamps = Stamps()
    stamps.see(nodes(2))
    plain = stamps.arrive(candidate(1, request(gpus=8, time_limit_s=HOUR), submitted_at=NOW))
    hurried = stamps.arrive(
        candidate(2, request(gpus=8, time_limit_s=HOUR), submitted_at=NOW, deadline_at=NOW + 2 * HOUR)
    )
    relaxed = stamps.arrive(
        candidate(3, request(gpus=8, time_limit_s=HOUR), submitted_at=NOW, deadline_at=NOW + 900 * HOUR)
    )
    assert hurried.due_at == NOW + HOUR / 2
    assert plain.due_at is not None
    assert hurried.due_at < plain.due_at == relaxed.due_at


def test_job_that_is_due_for_its_deadline_starts_before_one_that_came_first() -> None:
    first = candidate(1, request(gpus=8), due_at=NOW + HOUR, score=1.0, submitted_at=NOW - HOUR)
    hurried = candidate(2, request(gpus=8), due_at=NOW - 1.0, score=9.0, submitted_at=NOW - HOUR)
    assert list(placements(make_plan(nodes(1), first, hurried))) == ["att-2"]


@pytest.mark.parametrize(
    ("deadline_s", "line", "can_be_met"),
    [
        (5 * HOUR, "to have ended by 13:00 UTC it must start by 11:00 UTC", True),
        (
            2.5 * HOUR,
            "it is to start by 09:00 UTC, may run 2 h and may not have ended by 10:30 UTC, its deadline",
            False,
        ),
        (
            1.5 * HOUR,
            "it may run 2 h and may not have ended by 09:30 UTC, its deadline: it had to start by 07:30 UTC",
            False,
        ),
    ],
)
def test_explanation_says_whether_the_deadline_can_still_be_met(
    deadline_s: float, line: str, can_be_met: bool
) -> None:
    busy = holding(1, {"node-01": ALL_GPUS}, placed_at=NOW, time_limit_s=HOUR)
    waits = candidate(1, request(gpus=8, time_limit_s=2 * HOUR), deadline_at=NOW + deadline_s)
    result = explanation_of(make_plan(nodes(1), waits, held=(busy,)), "att-1")
    assert result.details[-1] == line
    assert result.facts["can_be_met"] is can_be_met


def test_deadline_far_away_is_explained_without_a_time() -> None:
    planner = Planner(Policy())
    planner.add(candidate(1, request(), deadline_at=NOW * 100, expected_s=60.0))
    planner.plan(NOW)
    explanation = planner.explain("att-1", NOW)
    assert explanation is not None
    assert explanation.details == ()
    assert explanation.facts["can_be_met"] is True
