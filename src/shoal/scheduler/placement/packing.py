"""What a placement costs other jobs: how many fewer typical requests a node could take after it.

`ShapeCounts` counts the shapes of everything that is held and waits. It is a function of the present facts,
with no memory of its own, so a planner rebuilt from the same facts counts the same. Only shapes with GPUs
count, because placements compete for GPUs.

A node's worth is the sum over typical shapes of `weight * sqrt(how many of them it could take)`. A GPU that
no typical request could use, because too few CPUs or too small parts of shared GPUs are left, is worth
nothing. So placements that strand GPUs cost most. All numbers are integers, so that equal layouts cost
exactly the same however they are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.model.attempt import NodeTask
from shoal.model.node import is_slice, kinds_of
from shoal.scheduler.facts.amounts import MILLI, Need, NodeResources, millicpus_needed

NUM_SHAPES = 64
"""The most common shapes; the others are ignored."""


class RequestShape(NamedTuple):
    """What is asked of one node. The kind of GPU is not part of it, because holdings do not record it."""

    millicpus: int
    num_gpus: int
    gpu_milli: int


WHOLE_GPU_SHAPES = tuple(RequestShape(1, num_gpus, MILLI) for num_gpus in (1, 2, 4, 8))
"""Requests that may come next if no present request needs whole GPUs, so that shared GPUs are not spread over
all nodes."""
ShapeProfile = tuple[tuple[RequestShape, int], ...]
"""Shapes and their weights, the heaviest first. Weights are powers of four, so that one job more or less
seldom changes a profile; each change makes every node be evaluated again."""


def needed_shape(need: Need) -> RequestShape:
    return RequestShape(need.millicpus, need.num_gpus, need.gpu_milli)


def held_shape(task: NodeTask) -> RequestShape:
    return RequestShape(millicpus_needed(task.cpus), len(task.gpu_ids), task.gpu_milli)


class ShapeCounts:
    """Counts shapes as jobs come and go."""

    def __init__(self) -> None:
        self._counts: Counter[RequestShape] = Counter()
        self._num_shared = 0
        self._profile: ShapeProfile | None = ()

    def count(self, shape: RequestShape, num: int) -> None:
        """Add `num` nodes that are asked for the shape; negative removes."""
        if shape.num_gpus == 0:
            return
        self._counts[shape] += num
        if shape.gpu_milli < MILLI:
            self._num_shared += num
        if self._counts[shape] == 0:
            del self._counts[shape]
        self._profile = None

    def profile(self) -> ShapeProfile:
        """Return the profile: equal for equal counts, and for most that are nearly equal. Empty if no job
        shares GPUs.
        """
        if not self._num_shared:
            return ()
        if self._profile is None:
            steps = [(-((count.bit_length() + 1) // 2), shape) for shape, count in self._counts.items()]
            if all(shape.gpu_milli < MILLI for shape in self._counts):
                steps += [(min(steps)[0], shape) for shape in WHOLE_GPU_SHAPES]
            self._profile = tuple((shape, 4**-step) for step, shape in sorted(steps)[:NUM_SHAPES])
        return self._profile


MAX_REMEMBERED = 1 << 17
SCALE = 1 << 10
"""Steps of a square root."""
LARGE_WEIGHT = 0.1
"""How much whole GPUs on one node count."""
MAX_COUNTED_GPUS = 32
"""GPUs. A larger shape counts for no more than this, so that no sum of weights exceeds 64 bits."""

Ints = NDArray[np.int64]
FreeLayout = tuple[int, int, tuple[int, ...]]
"""Free CPUs in thousandths, unused GPUs, and what is left of each shared GPU."""


def size_weight(shape: RequestShape) -> int:
    """Small shapes can use the remainders of GPUs, and large shapes need what is rare. Both get a higher
    weight.
    """
    size = min(shape.num_gpus, MAX_COUNTED_GPUS) * shape.gpu_milli / MILLI
    return round(100 * (1 / size + LARGE_WEIGHT * size**3))


class Packing:
    """The worth of free layouts under one profile, cached. If no job shares GPUs there is no profile, and
    every placement costs zero.

    Whole GPUs alone are packed best by filling partly used nodes first, which `fit` does among equals.
    """

    def __init__(self) -> None:
        self.version = 0
        """Grows when the profile changes. Values computed before are stale then."""
        self._profile: ShapeProfile = ()
        self._worth: dict[FreeLayout, int] = {}

    def learn(self, profile: ShapeProfile) -> None:
        """Evaluate by this profile from now on."""
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
        """How many of each shape fit into a given number of thousandths of a shared GPU."""
        self._weight = np.array([weight * size_weight(shape) for shape, weight in profile], dtype=np.int64)

    def losses(self, need: Need, frees: Sequence[NodeResources], before: Sequence[FreeLayout]) -> list[int]:
        """Return what it costs to place `need` on nodes with this free capacity and layout, on
        which it fits.
        """
        if not self._profile:
            return [0] * len(frees)
        if len(self._worth) > MAX_REMEMBERED:
            self._worth.clear()
        after = [_after(need, free, layout) for free, layout in zip(frees, before, strict=True)]
        self._evaluate([layout for layout in {*before, *after} if layout not in self._worth])
        worth = self._worth
        return [
            worth[layout_before] - worth[layout_after]
            for layout_before, layout_after in zip(before, after, strict=True)
        ]

    def _evaluate(self, layouts: list[FreeLayout]) -> None:
        if not layouts:
            return
        # Free amounts are negative if a node shrank under its holdings. They are worth nothing.
        cpus = np.maximum(np.array([layout[0] for layout in layouts], dtype=np.int64), 0)
        gpus = np.maximum(np.array([layout[1] for layout in layouts], dtype=np.int64), 0)
        slots = gpus[:, None] // self._num_gpus * (MILLI // self._milli) + self._slots_of_parts(layouts)
        by_cpu = cpus[:, None] * MILLI // self._cpus
        num = np.minimum(slots * MILLI, by_cpu)
        # The square root of a float is rounded exactly, whatever else is in the array.
        roots = (np.sqrt(num.astype(np.float64)) * SCALE).astype(np.int64)
        self._worth.update(zip(layouts, (roots @ self._weight).tolist(), strict=True))

    def _slots_of_parts(self, layouts: list[FreeLayout]) -> Ints:
        """Return how many of each shape the shared GPUs could take; none for shapes of whole GPUs."""
        most = max([len(layout[2]) for layout in layouts])
        slots: Ints = np.zeros((len(layouts), len(self._milli)), dtype=np.int64)
        for index in range(most):
            slots += self._part_slots[
                [layout[2][index] if index < len(layout[2]) else 0 for layout in layouts]
            ]
        return slots


def free_layout(free: NodeResources) -> FreeLayout:
    return free.millicpus, free.num_gpus, tuple([left for _, left in free.parts]) if free.parts else ()


def _after(need: Need, free: NodeResources, layout: FreeLayout) -> FreeLayout:
    """Return a node's layout once `need` is placed there as `task_on` places it."""
    if need.is_exclusive:
        return 0, 0, ()
    cpus, gpus, parts = layout
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
