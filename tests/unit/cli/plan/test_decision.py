"""`shoal explain-decision` against a log written by a control plane on a test bench."""

from __future__ import annotations

import json

import pytest

from shoal.cli.plan import decision as cli
from shoal.cli.text import utc
from shoal.errors import Denied, NotFound
from shoal.scheduler.facts.plan import Eviction, EvictionGround
from shoal.scheduler.facts.policy import Policy
from tests.support.planes.bench import ControlPlaneLab, FakeLogServer


@pytest.fixture
def lab() -> ControlPlaneLab:
    """Two jobs that ran one after the other, and one that waits."""
    lab = ControlPlaneLab(num_nodes=1)
    first = lab.running_job(name="first", resources={"cpus": 8})
    lab.submit(name="second", resources={"cpus": 8})
    lab.submit(name="third", resources={"cpus": 8})
    lab.place()
    lab.stop(first)
    lab.run_loops()
    return lab


@pytest.fixture
def server(lab: ControlPlaneLab, monkeypatch: pytest.MonkeyPatch) -> FakeLogServer:
    server = FakeLogServer(lab)
    monkeypatch.setattr(cli, "connect", lambda: server)
    names = {
        event["data"]["name"]: event["job_id"] for event in server.log if event["kind"] == "job.submitted"
    }
    monkeypatch.setattr(cli, "resolve_job", lambda _, name: names[name])
    return server


def test_decision_of_a_job_reproduces_from_the_log(
    server: FakeLogServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.explain_decision("second", why="third", json=True) == 0
    (decision,) = json.loads(capsys.readouterr().out)["decisions"]
    assert decision["reproduces"]
    assert decision["recorded"] == decision["made_again"]
    assert "needs 1 node with 8 free CPUs" in decision["why"]


def test_decision_that_was_tampered_with_differs(
    server: FakeLogServer, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_event = [event for event in server.log if event["kind"] == "plan.made"][-1]
    plan_event["data"]["starts"][0]["allocation"][0]["cpus"] = 7.0
    assert cli.explain_decision(str(plan_event["seq"])) == 1
    assert "differs: the log up to event" in capsys.readouterr().out


def test_event_that_is_not_a_decision_is_refused(server: FakeLogServer) -> None:
    with pytest.raises(NotFound, match="event 1 is not a decision"):
        cli.explain_decision("1")


def test_job_that_never_started_has_no_decision(server: FakeLogServer) -> None:
    with pytest.raises(NotFound, match="no decision has started `third` yet"):
        cli.explain_decision("third")


def test_user_who_sees_part_of_the_log_is_refused(server: FakeLogServer) -> None:
    del server.log[0]
    with pytest.raises(Denied, match="only a part of it"):
        cli.explain_decision("second")


def test_decision_that_preempts_names_both_jobs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.running_job(name="slow", resources={"cpus": 8})
    lab.submit(name="urgent", resources={"cpus": 8}, priority="production")
    lab.clock.advance(Policy().settle_s)
    lab.place()
    server = FakeLogServer(lab)
    monkeypatch.setattr(cli, "connect", lambda: server)
    plan_event = [event for event in server.log if event["kind"] == "plan.made"][-1]
    assert cli.explain_decision(str(plan_event["seq"])) == 0
    output = capsys.readouterr().out
    assert " stops for " in output
    assert output.splitlines()[1].endswith(" CPU-hours"), "as `shoal why` tells it"
    assert f" of {utc(plan_event['at'])} UTC: " in output


def test_decisions_of_a_job_are_printed_in_order_with_evictions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = ControlPlaneLab(num_nodes=1)
    slow = lab.running_job(name="slow", resources={"cpus": 8})
    urgent = lab.submit(name="urgent", resources={"cpus": 8}, priority="production")
    for _ in range(40):
        lab.clock.advance(5.0)
        lab.run_loops()
    assert lab.status(urgent) == "running"
    ids = {"slow": slow.job_id, "urgent": urgent.job_id}
    monkeypatch.setattr(cli, "connect", lambda: FakeLogServer(lab))
    monkeypatch.setattr(cli, "resolve_job", lambda _, name: ids[name])
    shapes = {}
    for name in ids:
        assert cli.explain_decision(name, json=True) == 0
        document = json.loads(capsys.readouterr().out)["decisions"]
        shapes[name] = [(len(decision["recorded"]), len(decision["stops"])) for decision in document]
    assert shapes == {"slow": [(1, 0), (0, 1)], "urgent": [(0, 1), (1, 0)]}
    assert cli.explain_decision("urgent") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1 to stop" in lines[0]
    assert " stops for " in lines[1]
    assert "1 job to start" in lines[3]


@pytest.mark.parametrize(
    ("num_nodes", "lines"),
    [
        (3, ["1 lost task", "its lost task on n2 continues on n3 GPU 0,1"]),
        (2, ["1 lost task", "its lost task on n2 fits on no other node"]),
    ],
)
def test_decision_about_a_lost_task_says_where_it_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_nodes: int, lines: list[str]
) -> None:
    lab = ControlPlaneLab(num_nodes=num_nodes)
    job = lab.running_job(resources={"nodes": 2, "gpus": 2}, retry={"max": 1, "on": ["exit", "signal"]})
    lab.cluster.power_off("n2")
    lab.watch()
    lab.place()
    monkeypatch.setattr(cli, "connect", lambda: FakeLogServer(lab))
    monkeypatch.setattr(cli, "resolve_job", lambda *_: job.job_id)
    assert cli.explain_decision("gang", json=True) == 0
    start, moved = json.loads(capsys.readouterr().out)["decisions"]
    assert (len(start["recorded"]), start["replacements"]) == (1, [])
    assert (moved["recorded"], moved["replacements"]) == ([], moved["replacements_made_again"])
    assert cli.explain_decision("gang") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[3].endswith(lines[0])
    assert printed[4].endswith(lines[1])
    assert "not carried out" not in "".join(printed)


def test_decision_in_several_events_is_found_by_the_jobs_it_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.control.loops.decision.MAX_EVENT_BYTES", 1024)
    lab = ControlPlaneLab(num_nodes=2)
    lab.heal()
    jobs = [lab.submit(name=f"j{number}", resources={"cpus": 1}) for number in range(16)]
    lab.place()
    server = FakeLogServer(lab)
    assert [event for event in server.log if event["kind"] == "plan.part"]
    monkeypatch.setattr(cli, "connect", lambda: server)
    monkeypatch.setattr(cli, "resolve_job", lambda _, name: jobs[int(name[1:])].job_id)
    for job in range(16):
        assert cli.explain_decision(f"j{job}", json=True) == 0
        (decision,) = json.loads(capsys.readouterr().out)["decisions"]
        assert len(decision["recorded"]) == 1
        assert decision["num_others"] == 15


@pytest.mark.parametrize(
    ("others", "expected"), [(0, "1 job to start"), (1, "(and 1 other)"), (2, "(and 2 others)")]
)
def test_others_of_a_decision_are_counted_in_words(others: int, expected: str) -> None:
    assert cli._counts_text(
        {"recorded": [{}], "stops": [], "replacements": [], "num_others": others}
    ).endswith(expected)


@pytest.mark.parametrize(
    ("held", "expected"),
    [({"att_1": ("GPU", 8)}, "4 GPU-hours"), ({"att_1": ("CPU", 2)}, "1 CPU-hours"), ({}, "5 device-hours")],
)
def test_loss_is_printed_in_the_devices_the_stopped_job_held(
    held: dict[str, tuple[str, float]], expected: str
) -> None:
    stop = Eviction(
        attempt_id="att_1", for_attempt_id="att_2", ground=EvictionGround.PRIORITY,
        lost_s=1800.0, lost_device_s=18000.0, saved_at=None,
    )  # fmt: skip
    assert cli._loss_text(stop, held) == expected
