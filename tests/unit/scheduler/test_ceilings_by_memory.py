"""Memory cannot be used to get around a limit on CPUs: the CPUs that it keeps from other jobs count."""

from __future__ import annotations

from shoal.model.job import ResourceRequest
from shoal.model.people import DeviceAmounts
from shoal.scheduler import Candidate, NodeInfo, Planner, Policy, WaitReason
from shoal.scheduler.facts.amounts import ProjectInfo


def _job(number: int, project: str, request: ResourceRequest) -> Candidate:
    return Candidate(
        attempt_id=f"{project}-{number}",
        job_id=f"{project}-{number}",
        project=project,
        order=number,
        submitted_at=float(number),
        request=request,
    )


def test_project_with_few_cpus_cannot_block_the_cluster_with_memory() -> None:
    planner = Planner(Policy())
    for number in range(4):
        planner.set_node(NodeInfo(name=f"n{number}", cpus=8.0, memory_bytes=64))
    planner.set_projects([ProjectInfo(name="sly", limit=DeviceAmounts(cpus=8.0)), ProjectInfo(name="plain")])
    for number in range(4):
        planner.add(_job(number, "sly", ResourceRequest(cpus=0.001, memory_bytes=64)))
        planner.add(_job(10 + number, "plain", ResourceRequest(cpus=8.0)))
    started = [start.attempt_id for start in planner.plan(100.0).starts]
    assert len([attempt_id for attempt_id in started if attempt_id.startswith("sly")]) == 1
    assert len([attempt_id for attempt_id in started if attempt_id.startswith("plain")]) == 3
    waiting = next(attempt_id for attempt_id in planner.waiting if attempt_id.project == "sly")
    explanation = planner.explain(waiting.attempt_id, 100.0)
    assert explanation is not None
    assert explanation.why is WaitReason.LIMIT


def test_memory_that_goes_with_the_cpus_costs_nothing_more() -> None:
    planner = Planner(Policy())
    planner.set_node(NodeInfo(name="n0", cpus=8.0, memory_bytes=64))
    planner.set_projects([ProjectInfo(name="p", limit=DeviceAmounts(cpus=8.0))])
    planner.add(_job(1, "p", ResourceRequest(cpus=4.0)))
    planner.add(_job(2, "p", ResourceRequest(cpus=4.0, memory_bytes=32)))
    assert len(planner.plan(0.0).starts) == 2
