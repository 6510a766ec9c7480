"""Record that jobs are to end."""

from __future__ import annotations

import msgspec

from shoal.control.actor import Actor
from shoal.control.core import Core
from shoal.control.record import note
from shoal.errors import NotFound
from shoal.model.attempt import Attempt, EndReason
from shoal.model.job import Job
from shoal.model.moves import StopAsked
from shoal.store import Tx


def ask_to_stop(
    core: Core, tx: Tx, actor: Actor, job_ids: list[str], now: float, *, is_noted: bool = True
) -> list[tuple[Job, Attempt]]:
    """Record that they are to end; those that may still run something have to be cancelled afterwards.

    `is_noted`: with an event for each that it was asked for. What becomes of it always has one.
    """
    for job_id in job_ids:
        job, attempt = load(tx, job_id)
        if not job.is_open or job.stop_asked_by is not None:
            continue
        asked = msgspec.structs.replace(job, stop_asked_by=actor.name, version=job.version + 1)
        tx.jobs.update(asked)
        if is_noted:
            note(tx, "job.stop_asked", now, actor, job=job, attempt=attempt)
        stop = StopAsked(reason=EndReason.CANCELLED, by=actor.name)
        core.recorder.advance(tx, attempt.attempt_id, stop, actor)
    return [load(tx, job_id) for job_id in job_ids]


def load(tx: Tx, job_id: str) -> tuple[Job, Attempt]:
    """The job and its newest attempt; `NotFound`: there is none."""
    job, attempt = tx.jobs.get(job_id), tx.attempts.newest(job_id)
    if job is None or attempt is None:
        raise NotFound(f"no job `{job_id}`", hint="shoal queue --all")
    return job, attempt
