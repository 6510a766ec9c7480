"""What waits and what holds resources: read from the event log, and told to the planner as it changes.

Reading everything anew for each plan would cost in proportion to the queue; the log tells which jobs
changed since the last look. The first look of a control plane reads all that is open.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.control.backoff import Backoff
from shoal.control.relearn import OWN_REASONS
from shoal.control.snapshot import broken, candidate, holding, unmet
from shoal.model.attempt import HOLDING, Attempt, AttemptState
from shoal.model.job import Dependency, Job, JobOutcome
from shoal.model.node import Node
from shoal.model.people import Project
from shoal.model.request import Request
from shoal.model.window import Window
from shoal.scheduler import Candidate, Holding, Planner, Stamps
from shoal.store import EventFilter, Tx

EVERYTHING = 1 << 62
PROJECTS = EventFilter(kinds_prefix="project.")


class Changes(msgspec.Struct, frozen=True):
    """What a look at the store found, all of it as of one moment."""

    seen: int
    """The newest event then."""
    jobs: Sequence[tuple[Job, Attempt]]
    """Every job that may have changed, with its newest attempt."""
    outcomes: dict[str, JobOutcome | None]
    """Of the jobs that queued ones among them wait for."""
    nodes: list[Node]
    windows: list[Window]
    projects: list[Project] | None
    """None: none of them has changed."""


def look(tx: Tx, after: int | None) -> Changes:
    """What changed after that event; None: everything that is open."""
    seen = tx.events.head().seq
    if after is None:
        jobs = [*tx.attempts.queued(EVERYTHING), *tx.attempts.holding()]
    else:
        jobs = tx.jobs.changed_since(after)
    waited_for = {dep.job_id for job, own in jobs if own.state is AttemptState.QUEUED for dep in job.after}
    outcomes = tx.jobs.outcomes(sorted(waited_for)) if waited_for else {}
    projects = tx.people.projects() if after is None or have_projects_changed(tx, after) else None
    return Changes(seen, jobs, outcomes, tx.nodes.all(), tx.windows.all(), projects)


def have_projects_changed(tx: Tx, after: int) -> bool:
    """By the log, not by whoever changed them: a caller who is gone or hears of no answer may have, too."""
    return bool(tx.events.page(after, PROJECTS, 1))


class Waiting(msgspec.Struct, frozen=True):
    """A queued attempt, stamped."""

    candidate: Candidate
    attempt: Attempt
    after: tuple[Dependency, ...]


class Held(msgspec.Struct, frozen=True):
    """An attempt that holds resources."""

    holding: Holding
    request: Request


class Queue:
    """By job: each has one attempt that is not over. Only the event loop's thread touches it."""

    def __init__(self, planner: Planner, backoff: Backoff, stamps: Stamps) -> None:
        self.seen: int | None = None
        """The event up to which it is true; None before the first look."""
        self._planner = planner
        self._backoff = backoff
        self._waiting: dict[str, Waiting] = {}
        self._doomed: dict[str, str] = {}
        self._resting: set[str] = set()
        """Jobs whose next try is not due yet."""
        self.fresh: dict[str, Candidate] = {}
        """Stamped since this was emptied: a decision is recorded with the stamps it was the first to use."""
        self._stamps = stamps
        self._held: dict[str, Held] = {}
        """By job."""
        self._outcomes: dict[str, JobOutcome | None] = {}
        self._dependents: dict[str, set[str]] = {}
        """By job waited for; those and no others have an entry in `_outcomes`."""

    def take_in(self, changes: Changes) -> None:
        self.take_some(changes.jobs, changes.outcomes)
        self.seen = changes.seen

    def take_some(self, jobs: Sequence[tuple[Job, Attempt]], outcomes: dict[str, JobOutcome | None]) -> None:
        """Those of a look, before the others: until it is taken in whole, the next look finds them again."""
        touched: set[str] = set()
        for job, attempt in jobs:
            self._replace(job, attempt)
            touched.add(job.job_id)
            if job.job_id in self._dependents:
                self._outcomes[job.job_id] = job.outcome
                touched |= self._dependents[job.job_id]
        self._outcomes.update(outcomes)
        for job_id in sorted(touched):
            self._judge(job_id)

    @property
    def doomed(self) -> list[tuple[str, str]]:
        """Attempts whose dependencies can never be met, and why."""
        return [(self._waiting[job_id].attempt.attempt_id, why) for job_id, why in self._doomed.items()]

    @property
    def resting(self) -> list[str]:
        """Attempts whose backoff is not over."""
        return sorted(self._waiting[job_id].attempt.attempt_id for job_id in self._resting)

    def wake(self, now: float) -> float | None:
        """Let those be planned whose backoff is over. In how many seconds the next one is, if there is one.

        By the monotonic clock: a wall clock that jumps makes nobody wait longer.
        """
        self._backoff.keep_only(waiting.attempt.attempt_id for waiting in self._waiting.values())
        delays = [self._rest(job_id, now) for job_id in sorted(self._resting)]
        return min((delay for delay in delays if delay > 0), default=None)

    def _rest(self, job_id: str, now: float) -> float:
        """How long it waits yet; the planner is told."""
        waiting = self._waiting[job_id]
        delay = self._backoff.remaining_s(waiting.attempt)
        if delay <= 0:
            self._resting.discard(job_id)
        not_before = now + delay if delay > 0 else 0.0
        self._planner.add(msgspec.structs.replace(waiting.candidate, not_before=not_before))
        return delay

    def _replace(self, job: Job, attempt: Attempt) -> None:
        """Forget what was known of the job, then note what is true now."""
        before = self._waiting.pop(job.job_id, None)
        if before is not None:
            self._stamps.leave(before.attempt.attempt_id)
            self.fresh.pop(before.attempt.attempt_id, None)  # no decision will use it, or one has
        self._resting.discard(job.job_id)
        self._doomed.pop(job.job_id, None)
        for dep in before.after if before else ():
            self._dependents[dep.job_id].discard(job.job_id)
            if not self._dependents[dep.job_id]:
                del self._dependents[dep.job_id]
                self._outcomes.pop(dep.job_id, None)
        if before is not None and (attempt.state is not AttemptState.QUEUED or before.attempt != attempt):
            self._planner.drop(before.attempt.attempt_id)
        if before is not None and before.attempt.attempt_id != attempt.attempt_id:
            self._planner.release(
                before.attempt.attempt_id, attempt.queued_at
            )  # placed and over between two looks
        held = self._held.pop(job.job_id, None)
        if held is not None:
            self._look_at_end(held, attempt)
        if attempt.state is AttemptState.QUEUED:
            stamped = _first_if_it_goes_on(self._stamps.arrive(candidate(job, attempt)), attempt)
            self.fresh[attempt.attempt_id] = stamped
            self._waiting[job.job_id] = Waiting(stamped, attempt, job.after)
            for dep in job.after:
                self._dependents.setdefault(dep.job_id, set()).add(job.job_id)
        elif attempt.state in HOLDING:
            held = self._held[job.job_id] = Held(holding(job, attempt), job.request)
            self._planner.hold(held.holding)
        else:
            self._planner.release(attempt.attempt_id, attempt.ended_at or attempt.queued_at)

    def _look_at_end(self, held: Held, attempt: Attempt) -> None:
        """It may have ended; if by itself, those who wait with its like may be expected to run otherwise."""
        attempt_id, at = held.holding.attempt_id, attempt.ended_at or attempt.queued_at
        if attempt_id == attempt.attempt_id and attempt.state in HOLDING:
            return
        self._planner.release(attempt_id, at)
        if attempt_id != attempt.attempt_id or attempt.reason not in OWN_REASONS:
            return
        for changed in self._stamps.ended(held.holding, held.request, at - held.holding.placed_at, at):
            waiting = self._waiting[changed.job_id]
            stamped = self.fresh[changed.attempt_id] = _first_if_it_goes_on(changed, waiting.attempt)
            self._waiting[changed.job_id] = msgspec.structs.replace(waiting, candidate=stamped)
            self._judge(changed.job_id)

    def _judge(self, job_id: str) -> None:
        """Whether a queued job may be planned, waits for others, or never can start."""
        waiting = self._waiting.get(job_id)
        if waiting is None:
            return
        self._doomed.pop(job_id, None)
        self._resting.discard(job_id)
        why = broken(waiting.after, self._outcomes)
        lacking = unmet(waiting.after, self._outcomes)
        if why is not None:
            self._doomed[job_id] = why
            self._planner.drop(waiting.attempt.attempt_id)
        elif lacking:
            self._planner.add(msgspec.structs.replace(waiting.candidate, unmet=lacking))
        elif waiting.attempt.backoff_s > 0:
            self._resting.add(job_id)
        else:
            self._planner.add(waiting.candidate)


def _first_if_it_goes_on(stamped: Candidate, attempt: Attempt) -> Candidate:
    """What was kept for one that stopped to grow is not given to a shorter job now."""
    return msgspec.structs.replace(stamped, due_at=None) if attempt.goes_on else stamped
