"""Reports of outcomes, by hand."""

from __future__ import annotations

import msgspec
import pytest

from shoal.scheduler import Policy
from shoal.sim.checkpoints import Checkpoints
from shoal.sim.machines import Shape, nodes_of
from shoal.sim.report import report
from shoal.sim.twin import replay
from shoal.sim.workload import NodeChange, Workload
from tests.support.workloads import gpu_cluster, work


def test_waits_slowdowns_and_completions_are_those_of_the_jobs() -> None:
    jobs = work(0, 100, 8, project="a"), work(0, 100, 8, project="b")
    told = report(replay(gpu_cluster(*jobs), Policy()))
    assert told.overall.num_jobs == 2
    assert (told.overall.wait_s.mean, told.overall.wait_s.max) == (50, 100)
    assert told.overall.slowdown.mean == 1.5
    assert told.projects["b"].completion_s.mean == 200
    assert told.overall.device_hours == pytest.approx(8 * 200 / 3600)
    assert (told.utilisation, told.goodput) == (1.0, 1.0)


def test_lost_work_is_used_and_no_goodput() -> None:
    (node,) = nodes_of(Shape(1, 8))
    workload = Workload(
        nodes=(node,),
        jobs=[work(0, 100, 8)],
        changes=[NodeChange(at=50, name=node.name, view=None), NodeChange(at=60, name=node.name, view=node)],
    )
    told = report(replay(workload, Policy(), checkpoints=Checkpoints(interval_s=40, restart_s=5)))
    # 40 s are kept and 10 lost; from 60 on it reads for 5 s and works for 60. The node is away for 10 s.
    assert told.span_s == 125
    assert told.lost_hours == pytest.approx(8 * 10 / 3600)
    assert told.overhead_hours == pytest.approx(8 * 5 / 3600)
    assert told.utilisation == pytest.approx(115 / 115)
    assert told.goodput == pytest.approx(100 / 115)


def test_refused_jobs_are_counted_and_otherwise_left_out() -> None:
    told = report(replay(gpu_cluster(work(0, 10, 9), work(0, 10, 8)), Policy()))
    assert (told.num_refused, told.overall.num_jobs) == (1, 1)


def test_a_report_is_json() -> None:
    told = report(replay(gpu_cluster(work(0, 10, 8, user="ana")), Policy()))
    read = msgspec.json.decode(msgspec.json.encode(told))
    assert read["overall"]["wait_s"]["mean"] == 0
    assert read["user_fairness"]["parts"]["ana"]["received"] == 80
