"""The production planner and its stamps in the middle of a crowd, event by event, with each plan timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from benchmarks.yardsticks.crowd import Crowd
from shoal.model.attempt import Allocation
from shoal.scheduler import Candidate, Holding, NodeInfo, Planner, Policy, Stamps
from shoal.sim.workload import WorkJob


@dataclass
class Drive:
    """The production planner and stamps, fed with arrivals and ends one by one."""

    crowd: Crowd
    nodes: tuple[NodeInfo, ...]
    planner: Planner = field(default_factory=lambda: Planner(Policy()))
    stamps: Stamps = field(default_factory=Stamps)
    jobs: dict[str, WorkJob] = field(default_factory=dict)
    held: dict[str, Holding] = field(default_factory=dict)
    ends: list[tuple[float, str]] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    """CPU time of each plan."""
    facts_s: float = 0.0
    """CPU time of passing facts to the planner and of learning from ends, all together."""
    num_starts: int = 0

    def fill(self) -> None:
        """Running jobs hold nodes since their arrival. Jobs that do not fit wait, and so do the others."""
        crowd = self.crowd
        self.stamps.see(self.nodes)
        for node in self.nodes:
            self.planner.set_node(node)
        for job in crowd.ended:
            self.stamps.ended(_holding(job, (), job.submitted_at), job.request, job.run_s, crowd.at)
        for job in crowd.running:
            self._arrive(job)
        for start in self.planner.plan(crowd.at).starts:
            self._hold(start.attempt_id, start.allocation, self.jobs[start.attempt_id].submitted_at)
        for job in crowd.waiting[: max(len(crowd.waiting) - self.planner.num_waiting, 0)]:
            self._arrive(job)
        heapify(self.ends)
        self.num_starts = self._plan(crowd.at)
        self.plan_s.clear()

    def run(self, num_cycles: int) -> None:
        """Run one cycle for each time at which a job arrives or ends, until enough are measured."""
        coming = iter(self.crowd.coming)
        arrival = next(coming, None)
        while len(self.plan_s) < num_cycles:
            now = min(arrival.submitted_at if arrival else inf, self.ends[0][0] if self.ends else inf)
            if now == inf:
                return
            began = time.thread_time()
            while self.ends and self.ends[0][0] <= now:
                self._end(heappop(self.ends)[1], now)
            while arrival is not None and (arrival.submitted_at <= now or self._are_few):
                self._arrive(arrival)
                arrival = next(coming, None)
            self.facts_s += time.thread_time() - began
            self.num_starts += self._plan(now)

    @property
    def _are_few(self) -> bool:
        """Whether fewer jobs wait than should. Then the next job arrives before its time."""
        return self.planner.num_waiting < len(self.crowd.waiting)

    def _plan(self, now: float) -> int:
        began = time.thread_time()
        starts = self.planner.plan(now).starts
        self.plan_s.append(time.thread_time() - began)
        for start in starts:
            self._hold(start.attempt_id, start.allocation, now)
        return len(starts)

    def _arrive(self, job: WorkJob) -> None:
        order = len(self.jobs)
        self.jobs[job.job_id] = job
        candidate = Candidate(
            attempt_id=job.job_id,
            job_id=job.job_id,
            project=job.project,
            order=order,
            submitted_at=job.submitted_at,
            request=job.request,
            owner=job.user,
        )
        self.planner.add(self.stamps.arrive(candidate))

    def _hold(self, attempt_id: str, allocation: Allocation, since: float) -> None:
        job = self.jobs[attempt_id]
        self.stamps.leave(attempt_id)
        holding = self.held[attempt_id] = _holding(job, allocation, since)
        self.planner.hold(holding)
        heappush(self.ends, (since + job.run_s, attempt_id))

    def _end(self, attempt_id: str, now: float) -> None:
        job, holding = self.jobs[attempt_id], self.held.pop(attempt_id)
        self.planner.release(attempt_id, now)
        for changed in self.stamps.ended(holding, job.request, now - holding.placed_at, now):
            self.planner.add(changed)


def _holding(job: WorkJob, allocation: Allocation, since: float) -> Holding:
    return Holding(
        attempt_id=job.job_id,
        job_id=job.job_id,
        project=job.project,
        priority=job.priority,
        allocation=allocation,
        placed_at=since,
        time_limit_s=job.request.time_limit_s,
        owner=job.user,
    )
