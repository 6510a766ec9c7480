"""Move a service from one release to the next without a failed request, or back. Pure.

Rolling: one extra replica runs, and an old one goes only when a new one is ready in its place. If there is
no room for an extra replica, an old one goes first, provided others remain.

Canary: all old replicas stay, and the new release gets a growing part of the requests, step by step, as long
as it does no worse than the old one. A release that does worse, or whose replicas never become ready, is
rolled back: its replicas go as old ones become ready in their place, or at once if nearly all of its
requests fail.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil

import msgspec

from shoal.serving.scaling.traffic import Stats
from shoal.serving.table import BOUNDS_S

MAX_FAILURES = 3
"""Replicas of a new release that may end before they were ever ready."""

PATIENCE = 5
"""After this many times `bake_s`, a step ends even with too few requests to judge."""
HOPELESS = 0.9
"""If this part of the requests fails, fewer replicas that answer are better than more that do not."""


class RolloutPhase(StrEnum):
    ROLLING = "rolling"
    CANARY = "canary"
    DONE = "done"
    ROLLED_BACK = "rolled_back"


class RolloutRule(msgspec.Struct, frozen=True, kw_only=True):
    steps: tuple[float, ...] = (0.05, 0.25, 0.5)
    bake_s: float = 60.0
    error_rate: float = 0.05
    latency: float = 3.0
    requests: int = 20
    max_unavailable: int = 1


class ReplicaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas that exist. Draining ones do not count."""

    wanted: int
    """How many replicas the service should have, of any release."""
    old: int
    old_ready: int = 0
    """Old replicas that serve."""
    new_ready: int
    new_failures: int = 0
    has_no_room: bool = False
    """A new replica is wanted and cannot be started."""


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    stage: RolloutPhase
    step: int = 0
    baked_s: float | None = None
    """Seconds for which the step has had all its replicas ready; None: not all are."""


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    stage: RolloutPhase
    step: int = 0
    is_baking: bool = False
    old: int = 0
    new: int = 0
    """How many replicas of each release there should be."""
    share: float | None = None
    """Part of the requests for the new release; None: by replicas."""
    because: str = ""


def decide(
    rule: RolloutRule, where: RolloutProgress, fleet: ReplicaCounts, old: Stats, new: Stats
) -> RolloutPlan:
    """Return the next plan. `old` and `new` count since the step began. Only for an open rollout."""
    fault = judge(rule, old, new)
    if not fault and fleet.new_failures >= MAX_FAILURES:
        fault = f"{fleet.new_failures} replicas of it ended before they were ready"
    if fault:
        is_hopeless = new.requests >= rule.requests and new.errors >= HOPELESS * new.requests
        share = 0.0 if is_hopeless else None
        return RolloutPlan(stage=RolloutPhase.ROLLED_BACK, old=fleet.wanted, share=share, because=fault)
    if where.stage is RolloutPhase.CANARY:
        return _canary(rule, where, fleet, new)
    return _rolling(rule, fleet)


def _rolling(rule: RolloutRule, fleet: ReplicaCounts) -> RolloutPlan:
    wanted, ready = fleet.wanted, fleet.new_ready
    if ready >= wanted and fleet.old == 0:
        return RolloutPlan(stage=RolloutPhase.DONE, new=wanted)
    # If a new replica fails, another new one replaces it; no old one is started again.
    old = min(fleet.old, max(0, wanted - ready))
    missing = wanted - fleet.old_ready - ready
    if fleet.has_no_room and old > 0 and missing < min(rule.max_unavailable, wanted - 1):
        old -= 1
    return RolloutPlan(stage=RolloutPhase.ROLLING, old=old, new=min(wanted, max(ready + 1, wanted - old)))


def _canary(rule: RolloutRule, where: RolloutProgress, fleet: ReplicaCounts, new: Stats) -> RolloutPlan:
    if fleet.wanted == 0:
        return _rolling(rule, fleet)  # no replica could be a canary
    bake_s = rule.bake_s * (1 if new.requests >= rule.requests else PATIENCE)
    step, is_baked = where.step, where.baked_s is not None and where.baked_s >= bake_s
    if is_baked and step + 1 >= len(rule.steps):
        return _rolling(rule, fleet)
    if is_baked:
        step += 1
    share = rule.steps[step]
    count = max(1, ceil(fleet.wanted * share))
    return RolloutPlan(
        stage=RolloutPhase.CANARY,
        step=step,
        is_baking=fleet.new_ready >= count,
        old=fleet.wanted,
        new=count,
        share=share if fleet.new_ready else 0.0,
    )


def num_kept_serving(
    rule: RolloutRule, wanted: int, *, ready: int, others: int, is_hopeless: bool, has_no_room: bool
) -> int:
    """After a rollback, return how many of `others` keep serving. These are ready replicas of the withdrawn
    release; they serve until the other release has as many replicas as wanted.
    """
    if is_hopeless and ready > 0:
        return 0
    # Here even the only one may go, because the withdrawn release takes up the room.
    missing = max(1, rule.max_unavailable) if has_no_room else 0
    return min(others, max(0, wanted - ready - missing))


def judge(rule: RolloutRule, old: Stats, new: Stats) -> str:
    """Return what is worse about the new release than the old one; empty: nothing visible."""
    if new.requests < rule.requests:
        return ""
    rate, old_rate = new.errors / new.requests, old.errors / max(1, old.requests)
    if rate > rule.error_rate and rate > old_rate:
        return f"{rate:.1%} of its {new.requests} requests failed; {old_rate:.1%} of the old release's"
    slow, usual = quantile_s(new, 0.95), quantile_s(old, 0.95)
    if old.requests >= rule.requests and slow is not None and usual and slow > rule.latency * usual:
        return f"its first byte takes up to {slow:g} s in 95 % of requests; the old release's {usual:g} s"
    return ""


def quantile_s(stats: Stats, quantile: float) -> float | None:
    """Return the upper bound of the quantile's bucket, or the last bound if it is above all; None: no
    request.
    """
    total = sum(stats.first_byte_s)
    seen = 0
    for bound, count in zip((*BOUNDS_S, BOUNDS_S[-1]), stats.first_byte_s, strict=True):
        seen += count
        if total and seen >= quantile * total:
            return bound
    return None
