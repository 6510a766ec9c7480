"""All of a gang's nodes at once, or none: as many as fit now, and as close together or apart as was asked.

Closeness is a tree of levels (`LEVELS`): of the domains that are large enough the smallest is taken, at the
closest level that has one, and what does not fit into one is packed into few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from shoal.model.node import LEVELS
from shoal.scheduler.amounts import Demand
from shoal.scheduler.capacity import Capacity, NodeUse
from shoal.scheduler.fit import Finder

Nodes = Mapping[str, NodeUse]


def choose(demand: Demand, finder: Finder, capacity: Capacity, barred: AbstractSet[str]) -> list[str]:
    """Names of the nodes to start on, best fit first; empty when fewer than `min_nodes` will do."""
    barred = barred | demand.excluded if demand.excluded else barred
    if demand.avoided:
        elsewhere = _choose(demand, finder, capacity, barred | demand.avoided)
        if elsewhere:
            return elsewhere
    return _choose(demand, finder, capacity, barred)


def _choose(demand: Demand, finder: Finder, capacity: Capacity, barred: AbstractSet[str]) -> list[str]:
    if demand.within is None and demand.spread is None:
        found = finder.ranked(barred, demand.max_nodes)
        # Where it could wait for others' work it takes no more than it must.
        while len(found) > demand.min_nodes and capacity.nodes[found[-1]].view.is_busy:
            found.pop()
        return found if len(found) >= demand.min_nodes else []
    return gathered(demand, finder.ranked(barred), capacity.nodes)


def gathered(demand: Demand, names: list[str], nodes: Nodes) -> list[str]:
    """Of nodes that could all serve, the best first, those that do it together; empty when none do."""
    if demand.within is None:
        found = apart(demand, names, nodes)
        return found[: demand.max_nodes] if len(found) >= demand.min_nodes else []
    domains = split(names, demand.within, nodes)
    if not demand.is_close_required:
        return _as_close_as_possible(demand, apart(demand, names, nodes), nodes)
    usable = [apart(demand, members, nodes) for members in domains.values()]
    count = min(max(map(len, usable), default=0), demand.max_nodes)
    if count < demand.min_nodes:
        return []
    enough = [name for members in usable if len(members) >= count for name in members]
    return _closest(enough, count, _closest_first(demand.within), nodes)


def split(names: Iterable[str], label: str, nodes: Nodes) -> dict[str, list[str]]:
    """By domain of a level; nodes that are in none are left out."""
    domains: dict[str, list[str]] = {}
    for name in names:
        domain = nodes[name].label(label)
        if domain is not None:
            domains.setdefault(domain, []).append(name)
    return domains


def apart(demand: Demand, names: list[str], nodes: Nodes) -> list[str]:
    """The best node of each domain over which the gang is to spread; all of them when it is not."""
    if demand.spread is None:
        return names
    return [members[0] for members in split(names, demand.spread, nodes).values()]


def _as_close_as_possible(demand: Demand, names: list[str], nodes: Nodes) -> list[str]:
    """The largest count at all: in one domain of the closest level that has it, else in few of the widest."""
    count = min(len(names), demand.max_nodes)
    if count < demand.min_nodes:
        return []
    levels = LEVELS if demand.within in LEVELS else (demand.within or "",)
    return _closest(names, count, levels[::-1], nodes) or _packed(names, count, levels, nodes)


def _closest_first(within: str) -> tuple[str, ...]:
    """The levels inside one, from the closest, and itself."""
    return LEVELS[LEVELS.index(within) :][::-1] if within in LEVELS else (within,)


def _closest(names: list[str], count: int, levels: tuple[str, ...], nodes: Nodes) -> list[str]:
    """`count` of the nodes inside one domain of the first level that has so many in one; else none."""
    for number, level in enumerate(levels):
        able = [
            (len(members), domain, members)
            for domain, members in split(names, level, nodes).items()
            if len(members) >= count
        ]
        if able:
            return _packed(min(able)[2], count, levels[:number][::-1], nodes)
    return []


def _packed(names: list[str], count: int, levels: tuple[str, ...], nodes: Nodes) -> list[str]:
    """`count` of the nodes in few domains: the largest whole, and the smallest that holds what is left.

    `levels` from the widest; nodes that are in no domain come last.
    """
    if not levels or count == 0:
        return names[:count]
    domains = split(names, levels[0], nodes)
    if not domains:
        return _packed(names, count, levels[1:], nodes)
    able = [(len(members), domain, members) for domain, members in domains.items() if len(members) >= count]
    if able:
        return _packed(min(able)[2], count, levels[1:], nodes)
    _, _, largest = min((-len(members), domain, members) for domain, members in domains.items())
    rest = [name for name in names if name not in set(largest)]
    return largest + _packed(rest, count - len(largest), levels, nodes)
