"""Nodes that could serve a gang, counted as it may use them: those of one domain together where it must be
close, and one of each domain over which it is to spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.scheduler.amounts import Demand
from shoal.scheduler.capacity import NodeUse


class Spots:
    def __init__(self, demand: Demand, nodes: Mapping[str, NodeUse]) -> None:
        self._demand = demand
        self._nodes = nodes
        self._within = demand.within if demand.is_close_required else None
        self._domains: dict[str, dict[str, set[str]]] = {}
        """By domain and spot, the nodes there."""
        self._all: set[str] = set()

    def none(self) -> Spots:
        """The same for none of the nodes."""
        return Spots(self._demand, self._nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def is_one(self, name: str) -> bool:
        """Whether a gang could use it: one in no domain it could not."""
        return None not in self._where(name)

    def add(self, name: str) -> None:
        domain, spot = self._where(name)
        assert domain is not None
        assert spot is not None
        self._all.add(name)
        self._domains.setdefault(domain, {}).setdefault(spot, set()).add(name)

    def discard(self, name: str) -> None:
        if name not in self._all:
            return
        domain, spot = self._where(name)
        assert domain is not None
        assert spot is not None
        self._all.discard(name)
        spots = self._domains[domain]
        spots[spot].discard(name)
        if not spots[spot]:
            del spots[spot]

    def has_beside(self, name: str) -> bool:
        """Whether another is in its spot already."""
        domain, spot = self._where(name)
        return spot in self._domains.get(domain or "", ())

    def is_enough(self) -> bool:
        """Whether the gang could start on some of them."""
        return any(len(spots) >= self._demand.min_nodes for spots in self._domains.values())

    def enough(self) -> list[list[str]]:
        """The nodes of each domain that has enough."""
        return [
            sorted(name for names in spots.values() for name in names)
            for _, spots in sorted(self._domains.items())
            if len(spots) >= self._demand.min_nodes
        ]

    def tightest(self, key: Callable[[str], Any]) -> list[str] | None:
        """As many as it needs, those with the least keys; None: there are not enough."""
        found = [
            sorted((min(names, key=key) for names in spots.values()), key=key)[: self._demand.min_nodes]
            for spots in self._domains.values()
            if len(spots) >= self._demand.min_nodes
        ]
        return min(found, key=lambda names: [key(name) for name in names], default=None)

    def _where(self, name: str) -> tuple[str | None, str | None]:
        node, spread = self._nodes[name], self._demand.spread
        domain = "" if self._within is None else node.label(self._within)
        return domain, name if spread is None else node.label(spread)
