"""Jobs of a trace for tests, written short.

Workloads for the twin, written short.
"""

from __future__ import annotations

from shoal.model.job import GpuRequest, ResourceRequest
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.loop import Schedule
from shoal.sim.traces.trace import TraceJob
from shoal.sim.workload import WorkJob, Workload


def trace_job(
    submitted_at: float,
    run_s: float,
    size: int = 1,
    *,
    limit_s: float | None = None,
    gpus: int = 0,
    project: str | None = None,
) -> TraceJob:
    return TraceJob(
        job_id=f"{submitted_at:g}+{run_s:g}x{size}",
        submitted_at=submitted_at,
        run_s=run_s,
        limit_s=limit_s,
        num_processors=size,
        num_gpus=gpus,
        project=project,
    )


def max_held(schedule: Schedule) -> int:
    """The most processors held at any moment. What ends at a moment is free for what starts then."""
    changes: list[tuple[float, int]] = []
    for one, start in zip(schedule.jobs, schedule.starts, strict=True):
        changes += [(start, one.num_processors), (start + one.run_s, -one.num_processors)]
    held, most = 0, 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def work_job(
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
        request=ResourceRequest(
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
    return Workload(nodes=nodes_of(ClusterShape(nodes, gpus)), jobs=jobs)
