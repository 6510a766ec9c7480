"""Reports of outcomes, by hand."""

from __future__ import annotations

import msgspec
import pytest

from shoal.scheduler import Policy
from shoal.sim.assumptions import CheckpointModel
from shoal.sim.cluster_shapes import ClusterShape, nodes_of
from shoal.sim.report import build_report
from shoal.sim.twin import simulate_workload
from shoal.sim.workload import NodeChange, Workload
from tests.support.sim_jobs import gpu_cluster, work_job


def test_waits_slowdowns_and_completions_are_those_of_the_jobs() -> None:
    jobs = work_job(0, 100, 8, project="a"), work_job(0, 100, 8, project="b")
    report = build_report(simulate_workload(gpu_cluster(*jobs), Policy()))
    assert report.overall.num_jobs == 2
    assert (report.overall.wait_s.mean, report.overall.wait_s.max) == (50, 100)
    assert report.overall.slowdown.mean == 1.5
    assert report.projects["b"].completion_s.mean == 200
    assert report.overall.device_hours == pytest.approx(8 * 200 / 3600)
    assert (report.utilisation, report.goodput) == (1.0, 1.0)


def test_lost_work_is_used_and_no_goodput() -> None:
    (node,) = nodes_of(ClusterShape(1, 8))
    workload = Workload(
        nodes=(node,),
        jobs=[work_job(0, 100, 8)],
        changes=[NodeChange(at=50, name=node.name, view=None), NodeChange(at=60, name=node.name, view=node)],
    )
    report = build_report(
        simulate_workload(workload, Policy(), checkpoints=CheckpointModel(interval_s=40, restart_s=5))
    )
    # 40 s are kept and 10 lost. From 60 on the job reads for 5 s and works for 60. The node is away for 10 s.
    assert report.span_s == 125
    assert report.lost_hours == pytest.approx(8 * 10 / 3600)
    assert report.overhead_hours == pytest.approx(8 * 5 / 3600)
    assert report.utilisation == pytest.approx(115 / 115)
    assert report.goodput == pytest.approx(100 / 115)


def test_refused_jobs_are_counted_and_otherwise_left_out() -> None:
    report = build_report(simulate_workload(gpu_cluster(work_job(0, 10, 9), work_job(0, 10, 8)), Policy()))
    assert (report.num_refused, report.overall.num_jobs) == (1, 1)


def test_a_report_is_json() -> None:
    report = build_report(simulate_workload(gpu_cluster(work_job(0, 10, 8, user="ana")), Policy()))
    read = msgspec.json.decode(msgspec.json.encode(report))
    assert read["overall"]["wait_s"]["mean"] == 0
    assert read["user_fairness"]["parts"]["ana"]["received"] == 80
