"""Expected fragmentation: how much of a node's free GPUs a typical request could not use.

For one kind of request: everything, if the node cannot take it at all; else the GPUs too full for it. The
expected amount weighs the kinds by how often they are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.sim.references.packing.cluster import Cluster, Ints
from shoal.sim.traces.openb import Pod

Floats = NDArray[np.float64]
POPULAR = 0.95
"""Of all pods: the rarer kinds are left out, as published."""


class Fragments:
    """The kinds of request in a workload. Memory is no part of a kind."""

    def __init__(self, pods: Sequence[Pod]) -> None:
        counted = Counter((pod.cpu_milli, pod.num_gpus, pod.gpu_milli, pod.models) for pod in pods)
        kinds, seen = [], 0
        for kind, count in sorted(counted.items(), key=lambda item: (-item[1], item[0])):
            if seen >= POPULAR * len(pods):
                break
            kinds.append((kind, count))
            seen += count
        self._weight = np.array([count / seen for _, count in kinds])
        self._cpu = np.array([kind[0] for kind, _ in kinds])
        self._num_gpus = np.array([kind[1] for kind, _ in kinds])
        self._gpu_milli = np.array([kind[2] for kind, _ in kinds])
        self._models = [kind[3] for kind, _ in kinds]

    def accessible(self, cluster: Cluster) -> NDArray[np.bool_]:
        """For each node, which kinds its model admits."""
        return np.stack([cluster.accessible(models) for models in self._models], axis=1)

    def expected(self, cpu: Ints, gpus: Ints, accessible: NDArray[np.bool_]) -> Floats:
        """For each of these nodes, in thousandths of a GPU."""
        is_open = gpus[:, None, :] >= self._gpu_milli[:, None]
        can_take = (is_open.sum(axis=2) >= self._num_gpus) & (cpu[:, None] >= self._cpu) & accessible
        # A kind without GPUs can use none of them: all that is free counts as fragmented.
        can_take &= self._num_gpus > 0
        unusable = np.where(is_open, 0, gpus[:, None, :]).sum(axis=2)
        lost = np.where(can_take, unusable, gpus.sum(axis=1)[:, None])
        total: Floats = lost @ self._weight
        return total
