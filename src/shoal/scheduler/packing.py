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
        self._part_slots: Ints = np.arange(MILLI)[:, None] // self._milli
        """How many of each shape fit into so many thousandths of a shared GPU."""
        self._weight = np.array([weight * size_weight(shape) for shape, weight in profile], dtype=np.int64)

    def losses(self, need: Need, frees: Sequence[Amounts], before: Sequence[Look]) -> list[int]:
        """What it costs to place `need` on nodes that have so much free and look so, and on which it fits."""
        if not self._profile:
            return [0] * len(frees)
        if len(self._worth) > MAX_REMEMBERED:
            self._worth.clear()
        after = [_after(need, free, look) for free, look in zip(frees, before, strict=True)]
        self._judge([look for look in {*before, *after} if look not in self._worth])
        worth = self._worth
        return [worth[old] - worth[new] for old, new in zip(before, after, strict=True)]

    def _judge(self, looks: list[Look]) -> None:
        if not looks:
            return
        # Less than nothing is free where a node shrank under its holdings: that is worth nothing.
        cpus = np.maximum(np.array([look[0] for look in looks], dtype=np.int64), 0)
        gpus = np.maximum(np.array([look[1] for look in looks], dtype=np.int64), 0)
        slots = gpus[:, None] // self._num_gpus * (MILLI // self._milli) + self._slots_of_parts(looks)
        by_cpu = cpus[:, None] * MILLI // self._cpus
        num = np.minimum(slots * MILLI, by_cpu)
        # The square root of a float is rounded exactly, whatever comes with it in an array.
        roots = (np.sqrt(num.astype(np.float64)) * SCALE).astype(np.int64)
        self._worth.update(zip(looks, (roots @ self._weight).tolist(), strict=True))

    def _slots_of_parts(self, looks: list[Look]) -> Ints:
        """How many of each shape the shared GPUs could take; none for shapes of whole ones."""
        most = max([len(look[2]) for look in looks])
        slots: Ints = np.zeros((len(looks), len(self._milli)), dtype=np.int64)
        for place in range(most):
            slots += self._part_slots[[look[2][place] if place < len(look[2]) else 0 for look in looks]]
        return slots


def look_of(free: Amounts) -> Look:
    return free.millicpus, free.num_gpus, tuple([left for _, left in free.parts]) if free.parts else ()


def _after(need: Need, free: Amounts, look: Look) -> Look:
    """How a node looks once `need` is placed there, as `share_of` places it."""
    if need.is_exclusive:
        return 0, 0, ()
    cpus, gpus, parts = look
    cpus -= need.millicpus
    if need.gpu_milli == MILLI:
        has_slices = need.gpu_kind is not None and is_slice(need.gpu_kind)
        return cpus, gpus if has_slices else gpus - need.num_gpus, parts
    if need.gpu_kind is None:
        usable = [left for left in parts if left >= need.gpu_milli]
    else:
        kinds = kinds_of(need.gpu_kind)
        usable = [left for kind, left in free.parts if left >= need.gpu_milli and kind in kinds]
    left = list(parts)
    if usable:
        fullest = min(usable)
        left.remove(fullest)
        if fullest > need.gpu_milli:
            left.append(fullest - need.gpu_milli)
    else:
        gpus -= 1
        left.append(MILLI - need.gpu_milli)
    return cpus, gpus, tuple(sorted(left))
