"""The keys that order waiting jobs: when a job is due, what it scores until then, and what a deadline
changes.

Due jobs go first, in order of arrival. Once a job is due, jobs that came later pass it only by backfill
behind its promise. All other jobs go by score, smallest first. Both keys are numbers that change only when
the forecast changes; `docs/guides/policy.md` has what each constant is worth on real logs.

A deadline changes the order and nothing else. No job is evicted for it, and a job that misses it keeps
running.
"""

from __future__ import annotations

from math import sqrt

import msgspec

from shoal.scheduler.explain.text import clock_time, duration
from shoal.scheduler.facts.plan import Explanation
from shoal.scheduler.facts.snapshot import Candidate
from shoal.scheduler.prediction.forecast import Expectation

SLACK_SHARE = 0.5
"""A job with a deadline is due after this share of the time until it must start. The rest is for the jobs
that hold its nodes to end."""


LEAST_SHARE = 0.05
"""Of the slack that the job would have without a deadline. A deadline cannot put a job at the front of the
queue at once."""


def latest_start(deadline_at: float, limit_s: float | None, expected_s: float | None) -> float:
    """Return the latest start by its time limit; without a limit, by its expected run time."""
    return deadline_at - (limit_s if limit_s is not None else expected_s or 0.0)


def due_for_deadline(submitted_at: float, start_by: float, due_at: float) -> float:
    """Return when it is due, given `due_at`, when it is due without a deadline. Whole seconds, like every due
    time.
    """
    wanted = submitted_at + SLACK_SHARE * (start_by - submitted_at)
    least = submitted_at + LEAST_SHARE * (due_at - submitted_at)
    return float(int(min(max(wanted, least), due_at)))


def with_deadline(
    explanation: Explanation, candidate: Candidate, promised_at: float | None, now: float
) -> Explanation:
    """Add whether its deadline can still be met. `promised_at`: its promised start, if it has one."""
    deadline_at, limit_s = candidate.deadline_at, candidate.request.time_limit_s
    if deadline_at is None:
        return explanation
    start_by = latest_start(deadline_at, limit_s, candidate.expected_s)
    can_be_met = max(promised_at or now, now) <= start_by
    facts = {**explanation.facts, "deadline_at": deadline_at, "start_by": start_by, "can_be_met": can_be_met}
    end, start = clock_time(deadline_at, now), clock_time(start_by, now)
    if end is None or start is None:  # too far to plan by the clock
        return msgspec.structs.replace(explanation, facts=facts)
    late = f"{_run(candidate)} and may not have ended by {end}, its deadline"
    if can_be_met:
        line = f"to have ended by {end} it must start by {start}"
    elif start_by < now:
        line = f"it {late}: it had to start by {start}"
    else:
        line = f"it is to start by {clock_time(promised_at or now, now)}, {late}"
    return msgspec.structs.replace(explanation, details=(*explanation.details, line), facts=facts)


def _run(candidate: Candidate) -> str:
    limit_s = candidate.request.time_limit_s
    if limit_s is not None:
        return f"may run {duration(limit_s)}"
    return f"is expected to run {duration(candidate.expected_s or 0.0)}"


PACE = 3.5
"""A job may wait this many times the geometric mean of its expected run and one hour before it is due."""
MOST_S = 10 * 3600.0
"""The longest slack, except for the two additions below. Longer slack lowers the mean wait and makes the
worst wait longer."""
WIDE_S = 4 * 3600.0
"""Added for a job as large as the cluster, and in proportion for smaller ones. Draining a cluster is
expensive for all waiting jobs, and the longer wide jobs wait, the more of them share one drain."""
SURE_WAITS = 50.0
"""If limits are as good as run times, a job may wait this many times the run time that it is sure to have."""
RESTAMP_FACTOR = 2.0
"""The keys of a waiting job are computed again once its expected run time has changed by this factor."""


def due_time(submitted_at: float, expectation: Expectation, share: float) -> float:
    """Return from when on the job goes before all that came later. `share` is the part of the cluster it asks
    for.

    Whole seconds, so that a replay from recorded numbers cannot differ in the last digit.
    """
    slack_s = min(PACE * sqrt(expectation.expected_s * 3600.0), MOST_S) + WIDE_S * min(share, 1.0)
    return float(int(submitted_at + max(slack_s, SURE_WAITS * expectation.sure_s)))


def score(expected_s: float, share: float) -> float:
    """Return the score. Smaller goes first.

    Slowdown weighs a second of waiting by 1 / run time, and the job costs run time x share. Smith's rule
    orders by cost over weight, which is run time^2 x share. The score is its square root.
    """
    return max(expected_s, 10.0) * sqrt(share)


def needs_restamp(expected_s: float, now_expected_s: float) -> bool:
    """Whether the forecast has moved so far that a waiting job's keys should follow."""
    ratio = now_expected_s / expected_s
    return ratio >= RESTAMP_FACTOR or ratio <= 1 / RESTAMP_FACTOR
