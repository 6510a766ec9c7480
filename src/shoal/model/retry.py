"""Decide after an attempt has ended: the job ends, or another attempt starts, and when."""

from __future__ import annotations

import msgspec

from shoal.model.attempt import CLUSTER_REASONS, Attempt, EndReason
from shoal.model.job import Job, JobOutcome
from shoal.wire import MAX_EARLY_ENDS, RuleAction, TaskOutcome

MAX_BACKOFF_S = 3600.0
MAX_LOSSES = 100
"""Losses in a row. A job that keeps taking its supervisor down must end some time."""
LONG_LIFE_S = 600.0
"""An attempt that ran this long does not take its supervisor down, so its loss counts as the first in a row.
A partition's time limit, or a user with more right to the nodes, may end every attempt of a healthy job.
"""
LOSS_BACKOFF_S = 0.5


class RetryDecision(msgspec.Struct, frozen=True, kw_only=True):
    """`job` is the job after the attempt's end. If `backoff_s` is None the job has ended."""

    job: Job
    backoff_s: float | None = None


def decide_retry(job: Job, attempt: Attempt, now: float, *, silent_s: float = 0.0) -> RetryDecision:
    """Decide after `attempt` (the job's newest, ended) whether the job ends or tries again.

    `silent_s`: how long a part of the attempt had been silent by then. Shoal cannot know whether that part
    lived.
    """
    assert attempt.reason is not None
    groups = max([attempt.rendezvous_round, *(outcome.restarts for outcome in attempt.outcomes)])
    restarts = groups - len(attempt.replacements) - attempt.num_excused
    job = msgspec.structs.replace(
        job,
        excluded_nodes=_excluded(job, attempt),
        avoided_nodes=(),
        failures=job.failures + restarts,
    )
    if attempt.reason is EndReason.SUCCEEDED:
        return _over(job, attempt, now, JobOutcome.SUCCEEDED, "")
    if job.stop_asked_by is not None or attempt.reason is EndReason.CANCELLED:
        by = f"stopped by {job.stop_asked_by}" if job.stop_asked_by else attempt.message
        return _over(job, attempt, now, JobOutcome.CANCELLED, by)
    if attempt.reason is EndReason.DEPENDENCY:
        return _over(job, attempt, now, JobOutcome.CANCELLED, attempt.message)
    if _hit(attempt, RuleAction.STOP_RETRIES):
        message = f"{attempt.message}; a log rule stops further retries"
        return _over(job, attempt, now, JobOutcome.FAILED, message)
    if attempt.reason in CLUSTER_REASONS:
        return _after_loss(job, attempt, now, silent_s)
    return _after_failure(job, attempt, now)


def may_restart_in_place(job: Job, attempt: Attempt, reason: EndReason, cause: TaskOutcome) -> bool:
    """Whether ranks that failed for this reason restart without a new attempt.

    `cause`: the likeliest cause that any node has reported.
    """
    left = job.retry.max_retries - job.failures - attempt.restarts
    is_in_vain = cause.gives_up or cause.num_early > MAX_EARLY_ENDS
    may_try = job.retry.in_place and reason in job.retry.on and job.stop_asked_by is None
    return may_try and left > 0 and not is_in_vain


def _after_loss(job: Job, attempt: Attempt, now: float, silent_s: float) -> RetryDecision:
    if attempt.reason is EndReason.PREEMPTED:
        return _retry_after(job, 0.0)
    before = 0 if _lived_s(attempt, now - silent_s) >= LONG_LIFE_S else job.losses
    job = msgspec.structs.replace(job, losses=before + 1, avoided_nodes=_nodes_to_avoid(attempt))
    if job.losses >= MAX_LOSSES:
        message = f"lost {job.losses} times in a row, the last time: {attempt.message}"
        return _over(job, attempt, now, JobOutcome.FAILED, message)
    # The first time there is no backoff. During a backoff a younger job takes the nodes, perhaps for hours.
    backoff_s = LOSS_BACKOFF_S * 2 ** min(job.losses - 2, 12) if job.losses > 1 else 0.0
    return _retry_after(job, min(backoff_s, MAX_BACKOFF_S))


def _lived_s(attempt: Attempt, until: float) -> float:
    """The longest known time for which the whole attempt was present.

    A replacement has a life of its own. A program that takes its supervisor down each minute lives for a
    minute, however often its task is replaced. But if the cluster stopped a task, or its replacement never
    began, other users wanted the nodes, and everything before it counts as one life.
    """
    if attempt.started_at is None:
        return 0.0
    lived_s, began_at = 0.0, attempt.started_at
    unbegun = set(attempt.node_names) - set(attempt.started_nodes)
    for replacement in attempt.replacements:
        is_newest = replacement.number == attempt.replacement_on(replacement.node)
        is_in_vain = is_newest and replacement.node in unbegun
        if replacement.lost.is_external_stop or is_in_vain:
            lived_s = max(lived_s, min(replacement.at, until) - began_at)
        if is_in_vain:
            return lived_s
        began_at = replacement.at
    return max(lived_s, until - began_at)


def _after_failure(job: Job, attempt: Attempt, now: float) -> RetryDecision:
    job = msgspec.structs.replace(job, failures=job.failures + 1)
    if attempt.reason not in job.retry.on or job.failures > job.retry.max_retries:
        return _over(job, attempt, now, JobOutcome.FAILED, attempt.message)
    backoff_s = job.retry.backoff_s * 2 ** min(job.failures - 1, 30)
    return _retry_after(job, min(backoff_s, MAX_BACKOFF_S))


def _retry_after(job: Job, backoff_s: float) -> RetryDecision:
    again = msgspec.structs.replace(job, epoch=job.epoch + 1, version=job.version + 1)
    return RetryDecision(job=again, backoff_s=backoff_s)


def _over(job: Job, attempt: Attempt, now: float, outcome: JobOutcome, because: str) -> RetryDecision:
    over = msgspec.structs.replace(
        job,
        outcome=outcome,
        because=because,
        exit_code=attempt.exit_code,
        ended_at=now,
        version=job.version + 1,
    )
    return RetryDecision(job=over)


def _hit(attempt: Attempt, action: RuleAction) -> bool:
    return any(action in outcome.rules_hit for outcome in attempt.outcomes)


def _nodes_to_avoid(attempt: Attempt) -> tuple[str, ...]:
    """Nodes to avoid: if a cluster stops a task by its own rules, another user gets the room before Shoal can
    see it.
    """
    return tuple(sorted(outcome.node for outcome in attempt.outcomes if outcome.is_external_stop))


def _excluded(job: Job, attempt: Attempt) -> tuple[str, ...]:
    bad = {o.node for o in attempt.outcomes if RuleAction.EXCLUDE_NODE in o.rules_hit}
    return tuple(sorted({*job.excluded_nodes, *bad}))
