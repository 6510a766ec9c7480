"""When a node could hold a need, going by the time limits of what runs there. A bound, not a forecast."""

from __future__ import annotations

from math import inf

from shoal.scheduler.amounts import Need
from shoal.scheduler.capacity import NodeUse
from shoal.scheduler.fit import fits


def free_at(need: Need, node: NodeUse, now: float) -> float:
    """The latest time from which an otherwise untouched node holds `need`; infinity where nobody knows."""
    if fits(need, node.whole, node.free):
        return now
    ends = sorted(node.ends, key=lambda end: (end[0], end[1].gpu_ids))
    for (ends_at, _), free in zip(ends, node.freed(share for _, share in ends), strict=True):
        if fits(need, node.whole, free):
            return max(ends_at, now)
    return inf
