"""Make recorded decisions again: the production planner, told what the log says it was told.

A decision reproduces when the same attempts start in the same order on the same nodes and devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from shoal.control.snapshot import broken, unmet
from shoal.model.job import JobOutcome
from shoal.scheduler import Eviction, Holding, Planner, Policy, Start, replacement
from shoal.scheduler.book import holding_of
from shoal.sim.history.facts import (
    Decision,
    Fact,
    JobOver,
    Leaving,
    Moved,
    NodeGone,
    NodeIs,
    Over,
    Placed,
    PolicyIs,
    ProjectsAre,
    Queued,
    WindowsAre,
)


class Verdict(msgspec.Struct, frozen=True):
    decision: Decision
    starts: tuple[Start, ...]
    """What the planner starts now, from the same facts."""
    evictions: tuple[Eviction, ...]
    """And whom it asks to stop."""

    @property
    def is_equal(self) -> bool:
        return (self.starts, self.evictions) == (self.decision.starts, self.decision.evictions)


class Replay:
    """A planner that lives through a log. Between decisions it stands as the cluster's own stood."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.planner = Planner(policy or Policy())
        self._is_policy_given = policy is not None
        self._waiting: dict[str, Queued] = {}
        """By attempt."""
        self._held: dict[str, Holding] = {}
        self._outcomes: dict[str, JobOutcome | None] = {}
        self._dependents: dict[str, set[str]] = {}
        """Attempts, by the job they wait for."""

    def verdicts(self, facts: Iterable[tuple[int, Fact]]) -> Iterator[Verdict]:
        """One for each decision, in order. Facts recorded after what a decision had seen come after it."""
        unseen: deque[tuple[int, Fact]] = deque()
        for seq, fact in facts:
            if not isinstance(fact, Decision):
                unseen.append((seq, fact))
                continue
            while unseen and unseen[0][0] <= fact.seen:
                self.tell(unseen.popleft()[1])
            yield self._decide(fact)
        for _, fact in unseen:
            self.tell(fact)

    def _decide(self, decision: Decision) -> Verdict:
        if decision.replaces is not None:
            return self._replace(decision, *decision.replaces)
        for attempt_id, (expected_s, due_at, score) in decision.stamps.items():
            self._stamp(attempt_id, expected_s, due_at, score)
        for attempt_id, queued in self._waiting.items():
            if queued.backoff_s > 0:
                self._judge(attempt_id, is_resting=attempt_id in decision.resting)
        for attempt_id in self._held if decision.is_all_saved else ():
            self.planner.save(attempt_id, None)
        for attempt_id, at in decision.saved.items():
            self.planner.save(attempt_id, at)
        self.planner.correct_usage(decision.usages)
        made = self.planner.plan(decision.at)
        for start in made.starts:
            self.planner.undo(start.attempt_id)  # the log tells what became of it
        return Verdict(decision, made.starts, made.evictions)

    def _replace(self, decision: Decision, attempt_id: str, lost: str) -> Verdict:
        share = replacement(self.planner.snapshot(), self.planner.policy, attempt_id, lost, decision.at)
        starts = () if share is None else (Start(attempt_id=attempt_id, allocation=(share,)),)
        return Verdict(decision, starts, ())

    def tell(self, fact: Fact) -> None:
        planner = self.planner
        match fact:
            case Queued(candidate=candidate, after=after):
                self._waiting[candidate.attempt_id] = fact
                self._ended(candidate.job_id, None)  # one that is tried again has not ended any more
                for dep in after:
                    self._dependents.setdefault(dep.job_id, set()).add(candidate.attempt_id)
                self._judge(candidate.attempt_id)
            case Placed():
                candidate = self._waiting.pop(fact.attempt_id).candidate
                held = self._held[fact.attempt_id] = holding_of(candidate, fact.allocation, fact.at)
                planner.hold(held)
            case Moved():
                held = self._held[fact.attempt_id]
                shares = tuple(fact.share if one.node == fact.lost else one for one in held.allocation)
                held = self._held[fact.attempt_id] = msgspec.structs.replace(held, allocation=shares)
                planner.hold(held)
            case Leaving():
                held = self._held[fact.attempt_id]
                planner.hold(msgspec.structs.replace(held, is_leaving=True, grows_to=fact.grows_to))
            case Over():
                self._waiting.pop(fact.attempt_id, None)
                self._held.pop(fact.attempt_id, None)
                planner.drop(fact.attempt_id)
                planner.release(fact.attempt_id, fact.at)
            case JobOver():
                self._ended(fact.job_id, fact.outcome)
            case NodeIs():
                planner.set_node(fact.view)
            case NodeGone():
                planner.drop_node(fact.name)
            case ProjectsAre():
                planner.set_projects(fact.views)
            case WindowsAre():
                planner.set_windows(fact.windows)
            case PolicyIs():
                if not self._is_policy_given:
                    self.planner = Planner.of(planner.snapshot(), fact.policy)
            case Decision():
                pass

    def _ended(self, job_id: str, outcome: JobOutcome | None) -> None:
        """Those who wait for it may start, or may not any more."""
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
        """Tell the planner of one that waits, if it may start."""
        queued = self._waiting.get(attempt_id)
        if queued is None:
            return
        is_resting = queued.backoff_s > 0 if is_resting is None else is_resting
        if is_resting or broken(queued.after, self._outcomes) or unmet(queued.after, self._outcomes):
            self.planner.drop(attempt_id)
        else:
            self.planner.add(queued.candidate)
