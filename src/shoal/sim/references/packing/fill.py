"""Fill a cluster beyond its capacity, pod by pod, and see how much of it gets used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Protocol

from shoal.sim.references.packing.cluster import Cluster, Ints, Request
from shoal.sim.traces.openb import Pod


class Packer(Protocol):
    def place(self, cluster: Cluster, request: Request, fitting: Ints) -> tuple[int, int | None]:
        """One of the nodes it fits on, of which there is at least one, and the GPU if it shares one."""


def overfilled(pods: Sequence[Pod], capacity_milli: int, ratio: float, random: Random) -> list[Pod]:
    """The pods shuffled, then more of them drawn at random, until they ask for `ratio` of the GPUs."""
    order = random.sample(pods, len(pods))
    asked = sum(pod.total_gpu_milli for pod in pods)
    while True:
        pod = random.choice(pods)
        # One GPU of the pod, not all: so the published experiment ends, a few GPUs beyond the ratio at most.
        if asked + pod.gpu_milli > ratio * capacity_milli:
            return order
        asked += pod.total_gpu_milli
        order.append(pod)


def fill(cluster: Cluster, pods: Iterable[Pod], packer: Packer) -> float:
    """Place what fits, in this order, for ever. The share of all GPUs that is allocated in the end."""
    allocated = 0
    for pod in pods:
        request = Request.of(pod)
        fitting = cluster.fitting(request)
        if len(fitting):
            node, gpu = packer.place(cluster, request, fitting)
            cluster.take(request, node, gpu)
            allocated += pod.total_gpu_milli
    return allocated / cluster.capacity_milli
