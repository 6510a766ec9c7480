"""From one release of a service to the next without a failed request, or back. Pure.

Rolling: one replica more than there should be, and an old one goes only when a new one is ready in its place.
Where there is no room for one more, an old one goes first, if there are others.
Canary: all the old ones stay, and the new release gets a part of the requests, step by step, for as long as
it does no worse than the old one beside it. A release that does worse, or whose replicas never become ready,
is taken back: its replicas go as old ones are ready in their place, or at once where nearly nothing succeeds.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil

import msgspec

from shoal.serving.table import BOUNDS_S
from shoal.serving.traffic import Stats

MAX_FAILURES = 3
"""Replicas of a new release that end before they were ever ready."""

PATIENCE = 5
"""So many times `bake_s`, and a step is over also with too few requests to say anything."""
HOPELESS = 0.9
"""Of the requests fail: fewer replicas that answer are better than more that do not."""


class Stage(StrEnum):
    ROLLING = "rolling"
    CANARY = "canary"
    DONE = "done"
    ROLLED_BACK = "rolled_back"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    steps: tuple[float, ...] = (0.05, 0.25, 0.5)
    bake_s: float = 60.0
    error_rate: float = 0.05
    latency: float = 3.0
    requests: int = 20
    max_unavailable: int = 1


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What there is. Replicas that drain do not count."""

    wanted: int
    """How many replicas the service should have, whatever their release."""
    old: int
    old_ready: int = 0
    """Of those, that serve."""
    new_ready: int
    new_failures: int = 0
    has_no_room: bool = False
    """A new one is wished for and cannot be started."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    stage: Stage
    step: int = 0
    baked_s: float | None = None
    """How long the step was watched with all its replicas ready; None: they are not yet."""


class Next(msgspec.Struct, frozen=True, kw_only=True):
    stage: Stage
    step: int = 0
    is_baking: bool = False
    old: int = 0
    new: int = 0
    """How many replicas of each there should be."""
    share: float | None = None
    """Of the requests, for the new release; None: all replicas alike."""
    because: str = ""


def decide(rule: Rule, where: Where, fleet: Fleet, old: Stats, new: Stats) -> Next:
    """`old` and `new`: what was counted of each since the step began. Only for a rollout that is open."""
    fault = judge(rule, old, new)
    if not fault and fleet.new_failures >= MAX_FAILURES:
        fault = f"{fleet.new_failures} replicas of it ended before they were ready"
    if fault:
        is_hopeless = new.requests >= rule.requests and new.errors >= HOPELESS * new.requests
        share = 0.0 if is_hopeless else None
        return Next(stage=Stage.ROLLED_BACK, old=fleet.wanted, share=share, because=fault)
    if where.stage is Stage.CANARY:
        return _canary(rule, where, fleet, new)
    return _rolling(rule, fleet)


def _rolling(rule: Rule, fleet: Fleet) -> Next:
    wanted, ready = fleet.wanted, fleet.new_ready
    if ready >= wanted and fleet.old == 0:
        return Next(stage=Stage.DONE, new=wanted)
    # No old one is started again when a new one fails: it is the new one that is replaced.
    old = min(fleet.old, max(0, wanted - ready))
    missing = wanted - fleet.old_ready - ready
    if fleet.has_no_room and old > 0 and missing < min(rule.max_unavailable, wanted - 1):
        old -= 1
    return Next(stage=Stage.ROLLING, old=old, new=min(wanted, max(ready + 1, wanted - old)))


def _canary(rule: Rule, where: Where, fleet: Fleet, new: Stats) -> Next:
    if fleet.wanted == 0:
        return _rolling(rule, fleet)  # there is nobody to try it on
    bake_s = rule.bake_s * (1 if new.requests >= rule.requests else PATIENCE)
    step, is_baked = where.step, where.baked_s is not None and where.baked_s >= bake_s
    if is_baked and step + 1 >= len(rule.steps):
        return _rolling(rule, fleet)
    if is_baked:
        step += 1
    share = rule.steps[step]
    count = max(1, ceil(fleet.wanted * share))
    return Next(
        stage=Stage.CANARY,
        step=step,
        is_baking=fleet.new_ready >= count,
        old=fleet.wanted,
        new=count,
        share=share if fleet.new_ready else 0.0,
    )


def kept(rule: Rule, wanted: int, *, ready: int, others: int, is_hopeless: bool, has_no_room: bool) -> int:
    """After a rollback: how many of `others`, which are ready and of the release taken back, serve on until
    there are as many as wanted of the one that serves.
    """
    if is_hopeless and ready > 0:
        return 0
    # Here the only one may go, too: what takes the room is what was taken back.
    missing = max(1, rule.max_unavailable) if has_no_room else 0
    return min(others, max(0, wanted - ready - missing))


def judge(rule: Rule, old: Stats, new: Stats) -> str:
    """What is wrong with the new release beside the old one; empty: nothing, as far as it shows."""
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
    """The upper bound of the bucket it falls into, the last where it is above all; None: no request."""
    total = sum(stats.first_byte_s)
    seen = 0
    for bound, count in zip((*BOUNDS_S, BOUNDS_S[-1]), stats.first_byte_s, strict=True):
        seen += count
        if total and seen >= quantile * total:
            return bound
    return None
