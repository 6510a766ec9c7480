"""Choose all nodes of a gang at once, or none: as many as fit now, as close together or spread as the job
asks.

Topology is a tree of levels (`LEVELS`). At the closest level that has a domain large enough, the smallest
such domain is taken. A gang that fits into no single domain is packed into few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from shoal.model.node import LEVELS
from shoal.scheduler.facts.amounts import Demand
from shoal.scheduler.facts.capacity import Capacity, NodeUse
from shoal.scheduler.placement.fit import NodeFinder

Nodes = Mapping[str, NodeUse]


def choose_nodes(
    demand: Demand, finder: NodeFinder, capacity: Capacity, barred: AbstractSet[str]
) -> list[str]:
    """Return the names of the nodes to start on, best fit first; empty if fewer than `min_nodes` fit."""
    barred = barred | demand.excluded if demand.excluded else barred
    if demand.avoided:
        unavoided = _choose(demand, finder, capacity, barred | demand.avoided)
        if unavoided:
            return unavoided
    return _choose(demand, finder, capacity, barred)


def _choose(demand: Demand, finder: NodeFinder, capacity: Capacity, barred: AbstractSet[str]) -> list[str]:
    if demand.within is None and demand.spread is None:
        ranked = finder.ranked(barred, demand.max_nodes)
        # On nodes with work from outside Shoal it takes no more than it must, because it could wait there.
        while len(ranked) > demand.min_nodes and capacity.nodes[ranked[-1]].view.is_busy:
            ranked.pop()
        return ranked if len(ranked) >= demand.min_nodes else []
    return choose_together(demand, finder.ranked(barred), capacity.nodes)


def choose_together(demand: Demand, names: list[str], nodes: Nodes) -> list[str]:
    """Return, of nodes that could all serve (the best first), those that can serve as one gang; empty if none
    can.
    """
    if demand.within is None:
        chosen = best_per_domain(demand, names, nodes)
        return chosen[: demand.max_nodes] if len(chosen) >= demand.min_nodes else []
    domains = split_by_domain(names, demand.within, nodes)
    if not demand.is_close_required:
        return _as_close_as_possible(demand, best_per_domain(demand, names, nodes), nodes)
    usable = [best_per_domain(demand, members, nodes) for members in domains.values()]
    count = min(max(map(len, usable), default=0), demand.max_nodes)
    if count < demand.min_nodes:
        return []
    enough = [name for members in usable if len(members) >= count for name in members]
    return _closest(enough, count, _closest_first(demand.within), nodes)


def split_by_domain(names: Iterable[str], label: str, nodes: Nodes) -> dict[str, list[str]]:
    """Group the nodes by domain of a level. Nodes that are in no domain are left out."""
    domains: dict[str, list[str]] = {}
    for name in names:
        domain = nodes[name].label(label)
        if domain is not None:
            domains.setdefault(domain, []).append(name)
    return domains


def best_per_domain(demand: Demand, names: list[str], nodes: Nodes) -> list[str]:
    """Return the best node of each domain over which the gang must spread; all nodes if it need not."""
    if demand.spread is None:
        return names
    return [members[0] for members in split_by_domain(names, demand.spread, nodes).values()]


def _as_close_as_possible(demand: Demand, names: list[str], nodes: Nodes) -> list[str]:
    """Take the largest count possible: in one domain of the closest level that has it, or else in few of the
    widest.
    """
    count = min(len(names), demand.max_nodes)
    if count < demand.min_nodes:
        return []
    levels = LEVELS if demand.within in LEVELS else (demand.within or "",)
    return _closest(names, count, levels[::-1], nodes) or _packed(names, count, levels, nodes)


def _closest_first(within: str) -> tuple[str, ...]:
    """Return the levels inside one, from the closest, and that level itself."""
    return LEVELS[LEVELS.index(within) :][::-1] if within in LEVELS else (within,)


def _closest(names: list[str], count: int, levels: tuple[str, ...], nodes: Nodes) -> list[str]:
    """Return `count` of the nodes in one domain, of the first level that has so large a domain; empty if none
    has.
    """
    for number, level in enumerate(levels):
        large_enough = [
            (len(members), domain, members)
            for domain, members in split_by_domain(names, level, nodes).items()
            if len(members) >= count
        ]
        if large_enough:
            return _packed(min(large_enough)[2], count, levels[:number][::-1], nodes)
    return []


def _packed(names: list[str], count: int, levels: tuple[str, ...], nodes: Nodes) -> list[str]:
    """Return `count` of the nodes from as few domains as possible: the largest whole, and the smallest that
    holds the rest.

    `levels` are given from the widest. Nodes that are in no domain come last.
    """
    if not levels or count == 0:
        return names[:count]
    domains = split_by_domain(names, levels[0], nodes)
    if not domains:
        return _packed(names, count, levels[1:], nodes)
    large_enough = [
        (len(members), domain, members) for domain, members in domains.items() if len(members) >= count
    ]
    if large_enough:
        return _packed(min(large_enough)[2], count, levels[1:], nodes)
    _, _, largest = min((-len(members), domain, members) for domain, members in domains.items())
    rest = [name for name in names if name not in set(largest)]
    return largest + _packed(rest, count - len(largest), levels, nodes)
