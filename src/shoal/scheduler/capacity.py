"""What is free on each node: its whole capacity less the holdings, and less what this cycle hands out.

The only mutable state of a cycle. Nodes that look alike to every request are grouped, so that the
later stages ask one question a group and not one a node.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from math import inf

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import Amounts, lowest, millicpus_needed, millicpus_there
from shoal.scheduler.snapshot import GpuView, Holding, NodeView


class NodeUse:
    """A node and what is used of it."""

    __slots__ = ("ends", "free", "free_gpus", "view", "whole")

    def __init__(self, view: NodeView) -> None:
        self.view = view
        self.free_gpus = tuple(sorted(view.gpus, key=lambda gpu: gpu.index))
        self.whole = Amounts(
            millicpus_there(view.cpus),
            view.memory_bytes,
            view.disk_bytes,
            len(self.free_gpus),
            by_kind(self.free_gpus),
        )
        self.free = self.whole
        self.ends: list[tuple[float, NodeShare]] = []
        """When each share held here ends at the latest; infinity where nobody knows."""

    @property
    def name(self) -> str:
        return self.view.name

    @property
    def is_open(self) -> bool:
        return self.view.closed_because is None

    def take(self, share: NodeShare, ends_at: float) -> None:
        """Give `share` away. Free amounts may fall below zero when a node has shrunk under its holdings."""
        if share.gpu_ids:
            self.free_gpus = tuple(gpu for gpu in self.free_gpus if gpu.index not in share.gpu_ids)
        self.free = Amounts(
            self.free.millicpus - millicpus_needed(share.cpus),
            self.free.memory_bytes - share.memory_bytes,
            self.free.disk_bytes - share.disk_bytes,
            len(self.free_gpus),
            by_kind(self.free_gpus) if share.gpu_ids else self.free.gpus,
        )
        self.ends.append((ends_at, share))


class Group:
    """Open nodes with the same capacity and the same free amounts; `names` is kept sorted.

    A group that lost its last member stays empty for ever: nodes that look so again form a new one.
    """

    __slots__ = ("free", "names", "number", "whole")

    def __init__(self, number: int, whole: Amounts, free: Amounts) -> None:
        self.number = number
        self.whole = whole
        self.free = free
        self.names: list[str] = []


class Capacity:
    """All nodes of a snapshot by name, and the open ones in groups."""

    def __init__(self, nodes: Iterable[NodeView], holdings: Iterable[Holding] = ()) -> None:
        # Sorted, so that the order of the snapshot's tuples cannot show in a plan.
        self.nodes = {view.name: NodeUse(view) for view in sorted(nodes, key=lambda view: view.name)}
        for holding in holdings:
            for share in holding.allocation:
                if share.node in self.nodes:
                    self.nodes[share.node].take(share, _ends_at(holding))
        self.stock: dict[Amounts, list[NodeUse]] = {}
        """Every node, open or not, by what it has in all."""
        self.born: list[Group] = []
        """Every group there ever was, in time: readers remember how far they have read."""
        self._groups: dict[tuple[Amounts, Amounts], Group] = {}
        for node in self.nodes.values():
            self.stock.setdefault(node.whole, []).append(node)
            if node.is_open:
                self._join(node)

    def lowest_free(self) -> dict[Amounts, Amounts]:
        """For each capacity, the least of each amount that is free on any open node that has it."""
        least: dict[Amounts, Amounts] = {}
        for group in self.groups:
            least[group.whole] = lowest(least.get(group.whole, group.free), group.free)
        return least

    @property
    def groups(self) -> Iterable[Group]:
        """Those that have members, in the order of their birth."""
        return self._groups.values()

    def take(self, share: NodeShare, ends_at: float) -> None:
        """Hand out a share of an open node."""
        node = self.nodes[share.node]
        key = node.whole, node.free
        names = self._groups[key].names
        del names[bisect_left(names, node.name)]
        if not names:
            del self._groups[key]
        node.take(share, ends_at)
        self._join(node)

    def _join(self, node: NodeUse) -> None:
        key = node.whole, node.free
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(len(self.born), *key)
            self.born.append(group)
        insort(group.names, node.name)


def _ends_at(holding: Holding) -> float:
    return inf if holding.time_limit_s is None else holding.placed_at + holding.time_limit_s


def by_kind(gpus: Iterable[GpuView]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(gpu.kind for gpu in gpus).items()))
