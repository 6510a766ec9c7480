"""What one node has once some of those who hold there are gone.

A search asks that thousands of times. Where whole GPUs of any kind are asked for and held, four integers
answer it; where kinds, slices or parts of GPUs matter, the devices themselves are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.model.attempt import NodeShare
from shoal.model.node import kinds_of
from shoal.scheduler.amounts import MILLI, Amounts, Need, less, millicpus_needed
from shoal.scheduler.capacity import NodeUse
from shoal.scheduler.fit import fits
from shoal.scheduler.release import free_without

Counts = tuple[int, int, int, int]
"""Thousandths of CPUs, bytes of memory and of disk, GPUs."""


class Vacancy:
    def __init__(
        self, node: NodeUse, need: Need, shares: Mapping[str, NodeShare], taken: Sequence[Need]
    ) -> None:
        """`shares`: all that is held there, by attempt. `taken`: needs it must hold besides."""
        self._node = node
        self._need = need
        self._shares = shares
        self._taken = taken
        self._gone: dict[str, None] = {}
        self._back: dict[str, Counts] | None = None
        """What each of them gives back; None: counting will not do."""
        self._free = self._needed = (0, 0, 0, 0)
        if _can_count(node, shares, (need, *taken)):
            self._back = {attempt_id: _counts(share) for attempt_id, share in shares.items()}
            self._needed = _needs(need, node.whole)
            self._free = node.free[:4]
            for one in taken:
                self._free = _sum(self._free, _needs(one, node.whole), -1)

    def leave(self, attempt_id: str) -> None:
        """It counts as gone."""
        if attempt_id not in self._gone:
            self._gone[attempt_id] = None
            if self._back is not None:
                self._free = _sum(self._free, self._back[attempt_id], 1)

    def stay(self, attempt_id: str) -> None:
        """It does not any more."""
        if attempt_id in self._gone:
            del self._gone[attempt_id]
            if self._back is not None:
                self._free = _sum(self._free, self._back[attempt_id], -1)

    def fits(self, also: Iterable[str] = ()) -> bool:
        """Whether the need does once those are gone as well."""
        if self._back is None:
            return fits(self._need, self._node.whole, self.free(also))
        cpus, memory, disk, gpus = self._free
        for attempt_id in also:
            back = self._back[attempt_id]
            cpus, memory, disk, gpus = cpus + back[0], memory + back[1], disk + back[2], gpus + back[3]
        needed = self._needed
        return cpus >= needed[0] and gpus >= needed[3] and memory >= needed[1] and disk >= needed[2]

    def left(self, also: Iterable[str] = ()) -> tuple[int, int]:
        """GPUs that are free then and thousandths of CPUs: the fewer, the tighter."""
        if self._back is None:
            free = self.free(also)
            return free.num_gpus, free.millicpus
        cpus, _, _, gpus = self._free
        for attempt_id in also:
            cpus, gpus = cpus + self._back[attempt_id][0], gpus + self._back[attempt_id][3]
        return gpus, cpus

    def free(self, also: Iterable[str] = ()) -> Amounts:
        """All that is free then."""
        free = free_without(self._node, [self._shares[one] for one in (*self._gone, *also)])
        for need in self._taken:
            free = less(free, need, self._node.whole)
        return free

    def use_of(self, attempt_id: str) -> float:
        """How many of the devices that it gives back the need has use for."""
        share, need = self._shares[attempt_id], self._need
        if need.num_gpus:
            return max(min(share.num_gpus, need.num_gpus * need.gpu_milli / MILLI), 0.01)
        return max(min(share.cpus, need.millicpus / MILLI), 0.01)

    def alike(self, attempt_id: str) -> Counts | None:
        """Of two that give back the same, it does not matter which stops; None: it may."""
        return None if self._back is None else self._back[attempt_id]


def _can_count(node: NodeUse, shares: Mapping[str, NodeShare], needs: Iterable[Need]) -> bool:
    """Whether the number of GPUs tells all: none is a slice, shared or gone, and kinds make no difference."""
    kinds = [kind for kind, _ in node.whole.gpus]
    if sum(count for _, count in node.whole.gpus) != node.whole.num_gpus:
        return False
    for need in needs:
        if need.is_exclusive or need.gpu_milli != MILLI:
            return False
        if need.gpu_kind is not None and not (len(kinds) == 1 and kinds[0] in kinds_of(need.gpu_kind)):
            return False
    held = 0
    for share in shares.values():
        if share.gpu_ids and share.gpu_milli != MILLI:
            return False
        held += len(share.gpu_ids)
    return held + len(node.devices.unused) == len(node.devices.all)


def _counts(share: NodeShare) -> Counts:
    return millicpus_needed(share.cpus), share.memory_bytes, share.disk_bytes, len(share.gpu_ids)


def _needs(need: Need, whole: Amounts) -> Counts:
    return need.millicpus, need.memory_on(whole), need.disk_bytes, need.num_gpus


def _sum(first: Counts, second: Counts, sign: int) -> Counts:
    return (
        first[0] + sign * second[0],
        first[1] + sign * second[1],
        first[2] + sign * second[2],
        first[3] + sign * second[3],
    )
