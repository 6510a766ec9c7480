"""Which nodes a job that has waited too long keeps from those behind it, so that wide gangs get their turn.

Not a reservation: it promises no time and looks at no forecast. It keeps exactly as many nodes as the
job needs at least, those that are free or will be first, and nothing on any other node.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.scheduler.amounts import Demand
from shoal.scheduler.capacity import NodeUse
from shoal.scheduler.fit import fits
from shoal.scheduler.possible import Possible
from shoal.scheduler.release import free_at
from shoal.scheduler.snapshot import Candidate

Wait = tuple[bool, float, int, int, str]
"""Sorts nodes by how soon they serve: free ones, then by when they are, then the emptiest, then by name."""


class Kept(NamedTuple):
    """`nodes` are closed to everybody that comes after `head` in the order."""

    head: Candidate
    demand: Demand
    nodes: frozenset[str]


def nodes_to_keep(demand: Demand, possible: Possible, barred: frozenset[str], now: float) -> frozenset[str]:
    """The nodes that serve it soonest; none when the rest of the cluster cannot hold it even when empty.

    A node that becomes free stays first in line, so the free ones among the kept only grow in number
    from cycle to cycle unless somebody with a higher priority takes them.
    """
    usable = possible.suitable(demand.need).without(demand.excluded | barred).open
    waits = [(node, _wait(demand, node, now)) for node in usable]
    if demand.within is None or not demand.is_close_required:
        return _soonest(demand, [wait for _, wait in waits])
    domains: dict[str, list[Wait]] = {}
    for node, wait in waits:
        if demand.within in node.view.labels:
            domains.setdefault(node.view.labels[demand.within], []).append(wait)
    choices = [
        (_last(demand, members), domain)
        for domain, members in domains.items()
        if len(members) >= demand.min_nodes
    ]
    return _soonest(demand, domains[min(choices)[1]]) if choices else frozenset()


def _wait(demand: Demand, node: NodeUse, now: float) -> Wait:
    is_busy = not fits(demand.need, node.whole, node.free)
    return is_busy, free_at(demand.need, node, now), -node.free.num_gpus, -node.free.millicpus, node.name


def _soonest(demand: Demand, waits: list[Wait]) -> frozenset[str]:
    if len(waits) < demand.min_nodes:
        return frozenset()
    return frozenset(wait[-1] for wait in sorted(waits)[: demand.min_nodes])


def _last(demand: Demand, waits: list[Wait]) -> tuple[int, float]:
    """How many nodes of a domain are missing, and when the last of them comes."""
    chosen = sorted(waits)[: demand.min_nodes]
    return sum(wait[0] for wait in chosen), chosen[-1][1]
