"""More of the same work: what a workload looks like when more of it arrives each day."""

from __future__ import annotations

import math
import re
from random import Random

import msgspec

from shoal.errors import SpecError
from shoal.sim.workload import WorkJob, Workload

MONTHS = {"month": 1.0, "quarter": 3.0, "year": 12.0}
WORDS = re.compile(r"(?P<percent>\d+(?:\.\d+)?)%(?:/(?P<unit>\w+))?")
JITTER_S = 3600.0
"""A copy arrives up to so much later: bursts stay bursts, and no two jobs arrive together for ever."""
JITTER_PART = 1 / 24
"""Of a log shorter than a day, up to so much of it later: more would spread its jobs, not add to them."""
SHORT_S = 86400.0
"""A log of less has not seen a day and a night."""

MAX_TIMES = 1000.0
MAX_JOBS = 2_000_000
"""More are not simulated: they would fill the memory of most machines."""


def growth(text: str, horizon_months: float) -> float:
    """`30%/month` over three months is 2.197 times."""
    found = WORDS.fullmatch(text.strip())
    unit = (found["unit"] or "month") if found else ""
    if found is None or unit not in MONTHS:
        raise SpecError(
            f"`--growth {text}`: so many percent a {', '.join(MONTHS)}", hint="--growth 30%/month"
        )
    if not 0 <= horizon_months < math.inf:
        raise SpecError(f"`--horizon {horizon_months:g}`: months from now, 0 or more", hint="--horizon 3")
    share, units = float(found["percent"]) / 100, horizon_months / MONTHS[unit]
    if math.log1p(share) * units > math.log(MAX_TIMES):
        raise SpecError(
            f"`--growth {text}` over {horizon_months:g} months is more than {MAX_TIMES:,.0f} times the jobs",
            hint="--growth 30%/month --horizon 3",
        )
    return float((1 + share) ** units)


def grown(workload: Workload, times: float, *, seed: int = 1) -> Workload:
    """`times` as many jobs, spread evenly over the log; each is one of the log, or a copy of one.

    The same seed gives the same jobs. What people ask for, and how long it runs, stays as it is.
    """
    if times == 1:
        return workload
    if len(workload.jobs) * times > MAX_JOBS:
        raise SpecError(
            f"{len(workload.jobs) * times:,.0f} jobs are too many to simulate; at most {MAX_JOBS:,} are",
            hint="say less `--growth`, or give a shorter part of the trace",
        )
    random = Random(seed)
    jitter_s = min(JITTER_S, JITTER_PART * span_s(workload))
    jobs: list[WorkJob] = []
    due = 0.0
    for job in workload.jobs:
        due += times
        jobs += [_copy(job, copy, random.uniform(0.0, jitter_s)) if copy else job for copy in range(int(due))]
        due -= int(due)
    jobs.sort(key=lambda job: job.submitted_at)
    return msgspec.structs.replace(workload, jobs=jobs)


def span_s(workload: Workload) -> float:
    """From the first submission to the last."""
    return workload.jobs[-1].submitted_at - workload.jobs[0].submitted_at if workload.jobs else 0.0


def _copy(job: WorkJob, number: int, later_s: float) -> WorkJob:
    return msgspec.structs.replace(
        job,
        job_id=f"{job.job_id}+{number}",
        submitted_at=job.submitted_at + later_s,
        array_id=job.array_id and f"{job.array_id}+{number}",
        deadline_at=None if job.deadline_at is None else job.deadline_at + later_s,
    )
