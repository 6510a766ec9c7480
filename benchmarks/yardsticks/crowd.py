"""A large cluster in the middle of a busy day: a real log laid over itself often enough to fill it.

Real: when jobs arrive, how long they run, how many GPUs they ask for. Made up, because the log does not have
it: users, time limits, and that each copy of each of its clusters is a project of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import msgspec

from shoal.scheduler.facts.snapshot import NodeInfo
from shoal.sim.from_trace import workload_of
from shoal.sim.traces.trace import TraceJob
from shoal.sim.workload import WorkJob

USERS_PER_PROJECT = 20
HOUR, DAY = 3600.0, 86_400.0
LIMITS_S = (HOUR, 4 * HOUR, 12 * HOUR, DAY, 3 * DAY, 7 * DAY, 30 * DAY)
"""Limits to choose from: the first that is at least 1.5 times the run."""
NO_LIMIT_IN = 5
"""One job in this many has no limit."""
APART_S = 97.31
"""Between two copies, so that no two of them do the same at the same moment."""


@dataclass(frozen=True)
class Crowd:
    """As of `at`, each list in order of arrival."""

    at: float
    ended: list[WorkJob]
    running: list[WorkJob]
    """They would run now if no job had waited."""
    waiting: list[WorkJob]
    coming: list[WorkJob]


def crowd(
    jobs: Sequence[TraceJob],
    nodes: tuple[NodeInfo, ...],
    *,
    copies: int,
    at: float,
    num_waiting: int,
    num_coming: int,
) -> Crowd:
    """Lay `jobs`, in order of submission, over each other `copies` times. Depends on the arguments alone."""
    lists: tuple[list[TraceJob], ...] = ([], [], [], [])
    for number in range(copies):
        parts = _around(jobs, at - number * APART_S, -(-num_waiting // copies), -(-num_coming // copies))
        for whole, part in zip(lists, parts, strict=True):
            whole.extend(_made_up(job, number) for job in part)
    ended, running, waiting, coming = (list(workload_of(part, nodes).jobs) for part in lists)
    return Crowd(at, ended, running, waiting[-num_waiting:], coming[:num_coming])


def _around(
    jobs: Sequence[TraceJob], at: float, num_waiting: int, num_coming: int
) -> tuple[list[TraceJob], ...]:
    """Of one copy: as many ended as wait, who runs, the last to come before `at`, the first after."""
    now = bisect_right(jobs, at, key=lambda job: job.submitted_at)
    running = [job for job in jobs[:now] if job.submitted_at + job.run_s > at]
    over = [job for job in jobs[:now] if job.submitted_at + job.run_s <= at][-2 * num_waiting :]
    return over[:-num_waiting], running, over[-num_waiting:], list(jobs[now : now + 2 * num_coming])


def _made_up(job: TraceJob, copy: int) -> TraceJob:
    dice = crc32(f"{copy}/{job.job_id}".encode())
    project = f"{job.project or 'cluster'}-{copy:02d}"
    limit_s = next((limit for limit in LIMITS_S if limit >= 1.5 * job.run_s), None)
    return msgspec.structs.replace(
        job,
        job_id=f"{copy}/{job.job_id}",
        submitted_at=job.submitted_at + copy * APART_S,
        project=project,
        user=f"{project}-{dice % USERS_PER_PROJECT}",
        limit_s=limit_s if dice // USERS_PER_PROJECT % NO_LIMIT_IN else None,
    )
