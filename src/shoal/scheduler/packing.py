"""What a placement costs others: how many typical requests fewer a node could take after it.

A node's worth is the sum over typical shapes of `weight * sqrt(how many of them it could take)`. What is too
large for the CPUs that are left beside it, or for the parts that are left of shared GPUs, is worth nothing:
placements that strand GPUs cost most. All in whole numbers, so that equal looks cost exactly the same however
they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.model.node import is_slice, kinds_of
from shoal.scheduler.amounts import MILLI, Amounts, Need
from shoal.scheduler.typical import Profile, Shape

MAX_REMEMBERED = 1 << 17
SCALE = 1 << 10
"""Steps of a square root."""
LARGE = 0.1
"""How much whole GPUs that lie together count."""
LARGEST = 32
"""GPUs: beyond that a shape counts for no more, and no sum of weights leaves 64 bits."""

Ints = NDArray[np.int64]
Look = tuple[int, int, tuple[int, ...]]
"""Free CPUs in thousandths, GPUs nobody uses, and what is left of each that is shared."""


def size_weight(shape: Shape) -> int:
    """Small ones find places for what is left of GPUs, large ones need what is rare: both count for more."""
    size = min(shape.num_gpus, LARGEST) * shape.gpu_milli / MILLI
    return round(100 * (1 / size + LARGE * size**3))


class Packing:
    """The worth of looks under one profile, remembered. Where nobody shares GPUs there is none, and nothing
    costs anything.

    Whole GPUs alone are packed best by filling broken nodes first, which is what `fit` does among equals.
    """

    def __init__(self) -> None:
        self.version = 0
        """Grows when the profile changes: what was computed before is old then."""
        self._profile: Profile = ()
        self._worth: dict[Look, int] = {}

    def learn(self, profile: Profile) -> None:
        """Judge by these shapes from now on."""
        if profile == self._profile:
            return
        self._profile = profile
        self._worth.clear()
        self.version += 1
        shapes = [shape for shape, _ in profile]
        self._cpus = np.array([max(shape.millicpus, 1) for shape in shapes], dtype=np.int64)
        self._num_gpus = np.array([shape.num_gpus for shape in shapes], dtype=np.int64)
        self._milli = np.array([shape.gpu_milli for shape in shapes], dtype=np.int64)
        self._weight = np.array([weight * size_weight(shape) for shape, weight in profile], dtype=np.int64)

    def losses(self, need: Need, frees: Sequence[Amounts]) -> list[int]:
        """What it costs to place `need` on nodes that have so much free, on each of which it fits."""
        if not self._profile:
            return [0] * len(frees)
        if len(self._worth) > MAX_REMEMBERED:
            self._worth.clear()
        before = [_look(free) for free in frees]
        after = [_after(need, free) for free in frees]
        self._judge([look for look in {*before, *after} if look not in self._worth])
        worth = self._worth
        return [worth[old] - worth[new] for old, new in zip(before, after, strict=True)]

    def _judge(self, looks: list[Look]) -> None:
        if not looks:
            return
        cpus = np.array([look[0] for look in looks], dtype=np.int64)
        gpus = np.array([look[1] for look in looks], dtype=np.int64)
        slots = gpus[:, None] // self._num_gpus * (MILLI // self._milli) + self._part_slots(looks)
        by_cpu = np.maximum(cpus, 0)[:, None] * MILLI // self._cpus
        num = np.minimum(slots * MILLI, by_cpu)
        # The square root of a float is rounded exactly, whatever comes with it in an array.
        roots = (np.sqrt(num.astype(np.float64)) * SCALE).astype(np.int64)
        self._worth.update(zip(looks, (roots @ self._weight).tolist(), strict=True))

    def _part_slots(self, looks: list[Look]) -> Ints:
        """How many of each shape the shared GPUs could take; none for shapes of whole ones."""
        most = max(len(look[2]) for look in looks)
        parts = np.zeros((len(looks), most), dtype=np.int64)
        for row, look in enumerate(looks):
            parts[row, : len(look[2])] = look[2]
        slots: Ints = (parts[:, None, :] // self._milli[:, None]).sum(axis=2)
        return slots


def _look(free: Amounts) -> Look:
    return free.millicpus, free.num_gpus, tuple([left for _, left in free.parts])


def _after(need: Need, free: Amounts) -> Look:
    """How a node looks once `need` is placed there, as `share_of` places it."""
    if need.is_exclusive:
        return 0, 0, ()
    cpus, gpus, parts = _look(free)
    cpus -= need.millicpus
    if need.gpu_milli == MILLI:
        has_slices = need.gpu_kind is not None and is_slice(need.gpu_kind)
        return cpus, gpus if has_slices else gpus - need.num_gpus, parts
    kinds = kinds_of(need.gpu_kind) if need.gpu_kind else None
    usable = [left for kind, left in free.parts if left >= need.gpu_milli and (not kinds or kind in kinds)]
    left = list(parts)
    if usable:
        left.remove(min(usable))
        left.append(min(usable) - need.gpu_milli)
    else:
        gpus -= 1
        left.append(MILLI - need.gpu_milli)
    return cpus, gpus, tuple(left)
