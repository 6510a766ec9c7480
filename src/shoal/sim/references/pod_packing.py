"""Packing without time: pods arrive in an order and stay, and a pod that fits nowhere is dropped.

The experiment of Weng et al., "Beware of Fragmentation" (USENIX ATC'23), and three of its policies.
`PackingCluster` holds the nodes of a GPU-sharing cluster as arrays. `fill` fills it beyond its capacity, pod
by pod, and returns how much of it gets used.

`BestFit` takes the node that has least left afterwards, CPU and GPUs counted half each, and its fullest GPU
with room. `RandomFit` takes any node that fits, and any GPU of it: the floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.errors import Bug
from shoal.sim.traces.openb import MILLI, GpuNode, Pod

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class PodRequest(NamedTuple):
    """The parts of a pod that matter. Pods with the same request are treated alike."""

    cpu_milli: int
    memory_mib: int
    num_gpus: int
    gpu_milli: int
    models: tuple[str, ...]

    @classmethod
    def of(cls, pod: Pod) -> PodRequest:
        return cls(pod.cpu_milli, pod.memory_mib, pod.num_gpus, pod.gpu_milli, pod.models)

    @property
    def is_shared(self) -> bool:
        return self.num_gpus == 1 and self.gpu_milli < MILLI


class PackingCluster:
    """Free CPU, memory and thousandths of each GPU, by node in order of name."""

    def __init__(self, nodes: Sequence[GpuNode]) -> None:
        ordered = sorted(nodes, key=lambda node: node.name)
        counts = np.array([node.num_gpus for node in ordered])
        self.cpu: Ints = np.array([node.cpu_milli for node in ordered])
        self.memory: Ints = np.array([node.memory_mib for node in ordered])
        self.gpus: Ints = np.where(np.arange(counts.max()) < counts[:, None], MILLI, 0)
        """One row per node. A node with fewer GPUs than the largest has zeros at the end."""
        self.capacity_milli = int(self.gpus.sum())
        models = [node.model for node in ordered]

        @cache
        def accessible(wanted: tuple[str, ...]) -> Bools:
            return np.array([not wanted or model in wanted for model in models])

        self.accessible = accessible
        """The nodes whose model is one of the requested ones."""

    def fitting(self, request: PodRequest) -> Ints:
        """The nodes that the request fits on now, in order of name."""
        fits = (self.cpu >= request.cpu_milli) & (self.memory >= request.memory_mib)
        if request.num_gpus:
            fits &= np.count_nonzero(self.gpus >= request.gpu_milli, axis=1) >= request.num_gpus
            fits &= self.accessible(request.models)
        return np.flatnonzero(fits)

    def take(self, request: PodRequest, node: int, gpu: int | None) -> None:
        """Place it on that GPU if it shares one, else on the node's first free GPUs."""
        row = self.gpus[node]
        if request.is_shared:
            row[gpu] -= request.gpu_milli
        elif request.num_gpus:
            row[np.flatnonzero(row == MILLI)[: request.num_gpus]] -= MILLI
        self.cpu[node] -= request.cpu_milli
        self.memory[node] -= request.memory_mib
        if min(self.cpu[node], self.memory[node], row.min()) < 0:
            raise Bug(f"{request} was placed on node {node}, where it does not fit", gpu=gpu)


class Packer(Protocol):
    def place(self, cluster: PackingCluster, request: PodRequest, fitting: Ints) -> tuple[int, int | None]:
        """One of the nodes that it fits on, of which there is at least one, and the GPU if it shares one."""


def overfilled(pods: Sequence[Pod], capacity_milli: int, ratio: float, random: Random) -> list[Pod]:
    """The pods shuffled, then more of them drawn at random, until they ask for `ratio` of the GPUs."""
    order = random.sample(pods, len(pods))
    requested = sum(pod.total_gpu_milli for pod in pods)
    while True:
        pod = random.choice(pods)
        # One GPU of the pod, not all: the published experiment ends like this, a few GPUs beyond the ratio at
        # most.
        if requested + pod.gpu_milli > ratio * capacity_milli:
            return order
        requested += pod.total_gpu_milli
        order.append(pod)


def fill(cluster: PackingCluster, pods: Iterable[Pod], packer: Packer) -> float:
    """Place what fits, in this order, for ever. Return the part of all GPUs that is allocated in the end."""
    allocated = 0
    for pod in pods:
        request = PodRequest.of(pod)
        fitting = cluster.fitting(request)
        if len(fitting):
            node, gpu = packer.place(cluster, request, fitting)
            cluster.take(request, node, gpu)
            allocated += pod.total_gpu_milli
    return allocated / cluster.capacity_milli


LARGEST_CPU_MILLI = 128_000
LARGEST_GPU_MILLI = 8 * MILLI
STEPS = 100
"""The published scores are whole numbers to 100. Nodes within one step are alike, and the first name wins."""


class BestFit:
    def place(self, cluster: PackingCluster, request: PodRequest, fitting: Ints) -> tuple[int, int | None]:
        cpu = (cluster.cpu[fitting] - request.cpu_milli) / LARGEST_CPU_MILLI
        gpu = (cluster.gpus[fitting].sum(axis=1) - request.num_gpus * request.gpu_milli) / LARGEST_GPU_MILLI
        score = np.floor((1 - cpu / 2 - gpu / 2) * STEPS)
        node = int(fitting[np.argmax(score)])
        if not request.is_shared:
            return node, None
        row = cluster.gpus[node]
        return node, int(np.argmin(np.where(row >= request.gpu_milli, row, MILLI + 1)))


class RandomFit:
    def __init__(self, random: Random) -> None:
        self._random = random

    def place(self, cluster: PackingCluster, request: PodRequest, fitting: Ints) -> tuple[int, int | None]:
        node = int(fitting[self._random.randrange(len(fitting))])
        if not request.is_shared:
            return node, None
        gpus = np.flatnonzero(cluster.gpus[node] >= request.gpu_milli)
        return node, int(gpus[self._random.randrange(len(gpus))])
