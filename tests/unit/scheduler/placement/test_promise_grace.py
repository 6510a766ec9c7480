"""A job holds its resources until its grace is over, not only until its limit."""

from __future__ import annotations

from shoal.model.attempt import NodeTask
from shoal.model.job import ResourceRequest
from shoal.scheduler import Candidate, Holding, NodeInfo, Planner, Policy


def _request(limit_s: float, grace_s: float) -> ResourceRequest:
    return ResourceRequest(cpus=4.0, time_limit_s=limit_s, grace_s=grace_s)


def _job(name: str, request: ResourceRequest, order: int) -> Candidate:
    return Candidate(
        attempt_id=name, job_id=name, project="p", order=order, submitted_at=float(order), request=request
    )


def test_promise_counts_the_grace_of_running_jobs_and_backfill() -> None:
    planner = Planner(Policy())
    for name in ("a", "b"):
        planner.set_node(NodeInfo(name=name, cpus=4.0, memory_bytes=64))
    held = _request(100.0, 20.0)
    task = NodeTask(node="a", cpus=4.0, memory_bytes=64)
    planner.hold(
        Holding(
            attempt_id="runs",
            job_id="runs",
            project="p",
            priority=0,
            allocation=(task,),
            placed_at=0.0,
            time_limit_s=100.0,
            request=held,
        )
    )
    planner.add(_job("wide", ResourceRequest(min_nodes=2, max_nodes=2, cpus=4.0), 1))
    planner.add(_job("too-long", _request(100.0, 30.0), 2))
    planner.add(_job("in-time", _request(90.0, 20.0), 3))
    result = planner.plan(10.0)
    assert [promise.at for promise in result.promises] == [120.0]
    assert [start.attempt_id for start in result.starts] == ["in-time"]
