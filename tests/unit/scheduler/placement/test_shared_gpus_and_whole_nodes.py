"""Parts of GPUs, slices, whole nodes, labels and topology: which job is given what."""

from __future__ import annotations

import msgspec

from shoal.model.job import GpuRequest, ResourceRequest, TopologyRequest
from shoal.model.people import DeviceAmounts
from shoal.scheduler import Candidate, GpuInfo, NodeInfo, Plan, Policy, WaitReason, plan
from shoal.scheduler.facts.amounts import ProjectInfo
from tests.support.clusters import (
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
    snapshot,
)


def part(milli: int, kind: str | None = None) -> ResourceRequest:
    gpu_request = GpuRequest(count=1, kind=kind, milli=milli)
    return ResourceRequest(gpus=gpu_request, cpus=1.0, memory_bytes=GIB)


def gpus_of(told_shares: object, attempt_id: str) -> tuple[int, ...]:
    starts = {start.attempt_id: start for start in told_shares.starts}  # type: ignore[attr-defined]
    return tuple(starts[attempt_id].allocation[0].gpu_ids)


def test_two_halves_share_one_gpu_and_a_third_takes_the_next() -> None:
    result = make_plan(nodes(1, gpus=2), *(candidate(number, part(500)) for number in (1, 2, 3)))
    assert [gpus_of(result, f"att-{number}") for number in (1, 2, 3)] == [(0,), (0,), (1,)]


def test_a_shared_gpu_request_is_never_split_over_two_gpus() -> None:
    result = make_plan(nodes(1, gpus=2), *(candidate(number, part(600)) for number in (1, 2, 3)))
    assert len(result.starts) == 2
    assert "0.6 of a free GPU" in explanation_of(result, "att-3").sentence


def test_a_shared_gpu_is_not_given_whole() -> None:
    result = make_plan(nodes(1, gpus=1), candidate(1, part(10)), candidate(2, request(gpus=1)))
    assert list(placements(result)) == ["att-1"]
    assert explanation_of(result, "att-2").why is WaitReason.RESOURCES


def test_slices_are_given_only_to_jobs_that_name_them() -> None:
    slices = tuple(GpuInfo(100 + number, "H100-1g.10gb") for number in range(2))
    cluster = (NodeInfo(name="n1", cpus=8.0, memory_bytes=8 * GIB, gpus=slices),)
    result = make_plan(
        cluster, candidate(1, request(gpus=1)), candidate(2, request(gpus=1, kind="H100-1g.10gb"))
    )
    assert list(placements(result)) == ["att-2"]
    refusal = explanation_of(result, "att-1")
    assert refusal.why is WaitReason.NEVER_FITS
    assert "no node has a whole GPU, this cluster has the slices `H100-1g.10gb`" in refusal.sentence
    assert "set `gpus: H100-1g.10gb`" in (refusal.hint or "")


def test_either_of_two_kinds_will_do() -> None:
    cluster = (node("node-01", kind="V100"), node("node-02", kind="H100"))
    result = make_plan(cluster, candidate(1, request(gpus=8, kind="A100|H100")))
    assert placements(result) == {"att-1": ["node-02"]}


def test_an_exclusive_job_gets_a_whole_idle_node_and_shares_it_with_none() -> None:
    held = holding(1, {"node-01": (0,)})
    alone = request(gpus=1, is_exclusive=True)
    result = make_plan(nodes(2), candidate(1, alone), candidate(2, alone), held=(held,))
    assert placements(result) == {"att-1": ["node-02"]}
    task = result.starts[0].allocation[0]
    assert (task.cpus, len(task.gpu_ids)) == (64.0, 8)
    assert "no other job on it" in explanation_of(result, "att-2").sentence


def test_labels_that_are_required_choose_the_nodes() -> None:
    cluster = (node("node-01"), node("node-02", labels={"gpu_memory": "80GB"}))
    wanted = request(gpus=1, require=(("gpu_memory", "80GB"),))
    assert placements(make_plan(cluster, candidate(1, wanted))) == {"att-1": ["node-02"]}
    result = make_plan(cluster, candidate(1, request(gpus=1, require=(("gpu_memory", "40GB"),))))
    assert "of `gpu_memory: 40GB` there is none: they have `80GB`" in explanation_of(result, "att-1").sentence


def test_a_spread_gang_gets_each_node_in_a_different_rack() -> None:
    cluster = (node("a", rack="r1"), node("b", rack="r1"), node("c", rack="r2"))
    apart = TopologyRequest(spread="rack", is_required=False)
    assert placements(make_plan(cluster, candidate(1, request(gpus=8, nodes=2, topology=apart)))) == {
        "att-1": ["a", "c"]
    }
    result = make_plan(cluster, candidate(1, request(gpus=8, nodes=3, topology=apart)))
    assert "each in another `rack`; at most 2 can be so" in explanation_of(result, "att-1").sentence


def test_closeness_takes_the_closest_level_that_holds_the_gang() -> None:
    cluster = (
        node("a", labels={"zone": "z1", "rack": "r1"}),
        node("b", labels={"zone": "z1", "rack": "r2"}),
        node("c", labels={"zone": "z2", "rack": "r3"}),
        node("d", labels={"zone": "z2", "rack": "r3"}),
    )
    wanted = request(gpus=8, nodes=2, topology=TopologyRequest(within="zone"))
    assert placements(make_plan(cluster, candidate(1, wanted))) == {"att-1": ["c", "d"]}


def limited(num_gpus: int, cluster: tuple[NodeInfo, ...], *waiting: Candidate) -> Plan:
    project = ProjectInfo(name="vision", limit=DeviceAmounts(gpus=num_gpus))
    facts = msgspec.structs.replace(snapshot(cluster, waiting), projects=(project,))
    return plan(facts, Policy(), NOW)


def test_parts_count_as_parts_against_a_limit() -> None:
    result = limited(1, nodes(1), *(candidate(number, part(300)) for number in range(1, 5)))
    assert len(result.starts) == 3
    explanation = explanation_of(result, "att-4").sentence
    assert explanation == "needs 0.3 GPUs; project `vision` holds 0.9 of its limit of 1"


def test_an_exclusive_job_counts_by_all_that_its_node_has() -> None:
    result = limited(
        4, nodes(1), candidate(1, request(gpus=1, is_exclusive=True)), candidate(2, request(gpus=1))
    )
    assert list(placements(result)) == ["att-2"]
    assert explanation_of(result, "att-1").sentence == (
        "needs 8 GPUs; project `vision` may have at most 4, its limit"
    )


def test_an_exclusive_job_waits_for_a_node_that_its_project_may_have() -> None:
    cluster = (node("large", gpus=8), node("small", gpus=2))
    wanted = request(gpus=1, is_exclusive=True)
    result = limited(4, cluster, candidate(1, wanted), candidate(2, wanted), candidate(3, wanted))
    assert placements(result) == {"att-1": ["small"]}
    assert explanation_of(result, "att-2").why is WaitReason.RESOURCES


def test_an_elastic_gang_of_whole_nodes_takes_no_more_than_its_limit() -> None:
    wanted = request(nodes=(1, 4), is_exclusive=True)
    assert placements(limited(20, nodes(4), candidate(1, wanted))) == {"att-1": ["node-01", "node-02"]}


def test_shared_gpus_are_not_spread_over_all_nodes() -> None:
    result = make_plan(nodes(4), *(candidate(number, part(100)) for number in range(1, 61)))
    assert {name for names in placements(result).values() for name in names} == {"node-01"}
    assert len(result.starts) == 60
