"""When a node could hold a need, going by the time limits of what runs there. A bound, not a forecast."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import Amounts, Need, millicpus_needed
from shoal.scheduler.capacity import NodeUse, by_kind
from shoal.scheduler.fit import fits


def free_at(need: Need, node: NodeUse) -> float:
    """From when an otherwise untouched node holds `need` at the latest.

    -infinity: it does now. Infinity: nobody knows.
    """
    if fits(need, node.whole, node.free):
        return -inf
    if need.gpu_kind is not None:
        return next((ends_at for ends_at, free in _steps(node) if fits(need, node.whole, free)), inf)
    # Asked of every node when a new need waits at the head: plain integers, and nothing built on the way.
    millicpus, memory, disk = node.free[:3]
    memory_needed = need.memory_on(node.whole)
    taken = _taken(node) if need.num_gpus else set()
    most_taken = node.whole.num_gpus - need.num_gpus
    for ends_at, share_millicpus, share in node.ends:
        millicpus += share_millicpus
        memory += share.memory_bytes
        disk += share.disk_bytes
        if taken:
            taken.difference_update(share.gpu_ids)
        if (
            millicpus >= need.millicpus
            and memory >= memory_needed
            and disk >= need.disk_bytes
            and len(taken) <= most_taken
        ):
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


def _taken(node: NodeUse) -> set[int]:
    """Numbers of its GPUs that are not free."""
    free = {gpu.index for gpu in node.free_gpus}
    return {gpu.index for gpu in node.view.gpus if gpu.index not in free}


def free_without(node: NodeUse, shares: Iterable[NodeShare]) -> Amounts:
    """What is free once those are given back."""
    millicpus, memory, disk = node.free[:3]
    back: set[int] = set()
    for share in shares:
        millicpus += millicpus_needed(share.cpus)
        memory += share.memory_bytes
        disk += share.disk_bytes
        back.update(share.gpu_ids)
    if not back:
        return node.free._replace(millicpus=millicpus, memory_bytes=memory, disk_bytes=disk)
    gpus = {gpu for gpu in node.view.gpus if gpu.index in back}.union(node.free_gpus)
    return Amounts(millicpus, memory, disk, len(gpus), by_kind(gpus))


def _steps(node: NodeUse) -> list[tuple[float, Amounts]]:
    """What is free after each end."""
    free, given_back, steps = node.free, set(node.free_gpus), []
    devices = {gpu.index: gpu for gpu in node.view.gpus}
    for ends_at, millicpus, share in node.ends:
        given_back.update(devices[index] for index in share.gpu_ids if index in devices)
        free = Amounts(
            free.millicpus + millicpus,
            free.memory_bytes + share.memory_bytes,
            free.disk_bytes + share.disk_bytes,
            len(given_back),
            by_kind(given_back) if share.gpu_ids else free.gpus,
        )
        steps.append((ends_at, free))
    return steps
