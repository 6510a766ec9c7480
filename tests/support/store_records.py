"""Small records for store tests, each with only what the test says and defaults for the rest."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.model.attempt import Attempt, AttemptState
from shoal.model.job import Job, JobOutcome, ResourceRequest
from shoal.model.node import Node, NodeFacts, Window, WindowKind
from shoal.store import Tx


def a_job(number: int = 1, **fields: Any) -> Job:
    values: dict[str, Any] = {
        "job_id": f"job_{number:08d}",
        "project": "vision",
        "number": number,
        "name": "train",
        "owner": "usr_ana",
        "owner_name": "ana",
        "request": ResourceRequest(),
        "spec_json": '{"run":"true"}',
        "submitted_at": 1000.0 + number,
    }
    return Job(**values | fields)


def an_attempt(job: Job, epoch: int = 1, **fields: Any) -> Attempt:
    values: dict[str, Any] = {
        "attempt_id": f"att_{job.job_id}_{epoch}",
        "job_id": job.job_id,
        "project": job.project,
        "epoch": epoch,
        "queued_at": job.submitted_at,
    }
    return Attempt(**values | fields)


def a_node(name: str = "n1", **fields: Any) -> Node:
    facts = NodeFacts(name=name, cpus=8.0, memory_bytes=1 << 34, disk_bytes=1 << 40)
    values: dict[str, Any] = {"facts": facts, "engine": "fake"}
    return Node(**values | fields)


def a_window(window_id: str = "w1", from_at: float = 100.0, **fields: Any) -> Window:
    values: dict[str, Any] = {
        "kind": WindowKind.RESERVATION,
        "nodes": ("n1", "n2"),
        "until_at": from_at + 60.0,
        "project": "vision",
        "because": "demo",
        "by": "ana",
    }
    return Window(window_id=window_id, from_at=from_at, **values | fields)


def add_job(tx: Tx, job: Job, **fields: Any) -> Attempt:
    """A job with its first attempt, as a submit leaves them."""
    attempt = an_attempt(job, **fields)
    tx.jobs.add(job)
    tx.attempts.add(attempt)
    return attempt


def move_attempt(tx: Tx, attempt: Attempt, state: AttemptState, **fields: Any) -> Attempt:
    """The attempt one version later, in another state."""
    moved = msgspec.structs.replace(attempt, state=state, version=attempt.version + 1, **fields)
    tx.attempts.update(moved)
    return moved


def end_job(tx: Tx, job: Job, attempt: Attempt, outcome: JobOutcome = JobOutcome.SUCCEEDED) -> Job:
    """The job's only attempt ends, and the job with it."""
    move_attempt(tx, attempt, AttemptState.ENDED)
    ended = msgspec.structs.replace(job, outcome=outcome, ended_at=2000.0, version=job.version + 1)
    tx.jobs.update(ended)
    return ended


def submit(tx: Tx, number: int, key: str | None = None) -> int:
    """What accepting one job does to the store, in the same order."""
    now = 1000.0 + number
    tx.keys.recall("user:ana", key or f"key-{number}", "f")
    tx.people.get_project("vision")
    taken = tx.submissions.admit("vision", 1).first
    job = a_job(taken, submitted_at=now)
    attempt = an_attempt(job)
    tx.submissions.add([(job, attempt)])
    told: dict[str, Any] = {"at": now, "actor": "user:ana", "project": "vision", "job_id": job.job_id}
    tx.events.append("job.submitted", **told, data={"number": taken})
    tx.events.append("attempt.queued", **told, attempt_id=attempt.attempt_id)
    tx.keys.remember("user:ana", key or f"key-{number}", "f", b"{}", now)
    return taken
