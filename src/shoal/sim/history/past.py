"""A cluster's log as a workload that can be simulated with something changed.

Each job keeps its request, runs as long as its last attempt did, and is submitted when it could first have
started, which is when the jobs it waited for had ended. A job that still runs or waits is assumed to run as
long as was expected, or as long as the median of all runs. Jobs that were given up before they ran are left
out.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from statistics import median

import msgspec

from shoal.model.job import Dependency
from shoal.scheduler import Candidate, NodeInfo, Policy
from shoal.scheduler.facts.amounts import ProjectInfo
from shoal.scheduler.prediction.forecast import UNKNOWN_S
from shoal.sim.history.facts import (
    AttemptEndFact,
    Fact,
    JobEndFact,
    NodeFact,
    NodeRemovalFact,
    PlacementFact,
    PolicyFact,
    ProjectsFact,
    QueuedFact,
    RecordedDecision,
    WindowsFact,
)
from shoal.sim.workload import NodeChange, WindowsChange, WorkJob, Workload

MOMENT_S = 1e-3
"""The shortest run: a run cannot take no time."""


class Past(msgspec.Struct, frozen=True):
    workload: Workload
    nodes: tuple[NodeInfo, ...]
    """The nodes at the end of the log."""
    policy: Policy
    num_given_up: int
    num_open: int
    """Jobs that run or wait at the end of the log."""


class _Life:
    """The life of one job."""

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
        self._nodes: dict[str, NodeInfo] = {}
        self._first: tuple[NodeInfo, ...] | None = None
        self._changes: list[NodeChange] = []
        self._windows: list[WindowsChange] = []
        self._projects: tuple[ProjectInfo, ...] = ()
        self._policy = Policy()
        self._expected: dict[str, float] = {}
        """By attempt, as recorded with decisions."""
        self._now = 0.0

    def read(self, fact: Fact) -> None:
        match fact:
            case QueuedFact():
                if self._first is None:
                    self._first = tuple(self._nodes.values())
                candidate = fact.candidate
                self._now = max(self._now, candidate.submitted_at)
                self._job_of[candidate.attempt_id] = candidate.job_id
                self._lives.setdefault(candidate.job_id, _Life(candidate, fact.after))
            case PlacementFact():
                life = self._lives[self._job_of[fact.attempt_id]]
                life.placed_at, life.ended_at, self._now = fact.at, None, max(self._now, fact.at)
            case AttemptEndFact():
                life = self._lives[self._job_of[fact.attempt_id]]
                life.ended_at, self._now = fact.at, max(self._now, fact.at)
            case RecordedDecision():
                self._expected |= {
                    attempt_id: stamps[0]
                    for attempt_id, stamps in fact.stamps.items()
                    if stamps[0] is not None
                }
            case JobEndFact():
                self._job_ends[fact.job_id] = self._now
            case NodeFact():
                self._nodes[fact.view.name] = fact.view
                self._change(fact.at, fact.view.name, fact.view, is_loss=fact.is_lost)
            case NodeRemovalFact():
                self._nodes.pop(fact.name, None)
                self._change(fact.at, fact.name, None)
            case WindowsFact():
                self._now = max(self._now, fact.at)
                self._windows.append(WindowsChange(at=self._now, windows=fact.windows))
            case ProjectsFact():
                self._projects = fact.views
            case PolicyFact():
                self._policy = fact.policy
            case _:
                pass

    def _change(self, at: float, name: str, view: NodeInfo | None, *, is_loss: bool = False) -> None:
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
        """The run time of a job that runs or waits: as expected, but not less than it has run."""
        expected_s = self._expected.get(life.candidate.attempt_id, typical_s)
        elapsed_s = self._now - life.placed_at if life.placed_at is not None else 0.0
        return max(expected_s, elapsed_s, MOMENT_S)

    def _job(self, life: _Life, run_s: float) -> WorkJob:
        candidate = life.candidate
        began = life.placed_at if life.placed_at is not None else inf
        ready_at = max([candidate.submitted_at, *(self._job_ends.get(dep.job_id, 0.0) for dep in life.after)])
        limit_s = candidate.request.time_limit_s
        request = candidate.request
        if limit_s is not None and limit_s < run_s:
            request = msgspec.structs.replace(request, time_limit_s=run_s)
        return WorkJob(
            job_id=candidate.job_id,
            submitted_at=min(ready_at, began),
            run_s=run_s,
            request=request,
            project=candidate.project,
            user=candidate.owner,
            name=candidate.name,
            queue=candidate.queue,
            priority=candidate.priority,
            array_id=candidate.array_id,
            array_at_once=candidate.array_at_once,
            deadline_at=candidate.deadline_at,
        )
