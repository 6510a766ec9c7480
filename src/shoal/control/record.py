"""The only way an attempt or a job changes: step, guarded write and event in one transaction.

Also idempotency: a change repeated with the same key gets the first reply and changes nothing.

Everything here runs inside `store.write` and is synchronous. If a guarded write raises `StaleRecord`, the
whole change is rolled back and the caller looks again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from shoal.control.actor import SHOAL, Actor
from shoal.control.memory.leases import Leases
from shoal.control.memory.queue import Backoff
from shoal.errors import LimitReached
from shoal.identity import CallerKind
from shoal.identity.replay import CHANGES
from shoal.ids import IdFactory
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.model.moves import LOSS_KINDS, AttemptEvent, Effect, step
from shoal.model.retry import decide_retry
from shoal.store import Tx
from shoal.wire import RuleAction

Item = TypeVar("Item")
REPORT_PATIENCE_S = 0.05
"""While the store is busy, a report of a start lets ends and plans go first: ends make room and plans use it.
"""


def batched(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


T = TypeVar("T")


def fingerprint(*parts: object) -> str:
    """Return a digest of the request, so that one key cannot be used for two different requests."""
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def run_idempotent(
    tx: Tx,
    actor: Actor,
    key: str | None,
    request_digest: str,
    now: float,
    answer_type: type[T],
    change: Callable[[], T],
) -> tuple[T, bool]:
    """Return the reply, and whether it is a remembered one. The key, the change and the reply commit
    together.

    Raise, with nothing changed, if the actor has lost its right since the request was admitted.
    """
    if actor.rights is not None:
        actor.rights.check(tx, now)
    if key is None:
        return change(), False
    remembered = tx.keys.recall(str(actor), key, request_digest)
    if remembered is not None:
        return msgspec.json.decode(remembered, type=answer_type), True
    answer = change()
    tx.keys.remember(str(actor), key, request_digest, msgspec.json.encode(answer), now)
    return answer, False


MAX_CHANGES_PER_DAY = 10_000
"""Limit for one user, because what is recorded stays for ever."""
BOUNDED = (
    *("job.", "attempt.", "node.", "access.denied", "user.updated"),
    *("token.revoked", "member.removed", "service.stop_asked", "window.cancelled"),
)
"""Events that do not count towards the limit. Jobs have a daily limit of their own project, operators may do
what they must, and the other events end something that was counted when it began. So the limit never keeps
anybody from taking a right away.
"""


def record_event(
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

    What the transaction has changed about people and tokens goes with the event: `shoal audit --verify` makes
    their tables again from the log.
    """
    if actor.kind == CallerKind.USER and not kind.startswith(BOUNDED):
        _count_today(tx, actor, now)
    subject = job or attempt
    changes = tx.people_changes.take()
    data = {**(data or {}), CHANGES: changes} if changes else data
    tx.events.append(
        kind=kind,
        at=now,
        actor=str(actor),
        project=subject.project if subject else project,
        job_id=subject.job_id if subject else None,
        attempt_id=attempt.attempt_id if attempt else None,
        node=node,
        data=data or {},
        request_id=actor.request_id,
    )


def _count_today(tx: Tx, actor: Actor, now: float) -> None:
    """Count one more change by the user. Raise `LimitReached` if that exceeds the daily limit."""
    if tx.daily_counts.add(f"user:{actor.id}", 1, now) > MAX_CHANGES_PER_DAY:
        raise LimitReached(
            f"{actor.name} has changed things {MAX_CHANGES_PER_DAY:,} times today (UTC), the most in a day; "
            "tokens can still be revoked, and jobs and services stopped",
            hint="wait until tomorrow, and see what asks so often with `shoal events`",
        )


class AttemptRecorder:
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
        """Feed one event to the attempt as it is recorded. `now`: when the event was decided, if not just
        now.

        Return the attempt after the event, or None if there is no such attempt. Late and repeated events
        change nothing. If the attempt ends, its job ends here too, or gets its next attempt.
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
        record_event(tx, f"attempt.{_verb(before, after)}", now, actor, attempt=after, data=data)
        if Effect.CLOSE in effects:
            job = tx.jobs.get(after.job_id)
            assert job is not None
            self._close(tx, job, after, now)
        return after

    def _close(self, tx: Tx, job: Job, attempt: Attempt, now: float) -> None:
        # Nodes that reported their own outcome are not silent, however long ago that was.
        reporting = {outcome.node for outcome in attempt.outcomes if outcome.kind not in LOSS_KINDS}
        silent = (node for node in attempt.node_names if node not in reporting)
        silent_s = max((self._leases.supervisor_silence_s(attempt, node) for node in silent), default=0.0)
        verdict = decide_retry(job, attempt, now, silent_s=silent_s)
        tx.jobs.update(verdict.job)
        for outcome in attempt.outcomes:
            if RuleAction.EXCLUDE_NODE in outcome.rules_hit:
                # The event is for people. It excludes the node for no other job, because the rule is the
                # job's own.
                data = {"because": outcome.message, "epoch": attempt.epoch}
                record_event(
                    tx, "node.suspected", now, SHOAL, job=job, attempt=attempt, node=outcome.node, data=data
                )
        if verdict.backoff_s is None:
            tx.secrets.drop(job.job_id)
            facts: dict[str, Any] = {"outcome": verdict.job.outcome, "because": verdict.job.because}
            record_event(tx, "job.ended", now, SHOAL, job=job, attempt=attempt, data=facts)
            return
        next_attempt = self.next_attempt(
            tx, verdict.job, now, verdict.backoff_s, goes_on=attempt.grows_to is not None
        )
        facts = {"reason": attempt.reason, "epoch": next_attempt.epoch, "backoff_s": verdict.backoff_s}
        if verdict.job.excluded_nodes:
            facts["excluded_nodes"] = verdict.job.excluded_nodes
        if verdict.job.avoided_nodes:
            facts["avoided_nodes"] = verdict.job.avoided_nodes
        record_event(tx, "job.retrying", now, SHOAL, job=job, attempt=next_attempt, data=facts)

    def next_attempt(
        self, tx: Tx, job: Job, now: float, backoff_s: float = 0.0, *, goes_on: bool = False
    ) -> Attempt:
        """Queue the attempt with the job's current epoch."""
        attempt = self.new_attempt(job, now, backoff_s, goes_on=goes_on)
        tx.attempts.add(attempt)
        self._backoff.begin(attempt)
        return attempt

    def new_attempt(self, job: Job, now: float, backoff_s: float = 0.0, *, goes_on: bool = False) -> Attempt:
        """Return the attempt with the job's current epoch. It is not recorded here."""
        return Attempt(
            attempt_id=self._new_id("att"),
            job_id=job.job_id,
            project=job.project,
            epoch=job.epoch,
            queued_at=now,
            backoff_s=backoff_s,
            is_growth=goes_on,
        )


def _verb(before: Attempt, after: Attempt) -> str:
    """Return the verb of the event's kind."""
    if after.rendezvous_round > before.rendezvous_round:
        return "regrouped"
    if after.failure != before.failure:
        return "explained"
    if after.recoveries != before.recoveries:
        return "recovered"
    if before.state is after.state:
        return "noted"
    return "placed" if after.state is AttemptState.STARTING else after.state.value
