"""What is usually asked for here: the shapes of all that is held and waits, and how common each of them is.

A function of what is held and what waits now, with no memory of its own: a planner built anew from the same
facts knows the same. Only shapes with GPUs count, which are what placements compete for.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from shoal.model.attempt import NodeShare
from shoal.scheduler.amounts import MILLI, Need, millicpus_needed

NUM_SHAPES = 64
"""The most common: the others are left out."""


class Shape(NamedTuple):
    """Of what is asked of one node. Which kind of GPU is no part of it: holdings do not tell."""

    millicpus: int
    num_gpus: int
    gpu_milli: int


WHOLE = tuple(Shape(1, num_gpus, MILLI) for num_gpus in (1, 2, 4, 8))
"""Who may ask next where nobody asks for whole GPUs now: parts are not to be strewn over all nodes."""
Profile = tuple[tuple[Shape, int], ...]
"""Shapes and their weights, the heaviest first. Weights are powers of four, so that one job more or less
seldom changes a profile, upon which every node is looked at again."""


def shape_asked(need: Need) -> Shape:
    return Shape(need.millicpus, need.num_gpus, need.gpu_milli)


def shape_held(share: NodeShare) -> Shape:
    return Shape(millicpus_needed(share.cpus), len(share.gpu_ids), share.gpu_milli)


class Typical:
    """Counts shapes as they come and go."""

    def __init__(self) -> None:
        self._counts: Counter[Shape] = Counter()
        self._num_shared = 0
        self._profile: Profile | None = ()

    def count(self, shape: Shape, num: int) -> None:
        """So many more nodes are asked to give it; fewer when negative."""
        if shape.num_gpus == 0:
            return
        self._counts[shape] += num
        if shape.gpu_milli < MILLI:
            self._num_shared += num
        if self._counts[shape] == 0:
            del self._counts[shape]
        self._profile = None

    def profile(self) -> Profile:
        """Equal for equal counts, and for most that are nearly equal. Empty where nobody shares GPUs."""
        if not self._num_shared:
            return ()
        if self._profile is None:
            steps = [(-((count.bit_length() + 1) // 2), shape) for shape, count in self._counts.items()]
            if all(shape.gpu_milli < MILLI for shape in self._counts):
                steps += [(min(steps)[0], shape) for shape in WHOLE]
            self._profile = tuple((shape, 4**-step) for step, shape in sorted(steps)[:NUM_SHAPES])
        return self._profile
