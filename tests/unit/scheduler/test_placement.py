"""Which jobs start, and on which nodes."""

from __future__ import annotations

import pytest

from shoal.model.attempt import NodeTask
from shoal.model.job import ResourceRequest
from shoal.scheduler import Holding, Policy, WaitReason
from tests.support.clusters import (
    ALL_GPUS,
    GIB,
    NOW,
    candidate,
    explanation_of,
    holding,
    make_plan,
    node,
    nodes,
    placements,
    request,
    within_label,
)


def test_a_higher_priority_starts_before_one_that_came_first() -> None:
    result = make_plan(nodes(1), candidate(1, request(gpus=8)), candidate(2, request(gpus=8), priority=5))
    assert list(placements(result)) == ["att-2"]


def test_among_equals_the_first_submitted_starts_first() -> None:
    result = make_plan(nodes(1), candidate(2, request(gpus=8)), candidate(1, request(gpus=8)))
    assert list(placements(result)) == ["att-1"]


def test_a_small_job_goes_where_the_fewest_gpus_are_left_over() -> None:
    held = holding(1, {"node-02": (0, 1, 2, 3, 4)})
    assert placements(make_plan(nodes(3), candidate(1, request(gpus=2)), held=(held,))) == {
        "att-1": ["node-02"]
    }


def test_a_node_with_work_from_outside_shoal_is_chosen_last() -> None:
    """Even if it would be the best fit. It is chosen if nothing else is left."""
    cluster = (node("node-01", gpus=4, is_busy=True), node("node-02"), node("node-03", is_busy=True))
    assert placements(make_plan(cluster, candidate(1, request(gpus=2)))) == {"att-1": ["node-02"]}
    jobs = [candidate(number, request(gpus=8)) for number in (1, 2, 3)]
    assert placements(make_plan(cluster, *jobs)) == {"att-1": ["node-02"], "att-2": ["node-03"]}
    gang = make_plan(cluster, candidate(1, request(gpus=4, nodes=2)))
    assert placements(gang) == {"att-1": ["node-02", "node-01"]}
    elastic = make_plan(cluster, candidate(1, request(gpus=4, nodes=(1, 3))))
    assert placements(elastic) == {"att-1": ["node-02"]}, "with more it would wait for them"


def test_a_job_without_gpus_keeps_off_nodes_that_have_some() -> None:
    cluster = (node("node-01"), node("node-02", gpus=0))
    assert placements(make_plan(cluster, candidate(1, request(cpus=2.0)))) == {"att-1": ["node-02"]}


def test_a_gang_takes_as_many_nodes_as_are_free_up_to_its_most() -> None:
    held = holding(1, {"node-01": ALL_GPUS})
    elastic = request(gpus=8, nodes=(2, 4))
    result = make_plan(nodes(4), candidate(1, elastic), held=(held,))
    assert placements(result) == {"att-1": ["node-02", "node-03", "node-04"]}
    assert placements(make_plan(nodes(6), candidate(1, elastic)))["att-1"] == [
        "node-01",
        "node-02",
        "node-03",
        "node-04",
    ]


def test_a_job_uses_avoided_nodes_only_if_it_cannot_start_on_others() -> None:
    def where(wanted: ResourceRequest, *held: Holding) -> dict[str, list[str]]:
        return placements(
            make_plan(nodes(3), candidate(1, wanted, avoided_nodes=("node-01", "node-02")), held=held)
        )

    assert where(request(gpus=8)) == {"att-1": ["node-03"]}
    assert where(request(gpus=8, nodes=(1, 3))) == {"att-1": ["node-03"]}
    assert where(request(gpus=8), holding(1, {"node-03": ALL_GPUS})) == {"att-1": ["node-01"]}
    assert where(request(gpus=8, nodes=3)) == {"att-1": ["node-01", "node-02", "node-03"]}


def test_a_gang_that_is_one_node_short_takes_nothing() -> None:
    result = make_plan(nodes(3), candidate(1, request(gpus=8, nodes=4)), candidate(2, request(gpus=8)))
    assert list(placements(result)) == ["att-2"]


def test_required_closeness_takes_the_smallest_domain_that_is_large_enough() -> None:
    cluster = (
        *(node(f"wide-{n}", rack="r1") for n in range(4)),
        *(node(f"tight-{n}", rack="r2") for n in range(2)),
        node("alone", rack="r3"),
        node("nowhere"),
    )
    result = make_plan(cluster, candidate(1, request(gpus=8, nodes=2, topology=within_label("rack"))))
    assert placements(result) == {"att-1": ["tight-0", "tight-1"]}


def test_preferred_topology_is_used_if_possible_and_never_delays() -> None:
    cluster = (node("a", rack="r1"), node("b", rack="r2"), node("c", rack="r2"))
    preferred = within_label("rack", required=False)
    together = make_plan(cluster, candidate(1, request(gpus=8, nodes=2, topology=preferred)))
    assert placements(together) == {"att-1": ["b", "c"]}
    apart = make_plan(cluster, candidate(1, request(gpus=8, nodes=3, topology=preferred)))
    assert placements(apart) == {"att-1": ["b", "c", "a"]}


def test_gpus_of_the_asked_kind_are_chosen_by_their_numbers() -> None:
    held = holding(1, {"node-01": (0, 2)})
    result = make_plan(
        (node("node-01", kind="H100"), node("node-02")),
        candidate(1, request(gpus=2, kind="H100")),
        held=(held,),
    )
    assert result.starts[0].allocation[0].gpu_ids == (1, 3)


@pytest.mark.parametrize(
    "wanted, expected",
    [
        (request(cpus=16.0), 128 * GIB),
        (request(gpus=4, cpus=1.0), 256 * GIB),
        (request(gpus=4, cpus=48.0), 384 * GIB),
        (request(gpus=4, memory_bytes=GIB), GIB),
    ],
)
def test_unspecified_memory_follows_the_larger_share_of_cpus_or_gpus(
    wanted: ResourceRequest, expected: int
) -> None:
    assert make_plan(nodes(1), candidate(1, wanted)).starts[0].allocation[0].memory_bytes == expected


def test_fractions_of_cpus_fill_a_node_exactly() -> None:
    ten_tenths = [candidate(number, request(cpus=0.1, memory_bytes=0)) for number in range(11)]
    assert len(make_plan((node("n", cpus=1.0),), *ten_tenths).starts) == 10


def test_holdings_on_a_shrunk_or_gone_node_break_no_plan() -> None:
    task = NodeTask(node="node-01", cpus=64.0, memory_bytes=900 * GIB, gpu_ids=(0, 77))
    gone = NodeTask(node="gone", cpus=1.0, memory_bytes=GIB)
    held = Holding(
        attempt_id="h", job_id="h", project="vision", priority=0, allocation=(task, gone), placed_at=NOW
    )
    result = make_plan(nodes(1), candidate(1, request(cpus=1.0)), held=(held,))
    assert explanation_of(result, "att-1").why is WaitReason.RESOURCES


def test_an_array_starts_only_as_many_elements_as_it_allows() -> None:
    elements = [
        candidate(number, request(cpus=1.0), array_id="arr", array_at_once=2, priority=number)
        for number in range(4)
    ]
    result = make_plan(nodes(1), *elements)
    assert list(placements(result)) == ["att-3", "att-2"]
    assert {explanation.why for explanation in result.explanations} == {WaitReason.ARRAY_LIMIT}


def test_a_job_in_backoff_starts_when_its_backoff_ends() -> None:
    assert make_plan(nodes(1), candidate(1, request(), not_before=NOW + 0.5)).starts == ()
    assert placements(make_plan(nodes(1), candidate(1, request(), not_before=NOW))) == {"att-1": ["node-01"]}


def test_small_jobs_pass_a_gang_that_waits_until_it_loses_patience() -> None:
    held = holding(1, {"node-01": ALL_GPUS})
    gang = request(gpus=8, nodes=3)
    fresh = make_plan(
        nodes(3), candidate(1, gang, submitted_at=NOW - 599), candidate(2, request(gpus=1)), held=(held,)
    )
    assert list(placements(fresh)) == ["att-2"]
    stale = make_plan(
        nodes(3), candidate(1, gang, submitted_at=NOW - 601), candidate(2, request(gpus=1)), held=(held,)
    )
    assert placements(stale) == {}
    assert explanation_of(stale, "att-1").why is WaitReason.RESOURCES
    assert explanation_of(stale, "att-2").why is WaitReason.BEHIND


def test_a_job_that_lost_patience_reserves_only_the_nodes_that_are_free_first() -> None:
    held = (
        holding(1, {"node-01": ALL_GPUS}, time_limit_s=700.0),
        holding(2, {"node-02": (0,)}, time_limit_s=10_000.0),
    )
    gang = candidate(1, request(gpus=8, nodes=2), submitted_at=0.0)
    # Reserved: node-03, which is free, and node-01, which becomes free before node-02.
    result = make_plan(
        nodes(3), gang, candidate(2, request(gpus=1)), candidate(3, request(gpus=8)), held=held
    )
    assert placements(result) == {"att-2": ["node-02"]}
    assert explanation_of(result, "att-3").why is WaitReason.BEHIND


def test_a_job_that_lost_patience_does_not_block_a_higher_priority() -> None:
    held = holding(1, {"node-01": ALL_GPUS})
    gang = candidate(1, request(gpus=8, nodes=2), submitted_at=0.0)
    result = make_plan(nodes(2), gang, candidate(2, request(gpus=8), priority=1), held=(held,))
    assert placements(result) == {"att-2": ["node-02"]}


@pytest.mark.parametrize("hopeless", [request(gpus=16), request(gpus=8, nodes=9)])
def test_a_job_that_can_never_run_blocks_no_other_job(hopeless: ResourceRequest) -> None:
    strict = Policy(patience_s=0.0)
    result = make_plan(
        nodes(2), candidate(1, hopeless, submitted_at=0.0), candidate(2, request(gpus=8)), policy=strict
    )
    assert list(placements(result)) == ["att-2"]
