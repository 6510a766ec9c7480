"""The node that has least left afterwards, CPU and GPUs counted half each, and its fullest GPU with room."""

from __future__ import annotations

import numpy as np

from shoal.sim.references.packing.cluster import Cluster, Ints, Request
from shoal.sim.traces.openb import MILLI

LARGEST_CPU_MILLI = 128_000
LARGEST_GPU_MILLI = 8 * MILLI
STEPS = 100
"""The published scores are whole numbers to 100; nodes within one step are alike, and the first name wins."""


class BestFit:
    def place(self, cluster: Cluster, request: Request, fitting: Ints) -> tuple[int, int | None]:
        cpu = (cluster.cpu[fitting] - request.cpu_milli) / LARGEST_CPU_MILLI
        gpu = (cluster.gpus[fitting].sum(axis=1) - request.num_gpus * request.gpu_milli) / LARGEST_GPU_MILLI
        score = np.floor((1 - cpu / 2 - gpu / 2) * STEPS)
        node = int(fitting[np.argmax(score)])
        if not request.is_shared:
            return node, None
        row = cluster.gpus[node]
        return node, int(np.argmin(np.where(row >= request.gpu_milli, row, MILLI + 1)))
