"""Let a job that took fewer nodes than it could use go on with more, where they would stand idle.

It is stopped at its last checkpoint and started again, so it is asked for only while nobody waits who could
run here, of a job whose checkpoints are seen, and where so much more time is won than is done again as the
policy says. While it stops, what it will take is kept for it.
"""

from __future__ import annotations

from math import inf

from shoal.model.request import Request
from shoal.scheduler.amounts import Amounts, demand_of, less, need_of
from shoal.scheduler.book import Book
from shoal.scheduler.claims import Claim, Claims, Draw
from shoal.scheduler.loss import lost, lost_s
from shoal.scheduler.policy import Policy
from shoal.scheduler.release import free_without
from shoal.scheduler.snapshot import Candidate, Holding
from shoal.scheduler.types import Eviction, Ground


def growth(book: Book, claims: Claims, policy: Policy, now: float) -> Eviction | None:
    """Of the jobs that would gain, the one that gains most; None when nobody would or somebody waits."""
    if not book.elastic or num_before(book):
        return None
    found = [_worth(book, claims, policy, book.holdings[one], now) for one in sorted(book.elastic)]
    worth = [one for one in found if one is not None]
    return max(worth, key=lambda one: (one[0], one[1].attempt_id), default=(0.0, None))[1]


def num_before(book: Book) -> int:
    """How many wait whom the open nodes could hold: idle nodes are for them first, whatever they wait for."""
    rows = (row for line in book.rows.lines.values() for row in line.rows.values())
    return sum(len(row.by_score) for row in rows if book.possible.is_open_for(row.key.demand))


def could_get(book: Book, claims: Claims, one: Holding, now: float) -> int:
    """How many nodes it would have with those that stand idle."""
    has = len(one.allocation)
    return has + len(_idle_nodes(book, claims, one, one.request.max_nodes - has if one.request else 0, now))


def won_s(one: Holding, gets: int, now: float) -> float:
    """Seconds by which it ends sooner with so many nodes. What has run for so long is taken to run as long
    again, and to be as much faster as it gets more nodes.
    """
    elapsed_s = now - one.placed_at
    left_s = elapsed_s if one.time_limit_s is None else min(elapsed_s, one.time_limit_s - elapsed_s)
    return left_s * (1 - len(one.allocation) / gets)


def _worth(
    book: Book, claims: Claims, policy: Policy, one: Holding, now: float
) -> tuple[float, Eviction] | None:
    """Device-seconds won beyond what is lost, if it pays."""
    if one.checkpoint_at is None or one.is_leaving:
        return None
    has, gets = len(one.allocation), could_get(book, claims, one, now)
    won = won_s(one, gets, now)
    if gets == has or won < policy.grow_gain * lost_s(one, now):
        return None
    eviction = Eviction(
        attempt_id=one.attempt_id,
        for_attempt_id=one.attempt_id,
        ground=Ground.GROWTH,
        lost_s=lost_s(one, now),
        lost_device_s=lost(one, now),
        saved_at=one.checkpoint_at,
        likely_device_s=lost(one, now),
        num_nodes=gets,
    )
    return won * has, eviction


def kept_to_grow(book: Book, claims: Claims, one: Holding, now: float) -> Claim | None:
    """The nodes on which one goes on that was asked to stop for that: its own, and those that are idle.

    Until it has stopped nobody else is given them who is not before it.
    """
    if one.request is None or one.grows_to is None:
        return None
    need, nodes = need_of(one.request), book.capacity.nodes
    spare: dict[str, Amounts | None] = {}
    for share in one.allocation:
        node = nodes.get(share.node)
        if node is not None:
            spare[share.node] = less(free_without(node, [share]), need, node.whole)
    more = _idle_nodes(book, claims, one, one.grows_to - len(one.allocation), now)
    spare.update((name, less(nodes[name].free, need, nodes[name].whole)) for name in more)
    draw = None
    if book.power.has_caps:
        # Its own as well: who is given room counts it as gone.
        left, kept, watts = book.power.left(), claims.watts(), book.power.of_nodes(need, spare)
        back = book.power.of_shares(one.allocation)
        draw = Draw(watts, {rack: left[rack] + back[rack] - kept[rack] - watts[rack] for rack in watts})
    return Claim(_as_candidate(one, one.request), inf, spare, (one.attempt_id,), draw)


def _as_candidate(one: Holding, request: Request) -> Candidate:
    return Candidate(
        attempt_id=one.attempt_id,
        job_id=one.job_id,
        project=one.project,
        label=one.label,
        priority=one.priority,
        order=0,
        submitted_at=one.placed_at,
        request=request,
    )


def _idle_nodes(book: Book, claims: Claims, one: Holding, count: int, now: float) -> list[str]:
    """Besides its own, up to so many that it could start on now. None on which others work: what was stopped
    to have them would wait there, and has run.
    """
    request = one.request
    if request is None or request.topology is not None or count <= 0:
        return []  # whether others are close enough is only known once it has left its own
    demand = demand_of(request, one.excluded_nodes)
    ends_at = now + (inf if one.time_limit_s is None else one.time_limit_s)
    own = {share.node for share in one.allocation}
    bars = claims.bars(one.project, now, ends_at)
    barred = claims.barred(demand.need, bars) | own | demand.excluded
    ranked = book.finders.of(demand.need).ranked(barred, count)
    more = [name for name in ranked if not book.capacity.nodes[name].view.is_busy]
    if book.power.has_caps:
        more = book.power.within(more, demand.need, claims.power_left(bars))
    while more and book.refusal(one.project, demand._replace(min_nodes=len(more))) is not None:
        more.pop()
    return more
