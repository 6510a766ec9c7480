"""Which GPUs of a node nobody uses, and how much is left of those that are shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from shoal.model.attempt import NodeShare
from shoal.model.node import is_slice, kinds_of
from shoal.scheduler.amounts import MILLI
from shoal.scheduler.snapshot import GpuView


class FreeDevices(NamedTuple):
    """The last three of `Amounts`."""

    num_gpus: int
    gpus: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, int], ...] = ()


class GpuUse:
    """A node's devices and what is used of each, in thousandths."""

    __slots__ = ("_used", "all", "free", "unused")

    def __init__(self, gpus: Iterable[GpuView]) -> None:
        self.all = tuple(sorted(gpus, key=lambda gpu: gpu.index))
        self._used: dict[int, int] = {}
        self.unused = self.all
        """Those that nobody uses, in order of their numbers."""
        self.free = self._look()

    def copy(self) -> GpuUse:
        other = GpuUse(())
        other.all, other.unused, other.free = self.all, self.unused, self.free
        other._used = dict(self._used)
        return other

    def use(self, share: NodeShare, sign: int) -> None:
        """Take (1) or give back (-1) what the share has. Devices that are gone meanwhile are nobody's."""
        for index in share.gpu_ids:
            used = self._used.get(index, 0) + sign * share.gpu_milli
            if used:
                self._used[index] = used
            else:
                del self._used[index]
        self.unused = tuple(gpu for gpu in self.all if gpu.index not in self._used)
        self.free = self._look()

    def without(self, shares: Iterable[NodeShare]) -> FreeDevices:
        """What would be free if those were given back."""
        other = self.copy()
        for share in shares:
            other.use(share, -1)
        return other.free

    def part(self, milli: int, kind: str | None) -> int | None:
        """The number of a device to share: the fullest that has so much left, else one nobody uses."""
        shared = [
            (MILLI - used, gpu.index)
            for gpu in self.all
            if (used := self._used.get(gpu.index, 0)) and used + milli <= MILLI and is_of(gpu, kind)
        ]
        if shared:
            return min(shared)[1]
        return next((gpu.index for gpu in self.unused if is_of(gpu, kind)), None)

    def _look(self) -> FreeDevices:
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


def is_of(gpu: GpuView, kind: str | None) -> bool:
    """Whether somebody who asks for `kind` may be given the device: a slice is given by name alone."""
    return gpu.kind in kinds_of(kind) if kind is not None else not is_slice(gpu.kind)
