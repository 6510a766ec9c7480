"""Which nodes can hold a need now, the tightest first, and what each of them takes.

Best fit: the fewest GPUs left over, then the fewest CPUs, then the name. Broken nodes fill up and
whole ones stay whole for those that need them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush, merge
from itertools import islice

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import MILLI, Amounts, Need
from shoal.scheduler.capacity import Capacity, Group, NodeUse

SHORT_OF = ("gpus", "cpus", "memory", "disk")
"""What a node may be short of, in the order people are told."""


def fits(need: Need, whole: Amounts, free: Amounts) -> bool:
    """Whether a node that has `whole` in all can give `need` out of `free`."""
    return (
        need.millicpus <= free.millicpus
        and (need.num_gpus == 0 or need.num_gpus <= free.gpus_of(need.gpu_kind))
        and need.memory_on(whole) <= free.memory_bytes
        and need.disk_bytes <= free.disk_bytes
    )


def shortages(need: Need, whole: Amounts, free: Amounts) -> tuple[str, ...]:
    """What is missing, of `SHORT_OF`; empty exactly when it fits."""
    is_short = (
        need.num_gpus > 0 and need.num_gpus > free.gpus_of(need.gpu_kind),
        need.millicpus > free.millicpus,
        need.memory_on(whole) > free.memory_bytes,
        need.disk_bytes > free.disk_bytes,
    )
    return tuple(name for name, short in zip(SHORT_OF, is_short, strict=True) if short)


def share_of(need: Need, node: NodeUse) -> NodeShare:
    """What `need` takes of a node it fits on: the GPUs with the lowest numbers."""
    usable = (gpu.index for gpu in node.free_gpus if need.gpu_kind in (None, gpu.kind))
    return NodeShare(
        node=node.name,
        cpus=need.millicpus / MILLI,
        memory_bytes=need.memory_on(node.whole),
        disk_bytes=need.disk_bytes,
        gpu_ids=tuple(islice(usable, need.num_gpus)),
    )


MAX_FINDERS = 4096

Entry = tuple[int, int, int, Group]
"""GPUs left over, CPUs left over, the group's number, the group."""


class Finder:
    """The nodes that fit one need, in order, kept while capacity comes and goes.

    Only groups born since the last look must be looked at: a placement costs as much as changed since, not
    as many nodes as there are.
    """

    def __init__(self, need: Need, capacity: Capacity) -> None:
        self._need = need
        self._capacity = capacity
        self._read = -1
        self._queue: list[Entry] = []

    def fits_anywhere(self) -> bool:
        """Whether any open node fits now."""
        self._catch_up()
        while self._queue and not self._queue[0][3].names:
            heappop(self._queue)
        return bool(self._queue)

    def ranked(self, barred: AbstractSet[str], limit: int | None = None) -> list[str]:
        """Names of nodes that fit now, the best first, at most `limit`, none of `barred`."""
        self._catch_up()
        found: list[str] = []
        looked_at: list[Entry] = []
        while self._queue and (limit is None or len(found) < limit):
            alike = self._pop_equals()
            looked_at += alike
            names = _merged([entry[3] for entry in alike], barred)
            found += islice(names, None if limit is None else limit - len(found))
        for entry in looked_at:
            heappush(self._queue, entry)
        return found

    def _catch_up(self) -> None:
        born = self._capacity.born
        if self._read == born.end:
            return
        new = born.since(self._read)
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
        for group in groups:
            if group.names and fits(need, group.whole, group.free):
                gpus_left = group.free.num_gpus - need.num_gpus
                cpus_left = group.free.millicpus - need.millicpus
                heappush(self._queue, (gpus_left, cpus_left, group.number, group))

    def _pop_equals(self) -> list[Entry]:
        """The groups that are equally good; empty ones are dropped for good."""
        equals: list[Entry] = []
        while self._queue and (not equals or self._queue[0][:2] == equals[0][:2]):
            entry = heappop(self._queue)
            if entry[3].names:
                equals.append(entry)
        return equals


class Finders:
    """One finder a need, as many as are asked for now and then."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._by_need: dict[Need, Finder] = {}

    def of(self, need: Need) -> Finder:
        finder = self._by_need.get(need)
        if finder is None:
            if len(self._by_need) >= MAX_FINDERS:
                self._by_need.clear()
            finder = self._by_need[need] = Finder(need, self._capacity)
        return finder


def _merged(groups: list[Group], barred: AbstractSet[str]) -> Iterator[str]:
    names = iter(groups[0].names) if len(groups) == 1 else merge(*(group.names for group in groups))
    return (name for name in names if name not in barred) if barred else names
