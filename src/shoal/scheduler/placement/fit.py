"""Which nodes can hold a need now, the tightest first, and what each of them gives.

Nodes with work from outside Shoal come last. Otherwise the order is by what the placement costs typical
requests (`packing`). Among equals it is best fit: the fewest GPUs left over, then the fewest CPUs, then the
name. Partly used nodes fill up, and empty ones stay empty for jobs that need whole nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush, merge
from itertools import islice

from shoal.model.attempt import NodeTask
from shoal.scheduler.facts.amounts import MILLI, Need, NodeResources
from shoal.scheduler.facts.capacity import Capacity, NodeGroup, NodeUse
from shoal.scheduler.facts.gpu_use import GpuUse, matches_kind

SHORTAGE_KINDS = ("gpus", "cpus", "memory", "disk", "alone")
"""What a node may be short of, in the order in which messages name it."""


def fits(need: Need, whole: NodeResources, free: NodeResources) -> bool:
    """Whether a node that has `whole` in all can give `need` out of `free`."""
    return (
        need.millicpus <= free.millicpus
        and (need.num_gpus == 0 or _has_gpus(need, free))
        and need.memory_on(whole) <= free.memory_bytes
        and need.disk_bytes <= free.disk_bytes
        and (not need.is_exclusive or free == whole)
    )


def _has_gpus(need: Need, free: NodeResources) -> bool:
    return need.num_gpus <= free.gpus_of(need.gpu_kind) or (
        need.gpu_milli < MILLI and free.has_part(need.gpu_milli, need.gpu_kind)
    )


def shortages(need: Need, whole: NodeResources, free: NodeResources) -> tuple[str, ...]:
    """Return what is missing, of `SHORTAGE_KINDS`; empty exactly if it fits."""
    is_short = (
        need.num_gpus > 0 and not _has_gpus(need, free),
        need.millicpus > free.millicpus,
        need.memory_on(whole) > free.memory_bytes,
        need.disk_bytes > free.disk_bytes,
        need.is_exclusive and free != whole,
    )
    return tuple(name for name, short in zip(SHORTAGE_KINDS, is_short, strict=True) if short)


def task_on(need: Need, node: NodeUse) -> NodeTask:
    """Return what `need` takes of a node that it fits on: the first free GPUs, or the fullest shared one."""
    if need.is_exclusive:
        return _all_of(node)
    return NodeTask(
        node=node.name,
        cpus=need.millicpus / MILLI,
        memory_bytes=need.memory_on(node.whole),
        disk_bytes=need.disk_bytes,
        gpu_ids=_gpu_ids(need, node.devices),
        gpu_milli=need.gpu_milli,
        charged_millicpus=need.charged_on(node.whole),
    )


def _all_of(node: NodeUse) -> NodeTask:
    return NodeTask(
        node=node.name,
        cpus=node.whole.millicpus / MILLI,
        memory_bytes=node.whole.memory_bytes,
        disk_bytes=node.whole.disk_bytes,
        gpu_ids=tuple(gpu.index for gpu in node.devices.all),
    )


def _gpu_ids(need: Need, devices: GpuUse) -> tuple[int, ...]:
    if need.gpu_milli < MILLI:
        shared = devices.shared_gpu_index(need.gpu_milli, need.gpu_kind)
        return () if shared is None else (shared,)
    if not need.num_gpus:
        return ()
    usable = (gpu.index for gpu in devices.unused if matches_kind(gpu, need.gpu_kind))
    return tuple(islice(usable, need.num_gpus))


MAX_FINDERS = 4096

RankedGroup = tuple[bool, int, int, int, int, NodeGroup]
"""Whether work from outside Shoal runs there, the placement's cost, free GPUs, free CPUs, the group's number,
the group."""


class NodeFinder:
    """The nodes that fit one need, in order, updated as capacity changes.

    Only groups that were formed since the last call are examined. So a placement costs as much as has changed
    since, however many nodes there are.
    """

    def __init__(self, need: Need, capacity: Capacity) -> None:
        self._need = need
        self._capacity = capacity
        self._read = -1
        self._learned = -1
        self._queue: list[RankedGroup] = []

    def ranked(self, barred: AbstractSet[str], limit: int | None = None) -> list[str]:
        """Return the names of nodes that fit now, the best first, at most `limit`, none of `barred`."""
        self._catch_up()
        fitting: list[str] = []
        if not self._queue:
            return fitting
        popped: list[RankedGroup] = []
        while self._queue and (limit is None or len(fitting) < limit):
            equals = self._pop_equals()
            popped += equals
            allowed = self._allowed([entry[-1] for entry in equals], barred)
            fitting += islice(allowed, None if limit is None else limit - len(fitting))
        for entry in popped:
            heappush(self._queue, entry)
        return fitting

    def _allowed(self, groups: list[NodeGroup], barred: AbstractSet[str]) -> Iterator[str]:
        """Yield the names of their nodes that are not barred and have the required labels."""
        names = iter(groups[0].names) if len(groups) == 1 else merge(*(group.names for group in groups))
        if barred:
            names = (name for name in names if name not in barred)
        labels = self._need.labels
        return (name for name in names if self._capacity.nodes[name].has(labels)) if labels else names

    def _catch_up(self) -> None:
        journal, packing = self._capacity.new_groups, self._capacity.packing
        if self._read == journal.end and self._learned == packing.version:
            return
        new = journal.since(self._read) if self._learned == packing.version else None
        self._learned = packing.version
        # Skipping a group that was formed and emptied since is cheap, but not free.
        # Empty groups far behind the first are never popped. Rebuild once they outnumber the others.
        most = 2 * self._capacity.num_groups + 64
        if new is None or len(new) > 2 * len(self._queue) + 64 or len(self._queue) + len(new) > most:
            self._queue.clear()
            self._add(self._capacity.groups)
        else:
            self._add(new)
        self._read = journal.end

    def _add(self, groups: Iterable[NodeGroup]) -> None:
        need = self._need
        fitting = [group for group in groups if group.names and fits(need, group.whole, group.free)]
        if not fitting:
            return
        layouts = [group.layout for group in fitting]
        losses = self._capacity.packing.losses(need, [group.free for group in fitting], layouts)
        for loss, group in zip(losses, fitting, strict=True):
            order = group.is_busy, loss, group.gpu_millis, group.layout[0], group.number
            heappush(self._queue, (*order, group))

    def _pop_equals(self) -> list[RankedGroup]:
        """Pop the groups that are equally good. Empty groups are dropped for good."""
        equals: list[RankedGroup] = []
        while self._queue and (not equals or self._queue[0][:4] == equals[0][:4]):
            entry = heappop(self._queue)
            if entry[-1].names:
                equals.append(entry)
        return equals


class NodeFinders:
    """One finder per need, for the `MAX_FINDERS` needs that were used last."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._by_need: dict[Need, NodeFinder] = {}

    def of(self, need: Need) -> NodeFinder:
        finder = self._by_need.pop(need, None)
        if finder is None:
            if len(self._by_need) >= MAX_FINDERS:
                del self._by_need[next(iter(self._by_need))]
            finder = NodeFinder(need, self._capacity)
        self._by_need[need] = finder
        return finder
