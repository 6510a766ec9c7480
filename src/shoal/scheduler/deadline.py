"""Deadlines: when a job must start to have ended in time, when it goes first for that, and what it is told.

A deadline changes the order and nothing else: nobody is evicted for it, and a job that misses it runs on.
"""

from __future__ import annotations

import msgspec

from shoal.scheduler.snapshot import Candidate
from shoal.scheduler.types import Explanation
from shoal.scheduler.words import clock_time, duration

SLACK_SHARE = 0.5
"""Of the time until it must start: then it is due. The rest is for those to end who hold what it needs."""


LEAST_SHARE = 0.05
"""Of the slack that a job like it has without a deadline: nobody buys the front of the queue with a date."""


def latest_start(deadline_at: float, limit_s: float | None, expected_s: float | None) -> float:
    """By its time limit; without one, by what is expected of it."""
    return deadline_at - (limit_s if limit_s is not None else expected_s or 0.0)


def due_for_deadline(submitted_at: float, start_by: float, due_at: float) -> float:
    """`due_at`: when it is due without a deadline. Whole seconds, like every due time."""
    wanted = submitted_at + SLACK_SHARE * (start_by - submitted_at)
    least = submitted_at + LEAST_SHARE * (due_at - submitted_at)
    return float(int(min(max(wanted, least), due_at)))


def with_deadline(
    told: Explanation, candidate: Candidate, promised_at: float | None, now: float
) -> Explanation:
    """Adds whether its deadline can still be met. `promised_at`: its start, if it is promised one."""
    deadline_at, limit_s = candidate.deadline_at, candidate.request.time_limit_s
    if deadline_at is None:
        return told
    start_by = latest_start(deadline_at, limit_s, candidate.expected_s)
    can_be_met = max(promised_at or now, now) <= start_by
    facts = {**told.facts, "deadline_at": deadline_at, "start_by": start_by, "can_be_met": can_be_met}
    end, start = clock_time(deadline_at, now), clock_time(start_by, now)
    if end is None or start is None:  # too far to plan by the clock
        return msgspec.structs.replace(told, facts=facts)
    late = f"{_run(candidate)} and may not have ended by {end}, its deadline"
    if can_be_met:
        line = f"to have ended by {end} it must start by {start}"
    elif start_by < now:
        line = f"it {late}: it had to start by {start}"
    else:
        line = f"it is to start by {clock_time(promised_at or now, now)}, {late}"
    return msgspec.structs.replace(told, details=(*told.details, line), facts=facts)


def _run(candidate: Candidate) -> str:
    limit_s = candidate.request.time_limit_s
    if limit_s is not None:
        return f"may run {duration(limit_s)}"
    return f"is expected to run {duration(candidate.expected_s or 0.0)}"
