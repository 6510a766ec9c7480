"""What the cluster could hold if nothing ran on it: the line between *not now* and *never*."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from shoal.scheduler.amounts import Amounts, Demand, Need
from shoal.scheduler.capacity import Capacity, NodeUse
from shoal.scheduler.fit import SHORT_OF, fits, shortages


class Suitable:
    """The nodes that could give some need when empty, by name."""

    def __init__(self, nodes: Iterable[NodeUse]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.open = [node for node in self.nodes if node.is_open]
        self.open_names = {node.name for node in self.open}
        self.closed = [node for node in self.nodes if not node.is_open]
        self.pools = {node.view.pool for node in self.nodes}

    def without(self, names: frozenset[str]) -> Suitable:
        return Suitable(node for node in self.nodes if node.name not in names) if names else self


class Possible:
    """Answers about empty nodes, remembered for the length of a cycle."""

    def __init__(self, capacity: Capacity) -> None:
        self._stock = capacity.stock
        self._by_need: dict[Need, Suitable] = {}
        self._by_wholes: dict[tuple[Amounts, ...], Suitable] = {}
        self._is_open: dict[Demand, bool] = {}

    def suitable(self, need: Need) -> Suitable:
        """Closed nodes too. Needs that the same nodes can give share one answer."""
        if need not in self._by_need:
            wholes = tuple(whole for whole in self._stock if fits(need, whole, whole))
            if need.labels:
                return self._labelled(need, wholes)
            if wholes not in self._by_wholes:
                self._by_wholes[wholes] = Suitable(
                    node for whole in wholes for node in self._stock[whole].values()
                )
            self._by_need[need] = self._by_wholes[wholes]
        return self._by_need[need]

    def _labelled(self, need: Need, wholes: tuple[Amounts, ...]) -> Suitable:
        nodes = (node for whole in wholes for node in self._stock[whole].values())
        self._by_need[need] = Suitable(node for node in nodes if node.has(need.labels))
        return self._by_need[need]

    def is_open_for(self, demand: Demand) -> bool:
        """Whether the nodes that take work, without those it excludes, could hold it when empty."""
        known = self._is_open.get(demand)
        if known is None:
            suitable = self.suitable(demand.need).without(demand.excluded)
            known = self._is_open[demand] = can_hold(demand, suitable.open)
        return known

    def telling(self, need: Need) -> tuple[str, ...]:
        """The amounts that tell the nodes that could give `need` from the others; never none."""
        short = {name for whole in self._stock for name in shortages(need, whole, whole)}
        if need.memory_bytes is None:
            short.discard("memory")  # in proportion: it is there where the CPUs and GPUs are
        if need.num_gpus:
            short.add("gpus")
        return tuple(name for name in SHORT_OF if name in short) or ("cpus",)

    def wholes(self) -> list[Amounts]:
        """What nodes have in all, each once."""
        return list(self._stock)

    def pools(self, whole: Amounts) -> set[str]:
        """Where nodes that have `whole` are."""
        return {node.view.pool for node in self._stock[whole].values()}


def can_hold(demand: Demand, nodes: Collection[NodeUse]) -> bool:
    """Whether `nodes`, each of which could give the need, are enough, and close enough or apart."""
    return most_together(demand, nodes) >= demand.min_nodes


def most_together(demand: Demand, nodes: Collection[NodeUse]) -> int:
    """How many of `nodes` could serve as one gang."""
    if demand.spread is None:
        if demand.within is None or not demand.is_close_required:
            return len(nodes)
        return max(by_domain(demand.within, nodes).values(), default=0)
    within = demand.within if demand.is_close_required else None
    apart: dict[str | None, set[str]] = {}
    for node in nodes:
        around = node.label(within) if within else ""
        domain = node.label(demand.spread)
        if around is not None and domain is not None:
            apart.setdefault(around, set()).add(domain)
    return max(map(len, apart.values()), default=0)


def by_domain(label: str, nodes: Collection[NodeUse]) -> Counter[str]:
    """How many of `nodes` each domain of the label has; nodes without the label are in none."""
    domains = (node.label(label) for node in nodes)
    return Counter(domain for domain in domains if domain is not None)
