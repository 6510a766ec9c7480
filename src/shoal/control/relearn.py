"""What a control plane that starts knows of run times: it reads the last runs from the log."""

from __future__ import annotations

from shoal.control.snapshot import holding
from shoal.model.attempt import Attempt, EndReason
from shoal.model.job import Job
from shoal.scheduler import Stamps
from shoal.scheduler.stamps import ask_of
from shoal.store import EventFilter, Tx

OWN_REASONS = frozenset(
    {EndReason.SUCCEEDED, EndReason.EXIT, EndReason.SIGNAL, EndReason.OOM, EndReason.TIME_LIMIT}
)
"""Ends that tell how long such a run takes: nobody stopped it and nothing was lost."""
MAX_EVENTS = 50_000
MAX_RUNS = 2_000
"""Read at a start, so that it takes less than a second; what is older is forgotten."""
ENDED = EventFilter(kinds_prefix="attempt.ended")


def last_runs(tx: Tx) -> list[tuple[Job, Attempt]]:
    """Runs that ended by themselves, the oldest first."""
    found = tx.events.page(max(tx.events.head().seq - MAX_EVENTS, 0), ENDED, MAX_EVENTS)
    runs = []
    for event in found[-MAX_RUNS:]:
        attempt = tx.attempts.get(event.attempt_id) if event.attempt_id else None
        job = tx.jobs.get(attempt.job_id) if attempt else None
        if attempt is not None and job is not None and attempt.reason in OWN_REASONS:
            runs.append((job, attempt))
    return runs


def relearn(stamps: Stamps, runs: list[tuple[Job, Attempt]]) -> None:
    for job, attempt in runs:
        if attempt.placed_at is not None and attempt.ended_at is not None:
            ask = ask_of(holding(job, attempt), job.request)
            stamps.forecast.note(ask, attempt.ended_at - attempt.placed_at)
