"""What becomes of a job when an attempt of it has ended: over, or another attempt, and when."""

from __future__ import annotations

import msgspec

from shoal.model.attempt import CLUSTER_REASONS, Attempt, EndReason
from shoal.model.job import Job, JobOutcome
from shoal.wire import MAX_EARLY, NodeOutcome, RuleAction

MAX_BACKOFF_S = 3600.0
MAX_LOSSES = 100
"""In a row: a job that keeps taking its supervisor down with it must end some time."""
LONG_LIFE_S = 600.0
"""What ran for so long does not do that, and its loss is the first in a row: a partition's time limit, or who
has more right to the nodes, may end every attempt of a healthy job."""
LOSS_BACKOFF_S = 0.5


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`job` is the job after the attempt's end; `backoff_s` None means it is over."""

    job: Job
    backoff_s: float | None = None


def judge(job: Job, attempt: Attempt, now: float, *, silent_s: float = 0.0) -> Verdict:
    """Decide after `attempt` (the job's newest, ended) whether the job ends or tries again.

    `silent_s`: for how long a part of it was not heard from by then. Nobody knows whether that lived.
    """
    assert attempt.reason is not None
    groups = max([attempt.generation, *(outcome.restarts for outcome in attempt.outcomes)])
    restarts = groups - len(attempt.replacements) - attempt.excused
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
        told = f"{attempt.message}; a log rule says not to try again"
        return _over(job, attempt, now, JobOutcome.FAILED, told)
    if attempt.reason in CLUSTER_REASONS:
        return _after_loss(job, attempt, now, silent_s)
    return _after_failure(job, attempt, now)


def may_regroup(job: Job, attempt: Attempt, reason: EndReason, cause: NodeOutcome) -> bool:
    """Whether ranks that failed for this reason are started again without a new attempt.

    `cause`: the likeliest one that any node has reported.
    """
    left = job.retry.max_retries - job.failures - attempt.restarts
    is_in_vain = cause.gives_up or cause.num_early > MAX_EARLY
    may_try = job.retry.in_place and reason in job.retry.on and job.stop_asked_by is None
    return may_try and left > 0 and not is_in_vain


def _after_loss(job: Job, attempt: Attempt, now: float, silent_s: float) -> Verdict:
    if attempt.reason is EndReason.PREEMPTED:
        return _again(job, 0.0)
    before = 0 if _lived_s(attempt, now - silent_s) >= LONG_LIFE_S else job.losses
    job = msgspec.structs.replace(job, losses=before + 1, avoided_nodes=_avoided(attempt))
    if job.losses >= MAX_LOSSES:
        told = f"lost {job.losses} times in a row, the last time: {attempt.message}"
        return _over(job, attempt, now, JobOutcome.FAILED, told)
    # The first time at once: while it waits, a younger job takes the nodes it had, perhaps for hours.
    backoff_s = LOSS_BACKOFF_S * 2 ** min(job.losses - 2, 12) if job.losses > 1 else 0.0
    return _again(job, min(backoff_s, MAX_BACKOFF_S))


def _lived_s(attempt: Attempt, until: float) -> float:
    """The longest time for which all of it was there, as far as that is known.

    A share that was begun in place of a lost one has a life of its own: what takes its supervisor down each
    minute lives for a minute, however often that is replaced. But where the cluster stopped a share, or the
    one in its place never began, others wanted the nodes: all that was before it was a life.
    """
    if attempt.started_at is None:
        return 0.0
    lived_s, began_at = 0.0, attempt.started_at
    unbegun = set(attempt.node_names) - set(attempt.started_nodes)
    for one in attempt.replacements:
        is_in_vain = one.node in unbegun and one.generation == attempt.incarnation(one.node)
        if one.lost.is_unasked or is_in_vain:
            lived_s = max(lived_s, min(one.at, until) - began_at)
        if is_in_vain:
            return lived_s
        began_at = one.at
    return max(lived_s, until - began_at)


def _after_failure(job: Job, attempt: Attempt, now: float) -> Verdict:
    job = msgspec.structs.replace(job, failures=job.failures + 1)
    if attempt.reason not in job.retry.on or job.failures > job.retry.max_retries:
        return _over(job, attempt, now, JobOutcome.FAILED, attempt.message)
    backoff_s = job.retry.backoff_s * 2 ** min(job.failures - 1, 30)
    return _again(job, min(backoff_s, MAX_BACKOFF_S))


def _again(job: Job, backoff_s: float) -> Verdict:
    again = msgspec.structs.replace(job, epoch=job.epoch + 1, version=job.version + 1)
    return Verdict(job=again, backoff_s=backoff_s)


def _over(job: Job, attempt: Attempt, now: float, outcome: JobOutcome, because: str) -> Verdict:
    over = msgspec.structs.replace(
        job,
        outcome=outcome,
        because=because,
        exit_code=attempt.exit_code,
        ended_at=now,
        version=job.version + 1,
    )
    return Verdict(job=over)


def _hit(attempt: Attempt, action: RuleAction) -> bool:
    return any(action in outcome.rules_hit for outcome in attempt.outcomes)


def _avoided(attempt: Attempt) -> tuple[str, ...]:
    """What a cluster stops by its own rules makes room for another, who is there before anybody knows."""
    return tuple(sorted(outcome.node for outcome in attempt.outcomes if outcome.is_unasked))


def _excluded(job: Job, attempt: Attempt) -> tuple[str, ...]:
    bad = {o.node for o in attempt.outcomes if RuleAction.EXCLUDE_NODE in o.rules_hit}
    return tuple(sorted({*job.excluded_nodes, *bad}))
