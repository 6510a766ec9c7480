"""What waits and what holds resources, kept in memory and brought up to date from the event log.

Reading everything anew for each plan would cost in proportion to the queue; the log tells which jobs
changed since the last look. The first look of a control plane reads all that is open.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from shoal.control.backoff import Backoff
from shoal.control.snapshot import broken, candidate, holding, unmet
from shoal.model.attempt import HOLDING, Attempt, AttemptState
from shoal.model.job import Dependency, Job, JobOutcome
from shoal.model.node import Node
from shoal.scheduler import Candidate, Holding, NodeView, Snapshot, in_order
from shoal.store import Tx

MAX_CANDIDATES = 5_000
"""Planned for in one cycle, in order; whoever is further back waits behind them. Those that may not start
whatever is free (a backoff, a full array) are not counted, or they would block the rest."""
EVERYTHING = 1 << 62


class Changes(msgspec.Struct, frozen=True):
    """What a look at the store found, all of it as of one moment."""

    seen: int
    """The newest event then."""
    jobs: list[tuple[Job, Attempt]]
    """Every job that may have changed, with its newest attempt."""
    outcomes: dict[str, JobOutcome | None]
    """Of the jobs that queued ones among them wait for."""
    nodes: list[Node]


def look(tx: Tx, after: int | None) -> Changes:
    """What changed after that event; None: everything that is open."""
    seen = tx.events.head().seq
    if after is None:
        jobs = [*tx.attempts.queued(EVERYTHING), *tx.attempts.holding()]
    else:
        jobs = tx.jobs.changed_since(after)
    waited_for = {dep.job_id for job, own in jobs if own.state is AttemptState.QUEUED for dep in job.after}
    outcomes = tx.jobs.outcomes(sorted(waited_for)) if waited_for else {}
    return Changes(seen, jobs, outcomes, tx.nodes.all())


class Waiting(msgspec.Struct, frozen=True):
    """A queued attempt."""

    candidate: Candidate
    attempt: Attempt
    after: tuple[Dependency, ...]


class Queue:
    """By job: each has one attempt that is not over. Only the event loop's thread touches it."""

    def __init__(self) -> None:
        self.seen: int | None = None
        """The event up to which it is true; None before the first look."""
        self.added: list[Candidate] = []
        """Became ready since `settled`."""
        self.is_disturbed = True
        """Anything else changed since `settled`, so that others may start or wait for another reason."""
        self._waiting: dict[str, Waiting] = {}
        self._ready: dict[str, Waiting] = {}
        self._doomed: dict[str, str] = {}
        self._holdings: dict[str, Holding] = {}
        self._outcomes: dict[str, JobOutcome | None] = {}
        self._dependents: dict[str, set[str]] = {}
        """By job waited for; those and no others have an entry in `_outcomes`."""

    def take_in(self, changes: Changes) -> None:
        touched: set[str] = set()
        for job, attempt in changes.jobs:
            self._replace(job, attempt)
            touched.add(job.job_id)
            if job.job_id in self._dependents:
                self._outcomes[job.job_id] = job.outcome
                touched |= self._dependents[job.job_id]
        self._outcomes.update(changes.outcomes)
        for job_id in sorted(touched):
            self._judge(job_id)
        self.seen = changes.seen

    def settled(self) -> None:
        """A plan was made of all this, and what it decided is recorded."""
        self.added = []
        self.is_disturbed = False

    @property
    def doomed(self) -> list[tuple[str, str]]:
        """Attempts whose dependencies can never be met, and why."""
        return [(self._waiting[job_id].attempt.attempt_id, why) for job_id, why in self._doomed.items()]

    @property
    def num_blocked(self) -> int:
        """How many wait for other jobs."""
        return len(self._waiting) - len(self._ready) - len(self._doomed)

    def blocked(self, job_id: str) -> Candidate | None:
        """The job's candidate with what it waits for, if it waits for other jobs."""
        waiting = self._waiting.get(job_id)
        if waiting is None or job_id in self._ready or job_id in self._doomed:
            return None
        return msgspec.structs.replace(waiting.candidate, unmet=unmet(waiting.after, self._outcomes))

    def snapshot(
        self, nodes: tuple[NodeView, ...], backoff: Backoff, now: float
    ) -> tuple[Snapshot, float | None]:
        """What one cycle looks at, and in how many seconds the first backoff ends, if one is running."""
        candidates = [_timed(waiting, backoff, now) for waiting in self._ready.values()]
        delays = [one.not_before - now for one in candidates if one.not_before > now]
        backoff.keep_only(waiting.attempt.attempt_id for waiting in self._waiting.values())
        if len(candidates) > MAX_CANDIDATES:
            candidates = self._first(candidates, now)
        holdings = sorted(self._holdings.values(), key=lambda held: held.attempt_id)
        snapshot = Snapshot(nodes=nodes, holdings=tuple(holdings), candidates=tuple(candidates))
        return snapshot, min(delays, default=None)

    def _first(self, candidates: list[Candidate], now: float) -> list[Candidate]:
        """Those at the head of the queue who may start if there is room, and as many who may not."""
        in_arrays = Counter(held.array_id for held in self._holdings.values())
        ready: list[Candidate] = []
        held_up: list[Candidate] = []
        for one in in_order(candidates):
            is_full = one.array_at_once is not None and in_arrays[one.array_id] >= one.array_at_once
            if one.not_before > now or is_full:
                held_up.append(one)
            else:
                in_arrays[one.array_id] += 1
                ready.append(one)
        return ready[:MAX_CANDIDATES] + held_up[:MAX_CANDIDATES]

    def _replace(self, job: Job, attempt: Attempt) -> None:
        """Forget what was known of the job, then note what is true now."""
        before = self._waiting.pop(job.job_id, None)
        was_held = self._holdings.pop(job.job_id, None) is not None
        was_ready = self._ready.pop(job.job_id, None) is not None
        was_doomed = self._doomed.pop(job.job_id, None) is not None
        for dep in before.after if before else ():
            self._dependents[dep.job_id].discard(job.job_id)
            if not self._dependents[dep.job_id]:
                del self._dependents[dep.job_id]
                self._outcomes.pop(dep.job_id, None)
        if attempt.state is AttemptState.QUEUED:
            self._waiting[job.job_id] = Waiting(candidate(job, attempt), attempt, job.after)
            for dep in job.after:
                self._dependents.setdefault(dep.job_id, set()).add(job.job_id)
        elif attempt.state in HOLDING:
            self._holdings[job.job_id] = holding(job, attempt)
        is_held = job.job_id in self._holdings
        self.is_disturbed |= was_held or was_ready or was_doomed or is_held

    def _judge(self, job_id: str) -> None:
        """Whether a queued job may be planned, waits for others, or never can start."""
        waiting = self._waiting.get(job_id)
        if waiting is None:
            return
        was_ready = self._ready.pop(job_id, None) is not None
        self._doomed.pop(job_id, None)
        why = broken(waiting.after, self._outcomes)
        if why is not None:
            self._doomed[job_id] = why
            self.is_disturbed = True
        elif not unmet(waiting.after, self._outcomes):
            self._ready[job_id] = waiting
            self.added.append(waiting.candidate)
        elif was_ready:
            self.is_disturbed = True


def _timed(waiting: Waiting, backoff: Backoff, now: float) -> Candidate:
    if waiting.attempt.backoff_s <= 0:
        return waiting.candidate
    return msgspec.structs.replace(waiting.candidate, not_before=now + backoff.remaining_s(waiting.attempt))
