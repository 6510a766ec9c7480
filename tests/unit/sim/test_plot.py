"""The curve of how long jobs waited, point by point."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from shoal.scheduler import Policy
from shoal.sim import plot
from shoal.sim.twin import simulate_workload
from tests.support.sim_jobs import gpu_cluster, work_job


def points(waits: list[float]) -> list[tuple[float, float]]:
    at, share = plot.steps(np.array(waits), 1.0, 100.0)
    return list(zip(at.tolist(), share.tolist(), strict=True))


def test_curve_of_a_single_job_rises_from_zero_and_continues() -> None:
    assert points([8.0]) == [(1.0, 0.0), (8.0, 1.0), (100.0, 1.0)]


def test_every_wait_is_a_step_and_equal_ones_are_one() -> None:
    assert points([20.0, 4.0, 4.0, 9.0]) == [(1, 0.0), (4, 0.5), (9, 0.75), (20, 1.0), (100, 1.0)]


def test_job_that_did_not_wait_is_counted_where_the_axis_begins() -> None:
    assert points([0.0, 0.2, 5.0, 6.0]) == [(1, 0.0), (1, 0.5), (5, 0.75), (6, 1.0), (100, 1.0)]


@pytest.mark.parametrize("num", [3, 7, 49, 490, 1200])
def test_no_step_is_lost_by_rounding(num: int) -> None:
    waits = [float(2 + at) for at in range(num)]
    assert [share for _, share in points(waits)[1:-1]] == [k / num for k in range(1, num + 1)]
    assert [at for at, _ in points(waits)[1:-1]] == waits


def test_each_project_has_a_curve_across_the_whole_axis_even_with_one_job() -> None:
    outcome = simulate_workload(
        gpu_cluster(work_job(0, 100, 8, project="a"), work_job(0, 100, 8, project="b")), Policy()
    )
    axes = Figure().subplots()
    plot._waits(axes, {"today": outcome}, {"today": {"linestyle": "-"}})
    drawn = {str(line.get_label()): np.array(line.get_xydata()).tolist() for line in axes.get_lines()}
    assert drawn == {"a": [[1, 0], [1, 1], [130, 1]], "b": [[1, 0], [100, 1], [130, 1]]}
    assert axes.get_xlim() == (1, 130)
