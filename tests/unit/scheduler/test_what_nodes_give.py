"""Parts of GPUs, slices, whole nodes, labels and distance: who is given what."""

from __future__ import annotations

import msgspec

from shoal.model.people import Devices
from shoal.model.request import GpuRequest, Request, TopologyRequest
from shoal.scheduler import Candidate, GpuView, NodeView, Plan, Policy, Why, plan
from shoal.scheduler.devices import ProjectView
from tests.support.clusters import (
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
    snapshot,
)


def part(milli: int, kind: str | None = None) -> Request:
    asked = GpuRequest(count=1, kind=kind, milli=milli)
    return Request(gpus=asked, cpus=1.0, memory_bytes=GIB)


def gpus_of(told_shares: object, attempt_id: str) -> tuple[int, ...]:
    starts = {start.attempt_id: start for start in told_shares.starts}  # type: ignore[attr-defined]
    return tuple(starts[attempt_id].allocation[0].gpu_ids)


def test_two_halves_share_one_gpu_and_a_third_takes_the_next() -> None:
    told = planned(nodes(1, gpus=2), *(job(number, part(500)) for number in (1, 2, 3)))
    assert [gpus_of(told, f"att-{number}") for number in (1, 2, 3)] == [(0,), (0,), (1,)]


def test_a_part_is_never_put_together_from_two_gpus() -> None:
    told = planned(nodes(1, gpus=2), *(job(number, part(600)) for number in (1, 2, 3)))
    assert len(told.starts) == 2
    assert "0.6 of a free GPU" in reason(told, "att-3").sentence


def test_a_shared_gpu_is_not_given_whole() -> None:
    told = planned(nodes(1, gpus=1), job(1, part(10)), job(2, request(gpus=1)))
    assert list(placed(told)) == ["att-1"]
    assert reason(told, "att-2").why is Why.RESOURCES


def test_slices_are_given_to_those_who_name_them_alone() -> None:
    slices = tuple(GpuView(100 + number, "H100-1g.10gb") for number in range(2))
    cluster = (NodeView(name="n1", cpus=8.0, memory_bytes=8 * GIB, gpus=slices),)
    told = planned(cluster, job(1, request(gpus=1)), job(2, request(gpus=1, kind="H100-1g.10gb")))
    assert list(placed(told)) == ["att-2"]
    refusal = reason(told, "att-1")
    assert refusal.why is Why.NEVER_FITS
    assert "no node has a whole GPU, this cluster has the slices `H100-1g.10gb`" in refusal.sentence
    assert "set `gpus: H100-1g.10gb`" in (refusal.hint or "")


def test_either_of_two_kinds_will_do() -> None:
    cluster = (node("node-01", kind="V100"), node("node-02", kind="H100"))
    told = planned(cluster, job(1, request(gpus=8, kind="A100|H100")))
    assert placed(told) == {"att-1": ["node-02"]}


def test_an_exclusive_job_gets_all_of_an_idle_node_and_nobody_joins_it() -> None:
    held = holding(1, {"node-01": (0,)})
    alone = request(gpus=1, is_exclusive=True)
    told = planned(nodes(2), job(1, alone), job(2, alone), held=(held,))
    assert placed(told) == {"att-1": ["node-02"]}
    share = told.starts[0].allocation[0]
    assert (share.cpus, len(share.gpu_ids)) == (64.0, 8)
    assert "no other job on it" in reason(told, "att-2").sentence


def test_labels_that_are_required_choose_the_nodes() -> None:
    cluster = (node("node-01"), node("node-02", labels={"gpu_memory": "80GB"}))
    asked = request(gpus=1, require=(("gpu_memory", "80GB"),))
    assert placed(planned(cluster, job(1, asked))) == {"att-1": ["node-02"]}
    told = planned(cluster, job(1, request(gpus=1, require=(("gpu_memory", "40GB"),))))
    assert "of `gpu_memory: 40GB` there is none: they have `80GB`" in reason(told, "att-1").sentence


def test_a_gang_that_is_to_spread_has_each_node_in_another_rack() -> None:
    cluster = (node("a", rack="r1"), node("b", rack="r1"), node("c", rack="r2"))
    apart = TopologyRequest(spread="rack", is_required=False)
    assert placed(planned(cluster, job(1, request(gpus=8, nodes=2, topology=apart)))) == {"att-1": ["a", "c"]}
    told = planned(cluster, job(1, request(gpus=8, nodes=3, topology=apart)))
    assert "each in another `rack`; at most 2 can be so" in reason(told, "att-1").sentence


def test_closeness_takes_the_closest_level_that_holds_the_gang() -> None:
    cluster = (
        node("a", labels={"zone": "z1", "rack": "r1"}),
        node("b", labels={"zone": "z1", "rack": "r2"}),
        node("c", labels={"zone": "z2", "rack": "r3"}),
        node("d", labels={"zone": "z2", "rack": "r3"}),
    )
    asked = request(gpus=8, nodes=2, topology=TopologyRequest(within="zone"))
    assert placed(planned(cluster, job(1, asked))) == {"att-1": ["c", "d"]}


def limited(num_gpus: int, cluster: tuple[NodeView, ...], *waiting: Candidate) -> Plan:
    project = ProjectView(name="vision", limit=Devices(gpus=num_gpus))
    facts = msgspec.structs.replace(snapshot(cluster, waiting), projects=(project,))
    return plan(facts, Policy(), NOW)


def test_parts_count_as_parts_against_a_limit() -> None:
    told = limited(1, nodes(1), *(job(number, part(300)) for number in range(1, 5)))
    assert len(told.starts) == 3
    said = reason(told, "att-4").sentence
    assert said == "needs 0.3 GPUs; project `vision` holds 0.9 of its limit of 1"


def test_an_exclusive_job_counts_by_all_that_its_node_has() -> None:
    told = limited(4, nodes(1), job(1, request(gpus=1, is_exclusive=True)), job(2, request(gpus=1)))
    assert list(placed(told)) == ["att-2"]
    assert reason(told, "att-1").sentence == ("needs 8 GPUs; project `vision` may have at most 4, its limit")


def test_an_exclusive_job_waits_for_a_node_that_its_project_may_have() -> None:
    cluster = (node("large", gpus=8), node("small", gpus=2))
    asked = request(gpus=1, is_exclusive=True)
    told = limited(4, cluster, job(1, asked), job(2, asked), job(3, asked))
    assert placed(told) == {"att-1": ["small"]}
    assert reason(told, "att-2").why is Why.RESOURCES


def test_an_elastic_gang_of_whole_nodes_takes_no_more_than_its_limit() -> None:
    asked = request(nodes=(1, 4), is_exclusive=True)
    assert placed(limited(20, nodes(4), job(1, asked))) == {"att-1": ["node-01", "node-02"]}


def test_parts_alone_are_not_strewn_over_all_nodes() -> None:
    told = planned(nodes(4), *(job(number, part(100)) for number in range(1, 61)))
    assert {name for names in placed(told).values() for name in names} == {"node-01"}
    assert len(told.starts) == 60
