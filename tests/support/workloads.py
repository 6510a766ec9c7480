"""Workloads for the twin, written short."""

from __future__ import annotations

from shoal.model.request import GpuRequest, Request
from shoal.sim.machines import Shape, nodes_of
from shoal.sim.workload import WorkJob, Workload


def work(
    submitted_at: float,
    run_s: float,
    gpus: int = 1,
    *,
    nodes: int = 1,
    limit_s: float | None = None,
    project: str = "default",
    user: str = "",
) -> WorkJob:
    """A job of so many GPUs on each of so many nodes; its limit is its run time if none is given."""
    return WorkJob(
        job_id=f"{submitted_at:g}+{run_s:g}x{gpus}",
        submitted_at=submitted_at,
        run_s=run_s,
        request=Request(
            min_nodes=nodes,
            max_nodes=nodes,
            cpus=gpus,
            gpus=GpuRequest(count=gpus),
            time_limit_s=run_s if limit_s is None else limit_s,
        ),
        project=project,
        user=user,
    )


def gpu_cluster(*jobs: WorkJob, nodes: int = 1, gpus: int = 8) -> Workload:
    return Workload(nodes=nodes_of(Shape(nodes, gpus)), jobs=jobs)
