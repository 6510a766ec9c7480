"""`shoal whatif` and `shoal plan` over a cluster's own history, as people type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli import past, progress
from shoal.engines.fake import Act, always
from tests.support.cli import Shell
from tests.support.lab import Lab
from tests.support.log_server import LogServer


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Ten jobs of a whole node on two nodes."""
    lab = Lab(num_nodes=2, script=always(Act(run_s=20.0)))
    lab.heal()
    for _ in range(10):
        lab.submit(resources={"cpus": 8, "gpus": 4}, time_limit="1m")
    live(lab, 120)
    monkeypatch.setattr(past, "connect", lambda: LogServer(lab))
    return lab


def live(lab: Lab, seconds: int) -> None:
    for _ in range(seconds):
        lab.clock.advance(1.0)
        lab.turn()


@pytest.mark.parametrize(
    "typed",
    [("--add", "8xH100:8"), ("--add", "2xfake:4"), ("--remove", "n2"), ("--quota", "lab=4")],
    ids=" ".join,
)
def test_history_is_simulated_with_a_change(shell: Shell, lab: Lab, typed: tuple[str, str]) -> None:
    told = shell("whatif", *typed)
    assert told.code == 0, told.err
    assert "recorded decisions come out equal" in told.out
    assert f"simulated: the history of this cluster, {typed[0][2:]} {typed[1]}" in told.out


def test_failures_are_learned_from_the_history(shell: Shell, lab: Lab) -> None:
    for _ in range(3):
        lab.cluster.power_off("n2")
        live(lab, 10)
        lab.cluster.power_on("n2")
        live(lab, 20)
    told = shell("whatif", "--failures", "2x")
    assert told.code == 0, told.err
    assert "a node fails every 2.0m and is away 10s; learned from the 3 that are recorded in " in told.out
    found = shell("whatif", "--failures", "20x", "--checkpoint", "1s", "--json").json()
    assert found["failures"]["recorded"]["num_failures"] == 3
    assert found["after"]["num_failures"] > found["before"]["num_failures"]


def test_history_without_failures_asks_how_often_they_are(shell: Shell, lab: Lab) -> None:
    refused = shell("whatif", "--failures", "2x")
    assert refused.code == 2
    assert "no node failed" in refused.err
    assert "hint: say how often one does: --mtbf 60d" in refused.err
    told = shell("whatif", "--failures", "2x", "--mtbf", "5m", "--repair", "10s")
    assert told.code == 0, told.err
    assert "a node fails every 5.0m and is away 10s; instead of the 0 that are" in told.out


def test_plan_of_this_cluster_needs_no_trace(shell: Shell, lab: Lab) -> None:
    told = shell("plan", "--target", "max wait < 10s", "--growth", "30%/month", "--processes", "1")
    assert told.code == 0, told.err
    assert "times those of this cluster's history" in told.out
    assert "2 (today)" in told.out
    assert "smallest that meets `max wait < 10s`: " in told.out


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


def test_pipe_is_told_now_and_then_what_is_being_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.01)
    with progress.long_work("simulating") as say:
        say("simulating 2 of 3")
        while "2 of 3" not in (told := capsys.readouterr().err):
            pass
    assert told.startswith("simulating")
    assert "s so far\n" in told
