"""Who starts, and where."""

from __future__ import annotations

import pytest

from shoal.model.attempt import NodeShare
from shoal.model.request import Request
from shoal.scheduler import Holding, Policy, Why
from tests.support.clusters import (
    ALL_GPUS,
    GIB,
    NOW,
    holding,
    job,
    node,
    nodes,
    placed,
    planned,
    reason,
    request,
    within,
)


def test_a_higher_priority_starts_before_one_that_came_first() -> None:
    told = planned(nodes(1), job(1, request(gpus=8)), job(2, request(gpus=8), priority=5))
    assert list(placed(told)) == ["att-2"]


def test_among_equals_the_first_to_come_is_the_first_to_start() -> None:
    told = planned(nodes(1), job(2, request(gpus=8)), job(1, request(gpus=8)))
    assert list(placed(told)) == ["att-1"]


def test_a_small_job_goes_where_the_fewest_gpus_are_left_over() -> None:
    held = holding(1, {"node-02": (0, 1, 2, 3, 4)})
    assert placed(planned(nodes(3), job(1, request(gpus=2)), held=(held,))) == {"att-1": ["node-02"]}


def test_a_node_that_others_work_on_is_taken_last() -> None:
    """Also where it would be the best fit; and it is taken where nothing else is left."""
    cluster = (node("node-01", gpus=4, is_busy=True), node("node-02"), node("node-03", is_busy=True))
    assert placed(planned(cluster, job(1, request(gpus=2)))) == {"att-1": ["node-02"]}
    jobs = [job(number, request(gpus=8)) for number in (1, 2, 3)]
    assert placed(planned(cluster, *jobs)) == {"att-1": ["node-02"], "att-2": ["node-03"]}
    gang = planned(cluster, job(1, request(gpus=4, nodes=2)))
    assert placed(gang) == {"att-1": ["node-02", "node-01"]}
    elastic = planned(cluster, job(1, request(gpus=4, nodes=(1, 3))))
    assert placed(elastic) == {"att-1": ["node-02"]}, "with more it would wait for them"


def test_a_job_without_gpus_keeps_off_nodes_that_have_some() -> None:
    cluster = (node("node-01"), node("node-02", gpus=0))
    assert placed(planned(cluster, job(1, request(cpus=2.0)))) == {"att-1": ["node-02"]}


def test_a_gang_takes_as_many_nodes_as_are_free_up_to_its_most() -> None:
    held = holding(1, {"node-01": ALL_GPUS})
    elastic = request(gpus=8, nodes=(2, 4))
    told = planned(nodes(4), job(1, elastic), held=(held,))
    assert placed(told) == {"att-1": ["node-02", "node-03", "node-04"]}
    assert placed(planned(nodes(6), job(1, elastic)))["att-1"] == ["node-01", "node-02", "node-03", "node-04"]


def test_a_job_avoids_nodes_as_long_as_it_can_start_elsewhere() -> None:
    def where(asked: Request, *held: Holding) -> dict[str, list[str]]:
        return placed(planned(nodes(3), job(1, asked, avoided_nodes=("node-01", "node-02")), held=held))

    assert where(request(gpus=8)) == {"att-1": ["node-03"]}
    assert where(request(gpus=8, nodes=(1, 3))) == {"att-1": ["node-03"]}
    assert where(request(gpus=8), holding(1, {"node-03": ALL_GPUS})) == {"att-1": ["node-01"]}
    assert where(request(gpus=8, nodes=3)) == {"att-1": ["node-01", "node-02", "node-03"]}


def test_a_gang_that_is_one_node_short_takes_nothing() -> None:
    told = planned(nodes(3), job(1, request(gpus=8, nodes=4)), job(2, request(gpus=8)))
    assert list(placed(told)) == ["att-2"]


def test_required_closeness_takes_the_smallest_domain_that_is_large_enough() -> None:
    cluster = (
        *(node(f"wide-{n}", rack="r1") for n in range(4)),
        *(node(f"tight-{n}", rack="r2") for n in range(2)),
        node("alone", rack="r3"),
        node("nowhere"),
    )
    told = planned(cluster, job(1, request(gpus=8, nodes=2, topology=within("rack"))))
    assert placed(told) == {"att-1": ["tight-0", "tight-1"]}


def test_preferred_closeness_is_had_when_it_can_be_and_never_delays() -> None:
    cluster = (node("a", rack="r1"), node("b", rack="r2"), node("c", rack="r2"))
    preferred = within("rack", required=False)
    together = planned(cluster, job(1, request(gpus=8, nodes=2, topology=preferred)))
    assert placed(together) == {"att-1": ["b", "c"]}
    apart = planned(cluster, job(1, request(gpus=8, nodes=3, topology=preferred)))
    assert placed(apart) == {"att-1": ["b", "c", "a"]}


def test_gpus_of_the_asked_kind_are_chosen_by_their_numbers() -> None:
    held = holding(1, {"node-01": (0, 2)})
    told = planned(
        (node("node-01", kind="H100"), node("node-02")), job(1, request(gpus=2, kind="H100")), held=(held,)
    )
    assert told.starts[0].allocation[0].gpu_ids == (1, 3)


@pytest.mark.parametrize(
    "asked, expected",
    [
        (request(cpus=16.0), 128 * GIB),
        (request(gpus=4, cpus=1.0), 256 * GIB),
        (request(gpus=4, cpus=48.0), 384 * GIB),
        (request(gpus=4, memory_bytes=GIB), GIB),
    ],
)
def test_memory_left_out_follows_the_larger_share_of_cpus_or_gpus(asked: Request, expected: int) -> None:
    assert planned(nodes(1), job(1, asked)).starts[0].allocation[0].memory_bytes == expected


def test_fractions_of_cpus_fill_a_node_exactly() -> None:
    ten_tenths = [job(number, request(cpus=0.1, memory_bytes=0)) for number in range(11)]
    assert len(planned((node("n", cpus=1.0),), *ten_tenths).starts) == 10


def test_holdings_on_a_node_that_shrank_or_left_start_nothing_and_break_nothing() -> None:
    share = NodeShare(node="node-01", cpus=64.0, memory_bytes=900 * GIB, gpu_ids=(0, 77))
    gone = NodeShare(node="gone", cpus=1.0, memory_bytes=GIB)
    held = Holding(
        attempt_id="h", job_id="h", project="vision", priority=0, allocation=(share, gone), placed_at=NOW
    )
    told = planned(nodes(1), job(1, request(cpus=1.0)), held=(held,))
    assert reason(told, "att-1").why is Why.RESOURCES


def test_an_array_starts_only_as_many_elements_as_it_allows() -> None:
    elements = [
        job(number, request(cpus=1.0), array_id="arr", array_at_once=2, priority=number)
        for number in range(4)
    ]
    told = planned(nodes(1), *elements)
    assert list(placed(told)) == ["att-3", "att-2"]
    assert {said.why for said in told.explanations} == {Why.ARRAY_LIMIT}


def test_a_job_in_its_backoff_starts_when_the_time_has_come() -> None:
    assert planned(nodes(1), job(1, request(), not_before=NOW + 0.5)).starts == ()
    assert placed(planned(nodes(1), job(1, request(), not_before=NOW))) == {"att-1": ["node-01"]}


def test_small_jobs_pass_a_gang_that_waits_until_it_loses_patience() -> None:
    held = holding(1, {"node-01": ALL_GPUS})
    gang = request(gpus=8, nodes=3)
    fresh = planned(nodes(3), job(1, gang, submitted_at=NOW - 599), job(2, request(gpus=1)), held=(held,))
    assert list(placed(fresh)) == ["att-2"]
    stale = planned(nodes(3), job(1, gang, submitted_at=NOW - 601), job(2, request(gpus=1)), held=(held,))
    assert placed(stale) == {}
    assert reason(stale, "att-1").why is Why.RESOURCES
    assert reason(stale, "att-2").why is Why.BEHIND


def test_a_job_that_lost_patience_keeps_the_nodes_that_serve_it_soonest_and_no_more() -> None:
    held = (
        holding(1, {"node-01": ALL_GPUS}, time_limit_s=700.0),
        holding(2, {"node-02": (0,)}, time_limit_s=10_000.0),
    )
    gang = job(1, request(gpus=8, nodes=2), submitted_at=0.0)
    # Kept: node-03, which is free, and node-01, which is free before node-02.
    told = planned(nodes(3), gang, job(2, request(gpus=1)), job(3, request(gpus=8)), held=held)
    assert placed(told) == {"att-2": ["node-02"]}
    assert reason(told, "att-3").why is Why.BEHIND


def test_a_job_that_lost_patience_does_not_hold_up_a_higher_priority() -> None:
    held = holding(1, {"node-01": ALL_GPUS})
    gang = job(1, request(gpus=8, nodes=2), submitted_at=0.0)
    told = planned(nodes(2), gang, job(2, request(gpus=8), priority=1), held=(held,))
    assert placed(told) == {"att-2": ["node-02"]}


@pytest.mark.parametrize("hopeless", [request(gpus=16), request(gpus=8, nodes=9)])
def test_a_job_that_can_never_run_holds_up_nobody(hopeless: Request) -> None:
    strict = Policy(patience_s=0.0)
    told = planned(nodes(2), job(1, hopeless, submitted_at=0.0), job(2, request(gpus=8)), policy=strict)
    assert list(placed(told)) == ["att-2"]
