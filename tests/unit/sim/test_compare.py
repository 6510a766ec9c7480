"""Two reports as rows of text."""

from __future__ import annotations

import pytest

from shoal.scheduler import Policy
from shoal.sim import scenario as scenario_module
from shoal.sim.cluster_shapes import ClusterShape
from shoal.sim.compare import overall_rows, project_rows, seconds, single_rows
from shoal.sim.report import build_report
from shoal.sim.scenario import Scenario, play, play_all
from shoal.sim.twin import simulate_workload
from shoal.sim.workload_changes import with_nodes
from tests.support.sim_jobs import gpu_cluster, work_job

WORKLOAD = gpu_cluster(work_job(0, 100, 8, project="a"), work_job(0, 100, 8, project="b"))
BEFORE = build_report(simulate_workload(WORKLOAD, Policy()))
AFTER = build_report(simulate_workload(with_nodes(WORKLOAD, [ClusterShape(1, 8)]), Policy()))


def test_each_measure_is_shown_before_after_and_as_a_change() -> None:
    rows = {row[0]: row[1:] for row in overall_rows(BEFORE, AFTER)}
    assert rows["jobs run"] == ("2", "2", "=")
    assert rows["wait, mean"] == ("50s", "0s", "-100%")
    assert rows["completion, mean"] == ("2.5m", "1.7m", "-33%")
    assert rows["utilisation"] == ("100.0%", "100.0%", "=")


def test_measures_without_a_value_are_left_out() -> None:
    names = [row[0] for row in overall_rows(BEFORE, AFTER)]
    assert not {"jobs refused", "node failures", "lost work, device-hours"} & set(names)
    assert [name for name, _ in single_rows(BEFORE)][:2] == ["jobs run", "wait, mean"]


def test_projects_are_listed_by_name() -> None:
    rows = project_rows(BEFORE, AFTER)
    assert [row[:2] for row in rows] == [("a", "1"), ("b", "1")]
    assert {row[2:5] for row in rows} == {("0s", "0s", "="), ("1.7m", "0s", "-100%")}


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0s"), (59.4, "59s"), (90, "1.5m"), (5400, "1.5h"), (864000, "10.0d")]
)
def test_times_are_shown_in_the_unit_that_fits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_a_scenario_has_the_same_outcome_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario_module, "FEW_JOBS", 0)
    scenarios = [Scenario(workload=WORKLOAD), Scenario(workload=with_nodes(WORKLOAD, [ClusterShape(1, 8)]))]
    there = play_all(scenarios)
    for scenario, outcome in zip(scenarios, there, strict=True):
        assert outcome.ends == play(scenario).ends
        assert build_report(outcome) == build_report(play(scenario))
