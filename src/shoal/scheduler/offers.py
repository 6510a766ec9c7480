"""What every node would cost that could serve a demand: who has to stop there, and what that loses.

Nodes are looked at one by one, when somebody asks, and again when somebody counts as gone who runs there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf

from shoal.scheduler.amounts import Amounts, Demand, Need
from shoal.scheduler.book import Book
from shoal.scheduler.fit import fits
from shoal.scheduler.loss import lost_s
from shoal.scheduler.on_node import cheapest_set
from shoal.scheduler.snapshot import Holding
from shoal.scheduler.spots import Spots
from shoal.scheduler.stakes import Side
from shoal.scheduler.vacancy import Vacancy

NUM_SETS = 4096
"""On so many nodes the cheapest set is looked for; on others everybody stops who is not spared in the end."""
TIE = 1e-6
"""Of those who are expected to lose alike, whoever loses less at most goes first."""

Cost = tuple[float, int, int, str]
"""What is lost, GPUs and CPUs left over, the node's name."""


class Offers:
    def __init__(
        self,
        book: Book,
        demand: Demand,
        sides: Collection[Side],
        barred: AbstractSet[str],
        gone: Mapping[str, Holding],
        taken: Mapping[str, Sequence[Need]],
        now: float,
        settle_s: float,
    ) -> None:
        """`sides`: who may be asked, once they run for `settle_s`. `gone`: count as stopped. `taken`: needs
        that nodes must hold besides, though nobody holds them.
        """
        self.book = book
        self.demand = demand
        self.need = demand.need
        self.sides = frozenset(sides)
        self.barred = barred | demand.excluded
        self.gone = dict(gone)
        self.taken = taken
        self.now = now
        self._settle_s = settle_s
        self.settles_at = inf
        """When the first may be asked of those who were passed over because they had only begun."""
        self.spots = Spots(demand, book.capacity.nodes)
        """Nodes that could serve."""
        self.costs: dict[str, tuple[Cost, list[str]]] = {}
        """The same, and who would have to stop."""
        self._typical = book.stakes.typical
        self._usable: dict[str, bool] = {}
        self._large: dict[Amounts, bool] = {}
        self._losses: dict[str, float] = {}
        self._vacancies: dict[str, Vacancy] = {}
        self._num_sets = 0

    def is_usable(self, name: str) -> bool:
        known = self._usable.get(name)
        if known is None:
            node, labels = self.book.capacity.nodes.get(name), self.need.labels
            known = node is not None and node.is_open and name not in self.barred
            known = known and node is not None and (not labels or node.has(labels))
            known = self._usable[name] = known and node is not None and self._is_large_enough(node.whole)
        return known

    def _is_large_enough(self, whole: Amounts) -> bool:
        known = self._large.get(whole)
        if known is None:
            known = self._large[whole] = fits(self.need, whole, whole)
        return known

    def vacancy(self, name: str) -> Vacancy:
        found = self._vacancies.get(name)
        if found is None:
            here = self.book.stakes.on_node.get(name, {})
            node, taken = self.book.capacity.nodes[name], self.taken.get(name, ())
            found = self._vacancies[name] = Vacancy(node, self.need, here, taken)
            for attempt_id in here:
                if attempt_id in self.gone:
                    found.leave(attempt_id)
        return found

    def leave(self, one: Holding) -> None:
        self.gone[one.attempt_id] = one
        for share in one.allocation:
            known = self._vacancies.get(share.node)
            if known is not None:
                known.leave(one.attempt_id)

    def stay(self, one: Holding) -> None:
        del self.gone[one.attempt_id]
        for share in one.allocation:
            known = self._vacancies.get(share.node)
            if known is not None:
                known.stay(one.attempt_id)

    def cheapest(self) -> Iterator[str]:
        """Whoever may stop, the one that loses least for each device first."""
        found = self.book.stakes.cheapest(self.sides, self.need, self.now)
        return filter(self._has_settled, found)

    def _has_settled(self, attempt_id: str) -> bool:
        at = self.book.holdings[attempt_id].placed_at + self._settle_s
        if at > self.now:
            self.settles_at = min(self.settles_at, at)
        return at <= self.now

    def look_at(self, name: str) -> None:
        """Note what it costs; a node that cannot serve is none to compare."""
        side_of, vacancy = self.book.stakes.side_of, self.vacancy(name)
        here = {
            attempt_id: self.lost(attempt_id)
            for attempt_id in sorted(self.book.stakes.on_node.get(name, ()))
            if attempt_id not in self.gone
            and side_of.get(attempt_id) in self.sides
            and self._has_settled(attempt_id)
        }
        self._num_sets += 1
        victims = cheapest_set(vacancy, here, self.need, is_rough=self._num_sets > NUM_SETS)
        self.costs.pop(name, None)
        if victims is None or not self.spots.is_one(name):
            self.spots.discard(name)
            return
        self.spots.add(name)
        loss = sum(here[attempt_id] for attempt_id in victims)
        self.costs[name] = (loss, *vacancy.left(victims), name), victims

    def lost(self, attempt_id: str) -> float:
        known = self._losses.get(attempt_id)
        if known is None:
            one = self.book.holdings[attempt_id]
            seconds = lost_s(one, self.now, self._typical) + TIE * lost_s(one, self.now)
            known = self._losses[attempt_id] = seconds * self.book.stakes.devices_of[attempt_id]
        return known

    def look_again(self, holdings: Iterable[Holding]) -> list[str]:
        """Where those run, it costs something else now."""
        nodes = sorted({share.node for one in holdings for share in one.allocation})
        usable = [name for name in nodes if self.is_usable(name)]
        for name in usable:
            self.look_at(name)
        return usable

    def able(self) -> Spots:
        """Where it fits once everybody who counts as gone is."""
        able = self.spots.none()
        for name in self.costs:
            if self.vacancy(name).fits():
                able.add(name)
        return able
