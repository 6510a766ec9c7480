"""Memory is not a way round a limit on CPUs: what it keeps from others counts."""

from __future__ import annotations

from shoal.model.people import Devices
from shoal.model.request import Request
from shoal.scheduler import Candidate, NodeView, Planner, Policy, Why
from shoal.scheduler.devices import ProjectView


def _job(number: int, project: str, request: Request) -> Candidate:
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
        planner.set_node(NodeView(name=f"n{number}", cpus=8.0, memory_bytes=64))
    planner.set_projects([ProjectView(name="sly", limit=Devices(cpus=8.0)), ProjectView(name="plain")])
    for number in range(4):
        planner.add(_job(number, "sly", Request(cpus=0.001, memory_bytes=64)))
        planner.add(_job(10 + number, "plain", Request(cpus=8.0)))
    started = [start.attempt_id for start in planner.plan(100.0).starts]
    assert len([one for one in started if one.startswith("sly")]) == 1
    assert len([one for one in started if one.startswith("plain")]) == 3
    waiting = next(one for one in planner.waiting if one.project == "sly")
    told = planner.explain(waiting.attempt_id, 100.0)
    assert told is not None
    assert told.why is Why.LIMIT


def test_memory_that_goes_with_the_cpus_costs_nothing_more() -> None:
    planner = Planner(Policy())
    planner.set_node(NodeView(name="n0", cpus=8.0, memory_bytes=64))
    planner.set_projects([ProjectView(name="p", limit=Devices(cpus=8.0))])
    planner.add(_job(1, "p", Request(cpus=4.0)))
    planner.add(_job(2, "p", Request(cpus=4.0, memory_bytes=32)))
    assert len(planner.plan(0.0).starts) == 2
