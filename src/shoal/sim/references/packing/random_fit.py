"""Any node it fits on, and any GPU of it: the floor."""

from __future__ import annotations

from random import Random

import numpy as np

from shoal.sim.references.packing.cluster import Cluster, Ints, Request


class RandomFit:
    def __init__(self, random: Random) -> None:
        self._random = random

    def place(self, cluster: Cluster, request: Request, fitting: Ints) -> tuple[int, int | None]:
        node = int(fitting[self._random.randrange(len(fitting))])
        if not request.is_shared:
            return node, None
        gpus = np.flatnonzero(cluster.gpus[node] >= request.gpu_milli)
        return node, int(gpus[self._random.randrange(len(gpus))])
