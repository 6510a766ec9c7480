"""Which nodes are looked at when others have to stop: as few as it takes to have a choice.

Those that cost nothing first, then those on which the cheapest jobs run, then those that could serve at
best. Where none could, or too few together, nothing else is looked at.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import islice

from shoal.scheduler.offers import Offers

EXTRA_NODES = 16
"""So many more nodes than it needs are compared."""
NUM_JOBS = 512
"""So many of the cheapest jobs are seen, and four more for each node, before whole nodes are compared."""
NUM_DOMAINS = 4
"""So many domains are compared where a gang must be close."""


class _Seen:
    """Of the cheapest jobs, those on one node."""

    __slots__ = ("attempt_ids", "missing")

    def __init__(self, missing: int) -> None:
        self.attempt_ids: list[str] = []
        self.missing = missing
        """How many GPUs must be given back yet, at least."""


class Shortlist:
    def __init__(self, offers: Offers) -> None:
        self._offers = offers
        self._seen: dict[str, _Seen] = {}

    def look(self) -> None:
        """Those that cost nothing first, then those on which the cheapest jobs run, then those that could
        serve at best: where none could, or too few together, nobody is looked at twice.
        """
        stakes, spots, demand = self._offers.book.stakes, self._offers.spots, self._offers.demand
        is_plain = not demand.is_close_required and demand.spread is None
        limit = demand.min_nodes + len(self._offers.taken) if is_plain else None
        ready = self._offers.book.finders.of(self._offers.need).ranked(self._offers.barred, limit)
        leaving = {share.node for one in self._offers.gone.values() for share in one.allocation}
        for name in sorted({*ready, *leaving}):
            if self._offers.is_usable(name) and self._offers.vacancy(name).fits():
                self._offers.look_at(name)
        if not self._offers.sides or spots.is_enough():
            return
        if is_plain:
            if self._look_where_run(leaving):
                return
            # Where small jobs fill all nodes, no node is free of dear ones, but some have few.
            for name in stakes.emptiest(2 * demand.min_nodes + 4 * EXTRA_NODES, self._offers.now):
                if name not in self._offers.costs and self._offers.is_usable(name):
                    self._offers.look_at(name)
        if not spots.is_enough():
            self._look_where_it_may_fit(leaving)

    def _look_where_it_may_fit(self, leaving: AbstractSet[str]) -> None:
        """Of the domains that could serve at best, those first that lose least, until there is a choice."""
        hopeful, now, stakes = self._hopeful(leaving), self._offers.now, self._offers.book.stakes
        losses = {name: stakes.loss_on(name, now) for names in hopeful for name in names}
        by_loss = [sorted(names, key=lambda name: (losses[name], name)) for names in hopeful]
        count = self._offers.demand.min_nodes
        by_loss.sort(key=lambda names: (sum(losses[name] for name in names[:count]), names))
        for number, names in enumerate(by_loss):
            if number >= NUM_DOMAINS and self._offers.spots.is_enough():
                return
            for place, name in enumerate(names):
                if place >= 2 * count + 4 * EXTRA_NODES and self._offers.spots.is_enough():
                    break
                if name not in self._offers.costs:
                    self._offers.look_at(name)

    def _hopeful(self, leaving: AbstractSet[str]) -> list[list[str]]:
        """Nodes that have enough GPUs and CPUs if all who may be asked stop, by domain, where those are
        enough together.
        """
        need, nodes, found = self._offers.need, self._offers.book.capacity.nodes, self._offers.spots.none()
        for name in (*self._offers.costs, *leaving):
            if self._offers.is_usable(name) and found.is_one(name):
                found.add(name)
        for name, cpus, gpus in self._offers.book.stakes.held_on(self._offers.sides):
            node = nodes.get(name)
            if node is None:
                continue
            few = node.whole.millicpus if need.is_exclusive else need.millicpus
            if node.free.millicpus + cpus < few or node.free.num_devices + gpus < need.num_gpus:
                continue
            if self._offers.is_usable(name) and found.is_one(name):
                found.add(name)
        return found.enough()

    def _look_where_run(self, leaving: AbstractSet[str]) -> bool:
        """Look at a node once enough of those have been seen there; whether there is a choice of nodes."""
        wanted, needed = self._offers.demand.min_nodes + EXTRA_NODES, self._offers.need.num_gpus
        holdings, nodes = self._offers.book.holdings, self._offers.book.capacity.nodes
        for attempt_id in islice(self._offers.cheapest(), NUM_JOBS + 4 * self._offers.demand.min_nodes):
            for share in holdings[attempt_id].allocation:
                name = share.node
                seen = self._seen.get(name)
                if seen is None:
                    if not self._offers.is_usable(name):
                        continue
                    missing = 0 if name in leaving else needed - nodes[name].free.num_devices
                    seen = self._seen[name] = _Seen(missing)
                seen.missing -= len(share.gpu_ids)
                seen.attempt_ids.append(attempt_id)
                # Most of those that are seen do not make room alone.
                if seen.missing > 0 or name in self._offers.costs:
                    continue
                if self._offers.vacancy(name).fits(seen.attempt_ids):
                    self._offers.look_at(name)
            if len(self._offers.costs) >= wanted and self._offers.spots.is_enough():
                return True
        return False
