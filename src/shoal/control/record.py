"""The only way an attempt or a job changes: step, guarded write and event in one transaction.

Everything here runs inside `store.write` and is synchronous. `Stale` from a guarded write rolls the
whole change back; the caller looks again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shoal.control.actor import SHOAL, Actor
from shoal.control.backoff import Backoff
from shoal.control.leases import Leases
from shoal.errors import LimitReached
from shoal.identity import CallerKind
from shoal.identity.replay import CHANGES
from shoal.ids import IdFactory
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.model.moves import LOSS_KINDS, AttemptEvent, Effect, step
from shoal.model.retry import judge
from shoal.store import Tx
from shoal.wire import RuleAction

MAX_CHANGES_PER_DAY = 10_000
"""Of one user: what is recorded stays for ever."""
BOUNDED = (
    *("job.", "attempt.", "node.", "access.denied", "user.updated"),
    *("token.revoked", "member.removed", "service.stop_asked", "window.cancelled"),
)
"""Events that are not counted: of jobs a project has so many a day, operators may do what they must, and
the others end what was counted when it began. So nobody is kept from taking a right away."""


def note(
    tx: Tx,
    kind: str,
    now: float,
    actor: Actor,
    *,
    job: Job | None = None,
    attempt: Attempt | None = None,
    project: str | None = None,
    node: str | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Append one event to the log. An attempt brings its job along.

    What the transaction has changed about people and tokens goes with it: `shoal audit --verify` makes their
    tables again from the log.
    """
    if actor.kind == CallerKind.USER and not kind.startswith(BOUNDED):
        _count_today(tx, actor, now)
    of = job or attempt
    changes = tx.people_changes.take()
    data = {**(data or {}), CHANGES: changes} if changes else data
    tx.events.append(
        kind=kind,
        at=now,
        actor=str(actor),
        project=of.project if of else project,
        job_id=of.job_id if of else None,
        attempt_id=attempt.attempt_id if attempt else None,
        node=node,
        data=data or {},
        request_id=actor.request_id,
    )


def _count_today(tx: Tx, actor: Actor, now: float) -> None:
    """Count one more change by the user. Raise `LimitReached` where that is one too many for a day."""
    if tx.daily_counts.add(f"user:{actor.id}", 1, now) > MAX_CHANGES_PER_DAY:
        raise LimitReached(
            f"{actor.name} has changed things {MAX_CHANGES_PER_DAY:,} times today (UTC), the most in a day; "
            "tokens can still be revoked, and jobs and services stopped",
            hint="wait until tomorrow, and see what asks so often with `shoal events`",
        )


class Recorder:
    """Applies events to attempts. Holds no state of its own."""

    def __init__(self, new_id: IdFactory, now: Callable[[], float], backoff: Backoff, leases: Leases) -> None:
        self._new_id = new_id
        self._now = now
        self._backoff = backoff
        self._leases = leases

    def advance(
        self,
        tx: Tx,
        attempt_id: str,
        event: AttemptEvent,
        actor: Actor = SHOAL,
        *,
        now: float | None = None,
    ) -> Attempt | None:
        """Feed one event to the attempt as it is recorded. `now`: when it was decided, if not just now.

        Returns the attempt after it, or None when nobody knows the attempt. Late and repeated events
        change nothing. When the attempt ends, its job ends or gets its next attempt here too.
        """
        before = tx.attempts.get(attempt_id)
        if before is None:
            return None
        now = self._now() if now is None else now
        after, effects = step(before, event, now)
        if after is before:
            return before
        tx.attempts.update(after)
        data = {"event": msgspec.to_builtins(event), "from": before.state, "to": after.state}
        note(tx, f"attempt.{_verb(before, after)}", now, actor, attempt=after, data=data)
        if Effect.CLOSE in effects:
            job = tx.jobs.get(after.job_id)
            assert job is not None
            self._close(tx, job, after, now)
        return after

    def _close(self, tx: Tx, job: Job, attempt: Attempt, now: float) -> None:
        # Who said himself that his part was over may have done so long ago: that is no silence.
        said = {outcome.node for outcome in attempt.outcomes if outcome.kind not in LOSS_KINDS}
        unheard = (node for node in attempt.node_names if node not in said)
        silent_s = max((self._leases.wordless_s(attempt, node) for node in unheard), default=0.0)
        verdict = judge(job, attempt, now, silent_s=silent_s)
        tx.jobs.update(verdict.job)
        for outcome in attempt.outcomes:
            if RuleAction.EXCLUDE_NODE in outcome.rules_hit:
                # Said, and not acted upon for others: the words are the job's own.
                told = {"because": outcome.message, "epoch": attempt.epoch}
                note(tx, "node.suspected", now, SHOAL, job=job, attempt=attempt, node=outcome.node, data=told)
        if verdict.backoff_s is None:
            tx.secrets.drop(job.job_id)
            facts: dict[str, Any] = {"outcome": verdict.job.outcome, "because": verdict.job.because}
            note(tx, "job.ended", now, SHOAL, job=job, attempt=attempt, data=facts)
            return
        again = self.next_attempt(
            tx, verdict.job, now, verdict.backoff_s, goes_on=attempt.grows_to is not None
        )
        facts = {"reason": attempt.reason, "epoch": again.epoch, "backoff_s": verdict.backoff_s}
        if verdict.job.excluded_nodes:
            facts["excluded_nodes"] = verdict.job.excluded_nodes
        if verdict.job.avoided_nodes:
            facts["avoided_nodes"] = verdict.job.avoided_nodes
        note(tx, "job.retrying", now, SHOAL, job=job, attempt=again, data=facts)

    def next_attempt(
        self, tx: Tx, job: Job, now: float, backoff_s: float = 0.0, *, goes_on: bool = False
    ) -> Attempt:
        """Queue the attempt with the job's current epoch."""
        attempt = self.new_attempt(job, now, backoff_s, goes_on=goes_on)
        tx.attempts.add(attempt)
        self._backoff.begin(attempt)
        return attempt

    def new_attempt(self, job: Job, now: float, backoff_s: float = 0.0, *, goes_on: bool = False) -> Attempt:
        """The attempt with the job's current epoch, not recorded yet."""
        return Attempt(
            attempt_id=self._new_id("att"),
            job_id=job.job_id,
            project=job.project,
            epoch=job.epoch,
            queued_at=now,
            backoff_s=backoff_s,
            goes_on=goes_on,
        )


def _verb(before: Attempt, after: Attempt) -> str:
    """What happened, for the event's kind."""
    if after.generation > before.generation:
        return "regrouped"
    if after.failure != before.failure:
        return "explained"
    if after.recoveries != before.recoveries:
        return "recovered"
    if before.state is after.state:
        return "noted"
    return "placed" if after.state is AttemptState.STARTING else after.state.value
