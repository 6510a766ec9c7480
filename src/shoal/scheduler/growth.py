"""Let a job that took fewer nodes than it could use go on with more, where they would stand idle.

It is stopped at its last checkpoint and started again, so it is asked for only while nobody waits for
room, of a job whose checkpoints are seen, and where far more time is won than is done again. One job at a
time: what it will take must not be promised to another as well.
"""

from __future__ import annotations

from math import inf

from shoal.scheduler.amounts import demand_of
from shoal.scheduler.book import Book
from shoal.scheduler.claims import Claims
from shoal.scheduler.loss import lost, lost_s
from shoal.scheduler.snapshot import Holding
from shoal.scheduler.types import Eviction, Ground

LEAST_S = 600.0
"""A job younger than this is left alone: it may be over soon."""
GAIN = 4.0
"""So many times what is done again must be won."""


def growth(book: Book, claims: Claims, now: float) -> Eviction | None:
    """Of the jobs that would gain, the one that gains most; None when nobody would or somebody waits."""
    if not book.elastic or len(book.rows):
        return None
    found = [_worth(book, claims, book.holdings[attempt_id], now) for attempt_id in sorted(book.elastic)]
    worth = [one for one in found if one is not None]
    return max(worth, key=lambda one: (one[0], one[1].attempt_id), default=(0.0, None))[1]


def _worth(book: Book, claims: Claims, one: Holding, now: float) -> tuple[float, Eviction] | None:
    """Device-seconds won beyond what is lost, if it pays."""
    elapsed_s = now - one.placed_at
    if one.checkpoint_at is None or one.is_leaving or elapsed_s < LEAST_S:
        return None
    has, gets = len(one.allocation), _nodes_after(book, claims, one, now)
    # What has run for so long is taken to run as long again, and to be as much faster as it gets more nodes.
    left_s = elapsed_s if one.time_limit_s is None else min(elapsed_s, one.time_limit_s - elapsed_s)
    won_s = left_s * (1 - has / gets)
    if won_s < GAIN * lost_s(one, now):
        return None
    eviction = Eviction(
        attempt_id=one.attempt_id,
        for_attempt_id=one.attempt_id,
        ground=Ground.GROWTH,
        lost_s=lost_s(one, now),
        lost_device_s=lost(one, now),
        saved_at=one.checkpoint_at,
        num_nodes=gets,
    )
    return won_s * has, eviction


def _nodes_after(book: Book, claims: Claims, one: Holding, now: float) -> int:
    """How many nodes it would have if it started now: its own, and those that are free."""
    has, request = len(one.allocation), one.request
    if request is None or request.topology is not None:
        return has  # whether others are close enough is only known once it has left its own
    demand = demand_of(request, one.excluded_nodes)
    ends_at = now + (inf if one.time_limit_s is None else one.time_limit_s)
    own = {share.node for share in one.allocation}
    bars = claims.bars(one.project, now, ends_at)
    barred = claims.barred(demand.need, bars) | own | demand.excluded
    more = book.finders.of(demand.need).ranked(barred, request.max_nodes - has)
    if book.power.has_caps:
        more = book.power.within(more, demand.need, claims.power_left(bars))
    while more and book.refusal(one.project, demand._replace(min_nodes=len(more))) is not None:
        more.pop()
    return has + len(more)
