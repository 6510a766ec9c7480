"""Ask those to stop who give way to others, and write down for both sides what that costs.

In the transaction of the plan that chose them. Nobody is told here: `watch` and the supervisors' renewals
carry a stop, which is a signal first and the job's `grace` to save its work. What was stopped waits again
in its old place, and nothing counts against its retries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.record import note
from shoal.control.snapshot import label
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job
from shoal.model.moves import StopAsked
from shoal.scheduler import Eviction, Ground
from shoal.scheduler.loss import RESTART_S
from shoal.scheduler.words import age
from shoal.store import Tx

RESTART = f"{RESTART_S / 60:.0f} min to start again"
RUNS = (AttemptState.STARTING, AttemptState.RUNNING)
Victim = tuple[Eviction, Job, Attempt]


def evict(core: Core, tx: Tx, evictions: Sequence[Eviction], now: float) -> list[str]:
    """The attempts that were asked to stop. Where anything has changed since the plan, nobody is for that
    job: another plan is made of what is true now.
    """
    asked: list[str] = []
    if evictions and evictions[0].ground is Ground.GROWTH:
        return _grow(core, tx, evictions[0], now)
    for for_id, equal in groupby(evictions, key=lambda one: one.for_attempt_id):
        head = tx.attempts.get(for_id)
        victims = [_load(tx, eviction) for eviction in equal]
        if head is None or head.state is not AttemptState.QUEUED:
            continue
        running = [victim for victim in victims if victim is not None]
        if len(running) == len(victims):
            _stop_all(core, tx, head, running, now)
            asked += [attempt.attempt_id for _, _, attempt in running]
    return asked


def _grow(core: Core, tx: Tx, eviction: Eviction, now: float) -> list[str]:
    """It stops for itself: the nodes it goes on with are kept for it until it has stopped."""
    loaded = _load(tx, eviction)
    if loaded is None:
        return []
    _, job, attempt = loaded
    has, gets = len(attempt.allocation), eviction.num_nodes
    because = (
        f"stopped to go on with {gets} nodes instead of {has}: they stand idle, and at most "
        f"{_work(attempt, eviction.lost_s)} are done again, {RESTART} included"
    )
    stop = StopAsked(reason=EndReason.PREEMPTED, by=str(SHOAL), because=because, grows_to=gets)
    core.recorder.advance(tx, attempt.attempt_id, stop, now=now)
    data = {**_bill(eviction), "has_nodes": has, "num_nodes": gets}
    note(tx, "job.grows", now, SHOAL, job=job, attempt=attempt, data=data)
    return [attempt.attempt_id]


def _load(tx: Tx, eviction: Eviction) -> Victim | None:
    """None when it does not run any more."""
    attempt = tx.attempts.get(eviction.attempt_id)
    if attempt is None or attempt.state not in RUNS:
        return None
    job = tx.jobs.get(attempt.job_id)
    assert job is not None
    return eviction, job, attempt


def _stop_all(core: Core, tx: Tx, head: Attempt, victims: Sequence[Victim], now: float) -> None:
    gains = tx.jobs.get(head.job_id)
    assert gains is not None
    for eviction, job, attempt in victims:
        because = reason(eviction, job, gains, attempt, now)
        stop = StopAsked(reason=EndReason.PREEMPTED, by=str(SHOAL), because=because)
        data = {**_bill(eviction), "for": label(gains) if gains.project == job.project else None}
        # Before the stop: whoever reads the log has counted it when the job waits again.
        note(tx, "job.evicted", now, SHOAL, job=job, attempt=attempt, data=data)
        tx.jobs.update(msgspec.structs.replace(job, evictions=job.evictions + 1, version=job.version + 1))
        core.recorder.advance(tx, attempt.attempt_id, stop, now=now)
    total: dict[str, Any] = {
        "num_jobs": len(victims),
        "lost_device_s": sum(eviction.lost_device_s for eviction, _, _ in victims),
        "likely_device_s": sum(eviction.likely_device_s for eviction, _, _ in victims),
        "jobs": [label(job) for _, job, _ in victims if job.project == gains.project],
    }
    note(tx, "job.preempted_for", now, SHOAL, job=gains, attempt=head, data=total)


def _bill(eviction: Eviction) -> dict[str, Any]:
    return {
        "ground": eviction.ground,
        "lost_s": eviction.lost_s,
        "lost_device_s": eviction.lost_device_s,
        "likely_device_s": eviction.likely_device_s,
        "saved_at": eviction.saved_at,
    }


def reason(eviction: Eviction, job: Job, gains: Job, attempt: Attempt, now: float) -> str:
    """Read in the project of the job that stops, which may not know that the other project exists."""
    who = label(gains) if gains.project == job.project else "a job of another project"
    if eviction.ground is Ground.PRIORITY:
        right = f"priority {gains.priority} over {job.priority}"
    else:
        right = "its quota, of which this job borrowed"
    most = f"at a loss of at most {_work(attempt, eviction.lost_s)}, {RESTART} included"
    return f"gave way to {who} ({right}), {most}; {_since(eviction, attempt, now)}"


def _since(eviction: Eviction, attempt: Attempt, now: float) -> str:
    """From where it goes on, as far as anybody knows."""
    if eviction.saved_at is not None:
        return f"saved {age(now - eviction.saved_at)} before"
    unknown = "no checkpoint of it is known"
    if eviction.likely_device_s >= eviction.lost_device_s:
        return unknown
    likely_s = eviction.lost_s * eviction.likely_device_s / eviction.lost_device_s
    return f"{unknown}, so it counted as {_work(attempt, likely_s)}, as the median of others"


def _work(attempt: Attempt, lost_s: float) -> str:
    """`3.2 GPU-hours`; of a job without GPUs, of its CPUs."""
    num_gpus: float = sum(share.num_gpus for share in attempt.allocation)
    count = num_gpus or sum(share.cpus for share in attempt.allocation)
    hours = lost_s / 3600 * count
    return f"{hours:.2g} {'GPU' if num_gpus else 'CPU'}-hours"
