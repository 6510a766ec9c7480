"""Make recorded decisions again: the production planner gets the facts that the log recorded.

A decision reproduces when the same attempts start in the same order on the same nodes and devices, and the
same nodes take over lost tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from shoal.control.memory.planner_input import broken_dependency, unmet_dependencies
from shoal.model.job import JobOutcome
from shoal.scheduler import (
    Eviction,
    Holding,
    PlannedReplacement,
    PlannedStart,
    Planner,
    Policy,
    TaskLoss,
)
from shoal.scheduler.facts.cluster_state import holding_of
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
    StopFact,
    TaskMoveFact,
    WindowsFact,
)


class ReplayVerdict(msgspec.Struct, frozen=True):
    decision: RecordedDecision
    starts: tuple[PlannedStart, ...]
    """What the planner starts now, from the same facts."""
    evictions: tuple[Eviction, ...]
    """The attempts that the planner asks to stop."""
    replacements: tuple[PlannedReplacement, ...]

    @property
    def is_equal(self) -> bool:
        recorded = self.decision
        return (self.starts, self.evictions, self.replacements) == (
            recorded.starts,
            recorded.evictions,
            recorded.replacements,
        )


class DecisionReplay:
    """A planner that follows a log. Between decisions it has the state of the cluster's own planner."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.planner = Planner(policy or Policy())
        self._is_policy_given = policy is not None
        self._waiting: dict[str, QueuedFact] = {}
        """By attempt."""
        self._held: dict[str, Holding] = {}
        self._outcomes: dict[str, JobOutcome | None] = {}
        self._dependents: dict[str, set[str]] = {}
        """Waiting attempts, by the job they depend on."""

    def verdicts(self, facts: Iterable[tuple[int, Fact]]) -> Iterator[ReplayVerdict]:
        """One verdict for each decision, in order. Facts recorded after a decision's view of the log are
        applied after it.
        """
        unseen: deque[tuple[int, Fact]] = deque()
        for seq, fact in facts:
            if not isinstance(fact, RecordedDecision):
                unseen.append((seq, fact))
                continue
            while unseen and unseen[0][0] <= fact.seen:
                self.apply(unseen.popleft()[1])
            yield self._decide(fact)
        for _, fact in unseen:
            self.apply(fact)

    def _decide(self, decision: RecordedDecision) -> ReplayVerdict:
        for attempt_id, (expected_s, due_at, score) in decision.stamps.items():
            self._stamp(attempt_id, expected_s, due_at, score)
        for attempt_id, queued in self._waiting.items():
            if queued.backoff_s > 0:
                self._judge(attempt_id, is_resting=attempt_id in decision.resting)
        for attempt_id in self._held if decision.is_all_saved else ():
            self.planner.save(attempt_id, None)
        for attempt_id, at in decision.saved.items():
            self.planner.save(attempt_id, at)
        self.planner.set_losses(
            TaskLoss(attempt_id=planned.attempt_id, node=planned.lost_node)
            for planned in decision.replacements
        )
        self.planner.correct_usage(decision.usages)
        made = self.planner.plan(decision.at)
        for planned in made.placements:
            self.planner.undo(planned.attempt_id)  # the log has what became of it
        return ReplayVerdict(decision, made.starts, made.evictions, made.replacements)

    def apply(self, fact: Fact) -> None:
        planner = self.planner
        match fact:
            case QueuedFact(candidate=candidate, after=after):
                self._waiting[candidate.attempt_id] = fact
                self._ended(candidate.job_id, None)  # a job that is tried again has not ended
                for dep in after:
                    self._dependents.setdefault(dep.job_id, set()).add(candidate.attempt_id)
                self._judge(candidate.attempt_id)
            case PlacementFact():
                candidate = self._waiting.pop(fact.attempt_id).candidate
                held = self._held[fact.attempt_id] = holding_of(candidate, fact.allocation, fact.at)
                planner.hold(held)
            case TaskMoveFact():
                held = self._held[fact.attempt_id]
                tasks = tuple(fact.task if task.node == fact.lost else task for task in held.allocation)
                held = self._held[fact.attempt_id] = msgspec.structs.replace(held, allocation=tasks)
                planner.hold(held)
            case StopFact():
                held = self._held[fact.attempt_id]
                planner.hold(msgspec.structs.replace(held, is_stopping=True, grows_to=fact.grows_to))
            case AttemptEndFact():
                self._waiting.pop(fact.attempt_id, None)
                self._held.pop(fact.attempt_id, None)
                planner.drop(fact.attempt_id)
                planner.release(fact.attempt_id, fact.at)
            case JobEndFact():
                self._ended(fact.job_id, fact.outcome)
            case NodeFact():
                planner.set_node(fact.view)
            case NodeRemovalFact():
                planner.drop_node(fact.name)
            case ProjectsFact():
                planner.set_projects(fact.views)
            case WindowsFact():
                planner.set_windows(fact.windows)
            case PolicyFact():
                if not self._is_policy_given:
                    self.planner = Planner.of(planner.snapshot(), fact.policy)
            case RecordedDecision():
                pass

    def _ended(self, job_id: str, outcome: JobOutcome | None) -> None:
        """Jobs that depend on it may start, or never can."""
        self._outcomes[job_id] = outcome
        for attempt_id in sorted(self._dependents.get(job_id, ())):
            self._judge(attempt_id)

    def _stamp(
        self, attempt_id: str, expected_s: float | None, due_at: float | None, score: float | None
    ) -> None:
        queued = self._waiting.get(attempt_id)
        if queued is not None:
            stamped = msgspec.structs.replace(
                queued.candidate, expected_s=expected_s, due_at=due_at, score=score
            )
            self._waiting[attempt_id] = msgspec.structs.replace(queued, candidate=stamped)
            self._judge(attempt_id)

    def _judge(self, attempt_id: str, *, is_resting: bool | None = None) -> None:
        """Pass a waiting attempt to the planner, if it may start."""
        queued = self._waiting.get(attempt_id)
        if queued is None:
            return
        is_resting = queued.backoff_s > 0 if is_resting is None else is_resting
        if (
            is_resting
            or broken_dependency(queued.after, self._outcomes)
            or unmet_dependencies(queued.after, self._outcomes)
        ):
            self.planner.drop(attempt_id)
        else:
            self.planner.add(queued.candidate)
