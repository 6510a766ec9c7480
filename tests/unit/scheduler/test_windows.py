"""Maintenance and reservations: who may start on their nodes, and when others are promised them."""

from __future__ import annotations

import pytest

from shoal.scheduler import Planner, Policy, Why
from shoal.scheduler.devices import ProjectView
from tests.support.clusters import (
    ALL_GPUS,
    NOW,
    holding,
    job,
    nodes,
    placed,
    planned,
    reason,
    request,
    snapshot,
    window,
    within,
)

HOUR = 3600.0
REPAIR = window(("node-01",), 2 * HOUR, 4 * HOUR)
OURS = window(("node-01",), 2 * HOUR, 4 * HOUR, project="vision")


@pytest.mark.parametrize("limit_s", [HOUR, 2 * HOUR])
def test_job_that_is_gone_before_maintenance_begins_starts_there(limit_s: float) -> None:
    told = planned(nodes(1), job(1, request(gpus=8, time_limit_s=limit_s)), windows=(REPAIR,))
    assert placed(told) == {"att-1": ["node-01"]}


@pytest.mark.parametrize("limit_s", [2 * HOUR + 1, None])
def test_job_that_may_run_into_maintenance_goes_elsewhere_or_waits(limit_s: float | None) -> None:
    one = job(1, request(gpus=8, time_limit_s=limit_s))
    assert placed(planned(nodes(2), one, windows=(REPAIR,))) == {"att-1": ["node-02"]}
    told = planned(nodes(1), one, windows=(REPAIR,))
    assert placed(told) == {}
    assert reason(told, "att-1").why is Why.WINDOW
    assert reason(told, "att-1").hint == "`time_limit: 120m` or less could start now"


@pytest.mark.parametrize("limit_s", [60.0, None])
def test_node_in_maintenance_takes_nobody_and_is_looked_at_when_it_ends(limit_s: float | None) -> None:
    now = window(("node-01",), -60.0, HOUR)
    told = planned(nodes(1), job(1, request(gpus=1, time_limit_s=limit_s)), windows=(now,))
    assert placed(told) == {}
    assert told.look_again_at == NOW + HOUR
    assert [(promise.at, promise.nodes) for promise in told.promises] == [(NOW + HOUR, ("node-01",))]


def test_window_that_is_over_bars_nobody() -> None:
    over = window(("node-01",), -HOUR, 0.0)
    assert placed(planned(nodes(1), job(1, request(gpus=1)), windows=(over,)))


def test_plan_is_looked_at_again_when_a_window_begins() -> None:
    told = planned(nodes(1), windows=(REPAIR,))
    assert told.look_again_at == REPAIR.from_at


@pytest.mark.parametrize("begins_s", [-60.0, 2 * HOUR])
def test_reservation_never_stands_in_the_way_of_its_own_project(begins_s: float) -> None:
    ours = window(("node-01",), begins_s, 4 * HOUR, project="vision")
    told = planned(nodes(1), job(1, request(gpus=8)), windows=(ours,))
    assert placed(told) == {"att-1": ["node-01"]}


def test_reservation_is_also_for_the_projects_below_its_own() -> None:
    small, other = (job(n, request(gpus=1), project=p) for n, p in ((1, "detection"), (2, "speech")))
    planner = Planner.of(snapshot(nodes(1), (small, other), windows=(OURS,)), Policy())
    planner.set_projects([ProjectView(name="vision"), ProjectView(name="detection", parent="vision")])
    assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-1"]


def test_job_of_another_project_may_not_run_into_a_reservation() -> None:
    told = planned(nodes(1), job(1, request(gpus=8), project="speech"), windows=(OURS,))
    assert reason(told, "att-1").why is Why.WINDOW


def test_promise_moves_behind_a_window_that_the_job_would_meet() -> None:
    busy = holding(1, {"node-01": ALL_GPUS}, placed_at=NOW, time_limit_s=HOUR)
    told = planned(
        nodes(1), job(1, request(gpus=8, time_limit_s=1.5 * HOUR)), held=(busy,), windows=(REPAIR,)
    )
    assert [promise.at for promise in told.promises] == [REPAIR.until_at]


def test_promise_before_a_window_stays_if_the_job_is_gone_by_then() -> None:
    busy = holding(1, {"node-01": ALL_GPUS}, placed_at=NOW, time_limit_s=HOUR)
    told = planned(nodes(1), job(1, request(gpus=8, time_limit_s=HOUR)), held=(busy,), windows=(REPAIR,))
    assert [promise.at for promise in told.promises] == [NOW + HOUR]


@pytest.mark.parametrize("near", [None, within("rack")])
def test_gang_is_promised_a_moment_at_which_none_of_its_nodes_is_shut(near: object) -> None:
    """node-01 is free until its repair, node-02 only from an hour on: two hours fit on both only later."""
    busy = holding(1, {"node-02": ALL_GPUS}, placed_at=NOW, time_limit_s=HOUR)
    gang = job(1, request(gpus=8, nodes=2, time_limit_s=2 * HOUR, topology=near))
    told = planned(nodes(2, rack="r1"), gang, held=(busy,), windows=(REPAIR,))
    assert [(promise.at, promise.nodes) for promise in told.promises] == [
        (REPAIR.until_at, ("node-01", "node-02"))
    ]


def test_gap_between_two_windows_is_used_when_it_is_long_enough() -> None:
    later = window(("node-01",), 6 * HOUR, 7 * HOUR)
    for limit_s, at in ((2 * HOUR, REPAIR.until_at), (2.5 * HOUR, later.until_at)):
        busy = holding(1, {"node-01": ALL_GPUS}, placed_at=NOW, time_limit_s=1.5 * HOUR)
        waits = job(1, request(gpus=8, time_limit_s=limit_s))
        told = planned(nodes(1), waits, held=(busy,), windows=(later, REPAIR))
        assert [promise.at for promise in told.promises] == [at]


def test_nothing_is_kept_on_a_node_with_a_window_when_nobody_knows_when_it_is_free() -> None:
    endless = holding(1, {"node-01": ALL_GPUS})
    policy = Policy(patience_s=0.0, patience_factor=0.0)
    waits = job(1, request(gpus=8, time_limit_s=HOUR))
    told = planned(nodes(1), waits, held=(endless,), windows=(REPAIR,), policy=policy)
    assert told.promises == ()
    told = planned(nodes(1), waits, held=(endless,), policy=policy)
    assert [promise.nodes for promise in told.promises] == [("node-01",)]


def test_fewer_nodes_are_not_offered_where_a_window_is_ahead() -> None:
    gang = job(1, request(gpus=8, nodes=3))
    busy = holding(1, {"node-03": ALL_GPUS})
    told = planned(nodes(3), gang, held=(busy,), windows=(REPAIR,))
    assert reason(told, "att-1").hint == "`nodes: 1..3` could start on what is free"
