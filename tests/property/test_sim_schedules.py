"""Whatever the jobs: no policy over-commits the machine, starts a job early, or breaks the order it
promises.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sim.loop import EventBatching, Processors, Schedule, simulate, true_run
from shoal.sim.references.backfilling import (
    Easy,
    FixedHead,
    f1,
    first_come,
    shortest,
    shortest_in_truth,
    smallest_area,
)
from shoal.sim.traces.trace import TraceJob
from tests.support.sim_jobs import max_held, trace_job

CAPACITY = 8
Run = Callable[[list[TraceJob]], Schedule]


def easy(*orders: Callable[[TraceJob], float]) -> Run:
    return lambda jobs: simulate(jobs, Processors(CAPACITY), Easy(*orders))


def kept_head(*, is_backfilling: bool) -> Run:
    return lambda jobs: simulate(
        jobs,
        Processors(CAPACITY),
        FixedHead(first_come, is_backfilling=is_backfilling),
        events=EventBatching.ONE_BY_ONE,
    )


def easy_with_truth(jobs: list[TraceJob]) -> Schedule:
    decider = Easy(first_come, shortest_in_truth, expect=true_run)
    return simulate(jobs, Processors(CAPACITY), decider, expect=true_run)


POLICIES: dict[str, Run] = {
    "easy": easy(),
    "easy, shortest backfill": easy(first_come, shortest),
    "easy, truth": easy_with_truth,
    "sjf": easy(shortest, shortest),
    "area": easy(smallest_area, smallest_area),
    "f1": easy(f1, f1),
    "fcfs": kept_head(is_backfilling=False),
    "kept head, backfill": kept_head(is_backfilling=True),
}

one_job = st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(0, 30), st.integers(1, CAPACITY))
some_jobs = st.lists(one_job, min_size=1, max_size=25).map(
    lambda rows: [trace_job(at, run, size, limit_s=run + over) for at, run, over, size in sorted(rows)]
)


@pytest.mark.parametrize("policy", POLICIES)
@given(jobs=some_jobs)
def test_no_schedule_exceeds_the_machine_or_starts_before_submission(
    policy: str, jobs: list[TraceJob]
) -> None:
    schedule = POLICIES[policy](jobs)
    assert max_held(schedule) <= CAPACITY
    assert all(start >= job.submitted_at for job, start in zip(jobs, schedule.starts, strict=True))


@given(jobs=some_jobs)
def test_jobs_start_in_order_of_arrival_without_backfill(jobs: list[TraceJob]) -> None:
    starts = list(POLICIES["fcfs"](jobs).starts)
    assert starts == sorted(starts)


@given(jobs=some_jobs)
def test_without_a_queue_no_job_waits(jobs: list[TraceJob]) -> None:
    apart = [
        trace_job(job.submitted_at + 1000 * place, job.run_s, job.num_processors)
        for place, job in enumerate(jobs)
    ]
    for run in POLICIES.values():
        assert run(apart).starts == [job.submitted_at for job in apart]


@given(jobs=some_jobs)
def test_with_exact_run_times_backfill_never_delays_the_first_waiting_job(jobs: list[TraceJob]) -> None:
    plain = POLICIES["fcfs"]([trace_job(job.submitted_at, job.run_s, job.num_processors) for job in jobs])
    filled = easy_with_truth(jobs)
    first = next((i for i, start in enumerate(plain.starts) if start > jobs[i].submitted_at), len(jobs) - 1)
    assert filled.starts[first] <= plain.starts[first]
