"""When a node could hold a need, going by the time limits of what runs there. A bound, not a forecast."""

from __future__ import annotations

from math import inf

from shoal.scheduler.amounts import Amounts, Need, millicpus_needed
from shoal.scheduler.capacity import NodeUse, by_kind
from shoal.scheduler.fit import fits


def free_at(need: Need, node: NodeUse, now: float) -> float:
    """The latest time from which an otherwise untouched node holds `need`; infinity where nobody knows."""
    free = node.free
    if fits(need, node.whole, free):
        return now
    given_back = set(node.free_gpus)
    for ends_at, share in sorted(node.ends, key=lambda end: (end[0], end[1].gpu_ids)):
        given_back.update(gpu for gpu in node.view.gpus if gpu.index in share.gpu_ids)
        free = Amounts(
            free.millicpus + millicpus_needed(share.cpus),
            free.memory_bytes + share.memory_bytes,
            free.disk_bytes + share.disk_bytes,
            len(given_back),
            by_kind(given_back),
        )
        if fits(need, node.whole, free):
            return max(ends_at, now)
    return inf
