"""Why a job that runs on fewer nodes than it could use gets no more. Decides nothing, names no other job."""

from __future__ import annotations

from shoal.scheduler.book import Book
from shoal.scheduler.claims import Claims
from shoal.scheduler.growth import could_get, num_before, won_s
from shoal.scheduler.loss import RESTART_S, lost_s
from shoal.scheduler.policy import Policy
from shoal.scheduler.snapshot import Holding
from shoal.scheduler.types import Explanation, Why
from shoal.scheduler.words import are, clock_time, duration, number_of

SAVE = "say `checkpoint: {}`, save to `$SHOAL_CHECKPOINT_DIR` now and then, and begin from what is there"


def not_grown(book: Book, claims: Claims, policy: Policy, one: Holding, now: float) -> Explanation:
    """Of a job that holds fewer nodes than it asked for at most."""
    has, most = len(one.allocation), one.request.max_nodes if one.request else 0
    gets = could_get(book, claims, one, now)
    reason, hint = _reason(book, policy, one, gets, now)
    return Explanation(
        attempt_id=one.attempt_id,
        job_id=one.job_id,
        why=Why.FEWER_NODES,
        sentence=f"runs on {number_of(has, 'node')} and could use {most}: {reason}",
        hint=hint,
        facts={
            "nodes": has,
            "nodes_most": most,
            "nodes_idle": gets - has,
            "saved_at": one.checkpoint_at,
            "lost_s": lost_s(one, now),
            "won_s": won_s(one, gets, now),
            "grow_gain": policy.grow_gain,
        },
    )


def _reason(book: Book, policy: Policy, one: Holding, gets: int, now: float) -> tuple[str, str | None]:
    has, waiting = len(one.allocation), num_before(book)
    if one.is_leaving:
        return f"it is stopping, and goes on with {one.grows_to or 'what is free then'}", None
    if one.request is not None and one.request.topology is not None:
        return "a job with `topology` is not moved to grow", None
    if waiting:
        verb = "waits" if waiting == 1 else "wait"
        return f"{number_of(waiting, 'job')} {verb}, and it grows only while nobody does", None
    if gets == has:
        return "no other node is idle that it could have", None
    idle = are(gets - has, "idle")
    if one.checkpoint_at is None:
        return f"{idle}, but no checkpoint of it was seen, so all it has done would be lost", SAVE
    lost, won = lost_s(one, now), won_s(one, gets, now)
    if won >= policy.grow_gain * lost:
        return f"{idle}, and it is about to be stopped to go on with {gets}", None
    rule = f"{policy.grow_gain:g} times what it would do again ({duration(lost)})"
    return f"{idle}, and {gets} nodes would win it {duration(won)}, not yet {rule}", _when(
        policy, one, gets, now
    )


def _when(policy: Policy, one: Holding, gets: int, now: float) -> str | None:
    """The first moment at which it could pay, if it had just saved; None when that is past its half."""
    least_s = policy.grow_gain * RESTART_S / (1 - len(one.allocation) / gets)
    limit_s = one.time_limit_s
    told = clock_time(one.placed_at + least_s, now)
    if told is None or now >= one.placed_at + least_s or (limit_s is not None and least_s > limit_s / 2):
        return None
    return f"it grows after {told} at the earliest, soon after a checkpoint"
