"""A cluster's log as a workload that can be simulated with something changed.

What only the past knows is settled here: a job asks for what it asked for, runs as long as its last attempt
did, and comes when it could first have started, that is when the jobs it waited for had ended. What still
runs or waits is taken to run as long as was expected of it, or as the middle one of all runs. Jobs that were
given up before they ran are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from statistics import median

import msgspec

from shoal.model.job import Dependency
from shoal.scheduler import Candidate, NodeView, Policy
from shoal.scheduler.devices import ProjectView
from shoal.scheduler.forecast import UNKNOWN_S
from shoal.sim.history.facts import (
    Decision,
    Fact,
    JobOver,
    NodeGone,
    NodeIs,
    Over,
    Placed,
    PolicyIs,
    ProjectsAre,
    Queued,
    WindowsAre,
)
from shoal.sim.workload import NodeChange, WindowsChange, WorkJob, Workload

MOMENT_S = 1e-3
"""A run cannot take no time."""


class Past(msgspec.Struct, frozen=True):
    workload: Workload
    nodes: tuple[NodeView, ...]
    """Where the log ends."""
    policy: Policy
    num_given_up: int
    num_open: int
    """Running or waiting where the log ends."""


class _Life:
    """One job."""

    __slots__ = ("after", "candidate", "ended_at", "placed_at")

    def __init__(self, candidate: Candidate, after: tuple[Dependency, ...]) -> None:
        self.candidate = candidate
        self.after = after
        self.placed_at: float | None = None
        self.ended_at: float | None = None


def _ran_s(life: _Life) -> float:
    assert life.placed_at is not None
    assert life.ended_at is not None
    return max(life.ended_at - life.placed_at, MOMENT_S)


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
        self._windows: list[WindowsChange] = []
        self._projects: tuple[ProjectView, ...] = ()
        self._policy = Policy()
        self._expected: dict[str, float] = {}
        """By attempt, as was recorded with decisions."""
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
            case Decision():
                self._expected |= {one: said[0] for one, said in fact.stamps.items() if said[0] is not None}
            case JobOver():
                self._job_ends[fact.job_id] = self._now
            case NodeIs():
                self._nodes[fact.view.name] = fact.view
                self._change(fact.at, fact.view.name, fact.view, is_loss=fact.is_lost)
            case NodeGone():
                self._nodes.pop(fact.name, None)
                self._change(fact.at, fact.name, None)
            case WindowsAre():
                self._now = max(self._now, fact.at)
                self._windows.append(WindowsChange(at=self._now, windows=fact.windows))
            case ProjectsAre():
                self._projects = fact.views
            case PolicyIs():
                self._policy = fact.policy
            case _:
                pass

    def _change(self, at: float, name: str, view: NodeView | None, *, is_loss: bool = False) -> None:
        self._now = max(self._now, at)
        if self._first is not None:
            self._changes.append(NodeChange(at=self._now, name=name, view=view, is_loss=is_loss))

    def past(self) -> Past:
        lives = self._lives.values()
        over = [life for life in lives if life.ended_at is not None and life.placed_at is not None]
        still = [life for life in lives if life.ended_at is None]
        typical_s = median([_ran_s(life) for life in over]) if over else UNKNOWN_S
        jobs = [self._job(life, _ran_s(life)) for life in over]
        jobs += [self._job(life, self._expected_s(life, typical_s)) for life in still]
        jobs.sort(key=lambda job: (job.submitted_at, job.job_id))
        workload = Workload(
            nodes=self._first or tuple(self._nodes.values()),
            jobs=tuple(jobs),
            changes=tuple(self._changes),
            windows=tuple(self._windows),
            projects=self._projects,
        )
        nodes = tuple(self._nodes.values())
        return Past(workload, nodes, self._policy, len(lives) - len(over) - len(still), len(still))

    def _expected_s(self, life: _Life, typical_s: float) -> float:
        """Of one that runs or waits: as was expected, but not less than it has run."""
        expected_s = self._expected.get(life.candidate.attempt_id, typical_s)
        elapsed_s = self._now - life.placed_at if life.placed_at is not None else 0.0
        return max(expected_s, elapsed_s, MOMENT_S)

    def _job(self, life: _Life, run_s: float) -> WorkJob:
        one = life.candidate
        began = life.placed_at if life.placed_at is not None else inf
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
            array_id=one.array_id,
            array_at_once=one.array_at_once,
            deadline_at=one.deadline_at,
        )
