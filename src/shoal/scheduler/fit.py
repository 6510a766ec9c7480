"""Which nodes can hold a need now, the tightest first, and what each of them takes.

Best fit: the fewest GPUs left over, then the fewest CPUs, then the name. Broken nodes fill up and
whole ones stay whole for those that need them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


NUM_HOPELESS = 64

Entry = tuple[int, int, int, Group]
"""GPUs left over, CPUs left over, the group's number, the group."""


class Finder:
    """The nodes that fit one need, kept in order while the cycle hands out capacity.

    Nothing becomes free within a cycle, so only groups born since the last look must be looked at: a
    placement costs as much as changed since, not as many nodes as there are.
    """

    def __init__(self, need: Need, born: list[Group], groups: Iterable[Group]) -> None:
        """`groups` are to be looked at now, and those that come to be `born` when they are."""
        self._need = need
        self._born = born
        self._num_read = len(born)
        self._queue: list[Entry] = []
        self._add(groups)

    @property
    def is_empty(self) -> bool:
        """True after a search that found that no node fits, barred or not."""
        return not self._queue

    def ranked(self, barred: frozenset[str], limit: int | None = None) -> list[str]:
        """Names of nodes that fit now, the best first, at most `limit`, none of `barred`."""
        self._add(self._born[self._num_read :])
        self._num_read = len(self._born)
        found: list[str] = []
        looked_at: list[Entry] = []
        while self._queue and (limit is None or len(found) < limit):
            alike = self._pop_equals()
            looked_at += alike
            names = _merged((entry[3] for entry in alike), barred)
            found += islice(names, None if limit is None else limit - len(found))
        for entry in looked_at:
            heappush(self._queue, entry)
        return found

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
    """One finder a need. What asks for more than something that fits nowhere is not searched for at all."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._by_need: dict[Need, Finder] = {}
        self._hopeless: list[Need] = []

    def of(self, need: Need) -> Finder:
        if need not in self._by_need:
            is_hopeless = any(less.asks_no_more_than(need) for less in self._hopeless)
            groups = () if is_hopeless else self._capacity.groups
            self._by_need[need] = Finder(need, self._capacity.born, groups)
        return self._by_need[need]

    def note_failure(self, need: Need) -> None:
        """Remember a need that no node fits; the smallest ones, and only so many that asking stays cheap."""
        if not self.of(need).is_empty or any(less.asks_no_more_than(need) for less in self._hopeless):
            return
        smallest = [other for other in self._hopeless if not need.asks_no_more_than(other)]
        self._hopeless = [*smallest, need][-NUM_HOPELESS:]


def _merged(groups: Iterable[Group], barred: frozenset[str]) -> Iterator[str]:
    names = merge(*(group.names for group in groups))
    return (name for name in names if name not in barred) if barred else names
