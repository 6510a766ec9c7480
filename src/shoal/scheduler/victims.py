"""The set of running jobs whose end loses least and lets one demand start.

Nodes are looked at in the order of what their cheapest jobs lose, and only as many as it takes to have a
choice. On each the cheapest set is found, exactly where few jobs run. The nodes that cost least are taken
one by one: a gang stops whole and is counted once. In the end whoever can be spared is, the dearest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from itertools import combinations, islice
from typing import NamedTuple

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import Amounts, Demand, Need, less
from shoal.scheduler.book import Book
from shoal.scheduler.capacity import NodeUse
from shoal.scheduler.fit import fits
from shoal.scheduler.loss import lost
from shoal.scheduler.release import free_without
from shoal.scheduler.snapshot import Holding
from shoal.scheduler.stakes import Side

EXTRA_NODES = 16
"""So many more nodes than it needs are compared."""
NUM_JOBS = 4096
"""So many of the cheapest jobs are seen before whole nodes are compared."""
EXACT_UP_TO = 6
"""Jobs on one node, of which every set is tried."""

Cost = tuple[float, int, int, str]
"""What is lost, GPUs and CPUs left over, the node's name."""


class Found(NamedTuple):
    victims: list[Holding]
    spare: dict[str, Amounts]
    """The nodes to start on, and what they have left beside it then."""
    stopping: tuple[str, ...]
    """Who has to be gone from them first."""


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
        self._usable: dict[str, bool] = {}
        self._losses: dict[str, float] = {}
        self._sides: frozenset[Side] = frozenset()
        self._pending: dict[str, list[NodeShare]] = {}
        """By node that is not looked at yet, what the cheapest hold there."""
        self._per_domain: Counter[str | None] = Counter()
        self._costs: dict[str, tuple[Cost, list[Holding]]] = {}
        """Nodes that could serve, and who would have to stop."""

    def run(self, sides: Collection[Side], take: Callable[[list[Holding]], bool]) -> Found | None:
        """`sides`: who may be evicted. `take`: asked before anybody is; says no where a right runs out."""
        self._sides = frozenset(sides)
        self._collect()
        domains = [names for names in self._domains(self._costs).values() if self._is_enough(len(names))]
        for _, names in sorted((self._estimate(names), names) for names in domains):
            victims = self._choose(names, take)
            if self._start_nodes() is not None:
                self._spare_some(victims)
                return self._found(victims)
            for one in victims.values():
                del self._gone[one.attempt_id]
            self._look_again(victims.values())
        return None

    # Which nodes to compare.

    def _collect(self) -> None:
        """Those that cost nothing first, then those on which the cheapest jobs run."""
        book, per_domain = self._book, self._per_domain
        limit = None if self._demand.is_close_required else self._demand.min_nodes + len(self._taken)
        ready = set(book.finders.of(self._need).ranked(self._barred, limit))
        leaving = {share.node for one in self._gone.values() for share in one.allocation}
        for name in sorted(ready | leaving):
            if self._is_usable(name) and self._fits(name, ()):
                self._look_at(name)
        if not self._sides or self._is_enough(max(per_domain.values(), default=0)):
            return
        cheapest = book.stakes.cheapest(self._sides, self._need, self._now)
        if self._look_where_run(islice(cheapest, NUM_JOBS), leaving):
            return
        # Where small jobs fill all nodes, no node is free of dear ones, but some have few.
        for name in book.stakes.emptiest(4 * (self._demand.min_nodes + EXTRA_NODES), self._now):
            if name not in self._costs and self._is_usable(name):
                self._look_at(name)
        if not self._is_enough(max(per_domain.values(), default=0)):
            self._look_where_run(cheapest, leaving)

    def _look_where_run(self, attempt_ids: Iterable[str], leaving: AbstractSet[str]) -> bool:
        """Look at a node once enough of those have been seen there; whether there is a choice of nodes."""
        wanted, pending = self._demand.min_nodes + EXTRA_NODES, self._pending
        for attempt_id in attempt_ids:
            for share in self._book.holdings[attempt_id].allocation:
                if share.node in self._costs or not self._is_usable(share.node):
                    continue
                here = pending.setdefault(share.node, [])
                here.append(share)
                if self._may_fit(share.node, here, leaving) and self._fits(share.node, here):
                    self._look_at(share.node)
            if len(self._costs) >= wanted and self._is_enough(max(self._per_domain.values())):
                return True
        return False

    def _may_fit(self, name: str, stopped: list[NodeShare], leaving: AbstractSet[str]) -> bool:
        """False: surely not. Most jobs that are looked at do not make room alone."""
        free = self._book.capacity.nodes[name].free.num_devices
        return name in leaving or free + sum(len(share.gpu_ids) for share in stopped) >= self._need.num_gpus

    def _is_enough(self, num_nodes: int) -> bool:
        return num_nodes >= self._demand.min_nodes

    def _domain(self, name: str) -> str | None:
        """Nodes of one may serve together; None: with no others."""
        if not self._demand.is_close_required or self._demand.within is None:
            return ""
        return self._book.capacity.nodes[name].label(self._demand.within)

    def _domains(self, names: Iterable[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in sorted(names):
            found.setdefault(self._domain(name) or "", []).append(name)
        return found

    def _is_usable(self, name: str) -> bool:
        known = self._usable.get(name)
        if known is None:
            node = self._book.capacity.nodes.get(name)
            known = node is not None and node.is_open and name not in self._barred
            known = known and node is not None and node.has(self._need.labels)
            known = known and node is not None and fits(self._need, node.whole, node.whole)
            self._usable[name] = known
        return known

    # What a node costs.

    def _free(self, name: str, stopped: Iterable[NodeShare]) -> Amounts:
        """What it has once those and everybody who counts as gone are."""
        node = self._book.capacity.nodes[name]
        leaving = [
            share
            for attempt_id, one in self._book.stakes.on_node.get(name, {}).items()
            if attempt_id in self._gone
            for share in one.allocation
            if share.node == name
        ]
        free = free_without(node, [*leaving, *stopped])
        for need in self._taken.get(name, ()):
            free = less(free, need, node.whole)
        return free

    def _fits(self, name: str, stopped: Iterable[NodeShare]) -> bool:
        return fits(self._need, self._book.capacity.nodes[name].whole, self._free(name, stopped))

    def _look_at(self, name: str) -> None:
        """Note what it costs; a node that cannot serve is none to compare."""
        here = [
            one
            for attempt_id, one in sorted(self._book.stakes.on_node.get(name, {}).items())
            if attempt_id not in self._gone and not one.is_leaving and Side.of(one) in self._sides
        ]
        victims = self._cheapest_set(name, here)
        domain = self._domain(name)
        if self._costs.pop(name, None) is not None:
            self._per_domain[domain] -= 1
        if victims is None or domain is None:
            return
        self._per_domain[domain] += 1
        loss = self._sum(victims)
        free = self._free(name, _shares(name, victims))
        self._costs[name] = (loss, free.num_gpus, free.millicpus, name), victims

    def _cheapest_set(self, name: str, here: list[Holding]) -> list[Holding] | None:
        if self._fits(name, ()):
            return []
        if not self._fits(name, _shares(name, here)):
            return None
        if len(here) <= EXACT_UP_TO:
            sets = [few for count in range(1, len(here) + 1) for few in combinations(here, count)]
            by_loss = sorted(sets, key=self._sum)
            return next(list(few) for few in by_loss if self._fits(name, _shares(name, few)))
        return self._greedy_set(name, here)

    def _greedy_set(self, name: str, here: list[Holding]) -> list[Holding]:
        """By what is lost for each device that it has use for, then without whoever turns out not needed."""
        loss = {one.attempt_id: lost(one, self._now) for one in here}
        chosen: list[Holding] = []
        for one in sorted(
            here, key=lambda one: (loss[one.attempt_id] / self._use(name, one), one.attempt_id)
        ):
            chosen.append(one)
            if self._fits(name, _shares(name, chosen)):
                break
        for one in sorted(chosen, key=lambda one: (-self._lost(one), one.attempt_id)):
            fewer = [other for other in chosen if other is not one]
            if self._fits(name, _shares(name, fewer)):
                chosen = fewer
        return chosen

    def _sum(self, holdings: Iterable[Holding]) -> float:
        return sum(self._lost(one) for one in holdings)

    def _lost(self, one: Holding) -> float:
        known = self._losses.get(one.attempt_id)
        if known is None:
            known = self._losses[one.attempt_id] = lost(one, self._now)
        return known

    def _use(self, name: str, one: Holding) -> float:
        """How much of what it holds there is of use."""
        (share,) = _shares(name, [one])
        if self._need.num_gpus:
            return max(min(share.num_gpus, self._need.num_gpus * self._need.gpu_milli / 1000), 0.01)
        return max(min(share.cpus, self._need.millicpus / 1000), 0.01)

    # Which of them to take.

    def _estimate(self, names: list[str]) -> float:
        losses = sorted(self._costs[name][0][0] for name in names)
        return sum(losses[: self._demand.min_nodes])

    def _choose(self, names: list[str], take: Callable[[list[Holding]], bool]) -> dict[str, Holding]:
        """Those who stop so that as many of the nodes as needed can serve, if they can."""
        victims: dict[str, Holding] = {}
        queue, ready = [self._costs[name][0] for name in names], 0
        heapify(queue)
        while queue and ready < self._demand.min_nodes:
            cost = heappop(queue)
            known = self._costs.get(cost[-1])
            if known is None or known[0] != cost or (known[1] and not take(known[1])):
                continue  # it costs something else by now, or a right ran out
            ready += 1
            for one in known[1]:
                victims[one.attempt_id] = self._gone[one.attempt_id] = one
            for name in self._look_again(known[1]):
                if name != cost[-1] and name in self._costs:
                    heappush(queue, self._costs[name][0])
        return victims

    def _look_again(self, holdings: Iterable[Holding]) -> list[str]:
        """Where those run, it costs something else now."""
        nodes = sorted({share.node for one in holdings for share in one.allocation})
        usable = [name for name in nodes if self._is_usable(name)]
        for name in usable:
            self._look_at(name)
        return usable

    def _start_nodes(self) -> list[str] | None:
        """Where it starts once everybody who counts as gone is; None: nowhere."""
        able = [name for name in self._costs if self._fits(name, ())]
        domains = [names for names in self._domains(able).values() if self._is_enough(len(names))]
        if not domains:
            return None
        ranked = (sorted(names, key=self._tightness)[: self._demand.min_nodes] for names in domains)
        return min(ranked, key=lambda names: [self._tightness(name) for name in names])

    def _tightness(self, name: str) -> tuple[int, int, str]:
        free = self._free(name, ())
        return free.num_gpus, free.millicpus, name

    def _spare_some(self, victims: dict[str, Holding]) -> None:
        """Whoever it can start without goes on, the dearest first."""
        able = {name for name in self._costs if self._fits(name, ())}
        count = Counter(self._domain(name) for name in able)
        for one in sorted(victims.values(), key=lambda one: (-self._lost(one), one.attempt_id)):
            del self._gone[one.attempt_id]
            here = [share.node for share in one.allocation if share.node in able]
            lacking = [name for name in here if not self._fits(name, ())]
            without = count - Counter(self._domain(name) for name in lacking)
            if self._is_enough(max(without.values(), default=0)):
                able.difference_update(lacking)
                count = without
                del victims[one.attempt_id]
            else:
                self._gone[one.attempt_id] = one

    def _found(self, victims: dict[str, Holding]) -> Found:
        nodes = self._start_nodes() or []
        spare = {name: less(self._free(name, ()), self._need, self._whole(name)) for name in nodes}
        there = {
            one for name in nodes for one in self._book.stakes.on_node.get(name, {}) if one in self._gone
        }
        return Found(list(victims.values()), spare, tuple(sorted(there | victims.keys())))

    def _whole(self, name: str) -> Amounts:
        node: NodeUse = self._book.capacity.nodes[name]
        return node.whole


def _shares(name: str, holdings: Iterable[Holding]) -> list[NodeShare]:
    """What they hold there."""
    return [share for one in holdings for share in one.allocation if share.node == name]
