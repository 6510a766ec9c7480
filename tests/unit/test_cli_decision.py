"""`shoal explain-decision` against a log that a control plane on a bench wrote."""

from __future__ import annotations

import json

import pytest

from shoal.cli import decision as cli
from shoal.cli.text import utc
from shoal.errors import Denied, NotFound
from shoal.scheduler.policy import Policy
from shoal.scheduler.types import Eviction, Ground
from tests.support.lab import Lab
from tests.support.log_server import LogServer


@pytest.fixture
def lab() -> Lab:
    """Two jobs that ran one after the other, and one that waits."""
    lab = Lab(num_nodes=1)
    first = lab.running(name="first", resources={"cpus": 8})
    lab.submit(name="second", resources={"cpus": 8})
    lab.submit(name="third", resources={"cpus": 8})
    lab.place()
    lab.stop(first)
    lab.turn()
    return lab


@pytest.fixture
def server(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> LogServer:
    server = LogServer(lab)
    monkeypatch.setattr(cli, "connect", lambda: server)
    names = {
        event["data"]["name"]: event["job_id"] for event in server.log if event["kind"] == "job.submitted"
    }
    monkeypatch.setattr(cli, "one_job", lambda _, name: names[name])
    return server


def test_decision_of_a_job_reproduces_from_the_log(
    server: LogServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.explain_decision("second", why="third", json=True) == 0
    (told,) = json.loads(capsys.readouterr().out)["decisions"]
    assert told["reproduces"]
    assert told["recorded"] == told["made_again"]
    assert "needs 1 node with 8 free CPUs" in told["why"]


def test_decision_that_was_tampered_with_differs(
    server: LogServer, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [event for event in server.log if event["kind"] == "plan.made"][-1]
    made["data"]["starts"][0]["allocation"][0]["cpus"] = 7.0
    assert cli.explain_decision(str(made["seq"])) == 1
    assert "differs: from the log up to event" in capsys.readouterr().out


def test_event_that_is_no_decision_is_refused(server: LogServer) -> None:
    with pytest.raises(NotFound, match="event 1 is no decision"):
        cli.explain_decision("1")


def test_job_that_never_started_has_no_decision(server: LogServer) -> None:
    with pytest.raises(NotFound, match="no decision has started `third` yet"):
        cli.explain_decision("third")


def test_who_sees_a_part_of_the_log_is_told_so(server: LogServer) -> None:
    del server.log[0]
    with pytest.raises(Denied, match="only a part of it"):
        cli.explain_decision("second")


def test_decision_that_stops_somebody_says_whom_and_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(num_nodes=1)
    lab.running(name="slow", resources={"cpus": 8})
    lab.submit(name="urgent", resources={"cpus": 8}, priority="production")
    lab.clock.advance(Policy().settle_s)
    lab.place()
    server = LogServer(lab)
    monkeypatch.setattr(cli, "connect", lambda: server)
    made = [event for event in server.log if event["kind"] == "plan.made"][-1]
    assert cli.explain_decision(str(made["seq"])) == 0
    told = capsys.readouterr().out
    assert " stops for " in told
    assert told.splitlines()[1].endswith(" CPU-hours"), "as `shoal why` tells it"
    assert f" of {utc(made['at'])} UTC: " in told


def test_decisions_of_a_job_are_told_in_order_with_evictions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(num_nodes=1)
    slow = lab.running(name="slow", resources={"cpus": 8})
    urgent = lab.submit(name="urgent", resources={"cpus": 8}, priority="production")
    for _ in range(40):
        lab.clock.advance(5.0)
        lab.turn()
    assert lab.status(urgent) == "running"
    ids = {"slow": slow.job_id, "urgent": urgent.job_id}
    monkeypatch.setattr(cli, "connect", lambda: LogServer(lab))
    monkeypatch.setattr(cli, "one_job", lambda _, name: ids[name])
    shapes = {}
    for name in ids:
        assert cli.explain_decision(name, json=True) == 0
        told = json.loads(capsys.readouterr().out)["decisions"]
        shapes[name] = [(len(one["recorded"]), len(one["stops"])) for one in told]
    assert shapes == {"slow": [(1, 0), (0, 1)], "urgent": [(0, 1), (1, 0)]}
    assert cli.explain_decision("urgent") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1 to stop" in lines[0]
    assert " stops for " in lines[1]
    assert "1 job to start" in lines[3]


def test_decision_in_several_events_is_found_by_the_jobs_it_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.control.decision.MAX_EVENT_BYTES", 1024)
    lab = Lab(num_nodes=2)
    lab.heal()
    jobs = [lab.submit(name=f"j{number}", resources={"cpus": 1}) for number in range(16)]
    lab.place()
    server = LogServer(lab)
    assert [event for event in server.log if event["kind"] == "plan.part"]
    monkeypatch.setattr(cli, "connect", lambda: server)
    monkeypatch.setattr(cli, "one_job", lambda _, name: jobs[int(name[1:])].job_id)
    for job in range(16):
        assert cli.explain_decision(f"j{job}", json=True) == 0
        (told,) = json.loads(capsys.readouterr().out)["decisions"]
        assert len(told["recorded"]) == 1
        assert told["num_others"] == 15


@pytest.mark.parametrize(
    ("others", "told"), [(0, "1 job to start"), (1, "(and 1 other)"), (2, "(and 2 others)")]
)
def test_others_of_a_decision_are_counted_in_words(others: int, told: str) -> None:
    assert cli._counted({"recorded": [{}], "stops": [], "num_others": others}).endswith(told)


@pytest.mark.parametrize(
    ("held", "told"),
    [({"att_1": ("GPU", 8)}, "4 GPU-hours"), ({"att_1": ("CPU", 2)}, "1 CPU-hours"), ({}, "5 device-hours")],
)
def test_loss_is_told_in_what_the_stopped_one_held(held: dict[str, tuple[str, float]], told: str) -> None:
    stop = Eviction(
        attempt_id="att_1", for_attempt_id="att_2", ground=Ground.PRIORITY,
        lost_s=1800.0, lost_device_s=18000.0, saved_at=None,
    )  # fmt: skip
    assert cli._lost(stop, held) == told
