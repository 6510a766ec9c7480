"""Stop a job; try an ended job again."""

from __future__ import annotations

import os

import msgspec

from shoal.control.actor import Actor
from shoal.control.capabilities import JobAdmission, Records
from shoal.control.commands.job_records import ask_to_stop, load_job
from shoal.control.commands.submit import (
    check_checkpoint,
    check_priority,
    check_queue,
    check_quota,
    count_today,
)
from shoal.control.job_specs import archive_path, spec_of
from shoal.control.loops.watch import cancel
from shoal.control.record import fingerprint, record_event, run_idempotent
from shoal.engines.base import Engine
from shoal.errors import StateError
from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job
from shoal.settings import Settings
from shoal.store import Tx


async def stop_job(records: Records, engine: Engine, actor: Actor, job_id: str, key: str | None) -> Job:
    """Ask the job to stop. A job that has already ended is returned as it is."""

    def change(tx: Tx) -> tuple[Job, Attempt]:
        now = records.clock.now()

        def stop() -> list[str]:
            ask_to_stop(records.recorder, tx, actor, [job_id], now)
            return [job_id]

        run_idempotent(tx, actor, key, fingerprint("stop", f"job {job_id}"), now, list[str], stop)
        return load_job(tx, job_id)

    job, attempt = await records.store.write(change)
    if attempt.state is AttemptState.STOPPING:
        await cancel(engine, job, attempt)
    return job


async def retry_job(admission: JobAdmission, actor: Actor, job_id: str, key: str | None) -> Job:
    """Make a new attempt of an ended job, with the same frozen spec."""
    refusal = _missing_archive(
        admission.settings, await admission.records.store.read(lambda tx: tx.jobs.get(job_id))
    )

    def change(tx: Tx) -> Job:
        now = admission.records.clock.now()
        digest = fingerprint("retry", job_id)
        run_idempotent(
            tx, actor, key, digest, now, bool, lambda: _retry(admission, tx, actor, job_id, now, refusal)
        )
        return load_job(tx, job_id)[0]

    return await admission.records.store.write(change)


def _missing_archive(settings: Settings, job: Job | None) -> StateError | None:
    """Return the error if the job's snapshot was removed as old. Otherwise renew the date of the snapshot, so
    that it stays.
    """
    if job is None or job.is_open or job.archive_digest is None:
        return None
    try:
        os.utime(archive_path(settings, job.archive_digest))
    except FileNotFoundError:
        return StateError(
            f"the working directory of job {job.reference} was removed as old; it cannot run without it",
            hint="submit it again with `shoal run`, which sends it along",
        )
    return None


def _retry(
    admission: JobAdmission, tx: Tx, actor: Actor, job_id: str, now: float, refusal: StateError | None
) -> bool:
    job, _ = load_job(tx, job_id)
    if job.replica is not None:
        raise StateError(
            f"job {job.reference} is a replica of service `{job.replica.service}`, which starts its own",
            hint=f"shoal scale {job.replica.service} 1",
        )
    if job.is_open:
        raise StateError(
            f"job {job.reference} has not ended; only an ended job can be tried again",
            hint=f"shoal why {job.reference}",
        )
    if refusal is not None:
        raise refusal
    spec = spec_of(job)
    if spec.secrets:
        raise StateError(
            f"the secrets of job {job.reference} were thrown away when it ended; it cannot run without them",
            hint="submit it again with `shoal run`, which sends them along",
        )
    project = tx.people.get_project(job.project)
    assert project is not None
    check_queue(admission.settings, spec)
    check_checkpoint(admission.engine, spec)
    priority = check_priority(admission.planning.planner, project, spec)
    check_quota(project, tx.jobs.count_open(project.name), 1)
    count_today(tx, project, 1, now)
    again = msgspec.structs.replace(
        job,
        priority=priority,
        epoch=job.epoch + 1,
        failures=0,
        losses=0,
        evictions=0,
        avoided_nodes=(),
        stop_asked_by=None,
        outcome=None,
        because="",
        exit_code=None,
        ended_at=None,
        version=job.version + 1,
    )
    tx.jobs.update(again)
    attempt = admission.records.recorder.next_attempt(tx, again, now)
    record_event(tx, "job.retried", now, actor, job=again, attempt=attempt)
    return True
