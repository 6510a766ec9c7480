"""Jobs of a trace for tests, written short."""

from __future__ import annotations

from shoal.sim.loop import Schedule
from shoal.sim.traces.job import TraceJob


def job(
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


def most_held(schedule: Schedule) -> int:
    """The most processors held at any moment. What ends at a moment is free for what starts then."""
    changes: list[tuple[float, int]] = []
    for one, start in zip(schedule.jobs, schedule.starts, strict=True):
        changes += [(start, one.num_processors), (start + one.run_s, -one.num_processors)]
    held, most = 0, 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most
