"""A copy of the planner in which nothing counts: who would start now if a waiting job asked otherwise."""

from __future__ import annotations

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.request import Request
from shoal.scheduler.planner import Planner
from shoal.scheduler.policy import Policy
from shoal.scheduler.snapshot import Candidate, Snapshot
from shoal.scheduler.types import Promise


class Rehearsal:
    """Of one moment. Costs one copy of the facts, and then one cycle a question."""

    def __init__(self, snapshot: Snapshot, policy: Policy, now: float) -> None:
        self._planner = Planner.of(snapshot, policy)
        self._now = now
        self._last = max((one.order for one in snapshot.candidates), default=0) + 1
        made = self._planner.plan(now)
        self.promises: tuple[Promise, ...] = made.promises
        self.starting = frozenset(start.attempt_id for start in made.starts)
        """Those who start as they are."""

    def start(self, candidate: Candidate, asked: Request) -> Allocation | None:
        """What it would be given now if it were cancelled and submitted again with `asked`; None: nothing."""
        planner = self._planner
        planner.add(resubmitted(candidate, asked, self._now, self._last))
        made = planner.plan(self._now)
        for start in made.starts:
            planner.undo(start.attempt_id)
        planner.add(candidate)
        given = (start.allocation for start in made.starts if start.attempt_id == candidate.attempt_id)
        return next(given, None)


def resubmitted(candidate: Candidate, asked: Request, now: float, order: int) -> Candidate:
    """The same job, come now and after all others: nobody keeps a place that another request earned.

    What is expected of it and what it scores stay as they are; a smaller request would score better.
    """
    due_at, expected_s, limit_s = candidate.due_at, candidate.expected_s, asked.time_limit_s
    if due_at is not None:
        due_at += max(now - candidate.submitted_at, 0.0)
    if expected_s is not None and limit_s is not None:
        expected_s = min(expected_s, limit_s)
    return msgspec.structs.replace(
        candidate,
        request=asked,
        order=order,
        submitted_at=max(now, candidate.submitted_at),
        expected_s=expected_s,
        due_at=due_at,
    )
