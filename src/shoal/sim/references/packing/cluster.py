"""The nodes of a GPU-sharing cluster as arrays, and what a pod takes from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import Bug
from shoal.sim.traces.openb import MILLI, GpuNode, Pod

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Request(NamedTuple):
    """What matters of a pod. Pods with the same request are treated alike."""

    cpu_milli: int
    memory_mib: int
    num_gpus: int
    gpu_milli: int
    models: tuple[str, ...]

    @classmethod
    def of(cls, pod: Pod) -> Request:
        return cls(pod.cpu_milli, pod.memory_mib, pod.num_gpus, pod.gpu_milli, pod.models)

    @property
    def is_shared(self) -> bool:
        return self.num_gpus == 1 and self.gpu_milli < MILLI


class Cluster:
    """Free CPU, memory and thousandths of each GPU, by node in order of name."""

    def __init__(self, nodes: Sequence[GpuNode]) -> None:
        ordered = sorted(nodes, key=lambda node: node.name)
        counts = np.array([node.num_gpus for node in ordered])
        self.cpu: Ints = np.array([node.cpu_milli for node in ordered])
        self.memory: Ints = np.array([node.memory_mib for node in ordered])
        self.gpus: Ints = np.where(np.arange(counts.max()) < counts[:, None], MILLI, 0)
        """One row a node; a node with fewer GPUs than the largest has zeros at the end."""
        self.capacity_milli = int(self.gpus.sum())
        models = [node.model for node in ordered]

        @cache
        def accessible(wanted: tuple[str, ...]) -> Bools:
            return np.array([not wanted or model in wanted for model in models])

        self.accessible = accessible
        """The nodes whose model is one of those wanted."""

    def fitting(self, request: Request) -> Ints:
        """The nodes it fits on now, in order of name."""
        fits = (self.cpu >= request.cpu_milli) & (self.memory >= request.memory_mib)
        if request.num_gpus:
            fits &= np.count_nonzero(self.gpus >= request.gpu_milli, axis=1) >= request.num_gpus
            fits &= self.accessible(request.models)
        return np.flatnonzero(fits)

    def take(self, request: Request, node: int, gpu: int | None) -> None:
        """Place it: on that GPU if it shares one, else on the node's first free GPUs."""
        row = self.gpus[node]
        if request.is_shared:
            row[gpu] -= request.gpu_milli
        elif request.num_gpus:
            row[np.flatnonzero(row == MILLI)[: request.num_gpus]] -= MILLI
        self.cpu[node] -= request.cpu_milli
        self.memory[node] -= request.memory_mib
        if min(self.cpu[node], self.memory[node], row.min()) < 0:
            raise Bug(f"{request} was placed on node {node}, where it does not fit", gpu=gpu)
