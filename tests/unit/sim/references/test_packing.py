"""Packing references, on clusters of one or two nodes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from shoal.errors import Bug
from shoal.sim.references.fragmentation import Fgd, Fragments
from shoal.sim.references.pod_packing import BestFit, PackingCluster, PodRequest, RandomFit, fill, overfilled
from shoal.sim.traces.openb import GpuNode, Pod

HALF = Pod(name="half", cpu_milli=1000, memory_mib=1, num_gpus=1, gpu_milli=500)
WHOLE = Pod(name="whole", cpu_milli=1000, memory_mib=1, num_gpus=1, gpu_milli=1000)
PAIR = Pod(name="pair", cpu_milli=1000, memory_mib=1, num_gpus=2, gpu_milli=1000)
NO_GPU = Pod(name="none", cpu_milli=4000, memory_mib=1)


def node(name: str, num_gpus: int, *, cpus: int = 8, model: str = "T4") -> GpuNode:
    return GpuNode(name=name, cpu_milli=cpus * 1000, memory_mib=100, num_gpus=num_gpus, model=model)


def place(cluster: PackingCluster, pod: Pod, packer: BestFit | Fgd | RandomFit) -> tuple[int, int | None]:
    request = PodRequest.of(pod)
    return packer.place(cluster, request, cluster.fitting(request))


def test_a_pod_fits_where_cpu_memory_gpus_and_model_do() -> None:
    cluster = PackingCluster([node("d", 2, cpus=0), node("c", 1), node("a", 2, model="A10"), node("b", 2)])
    assert cluster.fitting(PodRequest.of(PAIR)).tolist() == [0, 1]
    only_t4 = PodRequest.of(PAIR)._replace(models=("T4", "P100"))
    assert cluster.fitting(only_t4).tolist() == [1]


def test_whole_gpus_are_those_that_no_pod_shares() -> None:
    cluster = PackingCluster([node("a", 2)])
    cluster.take(PodRequest.of(HALF), 0, 1)
    cluster.take(PodRequest.of(WHOLE), 0, None)
    assert cluster.gpus.tolist() == [[0, 500]]
    assert cluster.cpu.tolist() == [6000]
    with pytest.raises(Bug, match="does not fit"):
        cluster.take(PodRequest.of(HALF)._replace(gpu_milli=600), 0, 1)


def test_fragments_are_what_typical_pods_cannot_use() -> None:
    fragments = Fragments([HALF, WHOLE])
    gpus = np.array([[500, 0], [300, 0], [500, 1000], [500, 500]])
    every = np.ones((4, 2), dtype=bool)
    enough = np.full(4, 8000)
    # Half of the pods want 1000: of 500 + 1000 they lose 500, of 500 + 500 all.
    assert fragments.expected(enough, gpus, every).tolist() == [250, 300, 250, 500]
    assert fragments.expected(np.zeros(4, dtype=int), gpus, every).tolist() == [500, 300, 1500, 1000]
    assert fragments.expected(enough, gpus, ~every).tolist() == [500, 300, 1500, 1000]


def test_a_pod_without_gpus_can_use_none_of_them() -> None:
    one = Fragments([NO_GPU]).expected(np.array([8000]), np.array([[1000]]), np.ones((1, 1), dtype=bool))
    assert one.tolist() == [1000]


def test_rare_kinds_of_pods_are_left_out() -> None:
    fragments = Fragments([HALF] * 97 + [WHOLE] * 3)
    assert fragments.expected(np.array([8000]), np.array([[500]]), np.ones((1, 1), dtype=bool)).tolist() == [
        0
    ]


def test_fgd_fills_the_broken_gpu_first() -> None:
    cluster = PackingCluster([node("a", 2)])
    cluster.take(PodRequest.of(HALF), 0, 1)
    assert place(cluster, HALF, Fgd(cluster, Fragments([HALF, WHOLE]))) == (0, 1)


def test_fgd_leaves_the_pair_of_gpus_to_pods_that_need_it() -> None:
    cluster = PackingCluster([node("a", 2), node("b", 1)])
    assert place(cluster, WHOLE, Fgd(cluster, Fragments([WHOLE, PAIR]))) == (1, None)


def test_fgd_takes_the_first_name_among_equals() -> None:
    cluster = PackingCluster([node("b", 1), node("a", 1)])
    fgd = Fgd(cluster, Fragments([WHOLE]))
    assert fill(cluster, [WHOLE], fgd) == 0.5
    assert cluster.gpus.tolist() == [[0], [1000]]


def test_fgd_scores_a_node_again_once_it_changed() -> None:
    cluster = PackingCluster([node("a", 2), node("b", 2)])
    fgd = Fgd(cluster, Fragments([HALF, WHOLE]))
    assert fill(cluster, [HALF, HALF, HALF, WHOLE], fgd) == 2.5 / 4
    assert cluster.gpus.tolist() == [[0, 500], [0, 1000]]


def test_best_fit_takes_the_node_with_least_left() -> None:
    cluster = PackingCluster([node("a", 8, cpus=96), node("b", 8, cpus=32), node("c", 2, cpus=32)])
    assert place(cluster, WHOLE, BestFit()) == (2, None)


def test_best_fit_takes_the_fullest_gpu_with_room() -> None:
    cluster = PackingCluster([node("a", 4)])
    cluster.gpus[0] = [1000, 600, 500, 400]
    assert place(cluster, HALF, BestFit()) == (0, 2)


def test_random_fit_uses_every_place_that_fits_and_no_other() -> None:
    cluster = PackingCluster([node("a", 2), node("b", 2), node("c", 0)])
    cluster.gpus[0] = [400, 1000]
    packer = RandomFit(Random(1))
    assert {place(cluster, HALF, packer) for _ in range(200)} == {(0, 1), (1, 0), (1, 1)}


def test_a_workload_is_shuffled_and_filled_up_to_the_ratio() -> None:
    pods = [HALF, WHOLE, NO_GPU]
    order = overfilled(pods, 10_000, 1.3, Random(7))
    assert sorted(pod.name for pod in order[:3]) == ["half", "none", "whole"]
    assert 12_000 < sum(pod.total_gpu_milli for pod in order) <= 13_000


def test_pod_that_fits_nowhere_is_dropped() -> None:
    cluster = PackingCluster([node("a", 1)])
    assert fill(cluster, [HALF, WHOLE, HALF], BestFit()) == 1.0
