"""First in, first out on each project's own nodes."""

from __future__ import annotations

from shoal.sim.loop import GpuNodes, simulate
from shoal.sim.references.virtual_clusters import FifoInClusters, slots
from tests.support.sim_jobs import trace_job

NODES_OF = {"a": range(2), "b": range(2, 3)}


def test_the_head_blocks_its_own_cluster_and_no_other() -> None:
    jobs = [
        trace_job(0, 10, gpus=8, project="a"),
        trace_job(1, 5, gpus=16, project="a"),
        trace_job(2, 1, gpus=1, project="a"),
        trace_job(2, 1, gpus=4, project="b"),
    ]
    schedule = simulate(jobs, GpuNodes([8, 8, 8]), FifoInClusters(NODES_OF))
    assert schedule.starts == [0, 10, 15, 2]


def test_a_small_job_takes_the_fullest_node_with_room() -> None:
    machine = GpuNodes([8, 8, 8])
    machine.free = [7, 3, 1]
    assert slots(machine, range(3), 2) == [(1, 2)]
    assert slots(machine, range(3), 8) is None


def test_a_large_job_takes_whole_nodes_and_leaves_the_rest_of_the_last() -> None:
    machine = GpuNodes([8, 8, 8])
    machine.free = [8, 7, 8]
    assert slots(machine, range(3), 12) == [(0, 8), (2, 4)]
    assert slots(machine, range(3), 24) is None
