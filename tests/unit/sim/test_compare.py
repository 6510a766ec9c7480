"""Two reports as rows of text."""

from __future__ import annotations

import pytest

from shoal.scheduler import Policy
from shoal.sim import scenario as scenario_module
from shoal.sim.change import with_nodes
from shoal.sim.compare import overall_rows, project_rows, seconds, single_rows
from shoal.sim.machines import Shape
from shoal.sim.report import report
from shoal.sim.scenario import Scenario, play, play_all
from shoal.sim.twin import replay
from tests.support.workloads import gpu_cluster, work

WORKLOAD = gpu_cluster(work(0, 100, 8, project="a"), work(0, 100, 8, project="b"))
BEFORE = report(replay(WORKLOAD, Policy()))
AFTER = report(replay(with_nodes(WORKLOAD, [Shape(1, 8)]), Policy()))


def test_each_measure_is_told_before_after_and_as_a_change() -> None:
    rows = {row[0]: row[1:] for row in overall_rows(BEFORE, AFTER)}
    assert rows["jobs run"] == ("2", "2", "=")
    assert rows["wait, mean"] == ("50s", "0s", "-100%")
    assert rows["completion, mean"] == ("2.5m", "1.7m", "-33%")
    assert rows["utilisation"] == ("100.0%", "100.0%", "=")


def test_measures_that_say_nothing_are_left_out() -> None:
    names = [row[0] for row in overall_rows(BEFORE, AFTER)]
    assert not {"jobs refused", "node failures", "lost work, device-hours"} & set(names)
    assert [name for name, _ in single_rows(BEFORE)][:2] == ["jobs run", "wait, mean"]


def test_projects_are_told_by_name() -> None:
    rows = project_rows(BEFORE, AFTER)
    assert [row[:2] for row in rows] == [("a", "1"), ("b", "1")]
    assert {row[2:5] for row in rows} == {("0s", "0s", "="), ("1.7m", "0s", "-100%")}


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0s"), (59.4, "59s"), (90, "1.5m"), (5400, "1.5h"), (864000, "10.0d")]
)
def test_times_are_told_in_the_unit_that_fits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_a_scenario_has_the_same_outcome_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario_module, "FEW_JOBS", 0)
    scenarios = [Scenario(workload=WORKLOAD), Scenario(workload=with_nodes(WORKLOAD, [Shape(1, 8)]))]
    there = play_all(scenarios)
    for scenario, outcome in zip(scenarios, there, strict=True):
        assert outcome.ends == play(scenario).ends
        assert report(outcome) == report(play(scenario))
