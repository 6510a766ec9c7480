"""Planning: targets and growth as they are written, and the smallest cluster that meets a target."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from shoal.errors import SpecError
from shoal.scheduler import Policy
from shoal.sim.cluster_shapes import ClusterShape, PlannedFleet
from shoal.sim.report import SimulationReport, build_report
from shoal.sim.scenario import Scenario
from shoal.sim.sizing import Statistic, TargetMeasure, parse_target, simulate_report, smallest_cluster
from shoal.sim.twin import simulate_workload
from shoal.sim.workload_changes import JITTER_S, grown, growth
from tests.support.sim_jobs import gpu_cluster, work_job


def here(scenarios: Sequence[Scenario]) -> list[SimulationReport]:
    return [simulate_report(one) for one in scenarios]


def ten_at_once() -> Scenario:
    """Ten jobs of a whole node each, all at the same moment, an hour long."""
    return Scenario(workload=gpu_cluster(*(work_job(0, 3600, 8) for _ in range(10))))


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize(
    ("target", "fewest"), [("max wait < 1s", 10), ("max wait < 61m", 5), ("mean wait < 1d", 1)]
)
def test_the_smallest_cluster_that_meets_the_target_is_found(target: str, fewest: int, at_once: int) -> None:
    answer = smallest_cluster(
        ten_at_once(), PlannedFleet(ClusterShape(2, 8)), parse_target(target), here, at_once=at_once
    )
    assert answer.fleet.shape == ClusterShape(fewest, 8)
    tried = {trial.num_nodes: trial.is_met for trial in answer.trials}
    assert tried[fewest]
    assert fewest == 1 or not tried[fewest - 1]
    assert 2 in tried


def test_no_size_is_simulated_twice() -> None:
    sizes: list[int] = []

    def counted(scenarios: Sequence[Scenario]) -> list[SimulationReport]:
        sizes.extend(len(one.workload.nodes) for one in scenarios)
        return here(scenarios)

    smallest_cluster(
        ten_at_once(), PlannedFleet(ClusterShape(4, 8)), parse_target("max wait < 1s"), counted, at_once=2
    )
    assert len(sizes) == len(set(sizes))


def test_a_cluster_is_never_smaller_than_its_largest_job() -> None:
    scenario = Scenario(workload=gpu_cluster(work_job(0, 60, 8, nodes=3), nodes=3))
    answer = smallest_cluster(
        scenario, PlannedFleet(ClusterShape(1, 8)), parse_target("max wait < 1d"), here, at_once=2
    )
    assert answer.fleet.shape.count == 3
    assert min(trial.num_nodes for trial in answer.trials) == 3


def test_a_target_that_no_size_meets_is_reported() -> None:
    with pytest.raises(SpecError, match="missed even on 10 nodes"):
        smallest_cluster(
            ten_at_once(),
            PlannedFleet(ClusterShape(1, 8)),
            parse_target("mean completion < 1s"),
            here,
            at_once=8,
        )


def test_a_target_reads_its_measure_from_a_report() -> None:
    report = build_report(simulate_workload(gpu_cluster(work_job(0, 100, 8), work_job(0, 100, 8)), Policy()))
    assert parse_target("max wait < 2m").value(report) == 100
    assert parse_target("mean slowdown < 2").value(report) == 1.5
    assert parse_target("p99.9  completion<1h").value(report) == 200
    assert parse_target("p50 wait < 90s").bound == 90
    assert parse_target("p95 wait < 10m").statistic is Statistic.P95
    assert parse_target("p95 wait < 10m").measure is TargetMeasure.WAIT


@pytest.mark.parametrize("text", ["", "p95 wait", "p96 wait < 1m", "p95 joy < 1m", "p95 wait < soon"])
def test_a_target_that_cannot_be_read_says_how_one_is_written(text: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_target(text)
    assert refused.value.hint == '--target "p95 wait < 10m"'


def test_growth_compounds() -> None:
    assert growth("30%/month", 3) == pytest.approx(1.3**3)
    assert growth("44%/year", 6) == pytest.approx(1.2)
    assert growth("0%", 3) == 1
    with pytest.raises(SpecError, match="a percentage per"):
        growth("30 per month", 3)
    for wrong, months in (
        ("1000000%/month", 3),
        ("9" * 400 + "%", 3),
        ("30%/month", -1),
        ("30%/month", math.nan),
    ):
        with pytest.raises(SpecError):
            growth(wrong, months)


def test_a_grown_workload_has_copies_of_its_jobs_each_a_little_later() -> None:
    workload = gpu_cluster(*(work_job(at, 60, 8) for at in range(0, 1_000_000, 10_000)))
    more = grown(workload, 2.5)
    assert len(more.jobs) == 250
    original_times = {job.submitted_at for job in workload.jobs}
    for job in more.jobs:
        assert job.submitted_at in original_times or 0 <= job.submitted_at % 10_000 <= JITTER_S
    assert len({job.job_id for job in more.jobs}) == 250
    assert grown(workload, 2.5).jobs == more.jobs
    assert [job.submitted_at for job in more.jobs] == sorted(job.submitted_at for job in more.jobs)


@pytest.mark.parametrize("span_s", [0, 60, 3600, 43200])
def test_copies_of_a_short_log_do_not_spread_it(span_s: int) -> None:
    """An hour of delay in a minute's log would make growth cost nothing."""
    workload = gpu_cluster(*(work_job(at, 60, 8) for at in (0, span_s / 2, span_s)))
    more = grown(workload, 10)
    assert len(more.jobs) == 30
    assert more.jobs[-1].submitted_at <= span_s * (1 + 1 / 24)


def test_a_workload_can_shrink() -> None:
    assert len(grown(gpu_cluster(*(work_job(at, 60, 8) for at in range(100))), 0.5).jobs) == 50
