"""The scheduler's own fit fills a cluster pod by pod."""

from __future__ import annotations

from benchmarks.yardsticks.policy_packing import unused, view_of
from shoal.sim.traces.openb import GpuNode, Pod

HALF = Pod(name="half", cpu_milli=1000, memory_mib=1, num_gpus=1, gpu_milli=500)
PAIR = Pod(name="pair", cpu_milli=1000, memory_mib=1, num_gpus=2, gpu_milli=1000, models=("T4", "A10"))
OTHER = Pod(name="other", cpu_milli=1000, memory_mib=1, num_gpus=1, gpu_milli=1000, models=("V100",))
NODES = [view_of(GpuNode(name=name, cpu_milli=8000, memory_mib=100, num_gpus=2, model="T4")) for name in "ab"]


def test_halves_leave_a_node_whole_for_a_pair() -> None:
    assert unused(NODES, [HALF, HALF, PAIR]) == 0.25


def test_pods_of_a_model_that_is_not_there_leave_all_unused() -> None:
    assert unused(NODES, [OTHER]) == 1.0
