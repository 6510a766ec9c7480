"""Make room for jobs that may evict others: whose end loses the least, and no more than needed.

One of these lives as long as a cycle. What was made room for earlier in it counts as if it had started, and
who gives way as if gone: so no quota is passed, and nobody is asked for more than they owe.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import repeat
from math import inf
from typing import NamedTuple

from shoal.scheduler.amounts import Amounts, Demand, Need
from shoal.scheduler.book import Book
from shoal.scheduler.claims import Draw
from shoal.scheduler.devices import Amount, held_by
from shoal.scheduler.giving import Giving
from shoal.scheduler.loss import lost, lost_s
from shoal.scheduler.offers import Offers
from shoal.scheduler.policy import Policy
from shoal.scheduler.power import Watts
from shoal.scheduler.rights import can_preempt
from shoal.scheduler.rows import LineKey
from shoal.scheduler.snapshot import Candidate, Holding
from shoal.scheduler.types import Eviction, Ground
from shoal.scheduler.victims import Found, Search

MAX_ROOMS = 16
"""Jobs for which others are stopping at once; more wait until those have started."""

MAX_TRIES = 8
"""So many times other nodes are looked for where the cheapest have no power."""


class Room(NamedTuple):
    """Nodes that hold a job once everybody in `stopping` is gone, and what they have to spare then."""

    spare: dict[str, Amounts]
    stopping: tuple[str, ...]
    draw: Draw | None
    """Where racks have caps."""


class Preemption:
    def __init__(self, book: Book, policy: Policy, now: float) -> None:
        self._book = book
        self._policy = policy
        self._now = now
        self._gone: dict[str, Holding] = dict(book.stakes.leaving)
        self._served: list[tuple[str, Amount]] = []
        self._taken: dict[str, list[Need]] = {}
        """By node, what it was made room for."""
        self.evictions: list[Eviction] = []
        self.settles_at = inf
        """When the first may be asked of those who were passed over because they had only begun."""

    @property
    def nodes(self) -> AbstractSet[str]:
        """Where room is being made."""
        return self._taken.keys()

    @property
    def is_exhausted(self) -> bool:
        return len(self._served) >= MAX_ROOMS

    def may_serve(self, key: LineKey) -> bool:
        """Whether anybody of the line may be privileged. Cheap: most clusters have nobody."""
        return can_preempt(key.priority, self._policy) or self._book.tree.has_quota(key.project)

    def is_privileged(self, candidate: Candidate, asked: Amount) -> bool:
        """Whether it may evict anybody at all, as far as its own side goes."""
        return can_preempt(candidate.priority, self._policy) or self._book.tree.is_within_quota(
            candidate.project, asked
        )

    def allows(self, project: str, amount: Amount) -> bool:
        """Whether a start of so much leaves to those it makes room for what their projects may hold."""
        if not self._served or not self._book.tree.has_ceilings:
            return True
        with self._as_if_done():
            return self._book.tree.refusal(project, amount) is None

    def make_room(
        self, head: Candidate, demand: Demand, barred: AbstractSet[str], kept: Watts
    ) -> Room | None:
        """The cheapest room for it outside `barred` and beside the power that is `kept` for others. None:
        whoever it may evict is not enough. Nobody is evicted for power alone.
        """
        if self.is_exhausted:
            return None
        for _ in repeat(None, MAX_TRIES):
            found, giving = self._search(head, demand, barred)
            if found is None:
                return None
            draw, beyond = self._draw(found, demand, kept)
            if not beyond:
                return self._make(head, demand, found, giving, draw)
            barred = barred | beyond
        return None

    def _search(
        self, head: Candidate, demand: Demand, barred: AbstractSet[str]
    ) -> tuple[Found | None, Giving]:
        book, found = self._book, None
        with self._as_if_done():
            demand = book.allowed(head.project, demand)
            giving = Giving(head, book.asked(demand), book.tree, self._policy)
            for sides in giving.choices(book.stakes.sides):
                if found is None and (sides or self._gone):
                    offers = Offers(
                        book, demand, sides, barred, self._gone, self._taken, self._now, self._policy.settle_s
                    )
                    with giving.undone():
                        found = Search(offers).run(giving)
                    self.settles_at = min(self.settles_at, offers.settles_at)
        return found, giving

    def _make(self, head: Candidate, demand: Demand, found: Found, giving: Giving, draw: Draw | None) -> Room:
        for one in found.victims:
            self.evictions.append(self._eviction(head, one, giving.grounds[one.attempt_id]))
            self._gone[one.attempt_id] = one
        self._served.append((head.project, giving.asked))
        for name in found.spare:
            self._taken.setdefault(name, []).append(demand.need)
        return Room(found.spare, found.stopping, draw)

    def _draw(self, found: Found, demand: Demand, kept: Watts) -> tuple[Draw | None, frozenset[str]]:
        """What it takes of the power of its racks once everybody is gone who counts as gone, and leaves; and
        the nodes of racks that have too little, but for as many of those found as they have enough for.
        """
        power = self._book.power
        if not power.has_caps:
            return None, frozenset()
        gone = {one.attempt_id: one for one in (*self._gone.values(), *found.victims)}
        back = power.of_shares(share for one in gone.values() for share in one.allocation)
        left = {rack: left + back[rack] - kept.get(rack, 0) for rack, left in power.left().items()}
        able = power.within(found.spare, demand.need, left)
        short = {power.racks[name] for name in found.spare if name not in able}
        beyond = frozenset(name for name, rack in power.racks.items() if rack in short and name not in able)
        watts = power.of_nodes(demand.need, found.spare)
        return Draw(watts, {rack: left[rack] - watts[rack] for rack in watts}), beyond

    def _eviction(self, head: Candidate, one: Holding, why: Ground) -> Eviction:
        return Eviction(
            attempt_id=one.attempt_id,
            for_attempt_id=head.attempt_id,
            ground=why,
            lost_s=lost_s(one, self._now),
            lost_device_s=lost(one, self._now),
            saved_at=one.checkpoint_at,
            likely_device_s=lost(one, self._now, self._book.stakes.typical),
        )

    @contextmanager
    def _as_if_done(self) -> Iterator[None]:
        """Look at projects as they will be."""
        tree = self._book.tree
        gone, served = list(self._gone.values()), list(self._served)
        for one in gone:
            tree.give(one.project, held_by(one.allocation))
        for project, amount in served:
            tree.take(project, amount)
        try:
            yield
        finally:
            for one in gone:
                tree.take(one.project, held_by(one.allocation))
            for project, amount in served:
                tree.give(project, amount)
