"""`shoal whatif` and `shoal plan` over a cluster's own history, as people type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli import progress
from shoal.cli.plan import inputs
from shoal.engines.fake import Act, always
from tests.support.fakes.api_server import Shell
from tests.support.planes.bench import ControlPlaneLab, FakeLogServer


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> ControlPlaneLab:
    """Ten jobs of a whole node on two nodes."""
    lab = ControlPlaneLab(num_nodes=2, script=always(Act(run_s=20.0)))
    lab.heal()
    for _ in range(10):
        lab.submit(resources={"cpus": 8, "gpus": 4}, time_limit="1m")
    live(lab, 120)
    monkeypatch.setattr(inputs, "connect", lambda: FakeLogServer(lab))
    return lab


def live(lab: ControlPlaneLab, seconds: int) -> None:
    for _ in range(seconds):
        lab.clock.advance(1.0)
        lab.run_loops()


@pytest.mark.parametrize(
    "typed",
    [("--add", "8xH100:8"), ("--add", "2xfake:4"), ("--remove", "n2"), ("--quota", "lab=4")],
    ids=" ".join,
)
def test_history_is_simulated_with_a_change(
    shell: Shell, lab: ControlPlaneLab, typed: tuple[str, str]
) -> None:
    result = shell("whatif", *typed)
    assert result.code == 0, result.err
    assert "recorded decisions come out equal" in result.out
    assert f"simulated: the history of this cluster, {typed[0][2:]} {typed[1]}" in result.out


def test_failures_are_learned_from_the_history(shell: Shell, lab: ControlPlaneLab) -> None:
    for _ in range(3):
        lab.cluster.power_off("n2")
        live(lab, 10)
        lab.cluster.power_on("n2")
        live(lab, 20)
    result = shell("whatif", "--failures", "2x")
    assert result.code == 0, result.err
    assert "a node fails every 2.0m and is down 10s; learned from the 3 recorded in " in result.out
    outcome = shell("whatif", "--failures", "20x", "--checkpoint", "1s", "--json").json()
    assert outcome["failures"]["recorded"]["num_failures"] == 3
    assert outcome["after"]["num_failures"] > outcome["before"]["num_failures"]


def test_history_without_failures_asks_for_a_failure_rate(shell: Shell, lab: ControlPlaneLab) -> None:
    refused = shell("whatif", "--failures", "2x")
    assert refused.code == 2
    assert "no node failed" in refused.err
    assert "hint: give a failure rate: --mtbf 60d" in refused.err
    result = shell("whatif", "--failures", "2x", "--mtbf", "5m", "--repair", "10s")
    assert result.code == 0, result.err
    assert "a node fails every 5.0m and is down 10s; instead of the 0 recorded" in result.out


def test_plan_of_this_cluster_needs_no_trace(shell: Shell, lab: ControlPlaneLab) -> None:
    result = shell("plan", "--target", "max wait < 10s", "--growth", "30%/month", "--processes", "1")
    assert result.code == 0, result.err
    assert "times those of this cluster's history" in result.out
    assert "2 (today)" in result.out
    assert "smallest that meets `max wait < 10s`: " in result.out


def test_plan_of_a_trace_says_that_it_counts_nodes(shell: Shell, tmp_path: Path) -> None:
    refused = shell("plan", str(tmp_path / "none.csv"), "--target", "max wait < 10s")
    assert refused.code == 2
    assert "hint: --nodes 8xH100:8" in refused.err


@pytest.mark.parametrize(
    "typed",
    [
        ("--add", "many"),
        ("--quota", "vision"),
        ("--failures", "often"),
        ("--mtbf", "soon"),
        ("--checkpoint", "x"),
        ("--policy", "no-such.yaml"),
        ("--nodes", "x8"),
    ],
    ids=" ".join,
)
def test_wrong_flag_is_refused_before_the_trace_is_read(
    shell: Shell, tmp_path: Path, typed: tuple[str, str]
) -> None:
    refused = shell("whatif", str(tmp_path / "none.csv"), *typed)
    assert refused.code == 2
    assert typed[1] in refused.err or typed[0] in refused.err
    assert "none.csv" not in refused.err


def test_pipe_gets_progress_lines_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.01)
    with progress.long_work("simulating") as say:
        say("simulating 2 of 3")
        while "2 of 3" not in (errors := capsys.readouterr().err):
            pass
    assert errors.startswith("simulating")
    assert "s so far\n" in errors
