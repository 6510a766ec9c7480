"""No job waits for ever: later jobs pass a due job only beside its promise.

From the time a job is due, the first of its queue is the job itself or one that came before it. The first job
is promised a start no later than the time by which all running jobs must have ended, and jobs that start
beside it delay nothing. So once it is due, a job waits at most one longest limit, and one more for each job
that came before it and still waits.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.job import ResourceRequest
from shoal.scheduler import Candidate, Holding, NodeInfo, Policy
from shoal.sim.twin import simulate_workload
from shoal.sim.workload import WorkJob, Workload

SLACK_S = 50.0
LONGEST_S = 100.0


class ShortestFirst:
    """Stamps that an adversary would choose: the longest job comes last until it is due."""

    def see(self, nodes: Iterable[NodeInfo]) -> None:
        pass

    def arrive(self, candidate: Candidate) -> Candidate:
        limit_s = candidate.request.time_limit_s or LONGEST_S
        return msgspec.structs.replace(
            candidate, expected_s=limit_s, due_at=candidate.submitted_at + SLACK_S, score=limit_s
        )

    def leave(self, attempt_id: str) -> None:
        pass

    def ended(self, holding: Holding, request: ResourceRequest, run_s: float, now: float) -> list[Candidate]:
        return []


def _job(number: int, at: float, nodes: int, cpus: int, limit_s: float, used: float) -> WorkJob:
    request = ResourceRequest(min_nodes=nodes, max_nodes=nodes, cpus=float(cpus), time_limit_s=limit_s)
    return WorkJob(job_id=f"job-{number}", submitted_at=at, run_s=max(limit_s * used, 1.0), request=request)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """A wide, long job somewhere in a stream of small, short ones that never ends."""
    num_nodes = draw(st.integers(1, 3))
    nodes = tuple(NodeInfo(name=f"n{n}", cpus=4.0, memory_bytes=64) for n in range(num_nodes))
    every_s = draw(st.sampled_from([2.0, 5.0, 9.0]))
    used = draw(st.sampled_from([0.1, 0.9, 1.0]))
    small = [
        _job(
            number,
            number * every_s,
            1,
            draw(st.integers(1, 3)),
            draw(st.sampled_from([5.0, 20.0, 40.0])),
            used,
        )
        for number in range(draw(st.integers(20, 80)))
    ]
    wide = [
        _job(1000 + number, draw(st.floats(0, 100)), draw(st.integers(1, num_nodes)), 4, LONGEST_S, used)
        for number in range(draw(st.integers(1, 3)))
    ]
    jobs = sorted([*small, *wide], key=lambda job: (job.submitted_at, job.job_id))
    return Workload(nodes=nodes, jobs=tuple(jobs))


@given(workloads())
def test_no_job_waits_longer_than_the_jobs_before_it_can_cause(workload: Workload) -> None:
    starts = simulate_workload(workload, Policy(), stamper=ShortestFirst()).starts
    for index, job in enumerate(workload.jobs):
        due_at = job.submitted_at + SLACK_S
        num_ahead = sum(start > due_at for start in starts[:index])
        assert starts[index] <= due_at + (num_ahead + 1) * LONGEST_S, f"{job.job_id}: {starts[index]:g}"


def test_without_a_due_time_a_wide_job_would_starve() -> None:
    """Shows that the test above can fail: the same stream, with no job ever due."""

    class NobodyDue(ShortestFirst):
        def arrive(self, candidate: Candidate) -> Candidate:
            return msgspec.structs.replace(super().arrive(candidate), due_at=1e9)

    stream = [_job(number, number * 2.0, 1, 3, 5.0, 1.0) for number in range(400)]
    wide = _job(1000, 1.0, 1, 4, LONGEST_S, 1.0)
    jobs = sorted([*stream, wide], key=lambda job: job.submitted_at)
    workload = Workload(nodes=(NodeInfo(name="n0", cpus=4.0, memory_bytes=64),), jobs=tuple(jobs))
    starving, served = (
        simulate_workload(workload, Policy(), stamper=stamps).starts[jobs.index(wide)]
        for stamps in (NobodyDue(), ShortestFirst())
    )
    assert served <= 1.0 + SLACK_S + 2 * LONGEST_S
    assert starving > 1500.0
