"""When a node could hold a need, going by the time limits of what runs there. A bound, not a forecast."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import Amounts, Need, millicpus_needed
from shoal.scheduler.capacity import NodeUse
from shoal.scheduler.fit import fits


def free_at(need: Need, node: NodeUse) -> float:
    """From when an otherwise untouched node holds `need` at the latest.

    -infinity: it does now. Infinity: nobody knows.
    """
    if fits(need, node.whole, node.free):
        return -inf
    if need.num_gpus or need.is_exclusive:
        return next((ends_at for ends_at, free in _steps(node) if fits(need, node.whole, free)), inf)
    # Most of a log without GPUs is spent here: plain integers, and nothing built on the way.
    millicpus, memory, disk = node.free[:3]
    memory_needed = need.memory_on(node.whole)
    for ends_at, share_millicpus, share in node.ends:
        millicpus += share_millicpus
        memory += share.memory_bytes
        disk += share.disk_bytes
        if millicpus >= need.millicpus and memory >= memory_needed and disk >= need.disk_bytes:
            return ends_at
    return inf


def free_by(node: NodeUse, at: float) -> Amounts:
    """What is free then if everything that must have ended has, and nothing else."""
    free = node.free
    if not node.view.gpus:
        millicpus, memory, disk = free[:3]
        for ends_at, share_millicpus, share in node.ends:
            if ends_at > at:
                break
            millicpus += share_millicpus
            memory += share.memory_bytes
            disk += share.disk_bytes
        return Amounts(millicpus, memory, disk, 0, ())
    for ends_at, after in _steps(node):
        if ends_at > at:
            break
        free = after
    return free


def free_without(node: NodeUse, shares: Iterable[NodeShare]) -> Amounts:
    """What is free once those are given back."""
    millicpus, memory, disk = node.free[:3]
    back: list[NodeShare] = []
    for share in shares:
        millicpus += millicpus_needed(share.cpus)
        memory += share.memory_bytes
        disk += share.disk_bytes
        if share.gpu_ids:
            back.append(share)
    devices = node.devices.without(back) if back else node.devices.free
    return Amounts(millicpus, memory, disk, *devices)


def _steps(node: NodeUse) -> list[tuple[float, Amounts]]:
    """What is free after each end."""
    shares = (share for _, _, share in node.ends)
    return [(end[0], free) for end, free in zip(node.ends, node.freed(shares), strict=True)]
