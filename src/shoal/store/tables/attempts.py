"""Attempts, guarded by version. The newest one's state is copied to its job in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BindParameter, bindparam, case, insert, select, update

from shoal.model.attempt import HOLDING, Attempt, AttemptState
from shoal.model.job import Job
from shoal.store.base import StaleRecord
from shoal.store.schema import attempts, jobs
from shoal.store.session import Session, decode_attempt, decode_job, encode
from shoal.store.tables.jobs import WITH_NEWEST_ATTEMPT, chunks

INSERT = insert(attempts)
BY_ID = select(attempts.c.body).where(attempts.c.attempt_id == bindparam("id"))
OF_JOB = select(attempts.c.body).where(attempts.c.job_id == bindparam("of"))
OLDEST_FIRST = OF_JOB.order_by(attempts.c.epoch)
NEWEST = OF_JOB.order_by(attempts.c.epoch.desc()).limit(1)
UPDATE = (
    update(attempts)
    .where(attempts.c.attempt_id == bindparam("id"), attempts.c.version == bindparam("seen"))
    .values(state=bindparam("to_state"), version=bindparam("to_version"), body=bindparam("to_body"))
)
BECOME_NEWEST = (
    update(jobs)
    .where(jobs.c.job_id == bindparam("of"), jobs.c.newest_epoch < bindparam("to_epoch"))
    .values(
        newest_attempt_id=bindparam("to_newest"),
        newest_epoch=bindparam("to_epoch"),
        status=case((jobs.c.outcome.is_(None), bindparam("to_state")), else_=jobs.c.status),
    )
)
COPY_STATE = (
    update(jobs)
    .where(
        jobs.c.job_id == bindparam("of"),
        jobs.c.newest_attempt_id == bindparam("newest"),
        jobs.c.outcome.is_(None),
    )
    .values(status=bindparam("to_state"))
)
QUEUED = (
    WITH_NEWEST_ATTEMPT.where(jobs.c.status == AttemptState.QUEUED.value)
    .order_by(jobs.c.priority.desc(), jobs.c.submitted_at, jobs.c.job_id)
    .limit(bindparam("limit"))
)
STATES: BindParameter[Any] = bindparam("states", expanding=True)
IDS: BindParameter[Any] = bindparam("ids", expanding=True)
WITH_JOB = (
    select(jobs.c.body, attempts.c.body.label("attempt_body"))
    .join_from(attempts, jobs, jobs.c.job_id == attempts.c.job_id)
    .order_by(attempts.c.attempt_id)
)
IN_STATE = WITH_JOB.where(attempts.c.state.in_(STATES))
THESE = WITH_JOB.where(attempts.c.attempt_id.in_(IDS))


class AttemptTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run
        self._loaded: dict[str, Attempt] = {}
        """Attempts as this transaction has read or left them. Code that ends an attempt asks for it three
        times.
        """
        self._newest: dict[str, str] = {}
        """By job."""

    def forget(self) -> None:
        """Forget what was loaded. The writer calls this when it undoes a change."""
        self._loaded.clear()
        self._newest.clear()

    def add(self, attempt: Attempt) -> None:
        """Its job must exist. A job has one attempt per epoch."""
        self._run(INSERT, attempt_row(attempt))
        self._newest.pop(attempt.job_id, None)
        newest = {"to_newest": attempt.attempt_id, "to_epoch": attempt.epoch, "to_state": attempt.state}
        self._run(BECOME_NEWEST, {"of": attempt.job_id} | newest)

    def get(self, attempt_id: str) -> Attempt | None:
        loaded = self._loaded.get(attempt_id)
        if loaded is None:
            body = self._session.value(BY_ID, {"id": attempt_id})
            if body is None:
                return None
            loaded = self._loaded[attempt_id] = decode_attempt(body)
        return loaded

    def newest(self, job_id: str) -> Attempt | None:
        loaded = self._newest.get(job_id)
        if loaded is not None:
            return self._loaded[loaded]
        newest = _decode_optional(self._session.value(NEWEST, {"of": job_id}))
        if newest is not None:
            self._loaded[newest.attempt_id] = newest
            self._newest[job_id] = newest.attempt_id
        return newest

    def of_job(self, job_id: str) -> list[Attempt]:
        """Oldest first."""
        return [decode_attempt(body) for (body,) in self._run(OLDEST_FIRST, {"of": job_id})]

    def with_jobs(self, attempt_ids: Sequence[str]) -> list[tuple[Job, Attempt]]:
        """The attempts that exist, in the order of the ids."""
        by_id: dict[str, tuple[Job, Attempt]] = {}
        for ids in chunks(attempt_ids):
            for job, attempt_row in self._session.query(THESE, {"ids": ids}):
                attempt = decode_attempt(attempt_row)
                by_id[attempt.attempt_id] = decode_job(job), attempt
        return [by_id[attempt_id] for attempt_id in attempt_ids if attempt_id in by_id]

    def update(self, attempt: Attempt) -> None:
        """Replace the record whose version is one less. `StaleRecord` if there is no such record."""
        changes = {
            "id": attempt.attempt_id,
            "seen": attempt.version - 1,
            "to_state": attempt.state,
            "to_version": attempt.version,
            "to_body": encode(attempt),
        }
        if self._run(UPDATE, changes).rowcount == 0:
            raise StaleRecord(f"attempt {attempt.attempt_id} is no longer at version {attempt.version - 1}")
        copied = {"of": attempt.job_id, "newest": attempt.attempt_id, "to_state": attempt.state}
        self._run(COPY_STATE, copied)
        self._loaded[attempt.attempt_id] = attempt

    def queued(self, limit: int) -> list[tuple[Job, Attempt]]:
        """Queued attempts by priority, then age, then id."""
        return [
            (decode_job(job), decode_attempt(attempt)) for job, attempt in self._run(QUEUED, {"limit": limit})
        ]

    def holding(self) -> list[tuple[Job, Attempt]]:
        """Every attempt that holds resources, by id. Tens of thousands take a second, so never ask in a
        transaction that writes.
        """
        rows = self._session.query(IN_STATE, {"states": list(HOLDING)})
        return [(decode_job(job), decode_attempt(attempt)) for job, attempt in rows]

    def holding_on(self, node: str) -> list[tuple[Job, Attempt]]:
        """Attempts that hold resources and have, or had, a task on that node."""
        # JSON escapes quotes within a text, so only a field of that name and value can match.
        condition = attempts.c.body.contains(f'"node":{encode(node)}', autoescape=True)
        rows = self._session.query(IN_STATE.where(condition), {"states": list(HOLDING)})
        loaded = [(decode_job(job), decode_attempt(attempt_row)) for job, attempt_row in rows]
        return [(job, attempt) for job, attempt in loaded if node in attempt.node_names]


def attempt_row(attempt: Attempt) -> dict[str, Any]:
    """The attempt as a row of its table."""
    return {
        "attempt_id": attempt.attempt_id,
        "job_id": attempt.job_id,
        "epoch": attempt.epoch,
        "state": attempt.state,
        "version": attempt.version,
        "body": encode(attempt),
    }


def _decode_optional(body: str | None) -> Attempt | None:
    return None if body is None else decode_attempt(body)
