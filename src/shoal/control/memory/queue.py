"""What waits and what holds resources: read from the event log, and passed to the planner as it changes.

Reading everything for each plan would cost in proportion to the queue. The log names the jobs that changed
since the last look. The first look of a control plane reads all that is open.

`Backoff` holds when a queued attempt may be tried again, independent of jumps of the wall clock. A delay is
recorded as a duration. The control plane that queues the attempt turns the duration into a deadline on its
own monotonic clock. Another control plane does so when it first sees the attempt, and never waits longer than
the duration itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shoal.clock import Clock
from shoal.control.memory.planner_input import broken_dependency, candidate, holding, unmet_dependencies
from shoal.control.memory.start_predictions import NATURAL_ENDS
from shoal.model.attempt import HOLDING, Attempt, AttemptState
from shoal.model.job import Dependency, Job, JobOutcome, ResourceRequest
from shoal.model.node import Node, Window
from shoal.model.people import Project
from shoal.scheduler import Candidate, Holding, Planner, Stamps
from shoal.store import EventFilter, Tx


class Backoff:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready_at: dict[str, float] = {}

    def begin(self, attempt: Attempt) -> None:
        """Start the backoff of an attempt that is being queued. Called on the store's thread. A transaction
        that is rolled back does no harm.
        """
        if attempt.backoff_s > 0:
            self._ready_at[attempt.attempt_id] = self._clock.monotonic() + attempt.backoff_s

    def remaining_s(self, attempt: Attempt) -> float:
        """Seconds until the attempt may be placed; 0 if it may be placed now."""
        if attempt.backoff_s <= 0:
            return 0.0
        now = self._clock.monotonic()
        ready_at = self._ready_at.get(attempt.attempt_id)
        if ready_at is None:
            left = attempt.queued_at + attempt.backoff_s - self._clock.now()
            ready_at = now + min(max(left, 0.0), attempt.backoff_s)
            self._ready_at[attempt.attempt_id] = ready_at
        return max(ready_at - now, 0.0)

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        """Forget the other attempts, except those that have just begun, which the caller may not know."""
        if not self._ready_at:
            return
        kept, now = set(attempt_ids), self._clock.monotonic()
        # A copy, and item by item, because `begin` may add to it at any moment.
        for attempt_id, ready_at in list(self._ready_at.items()):
            if attempt_id not in kept and ready_at <= now:
                self._ready_at.pop(attempt_id, None)


EVERYTHING = 1 << 62
PROJECTS = EventFilter(kinds_prefix="project.")


class StoreChanges(msgspec.Struct, frozen=True):
    """What one look at the store found, all as of one moment."""

    seen_seq: int
    """The newest event at that moment."""
    jobs: Sequence[tuple[Job, Attempt]]
    """Every job that may have changed, with its newest attempt."""
    outcomes: dict[str, JobOutcome | None]
    """Outcomes of the jobs that queued jobs among `jobs` wait for."""
    nodes: list[Node]
    windows: list[Window]
    projects: list[Project] | None
    """None: no project has changed."""


def read_changes(tx: Tx, after: int | None) -> StoreChanges:
    """Return what changed after that event. None: everything that is open."""
    newest_seq = tx.events.head().seq
    if after is None:
        jobs = [*tx.attempts.queued(EVERYTHING), *tx.attempts.holding()]
    else:
        jobs = tx.jobs.changed_since(after)
    waited_for = {
        dep.job_id for job, attempt in jobs if attempt.state is AttemptState.QUEUED for dep in job.after
    }
    outcomes = tx.jobs.outcomes(sorted(waited_for)) if waited_for else {}
    projects = tx.people.projects() if after is None or have_projects_changed(tx, after) else None
    return StoreChanges(newest_seq, jobs, outcomes, tx.nodes.all(), tx.windows.all(), projects)


def have_projects_changed(tx: Tx, after: int) -> bool:
    """Whether a project changed, by the log. The command that changed it cannot say so reliably, because its
    caller may be gone or get no reply.
    """
    return bool(tx.events.page(after, PROJECTS, 1))


class QueuedAttempt(msgspec.Struct, frozen=True):
    """A queued attempt with its stamps."""

    candidate: Candidate
    attempt: Attempt
    after: tuple[Dependency, ...]


class HeldAttempt(msgspec.Struct, frozen=True):
    """An attempt that holds resources."""

    holding: Holding
    request: ResourceRequest


class JobQueue:
    """The open jobs, each with its one open attempt. Only the event loop's thread uses it."""

    def __init__(self, planner: Planner, backoff: Backoff, stamps: Stamps) -> None:
        self.seen_seq: int | None = None
        """The newest event that this view covers; None before the first look."""
        self._planner = planner
        self._backoff = backoff
        self._waiting: dict[str, QueuedAttempt] = {}
        self._doomed: dict[str, str] = {}
        self._resting: set[str] = set()
        """Jobs in backoff: their next try is not due."""
        self.fresh_stamps: dict[str, Candidate] = {}
        """Candidates stamped since the last decision. A decision is recorded with the stamps that it was the
        first to use.
        """
        self._stamps = stamps
        self._held: dict[str, HeldAttempt] = {}
        """By job."""
        self._outcomes: dict[str, JobOutcome | None] = {}
        self._dependents: dict[str, set[str]] = {}
        """By job waited for. Exactly these jobs have an entry in `_outcomes`."""

    def apply(self, changes: StoreChanges) -> None:
        self.apply_some(changes.jobs, changes.outcomes)
        self.seen_seq = changes.seen_seq

    def apply_some(self, jobs: Sequence[tuple[Job, Attempt]], outcomes: dict[str, JobOutcome | None]) -> None:
        """Apply some jobs of a look before the others. Until the whole look is applied, the next look finds
        them again.
        """
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
        """Attempts in backoff."""
        return sorted(self._waiting[job_id].attempt.attempt_id for job_id in self._resting)

    def wake(self, now: float) -> float | None:
        """Let the planner see the attempts whose backoff is over. Return the seconds until the next one, if
        there is one.

        Uses the monotonic clock, so a jump of the wall clock makes no job wait longer.
        """
        self._backoff.keep_only(waiting.attempt.attempt_id for waiting in self._waiting.values())
        delays = [self._backoff_left_s(job_id, now) for job_id in sorted(self._resting)]
        return min((delay for delay in delays if delay > 0), default=None)

    def _backoff_left_s(self, job_id: str, now: float) -> float:
        """Return how much longer the job waits, and tell the planner."""
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
            # no decision will use it, or a decision already has
            self.fresh_stamps.pop(before.attempt.attempt_id, None)
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
            )  # placed and ended between two looks
        held = self._held.pop(job.job_id, None)
        if held is not None:
            self._note_end(held, attempt)
        if attempt.state is AttemptState.QUEUED:
            stamped = _keep_place_if_growing(self._stamps.arrive(candidate(job, attempt)), attempt)
            self.fresh_stamps[attempt.attempt_id] = stamped
            self._waiting[job.job_id] = QueuedAttempt(stamped, attempt, job.after)
            for dep in job.after:
                self._dependents.setdefault(dep.job_id, set()).add(job.job_id)
        elif attempt.state in HOLDING:
            held = self._held[job.job_id] = HeldAttempt(holding(job, attempt), job.request)
            self._planner.hold(held.holding)
        else:
            self._planner.release(attempt.attempt_id, attempt.ended_at or attempt.queued_at)

    def _note_end(self, held: HeldAttempt, attempt: Attempt) -> None:
        """Release the attempt if it has ended. If it ended by itself, similar waiting jobs get a new expected
        run time.
        """
        attempt_id, at = held.holding.attempt_id, attempt.ended_at or attempt.queued_at
        if attempt_id == attempt.attempt_id and attempt.state in HOLDING:
            return
        self._planner.release(attempt_id, at)
        if attempt_id != attempt.attempt_id or attempt.reason not in NATURAL_ENDS:
            return
        for changed in self._stamps.ended(held.holding, held.request, at - held.holding.placed_at, at):
            waiting = self._waiting[changed.job_id]
            stamped = self.fresh_stamps[changed.attempt_id] = _keep_place_if_growing(changed, waiting.attempt)
            self._waiting[changed.job_id] = msgspec.structs.replace(waiting, candidate=stamped)
            self._judge(changed.job_id)

    def _judge(self, job_id: str) -> None:
        """Decide whether a queued job may be planned, waits for other jobs, or can never start."""
        waiting = self._waiting.get(job_id)
        if waiting is None:
            return
        self._doomed.pop(job_id, None)
        self._resting.discard(job_id)
        why = broken_dependency(waiting.after, self._outcomes)
        lacking = unmet_dependencies(waiting.after, self._outcomes)
        if why is not None:
            self._doomed[job_id] = why
            self._planner.drop(waiting.attempt.attempt_id)
        elif lacking:
            self._planner.add(msgspec.structs.replace(waiting.candidate, unmet=lacking))
        elif waiting.attempt.backoff_s > 0:
            self._resting.add(job_id)
        else:
            self._planner.add(waiting.candidate)


def _keep_place_if_growing(stamped: Candidate, attempt: Attempt) -> Candidate:
    """Drop the due time of an attempt that restarts to grow, so that no shorter job gets what was kept for
    it.
    """
    return msgspec.structs.replace(stamped, due_at=None) if attempt.is_growth else stamped
