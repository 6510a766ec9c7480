"""Make room for jobs that may evict others: whose end loses the least, and no more than needed.

One of these lives as long as a cycle. What was made room for earlier in it counts as if it had started, and
who gives way as if gone: so no quota is passed, and nobody is asked for more than they owe.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple

from shoal.scheduler.amounts import Amounts, Demand, Need
from shoal.scheduler.book import Book
from shoal.scheduler.claims import Draw
from shoal.scheduler.devices import Amount, asked_by, held_by
from shoal.scheduler.loss import lost, lost_s
from shoal.scheduler.policy import Policy
from shoal.scheduler.power import Watts
from shoal.scheduler.rights import can_preempt, ground
from shoal.scheduler.rows import LineKey
from shoal.scheduler.snapshot import Candidate, Holding
from shoal.scheduler.types import Eviction, Ground
from shoal.scheduler.victims import Found, Search

Given = dict[str, tuple[Holding, Ground]]
"""Who is to be evicted, by attempt, and by what right."""
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
        return can_preempt(candidate.priority, self._policy) or any(
            self._book.tree.covered(candidate.project, asked)
        )

    def make_room(
        self, head: Candidate, demand: Demand, barred: AbstractSet[str], kept: Watts
    ) -> Room | None:
        """The cheapest room for it outside `barred` and beside the power that is `kept` for others. None:
        whoever it may evict is not enough. Nobody is evicted for power alone.
        """
        if self.is_exhausted:
            return None
        for _ in repeat(None, MAX_TRIES):
            found, given = self._search(head, demand, barred)
            if found is None:
                return None
            draw, beyond = self._draw(found, demand, kept)
            if not beyond:
                return self._make(head, demand, found, given, draw)
            barred = barred | beyond
        return None

    def _search(
        self, head: Candidate, demand: Demand, barred: AbstractSet[str]
    ) -> tuple[Found | None, Given]:
        asked, stakes = asked_by(demand), self._book.stakes
        with self._as_if_done() as given:
            if self._book.tree.refusal(head.project, asked) is not None:
                return None, {}
            sides = [side for side in stakes.sides if self._ground(head, asked, side.priority, side.project)]
            if not sides and not self._gone:
                return None, {}
            search = Search(self._book, demand, barred, self._gone, self._taken, self._now)
            return search.run(sides, lambda victims: self._give(head, asked, victims, given)), given

    def _make(self, head: Candidate, demand: Demand, found: Found, given: Given, draw: Draw | None) -> Room:
        for one in found.victims:
            self.evictions.append(self._eviction(head, one, given[one.attempt_id][1]))
            self._gone[one.attempt_id] = one
        self._served.append((head.project, asked_by(demand)))
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

    def _ground(self, head: Candidate, asked: Amount, priority: int, project: str) -> Ground | None:
        return ground(head, asked, priority, project, self._book.tree, self._policy)

    def _eviction(self, head: Candidate, one: Holding, why: Ground) -> Eviction:
        return Eviction(
            attempt_id=one.attempt_id,
            for_attempt_id=head.attempt_id,
            ground=why,
            lost_s=lost_s(one, self._now),
            lost_device_s=lost(one, self._now),
            saved_at=one.checkpoint_at,
        )

    def _give(self, head: Candidate, asked: Amount, victims: list[Holding], given: Given) -> bool:
        """Whether all of them may be evicted one after the other; then they count as gone."""
        taken: list[Holding] = []
        for one in sorted(victims, key=lambda one: (held_by(one.allocation), one.attempt_id)):
            found = self._ground(head, asked, one.priority, one.project)
            if found is None:
                for back in taken:
                    self._book.tree.take(back.project, held_by(back.allocation))
                    del given[back.attempt_id]
                return False
            self._book.tree.give(one.project, held_by(one.allocation))
            given[one.attempt_id] = one, found
            taken.append(one)
        return True

    @contextmanager
    def _as_if_done(self) -> Iterator[Given]:
        """Look at projects as they will be. What is put into the yielded dict is given back like the rest."""
        tree = self._book.tree
        given: Given = {}
        for one in self._gone.values():
            tree.give(one.project, held_by(one.allocation))
        for project, amount in self._served:
            tree.take(project, amount)
        try:
            yield given
        finally:
            for one in (*self._gone.values(), *(holding for holding, _ in given.values())):
                tree.take(one.project, held_by(one.allocation))
            for project, amount in self._served:
                tree.give(project, amount)
