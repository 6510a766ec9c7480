"""The set of running jobs whose end loses least and lets one demand start.

Nodes are looked at in the order of what their cheapest jobs lose, and only as many as it takes to have a
choice. On each the cheapest set is found, exactly where few jobs run. The nodes that cost least are taken
one by one: a gang stops whole and is counted once. In the end whoever can be spared is, the dearest first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple, Protocol

from shoal.scheduler.amounts import Amounts, Demand, Need, less
from shoal.scheduler.book import Book
from shoal.scheduler.fit import fits
from shoal.scheduler.loss import lost_s
from shoal.scheduler.on_node import cheapest_set
from shoal.scheduler.snapshot import Holding
from shoal.scheduler.spots import Spots
from shoal.scheduler.stakes import Side
from shoal.scheduler.vacancy import Vacancy

EXTRA_NODES = 16
"""So many more nodes than it needs are compared."""
NUM_JOBS = 512
"""So many of the cheapest jobs are seen, and four more for each node, before whole nodes are compared."""
NUM_DOMAINS = 4
"""So many domains are compared where a gang must be close."""
NUM_SETS = 4096
"""On so many nodes the cheapest set is looked for; on others everybody stops who is not spared in the end."""

TIE = 1e-6
"""Of those who are expected to lose alike, whoever loses less at most goes first."""

Cost = tuple[float, int, int, str]
"""What is lost, GPUs and CPUs left over, the node's name."""


class Found(NamedTuple):
    victims: list[Holding]
    spare: dict[str, Amounts]
    """The nodes to start on, and what they have left beside it then."""
    stopping: tuple[str, ...]
    """Who has to be gone from them first."""


class Rights(Protocol):
    """Who may be asked to stop, one after the other, and whether that is enough for the ceilings."""

    def take(self, victims: Sequence[Holding]) -> bool:
        """They stop, if all of them may be asked to."""

    def spare(self, one: Holding) -> bool:
        """It goes on after all, if what is asked for is allowed beside it."""

    def lacking(self, cheapest: Iterator[Holding]) -> list[Holding] | None:
        """Who has to stop besides, so that what is asked for is allowed; they do. None: it never is."""

    def undo(self) -> None:
        """All of them go on."""


class _Seen:
    __slots__ = ("attempt_ids", "missing")

    def __init__(self, missing: int) -> None:
        self.attempt_ids: list[str] = []
        self.missing = missing
        """How many GPUs must be given back yet, at least."""


class Search:
    def __init__(
        self,
        book: Book,
        demand: Demand,
        barred: AbstractSet[str],
        gone: Mapping[str, Holding],
        taken: Mapping[str, Sequence[Need]],
        now: float,
    ) -> None:
        """`gone`: count as stopped. `taken`: needs that nodes must hold besides, though nobody holds them."""
        self._book = book
        self._demand = demand
        self._need = demand.need
        self._barred = barred | demand.excluded
        self._gone = dict(gone)
        self._taken = taken
        self._now = now
        self._typical = book.stakes.typical
        self._usable: dict[str, bool] = {}
        self._large: dict[Amounts, bool] = {}
        self._losses: dict[str, float] = {}
        self._vacancies: dict[str, Vacancy] = {}
        self._sides: frozenset[Side] = frozenset()
        self._num_sets = 0
        self._seen: dict[str, _Seen] = {}
        """By node, the cheapest that run there, as far as they were looked at."""
        self._spots = Spots(demand, book.capacity.nodes)
        """Nodes that could serve."""
        self._costs: dict[str, tuple[Cost, list[str]]] = {}
        """The same, and who would have to stop."""

    def run(self, sides: Collection[Side], rights: Rights) -> Found | None:
        """`sides`: who may be evicted."""
        self._sides = frozenset(sides)
        self._collect()
        for _, names in sorted((self._estimate(names), names) for names in self._spots.enough()):
            victims = self._choose(names, rights)
            if self._start_nodes() is not None:
                more = rights.lacking(self._others())
                for one in more or ():
                    victims[one.attempt_id] = one
                    self._leave(one)
                if more is not None:
                    self._spare_some(victims, rights)
                    return self._found(victims)
            rights.undo()
            for one in victims.values():
                self._stay(one)
            self._look_again(victims.values())
        return None

    # Which nodes to compare.

    def _collect(self) -> None:
        """Those that cost nothing first, then those on which the cheapest jobs run, then those that could
        serve at best: where none could, or too few together, nobody is looked at twice.
        """
        stakes, spots, demand = self._book.stakes, self._spots, self._demand
        is_plain = not demand.is_close_required and demand.spread is None
        limit = demand.min_nodes + len(self._taken) if is_plain else None
        ready = self._book.finders.of(self._need).ranked(self._barred, limit)
        leaving = {share.node for one in self._gone.values() for share in one.allocation}
        for name in sorted({*ready, *leaving}):
            if self._is_usable(name) and self._vacancy(name).fits():
                self._look_at(name)
        if not self._sides or spots.is_enough():
            return
        if is_plain:
            if self._look_where_run(leaving):
                return
            # Where small jobs fill all nodes, no node is free of dear ones, but some have few.
            for name in stakes.emptiest(2 * demand.min_nodes + 4 * EXTRA_NODES, self._now):
                if name not in self._costs and self._is_usable(name):
                    self._look_at(name)
        if not spots.is_enough():
            self._look_where_it_may_fit(leaving)

    def _look_where_it_may_fit(self, leaving: AbstractSet[str]) -> None:
        """Of the domains that could serve at best, those first that lose least, until there is a choice."""
        hopeful, now, stakes = self._hopeful(leaving), self._now, self._book.stakes
        losses = {name: stakes.loss_on(name, now) for names in hopeful for name in names}
        by_loss = [sorted(names, key=lambda name: (losses[name], name)) for names in hopeful]
        count = self._demand.min_nodes
        by_loss.sort(key=lambda names: (sum(losses[name] for name in names[:count]), names))
        for number, names in enumerate(by_loss):
            if number >= NUM_DOMAINS and self._spots.is_enough():
                return
            for place, name in enumerate(names):
                if place >= 2 * count + 4 * EXTRA_NODES and self._spots.is_enough():
                    break
                if name not in self._costs:
                    self._look_at(name)

    def _hopeful(self, leaving: AbstractSet[str]) -> list[list[str]]:
        """Nodes that have enough GPUs and CPUs if all who may be asked stop, by domain, where those are
        enough together.
        """
        need, nodes, found = self._need, self._book.capacity.nodes, self._spots.none()
        for name in (*self._costs, *leaving):
            if self._is_usable(name) and found.is_one(name):
                found.add(name)
        for name, cpus, gpus in self._book.stakes.held_on(self._sides):
            node = nodes.get(name)
            if node is None:
                continue
            few = node.whole.millicpus if need.is_exclusive else need.millicpus
            if node.free.millicpus + cpus < few or node.free.num_devices + gpus < need.num_gpus:
                continue
            if self._is_usable(name) and found.is_one(name):
                found.add(name)
        return found.enough()

    def _look_where_run(self, leaving: AbstractSet[str]) -> bool:
        """Look at a node once enough of those have been seen there; whether there is a choice of nodes."""
        wanted, needed = self._demand.min_nodes + EXTRA_NODES, self._need.num_gpus
        holdings, nodes = self._book.holdings, self._book.capacity.nodes
        cheapest = self._book.stakes.cheapest(self._sides, self._need, self._now)
        for attempt_id in islice(cheapest, NUM_JOBS + 4 * self._demand.min_nodes):
            for share in holdings[attempt_id].allocation:
                name = share.node
                seen = self._seen.get(name)
                if seen is None:
                    if not self._is_usable(name):
                        continue
                    missing = 0 if name in leaving else needed - nodes[name].free.num_devices
                    seen = self._seen[name] = _Seen(missing)
                seen.missing -= len(share.gpu_ids)
                seen.attempt_ids.append(attempt_id)
                # Most of those that are seen do not make room alone.
                if seen.missing > 0 or name in self._costs:
                    continue
                if self._vacancy(name).fits(seen.attempt_ids):
                    self._look_at(name)
            if len(self._costs) >= wanted and self._spots.is_enough():
                return True
        return False

    def _is_usable(self, name: str) -> bool:
        known = self._usable.get(name)
        if known is None:
            node, labels = self._book.capacity.nodes.get(name), self._need.labels
            known = node is not None and node.is_open and name not in self._barred
            known = known and node is not None and (not labels or node.has(labels))
            known = self._usable[name] = known and node is not None and self._is_large_enough(node.whole)
        return known

    def _is_large_enough(self, whole: Amounts) -> bool:
        known = self._large.get(whole)
        if known is None:
            known = self._large[whole] = fits(self._need, whole, whole)
        return known

    # What a node costs.

    def _vacancy(self, name: str) -> Vacancy:
        found = self._vacancies.get(name)
        if found is None:
            here = self._book.stakes.on_node.get(name, {})
            node, taken = self._book.capacity.nodes[name], self._taken.get(name, ())
            found = self._vacancies[name] = Vacancy(node, self._need, here, taken)
            for attempt_id in here:
                if attempt_id in self._gone:
                    found.leave(attempt_id)
        return found

    def _leave(self, one: Holding) -> None:
        self._gone[one.attempt_id] = one
        for share in one.allocation:
            known = self._vacancies.get(share.node)
            if known is not None:
                known.leave(one.attempt_id)

    def _stay(self, one: Holding) -> None:
        del self._gone[one.attempt_id]
        for share in one.allocation:
            known = self._vacancies.get(share.node)
            if known is not None:
                known.stay(one.attempt_id)

    def _look_at(self, name: str) -> None:
        """Note what it costs; a node that cannot serve is none to compare."""
        side_of, vacancy = self._book.stakes.side_of, self._vacancy(name)
        here = {
            attempt_id: self._lost(attempt_id)
            for attempt_id in sorted(self._book.stakes.on_node.get(name, ()))
            if attempt_id not in self._gone and side_of.get(attempt_id) in self._sides
        }
        self._num_sets += 1
        victims = cheapest_set(vacancy, here, self._need, is_rough=self._num_sets > NUM_SETS)
        self._costs.pop(name, None)
        if victims is None or not self._spots.is_one(name):
            self._spots.discard(name)
            return
        self._spots.add(name)
        loss = sum(here[attempt_id] for attempt_id in victims)
        self._costs[name] = (loss, *vacancy.left(victims), name), victims

    def _lost(self, attempt_id: str) -> float:
        known = self._losses.get(attempt_id)
        if known is None:
            one = self._book.holdings[attempt_id]
            seconds = lost_s(one, self._now, self._typical) + TIE * lost_s(one, self._now)
            known = self._losses[attempt_id] = seconds * self._book.stakes.devices_of[attempt_id]
        return known

    # Which of them to take.

    def _estimate(self, names: list[str]) -> float:
        return sum(sorted(self._costs[name][0][0] for name in names)[: self._demand.min_nodes])

    def _choose(self, names: list[str], rights: Rights) -> dict[str, Holding]:
        """Those who stop so that as many of the nodes as needed can serve, if they can."""
        victims: dict[str, Holding] = {}
        queue, ready = [self._costs[name][0] for name in names], self._spots.none()
        heapify(queue)
        while queue and not ready.is_enough():
            cost = heappop(queue)
            name = cost[-1]
            known = self._costs.get(name)
            if known is None or known[0] != cost or ready.has_beside(name):
                continue  # it costs something else by now, or stands where another does that was taken
            stop = [self._book.holdings[attempt_id] for attempt_id in known[1]]
            if stop and not rights.take(stop):
                continue  # a right ran out
            ready.add(name)
            for one in stop:
                victims[one.attempt_id] = one
                self._leave(one)
            for other in self._look_again(stop):
                if other != name and other in self._costs:
                    heappush(queue, self._costs[other][0])
        return victims

    def _look_again(self, holdings: Iterable[Holding]) -> list[str]:
        """Where those run, it costs something else now."""
        nodes = sorted({share.node for one in holdings for share in one.allocation})
        usable = [name for name in nodes if self._is_usable(name)]
        for name in usable:
            self._look_at(name)
        return usable

    def _others(self) -> Iterator[Holding]:
        """Whoever may stop and does not yet, the one that loses least for each device first."""
        for attempt_id in self._book.stakes.cheapest(self._sides, self._need, self._now):
            if attempt_id not in self._gone:
                yield self._book.holdings[attempt_id]

    def _able(self) -> Spots:
        """Where it fits once everybody who counts as gone is."""
        able = self._spots.none()
        for name in self._costs:
            if self._vacancy(name).fits():
                able.add(name)
        return able

    def _start_nodes(self) -> list[str] | None:
        """Where it starts once everybody who counts as gone is; None: nowhere."""
        return self._able().tightest(lambda name: (*self._vacancy(name).left(), name))

    def _spare_some(self, victims: dict[str, Holding], rights: Rights) -> None:
        """Whoever it can start without goes on, the dearest first."""
        able = self._able()
        dearest = sorted(victims.values(), key=lambda one: (-self._lost(one.attempt_id), one.attempt_id))
        for one in dearest:
            self._stay(one)
            here = [share.node for share in one.allocation if share.node in able]
            lacking = [name for name in here if not self._vacancy(name).fits()]
            for name in lacking:
                able.discard(name)
            if able.is_enough() and rights.spare(one):
                del victims[one.attempt_id]
                continue
            for name in lacking:
                able.add(name)
            self._leave(one)

    def _found(self, victims: dict[str, Holding]) -> Found:
        nodes, on_node = self._start_nodes() or [], self._book.stakes.on_node
        spare = {
            name: less(self._vacancy(name).free(), self._need, self._book.capacity.nodes[name].whole)
            for name in nodes
        }
        there = {one for name in nodes for one in on_node.get(name, ()) if one in self._gone}
        return Found(list(victims.values()), spare, tuple(sorted(there | victims.keys())))
