"""Maintenance and reservations: which jobs may start on their nodes, and when other jobs are
promised them.
"""

from __future__ import annotations

import pytest

from shoal.scheduler import Planner, Policy, WaitReason
from shoal.scheduler.facts.amounts import ProjectInfo
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
    snapshot,
    window,
    within_label,
)

HOUR = 3600.0
REPAIR = window(("node-01",), 2 * HOUR, 4 * HOUR)
OURS = window(("node-01",), 2 * HOUR, 4 * HOUR, project="vision")


@pytest.mark.parametrize("limit_s", [HOUR, 2 * HOUR])
def test_job_that_ends_before_maintenance_starts_on_the_node(limit_s: float) -> None:
    result = make_plan(nodes(1), candidate(1, request(gpus=8, time_limit_s=limit_s)), windows=(REPAIR,))
    assert placements(result) == {"att-1": ["node-01"]}


@pytest.mark.parametrize("limit_s", [2 * HOUR + 1, None])
def test_job_that_may_run_into_maintenance_uses_another_node_or_waits(limit_s: float | None) -> None:
    waiting = candidate(1, request(gpus=8, time_limit_s=limit_s))
    assert placements(make_plan(nodes(2), waiting, windows=(REPAIR,))) == {"att-1": ["node-02"]}
    result = make_plan(nodes(1), waiting, windows=(REPAIR,))
    assert placements(result) == {}
    assert explanation_of(result, "att-1").why is WaitReason.WINDOW
    assert explanation_of(result, "att-1").hint == "`time_limit: 120m` or less could start now"


@pytest.mark.parametrize("limit_s", [60.0, None])
def test_node_in_maintenance_takes_no_job_and_is_replanned_at_its_end(limit_s: float | None) -> None:
    now = window(("node-01",), -60.0, HOUR)
    result = make_plan(nodes(1), candidate(1, request(gpus=1, time_limit_s=limit_s)), windows=(now,))
    assert placements(result) == {}
    assert result.replan_at == NOW + HOUR
    assert [(promise.at, promise.nodes) for promise in result.promises] == [(NOW + HOUR, ("node-01",))]


def test_window_that_is_over_blocks_no_job() -> None:
    over = window(("node-01",), -HOUR, 0.0)
    assert placements(make_plan(nodes(1), candidate(1, request(gpus=1)), windows=(over,)))


def test_replan_time_is_the_begin_of_a_window() -> None:
    result = make_plan(nodes(1), windows=(REPAIR,))
    assert result.replan_at == REPAIR.from_at


@pytest.mark.parametrize("begins_s", [-60.0, 2 * HOUR])
def test_reservation_never_blocks_its_own_project(begins_s: float) -> None:
    ours = window(("node-01",), begins_s, 4 * HOUR, project="vision")
    result = make_plan(nodes(1), candidate(1, request(gpus=8)), windows=(ours,))
    assert placements(result) == {"att-1": ["node-01"]}


def test_reservation_is_also_for_the_projects_below_its_own() -> None:
    small, other = (candidate(n, request(gpus=1), project=p) for n, p in ((1, "detection"), (2, "speech")))
    planner = Planner.of(snapshot(nodes(1), (small, other), windows=(OURS,)), Policy())
    planner.set_projects([ProjectInfo(name="vision"), ProjectInfo(name="detection", parent="vision")])
    assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-1"]


def test_job_of_another_project_may_not_run_into_a_reservation() -> None:
    result = make_plan(nodes(1), candidate(1, request(gpus=8), project="speech"), windows=(OURS,))
    assert explanation_of(result, "att-1").why is WaitReason.WINDOW


def test_promise_moves_behind_a_window_that_the_job_would_meet() -> None:
    busy = holding(1, {"node-01": ALL_GPUS}, placed_at=NOW, time_limit_s=HOUR)
    result = make_plan(
        nodes(1), candidate(1, request(gpus=8, time_limit_s=1.5 * HOUR)), held=(busy,), windows=(REPAIR,)
    )
    assert [promise.at for promise in result.promises] == [REPAIR.until_at]


def test_promise_before_a_window_stays_if_the_job_is_gone_by_then() -> None:
    busy = holding(1, {"node-01": ALL_GPUS}, placed_at=NOW, time_limit_s=HOUR)
    result = make_plan(
        nodes(1), candidate(1, request(gpus=8, time_limit_s=HOUR)), held=(busy,), windows=(REPAIR,)
    )
    assert [promise.at for promise in result.promises] == [NOW + HOUR]


@pytest.mark.parametrize("near", [None, within_label("rack")])
def test_gang_is_promised_a_time_at_which_none_of_its_nodes_is_in_a_window(near: object) -> None:
    """node-01 is free until its repair, node-02 only from an hour on: two hours fit on both only later."""
    busy = holding(1, {"node-02": ALL_GPUS}, placed_at=NOW, time_limit_s=HOUR)
    gang = candidate(1, request(gpus=8, nodes=2, time_limit_s=2 * HOUR, topology=near))
    result = make_plan(nodes(2, rack="r1"), gang, held=(busy,), windows=(REPAIR,))
    assert [(promise.at, promise.nodes) for promise in result.promises] == [
        (REPAIR.until_at, ("node-01", "node-02"))
    ]


def test_gap_between_two_windows_is_used_when_it_is_long_enough() -> None:
    later = window(("node-01",), 6 * HOUR, 7 * HOUR)
    for limit_s, at in ((2 * HOUR, REPAIR.until_at), (2.5 * HOUR, later.until_at)):
        busy = holding(1, {"node-01": ALL_GPUS}, placed_at=NOW, time_limit_s=1.5 * HOUR)
        waits = candidate(1, request(gpus=8, time_limit_s=limit_s))
        result = make_plan(nodes(1), waits, held=(busy,), windows=(later, REPAIR))
        assert [promise.at for promise in result.promises] == [at]


def test_no_node_with_a_window_is_reserved_if_its_free_time_is_unknown() -> None:
    endless = holding(1, {"node-01": ALL_GPUS})
    policy = Policy(patience_s=0.0, patience_factor=0.0)
    waits = candidate(1, request(gpus=8, time_limit_s=HOUR))
    result = make_plan(nodes(1), waits, held=(endless,), windows=(REPAIR,), policy=policy)
    assert result.promises == ()
    result = make_plan(nodes(1), waits, held=(endless,), policy=policy)
    assert [promise.nodes for promise in result.promises] == [("node-01",)]


def test_fewer_nodes_are_not_offered_where_a_window_is_ahead() -> None:
    gang = candidate(1, request(gpus=8, nodes=3))
    busy = holding(1, {"node-03": ALL_GPUS})
    result = make_plan(nodes(3), gang, held=(busy,), windows=(REPAIR,))
    assert explanation_of(result, "att-1").hint == "`nodes: 1..3` could start on what is free"


def test_moment_a_window_begins_needs_no_second_plan() -> None:
    """If it did, the control plane would plan again and again until the clock moved on."""
    planner = Planner.of(snapshot(nodes(1), (), windows=(REPAIR,)), Policy())
    assert planner.plan(REPAIR.from_at).replan_at == REPAIR.until_at
    assert planner.plan(REPAIR.until_at).replan_at is None
