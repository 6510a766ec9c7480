"""A cluster's log as a workload that can be simulated with something changed.

What only the past knows is settled here: a job asks for what it asked for, runs as long as its last attempt
did, and comes when it could first have started, that is when the jobs it waited for had ended. Jobs that
never ran have no run time and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import msgspec

from shoal.model.job import Dependency
from shoal.scheduler import Candidate, NodeView, Policy
from shoal.scheduler.devices import ProjectView
from shoal.sim.history.facts import (
    Fact,
    JobOver,
    NodeGone,
    NodeIs,
    Over,
    Placed,
    PolicyIs,
    ProjectsAre,
    Queued,
)
from shoal.sim.workload import NodeChange, WorkJob, Workload

MOMENT_S = 1e-3
"""A run cannot take no time."""


class Past(msgspec.Struct, frozen=True):
    workload: Workload
    policy: Policy
    num_never_ran: int
    num_running: int
    """Taken to end where the log ends."""


class _Life:
    """One job."""

    __slots__ = ("after", "candidate", "ended_at", "placed_at")

    def __init__(self, candidate: Candidate, after: tuple[Dependency, ...]) -> None:
        self.candidate = candidate
        self.after = after
        self.placed_at: float | None = None
        self.ended_at: float | None = None


def past_of(facts: Iterable[tuple[int, Fact]]) -> Past:
    """The whole log, read once."""
    reader = _Reader()
    for _, fact in facts:
        reader.read(fact)
    return reader.past()


class _Reader:
    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._job_of: dict[str, str] = {}
        self._job_ends: dict[str, float] = {}
        self._nodes: dict[str, NodeView] = {}
        self._first: tuple[NodeView, ...] | None = None
        self._changes: list[NodeChange] = []
        self._projects: tuple[ProjectView, ...] = ()
        self._policy = Policy()
        self._now = 0.0

    def read(self, fact: Fact) -> None:
        match fact:
            case Queued():
                if self._first is None:
                    self._first = tuple(self._nodes.values())
                one = fact.candidate
                self._now = max(self._now, one.submitted_at)
                self._job_of[one.attempt_id] = one.job_id
                self._lives.setdefault(one.job_id, _Life(one, fact.after))
            case Placed():
                life = self._lives[self._job_of[fact.attempt_id]]
                life.placed_at, life.ended_at, self._now = fact.at, None, max(self._now, fact.at)
            case Over():
                life = self._lives[self._job_of[fact.attempt_id]]
                life.ended_at, self._now = fact.at, max(self._now, fact.at)
            case JobOver():
                self._job_ends[fact.job_id] = self._now
            case NodeIs():
                self._nodes[fact.view.name] = fact.view
                self._change(fact.view.name, fact.view)
            case NodeGone():
                self._nodes.pop(fact.name, None)
                self._change(fact.name, None)
            case ProjectsAre():
                self._projects = fact.views
            case PolicyIs():
                self._policy = fact.policy
            case _:
                pass

    def _change(self, name: str, view: NodeView | None) -> None:
        if self._first is not None:
            self._changes.append(NodeChange(at=self._now, name=name, view=view))

    def past(self) -> Past:
        ran = [life for life in self._lives.values() if life.placed_at is not None]
        jobs = sorted((self._job(life) for life in ran), key=lambda job: (job.submitted_at, job.job_id))
        workload = Workload(
            nodes=self._first or tuple(self._nodes.values()),
            jobs=tuple(jobs),
            changes=tuple(self._changes),
            projects=self._projects,
        )
        num_running = sum(life.ended_at is None for life in ran)
        return Past(workload, self._policy, len(self._lives) - len(ran), num_running)

    def _job(self, life: _Life) -> WorkJob:
        one = life.candidate
        began = life.placed_at if life.placed_at is not None else inf
        run_s = max((life.ended_at or self._now) - began, MOMENT_S)
        ready_at = max([one.submitted_at, *(self._job_ends.get(dep.job_id, 0.0) for dep in life.after)])
        limit_s = one.request.time_limit_s
        request = one.request
        if limit_s is not None and limit_s < run_s:
            request = msgspec.structs.replace(request, time_limit_s=run_s)
        return WorkJob(
            job_id=one.job_id,
            submitted_at=min(ready_at, began),
            run_s=run_s,
            request=request,
            project=one.project,
            user=one.owner,
            name=one.name,
            queue=one.queue,
            priority=one.priority,
        )
