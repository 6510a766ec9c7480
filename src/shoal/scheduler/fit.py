"""Which nodes can hold a need now, the tightest first, and what each of them takes.

Those with others' work on them last. Else where it costs those least that are typical here (`packing`);
among equals best fit: the fewest GPUs left over, then the fewest CPUs, then the name. Broken nodes fill up
and whole ones stay whole for those that need them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush, merge
from itertools import islice

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import MILLI, Amounts, Need
from shoal.scheduler.capacity import Capacity, Group, NodeUse
from shoal.scheduler.gpu_use import GpuUse, is_of

SHORT_OF = ("gpus", "cpus", "memory", "disk", "alone")
"""What a node may be short of, in the order people are told."""


def fits(need: Need, whole: Amounts, free: Amounts) -> bool:
    """Whether a node that has `whole` in all can give `need` out of `free`."""
    return (
        need.millicpus <= free.millicpus
        and (need.num_gpus == 0 or _has_gpus(need, free))
        and need.memory_on(whole) <= free.memory_bytes
        and need.disk_bytes <= free.disk_bytes
        and (not need.is_exclusive or free == whole)
    )


def _has_gpus(need: Need, free: Amounts) -> bool:
    return need.num_gpus <= free.gpus_of(need.gpu_kind) or (
        need.gpu_milli < MILLI and free.has_part(need.gpu_milli, need.gpu_kind)
    )


def shortages(need: Need, whole: Amounts, free: Amounts) -> tuple[str, ...]:
    """What is missing, of `SHORT_OF`; empty exactly when it fits."""
    is_short = (
        need.num_gpus > 0 and not _has_gpus(need, free),
        need.millicpus > free.millicpus,
        need.memory_on(whole) > free.memory_bytes,
        need.disk_bytes > free.disk_bytes,
        need.is_exclusive and free != whole,
    )
    return tuple(name for name, short in zip(SHORT_OF, is_short, strict=True) if short)


def share_of(need: Need, node: NodeUse) -> NodeShare:
    """What `need` takes of a node it fits on: the first free GPUs, or the fullest that is shared."""
    if need.is_exclusive:
        return _all_of(node)
    return NodeShare(
        node=node.name,
        cpus=need.millicpus / MILLI,
        memory_bytes=need.memory_on(node.whole),
        disk_bytes=need.disk_bytes,
        gpu_ids=_gpu_ids(need, node.devices),
        gpu_milli=need.gpu_milli,
        charged_millicpus=need.charged_on(node.whole),
    )


def _all_of(node: NodeUse) -> NodeShare:
    return NodeShare(
        node=node.name,
        cpus=node.whole.millicpus / MILLI,
        memory_bytes=node.whole.memory_bytes,
        disk_bytes=node.whole.disk_bytes,
        gpu_ids=tuple(gpu.index for gpu in node.devices.all),
    )


def _gpu_ids(need: Need, devices: GpuUse) -> tuple[int, ...]:
    if need.gpu_milli < MILLI:
        shared = devices.part(need.gpu_milli, need.gpu_kind)
        return () if shared is None else (shared,)
    if not need.num_gpus:
        return ()
    usable = (gpu.index for gpu in devices.unused if is_of(gpu, need.gpu_kind))
    return tuple(islice(usable, need.num_gpus))


MAX_FINDERS = 4096

Entry = tuple[bool, int, int, int, int, Group]
"""Whether others' work is there, what the placement costs, free GPUs, free CPUs, the group's number, it."""


class Finder:
    """The nodes that fit one need, in order, kept while capacity comes and goes.

    Only groups born since the last look must be looked at: a placement costs as much as changed since, not
    as many nodes as there are.
    """

    def __init__(self, need: Need, capacity: Capacity) -> None:
        self._need = need
        self._capacity = capacity
        self._read = -1
        self._learned = -1
        self._queue: list[Entry] = []

    def ranked(self, barred: AbstractSet[str], limit: int | None = None) -> list[str]:
        """Names of nodes that fit now, the best first, at most `limit`, none of `barred`."""
        self._catch_up()
        found: list[str] = []
        if not self._queue:
            return found
        looked_at: list[Entry] = []
        while self._queue and (limit is None or len(found) < limit):
            alike = self._pop_equals()
            looked_at += alike
            names = self._allowed([entry[-1] for entry in alike], barred)
            found += islice(names, None if limit is None else limit - len(found))
        for entry in looked_at:
            heappush(self._queue, entry)
        return found

    def _allowed(self, groups: list[Group], barred: AbstractSet[str]) -> Iterator[str]:
        """Names of their nodes that are not barred and have the labels that are needed."""
        names = iter(groups[0].names) if len(groups) == 1 else merge(*(group.names for group in groups))
        if barred:
            names = (name for name in names if name not in barred)
        labels = self._need.labels
        return (name for name in names if self._capacity.nodes[name].has(labels)) if labels else names

    def _catch_up(self) -> None:
        born, packing = self._capacity.born, self._capacity.packing
        if self._read == born.end and self._learned == packing.version:
            return
        new = born.since(self._read) if self._learned == packing.version else None
        self._learned = packing.version
        # A group that was born and died since is cheap to skip, but not for nothing.
        # Groups that died far behind the first are never popped: once they outnumber the living, start anew.
        most = 2 * self._capacity.num_groups + 64
        if new is None or len(new) > 2 * len(self._queue) + 64 or len(self._queue) + len(new) > most:
            self._queue.clear()
            self._add(self._capacity.groups)
        else:
            self._add(new)
        self._read = born.end

    def _add(self, groups: Iterable[Group]) -> None:
        need = self._need
        fitting = [group for group in groups if group.names and fits(need, group.whole, group.free)]
        if not fitting:
            return
        looks = [group.look for group in fitting]
        losses = self._capacity.packing.losses(need, [group.free for group in fitting], looks)
        for loss, group in zip(losses, fitting, strict=True):
            order = group.is_busy, loss, group.gpu_millis, group.look[0], group.number
            heappush(self._queue, (*order, group))

    def _pop_equals(self) -> list[Entry]:
        """The groups that are equally good; empty ones are dropped for good."""
        equals: list[Entry] = []
        while self._queue and (not equals or self._queue[0][:4] == equals[0][:4]):
            entry = heappop(self._queue)
            if entry[-1].names:
                equals.append(entry)
        return equals


class Finders:
    """One finder a need, as many as are asked for now and then."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._by_need: dict[Need, Finder] = {}

    def of(self, need: Need) -> Finder:
        finder = self._by_need.pop(need, None)
        if finder is None:
            if len(self._by_need) >= MAX_FINDERS:
                del self._by_need[next(iter(self._by_need))]
            finder = Finder(need, self._capacity)
        self._by_need[need] = finder
        return finder
