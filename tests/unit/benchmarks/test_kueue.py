"""The Kueue case in small: real loops, real store, real time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.yardsticks.kueue import Case, Kind, Result, drive, report, workloads

SMALL = Case(cohorts=2, queues=2, quota=2, borrow=2, kinds=(Kind(3, 1, 0.02), Kind(1, 4, 0.05)))


def test_the_case_is_kueues() -> None:
    case = Case()
    assert case.num_workloads == len(list(workloads(case))) == 15_000
    assert case.bound_s == 66.0


def test_every_workload_runs_to_its_end_and_none_faster_than_it_takes(tmp_path: Path) -> None:
    found = asyncio.run(drive(tmp_path, SMALL))
    assert found.took_s >= SMALL.bound_s
    assert found.num_ended == SMALL.num_workloads == 16


def test_the_table_says_how_far_over_the_bound_it_was() -> None:
    near = report(Case(), Result(took_s=70.0, submitting_s=9.0, cpu_s=40.0, num_ended=15_000))
    far = report(Case(), Result(took_s=99.0, submitting_s=9.0, cpu_s=40.0, num_ended=15_000))
    assert "met, 6.1% over" in near.text
    assert "missed: 50% over" in far.text
