"""When a gang whose nodes have windows can start: the first moment at which enough of them are free and
none of these would meet a window before it must have ended.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from math import inf

from shoal.scheduler.amounts import Demand
from shoal.scheduler.capacity import Capacity
from shoal.scheduler.windows import Hours, Span

Wait = tuple[float, str]
"""From when a node could hold the need at the latest, and its name."""
Opening = tuple[float, list[str]]


def first_opening(
    demand: Demand, waits: Sequence[Wait], hours: Hours, capacity: Capacity, now: float
) -> Opening | None:
    """The moment and the nodes; None when nobody knows one. `waits`: the soonest first."""
    known = [wait for wait in waits if wait[0] < inf]
    if demand.within is None or not demand.is_close_required:
        return _first(demand.min_nodes, known, hours, now)
    domains: dict[str, list[Wait]] = {}
    for at, name in known:
        domain = capacity.nodes[name].label(demand.within)
        if domain is not None:
            domains.setdefault(domain, []).append((at, name))
    openings = (_first(demand.min_nodes, domains[domain], hours, now) for domain in sorted(domains))
    return min((one for one in openings if one is not None), key=lambda one: one[0], default=None)


def _first(count: int, waits: Iterable[Wait], hours: Hours, now: float) -> Opening | None:
    of_node: dict[Wait, list[Span]] = {}
    num_plain = 0
    for wait in waits:
        since = max(wait[0], now)
        if wait[1] in hours.names:
            of_node[wait] = hours.spans(wait[1], since)
        elif num_plain < count:
            # Nodes without windows stay open once they are: more than `count` of them never matter.
            num_plain += 1
            of_node[wait] = [(since, inf)]
    spans = [span for found in of_node.values() for span in found]
    begins, ends = sorted(begin for begin, _ in spans), sorted(end for _, end in spans)
    for at in begins:
        if bisect_right(begins, at) - bisect_left(ends, at) >= count:
            chosen = [name for (_, name), found in of_node.items() if _is_in(at, found)]
            return at, chosen[:count]
    return None


def _is_in(at: float, spans: Iterable[Span]) -> bool:
    return any(begin <= at <= end for begin, end in spans)
