"""What one node has free once chosen attempts have stopped, and which attempts must stop there for a need to
fit.

A search asks this thousands of times. If only whole GPUs of any kind are needed and held, four integers
answer it. If kinds, slices or parts of GPUs matter, the devices themselves are examined.

`cheapest_set` finds the attempts that lose least together. It is exact if few jobs run on the node or all of
them free the same. Otherwise it goes by the loss per device of use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.model.attempt import NodeTask
from shoal.model.node import kinds_of
from shoal.scheduler.facts.amounts import MILLI, Need, NodeResources, millicpus_needed, remaining_after
from shoal.scheduler.facts.capacity import NodeUse
from shoal.scheduler.placement.earliest import free_without
from shoal.scheduler.placement.fit import fits

Counts = tuple[int, int, int, int]
"""Thousandths of CPUs, bytes of memory and of disk, GPUs."""


class FreedCapacity:
    def __init__(
        self, node: NodeUse, need: Need, tasks: Mapping[str, NodeTask], reserved: Sequence[Need]
    ) -> None:
        """`tasks`: all that is held there, by attempt. `reserved`: needs that the node must hold in
        addition.
        """
        self._node = node
        self._need = need
        self._tasks = tasks
        self._reserved = reserved
        self._gone: dict[str, None] = {}
        self._back: dict[str, Counts] | None = None
        """What each attempt frees; None: counting is not enough."""
        self._free = self._needed = (0, 0, 0, 0)
        if _can_count(node, tasks, (need, *reserved)):
            self._back = {attempt_id: _counts(task) for attempt_id, task in tasks.items()}
            self._needed = _needs(need, node.whole)
            self._free = node.free[:4]
            for reserved_need in reserved:
                self._free = _sum(self._free, _needs(reserved_need, node.whole), -1)

    def leave(self, attempt_id: str) -> None:
        """Count the attempt as stopped."""
        if attempt_id not in self._gone:
            self._gone[attempt_id] = None
            if self._back is not None:
                self._free = _sum(self._free, self._back[attempt_id], 1)

    def stay(self, attempt_id: str) -> None:
        """Do not count the attempt as stopped any more."""
        if attempt_id in self._gone:
            del self._gone[attempt_id]
            if self._back is not None:
                self._free = _sum(self._free, self._back[attempt_id], -1)

    def fits(self, also: Iterable[str] = ()) -> bool:
        """Whether the need fits once those in `also` have stopped too."""
        if self._back is None:
            return fits(self._need, self._node.whole, self.free(also))
        cpus, memory, disk, gpus = self._free
        for attempt_id in also:
            back = self._back[attempt_id]
            cpus, memory, disk, gpus = cpus + back[0], memory + back[1], disk + back[2], gpus + back[3]
        needed = self._needed
        return cpus >= needed[0] and gpus >= needed[3] and memory >= needed[1] and disk >= needed[2]

    def left(self, also: Iterable[str] = ()) -> tuple[int, int]:
        """Return the GPUs and thousandths of CPUs that are free then: the fewer, the tighter."""
        if self._back is None:
            free = self.free(also)
            return free.num_gpus, free.millicpus
        cpus, _, _, gpus = self._free
        for attempt_id in also:
            cpus, gpus = cpus + self._back[attempt_id][0], gpus + self._back[attempt_id][3]
        return gpus, cpus

    def free(self, also: Iterable[str] = ()) -> NodeResources:
        """Return all that is free then."""
        free = free_without(self._node, [self._tasks[attempt_id] for attempt_id in (*self._gone, *also)])
        for need in self._reserved:
            free = remaining_after(free, need, self._node.whole)
        return free

    def use_of(self, attempt_id: str) -> float:
        """Return how many of the devices that the attempt frees are of use to the need."""
        task, need = self._tasks[attempt_id], self._need
        if need.num_gpus:
            return max(min(task.num_gpus, need.num_gpus * need.gpu_milli / MILLI), 0.01)
        return max(min(task.cpus, need.millicpus / MILLI), 0.01)

    def alike(self, attempt_id: str) -> Counts | None:
        """Of two attempts that free the same, it does not matter which stops. None: it may matter."""
        return None if self._back is None else self._back[attempt_id]


def _can_count(node: NodeUse, tasks: Mapping[str, NodeTask], needs: Iterable[Need]) -> bool:
    """Whether the number of GPUs is enough: none is a slice, shared or gone, and kinds make no difference."""
    kinds = [kind for kind, _ in node.whole.gpus]
    if sum(count for _, count in node.whole.gpus) != node.whole.num_gpus:
        return False
    for need in needs:
        if need.is_exclusive or need.gpu_milli != MILLI:
            return False
        if need.gpu_kind is not None and not (len(kinds) == 1 and kinds[0] in kinds_of(need.gpu_kind)):
            return False
    held = 0
    for task in tasks.values():
        if task.gpu_ids and task.gpu_milli != MILLI:
            return False
        held += len(task.gpu_ids)
    return held + len(node.devices.unused) == len(node.devices.all)


def _counts(task: NodeTask) -> Counts:
    return millicpus_needed(task.cpus), task.memory_bytes, task.disk_bytes, len(task.gpu_ids)


def _needs(need: Need, whole: NodeResources) -> Counts:
    return need.millicpus, need.memory_on(whole), need.disk_bytes, need.num_gpus


def _sum(first: Counts, second: Counts, sign: int) -> Counts:
    return (
        first[0] + sign * second[0],
        first[1] + sign * second[1],
        first[2] + sign * second[2],
        first[3] + sign * second[3],
    )


EXACT_UP_TO = 6
"""Jobs on one node up to which every set is tried that could lose less than the best so far."""


def cheapest_set(
    freed: FreedCapacity, losses: Mapping[str, float], need: Need, *, is_rough: bool = False
) -> list[str] | None:
    """Return the cheapest attempts that make room for the need; None: all of them are not enough.

    `losses`: the attempts that may be asked, and what each would lose. `is_rough`: return all of them if any
    are needed.
    """
    if freed.fits():
        return []
    if not freed.fits(losses):
        return None
    if is_rough or need.is_exclusive:
        return list(losses)
    few = _greedy(freed, losses)
    gives = {freed.alike(attempt_id) for attempt_id in losses}
    if len(losses) > EXACT_UP_TO or (len(gives) == 1 and None not in gives):
        return few
    return _exact(freed, losses, few)


def _greedy(freed: FreedCapacity, losses: Mapping[str, float]) -> list[str]:
    """Choose by loss per device of use, then remove each attempt that turns out not to be needed."""
    chosen: list[str] = []
    for attempt_id in sorted(
        losses, key=lambda attempt_id: (losses[attempt_id] / freed.use_of(attempt_id), attempt_id)
    ):
        chosen.append(attempt_id)
        if freed.fits(chosen):
            break
    for attempt_id in sorted(chosen, key=lambda attempt_id: (-losses[attempt_id], attempt_id)):
        fewer = [other for other in chosen if other is not attempt_id]
        if freed.fits(fewer):
            chosen = fewer
    return chosen


def _exact(freed: FreedCapacity, losses: Mapping[str, float], best: list[str]) -> list[str]:
    """Return the cheapest of all sets; `best` if none is cheaper."""
    names = sorted(losses, key=lambda attempt_id: (losses[attempt_id], attempt_id))
    least = sum(losses[attempt_id] for attempt_id in best)
    sets: list[tuple[int, float, list[str]]] = [(0, 0.0, [])]
    while sets:
        start, loss, chosen = sets.pop()
        for index in range(start, len(names)):
            more = loss + losses[names[index]]
            if more >= least:
                break  # the attempts after it lose no less
            with_it = [*chosen, names[index]]
            if freed.fits(with_it):
                best, least = with_it, more
            else:
                sets.append((index + 1, more, with_it))
    return best
