"""`shoal explain-decision` against a log that a control plane on a bench wrote."""

from __future__ import annotations

import json
from typing import Any, Self

import msgspec
import pytest

from shoal.cli import decision as cli
from shoal.cli.text import utc
from shoal.errors import Denied, NotFound
from shoal.store import EventFilter
from tests.support.lab import Lab


class Server:
    """Answers what the command asks, out of the lab's own log."""

    def __init__(self, lab: Lab) -> None:
        found = lab.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 30))
        self.log: list[dict[str, Any]] = msgspec.to_builtins(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self, *, after: int = 0, limit: int, **wanted: str) -> list[dict[str, Any]]:
        found = [
            event
            for event in self.log
            if event["seq"] > after
            and event["kind"].startswith(wanted.get("kind", ""))
            and wanted.get("job", event["job_id"]) == event["job_id"]
        ]
        return found[:limit]


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
def server(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server(lab)
    monkeypatch.setattr(cli, "connect", lambda: server)
    names = {
        event["data"]["name"]: event["job_id"] for event in server.log if event["kind"] == "job.submitted"
    }
    monkeypatch.setattr(cli, "one_job", lambda _, name: names[name])
    return server


def test_decision_of_a_job_reproduces_from_the_log(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.explain_decision("second", why="third", json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["reproduces"]
    assert told["recorded"] == told["made_again"]
    assert "needs 1 node with 8 free CPUs" in told["why"]


def test_decision_that_was_tampered_with_differs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    made = [event for event in server.log if event["kind"] == "plan.made"][-1]
    made["data"]["starts"][0]["allocation"][0]["cpus"] = 7.0
    assert cli.explain_decision(str(made["seq"])) == 1
    assert "differs: from the log up to event" in capsys.readouterr().out


def test_event_that_is_no_decision_is_refused(server: Server) -> None:
    with pytest.raises(NotFound, match="event 1 is no decision"):
        cli.explain_decision("1")


def test_job_that_never_started_has_no_decision(server: Server) -> None:
    with pytest.raises(NotFound, match="no decision has started `third` yet"):
        cli.explain_decision("third")


def test_who_sees_a_part_of_the_log_is_told_so(server: Server) -> None:
    del server.log[0]
    with pytest.raises(Denied, match="only a part of it"):
        cli.explain_decision("second")


def test_decision_that_stops_somebody_says_whom_and_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(num_nodes=1)
    lab.running(name="slow", resources={"cpus": 8})
    lab.submit(name="urgent", resources={"cpus": 8}, priority="production")
    lab.place()
    server = Server(lab)
    monkeypatch.setattr(cli, "connect", lambda: server)
    made = [event for event in server.log if event["kind"] == "plan.made"][-1]
    assert cli.explain_decision(str(made["seq"])) == 0
    told = capsys.readouterr().out
    assert " stops for " in told
    assert f" of {utc(made['at'])} UTC: " in told
