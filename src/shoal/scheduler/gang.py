"""All of a gang's nodes at once, or none: as many as fit now, and as close together as was asked."""

from __future__ import annotations

from shoal.scheduler.amounts import Demand
from shoal.scheduler.capacity import Capacity
from shoal.scheduler.fit import Finder


def choose(demand: Demand, finder: Finder, capacity: Capacity, barred: frozenset[str]) -> list[str]:
    """Names of the nodes to start on, best fit first; empty when fewer than `min_nodes` will do."""
    barred = barred | demand.excluded if demand.excluded else barred
    if demand.within is None:
        found = finder.ranked(barred, demand.max_nodes)
        return found if len(found) >= demand.min_nodes else []
    found = finder.ranked(barred)
    domains = _split(found, demand.within, capacity)
    if demand.is_close_required:
        return _inside_one(demand, domains)
    return _close_if_possible(demand, found, domains)


def _split(names: list[str], label: str, capacity: Capacity) -> dict[str, list[str]]:
    domains: dict[str, list[str]] = {}
    for name in names:
        domain = capacity.nodes[name].view.labels.get(label)
        if domain is not None:
            domains.setdefault(domain, []).append(name)
    return domains


def _inside_one(demand: Demand, domains: dict[str, list[str]]) -> list[str]:
    """The largest count that one domain has, from the smallest domain that has it."""
    largest = max((len(names) for names in domains.values()), default=0)
    count = min(largest, demand.max_nodes)
    if count < demand.min_nodes:
        return []
    _, _, names = min((len(names), domain, names) for domain, names in domains.items() if len(names) >= count)
    return names[:count]


def _close_if_possible(demand: Demand, found: list[str], domains: dict[str, list[str]]) -> list[str]:
    """The largest count at all, in one domain if one has it, else in as few as a greedy choice finds."""
    count = min(len(found), demand.max_nodes)
    if count < demand.min_nodes:
        return []
    if any(len(names) >= count for names in domains.values()):
        return _inside_one(demand, domains)
    largest_first = sorted(domains.items(), key=lambda item: (-len(item[1]), item[0]))
    chosen = [name for _, names in largest_first for name in names]
    placed = set(chosen)
    return (chosen + [name for name in found if name not in placed])[:count]
