"""Which GPUs of a node are unused, and how much is left of the shared ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from shoal.model.attempt import NodeTask
from shoal.model.node import is_slice, kinds_of
from shoal.scheduler.facts.amounts import MILLI
from shoal.scheduler.facts.snapshot import GpuInfo


class FreeDevices(NamedTuple):
    """The last three fields of `NodeResources`."""

    num_gpus: int
    gpus: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, int], ...] = ()


class GpuUse:
    """A node's devices and the thousandths of each that are in use."""

    __slots__ = ("_used", "all", "free", "unused")

    def __init__(self, gpus: Iterable[GpuInfo]) -> None:
        self.all = tuple(sorted(gpus, key=lambda gpu: gpu.index))
        self._used: dict[int, int] = {}
        self.unused = self.all
        """The unused devices, in order of their indexes."""
        self.free = self._count_free()

    def copy(self) -> GpuUse:
        other = GpuUse(())
        other.all, other.unused, other.free = self.all, self.unused, self.free
        other._used = dict(self._used)
        return other

    def use(self, task: NodeTask, sign: int) -> None:
        """Take (1) or give back (-1) what the task holds. Devices that no longer exist are ignored."""
        for index in task.gpu_ids:
            used = self._used.get(index, 0) + sign * task.gpu_milli
            if used:
                self._used[index] = used
            else:
                del self._used[index]
        self.unused = tuple(gpu for gpu in self.all if gpu.index not in self._used)
        self.free = self._count_free()

    def without(self, tasks: Iterable[NodeTask]) -> FreeDevices:
        """Return what would be free if these tasks were given back."""
        other = self.copy()
        for task in tasks:
            other.use(task, -1)
        return other.free

    def shared_gpu_index(self, milli: int, kind: str | None) -> int | None:
        """Return the device to share: the fullest one with `milli` left, or else an unused one."""
        shared = [
            (MILLI - used, gpu.index)
            for gpu in self.all
            if (used := self._used.get(gpu.index, 0)) and used + milli <= MILLI and matches_kind(gpu, kind)
        ]
        if shared:
            return min(shared)[1]
        return next((gpu.index for gpu in self.unused if matches_kind(gpu, kind)), None)

    def _count_free(self) -> FreeDevices:
        gpus = tuple(sorted(Counter(gpu.kind for gpu in self.unused).items()))
        num_gpus = sum(count for kind, count in gpus if not is_slice(kind))
        if len(self._used) + len(self.unused) == len(self.all) and all(
            used == MILLI for used in self._used.values()
        ):
            return FreeDevices(num_gpus, gpus)
        left = (
            (gpu.kind, MILLI - self._used[gpu.index])
            for gpu in self.all
            if 0 < self._used.get(gpu.index, 0) < MILLI and not is_slice(gpu.kind)
        )
        return FreeDevices(num_gpus, gpus, tuple(sorted(left)))


def matches_kind(gpu: GpuInfo, kind: str | None) -> bool:
    """Whether a request for `kind` may be given the device. A MIG slice is given only if the request names
    it.
    """
    return gpu.kind in kinds_of(kind) if kind is not None else not is_slice(gpu.kind)
