"""Row 39 at the API, and row 18: the log shows tampering, and what people typed stays text."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.settings import ServerLimits
from tests.support.planes.world import ApiWorld, open_world

ESCAPES = (
    "\x1b[2J\x1b[H",
    "\x1b]0;owned\x07",
    "\x1b]8;;http://evil\x07click\x1b]8;;\x07",
    "a\rb",
    "a\x00b",
    "a\nb",
)


def test_an_untouched_log_is_whole(world: ApiWorld) -> None:
    verdict = world.call("GET", "/v1/audit/verify", role="operator").json()
    assert verdict["is_intact"]
    assert verdict["first_bad"] is None
    assert verdict["head"]["seq"] > 10


def edit(file: sqlite3.Connection) -> int:
    file.execute("update events set actor = 'user:mallory' where seq = 7")
    return 7


def delete(file: sqlite3.Connection) -> int:
    file.execute("delete from events where seq = 7")
    return 7


def swap(file: sqlite3.Connection) -> int:
    file.execute("update events set seq = -7 where seq = 7")
    file.execute("update events set seq = 7 where seq = 8")
    file.execute("update events set seq = 8 where seq = -7")
    return 7


@pytest.mark.parametrize("tamper", [edit, delete, swap])
def test_the_first_entry_that_was_tampered_with_is_named(
    tmp_path: Path, tamper: Callable[[sqlite3.Connection], int]
) -> None:
    with open_world(tmp_path, is_durable=True, limits=ServerLimits()) as world:
        assert world.call("GET", "/v1/audit/verify", role="admin").json()["is_intact"]
        with sqlite3.connect(tmp_path / "shoal.db") as file:
            for (name,) in file.execute("select name from sqlite_master where type = 'trigger'").fetchall():
                file.execute(f'drop trigger "{name}"')
            bad = tamper(file)
        verdict = world.call("GET", "/v1/audit/verify", role="admin").json()
        assert (verdict["is_intact"], verdict["first_bad"]) == (False, bad)
        assert verdict["because"]


@pytest.mark.parametrize("text", ESCAPES, ids=ascii)
def test_control_characters_are_refused_in_text_shown_to_others(world: ApiWorld, text: str) -> None:
    job = {"spec": {"run": "true", "name": text}, "project": "vision"}
    assert world.call("POST", "/v1/jobs", role="member", data=job).status == 422
    for method, path, body in (
        ("POST", "/v1/users", {"name": text}),
        ("POST", "/v1/projects", {"name": text}),
        ("POST", "/v1/tokens", {"label": text}),
        ("POST", "/v1/nodes/node-2/cordon", {"because": text}),
    ):
        refused = world.call(method, path, role="admin", data=body)
        assert refused.status == 422
        assert "\\u001b" not in refused.body.decode()


def test_every_change_by_a_person_leaves_an_entry_with_its_request(world: ApiWorld) -> None:
    created = world.call("POST", "/v1/tokens", role="lead", data={"label": "seen"})
    request_id = created.header("x-request-id")
    entries = world.call("GET", "/v1/audit?limit=1000", role="admin").json()["items"]
    mine = [entry for entry in entries if entry["request_id"] == request_id]
    assert [(entry["kind"], entry["actor"]) for entry in mine] == [("token.created", "user:ana")]
    assert created.json()["text"] not in str(entries)


def test_audit_names_every_refused_caller(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:  # a world without so many refusals that they are only counted
        for role, kind in (("member", "user"), ("job", "job"), ("supervisor", "supervisor")):
            world.call("POST", "/v1/nodes/node-2/cordon", role=role, data={"because": "sneaky"})
            (newest,) = world.call("GET", "/v1/audit?tail=1", role="operator").json()["items"]
            assert newest["kind"] == "access.denied"
            assert newest["actor"].partition(":")[0] == kind


def test_audit_leaves_out_changes_by_shoal_itself(world: ApiWorld) -> None:
    items = world.call("GET", "/v1/audit?limit=1000", role="operator").json()["items"]
    assert "shoal" not in {item["actor"] for item in items}


def test_the_tail_of_the_log_is_its_newest_entries_in_order(world: ApiWorld) -> None:
    newest = world.call("GET", "/v1/events?tail=1", role="admin").json()["items"][0]["seq"]
    tail = world.call("GET", "/v1/events?tail=3", role="admin").json()
    first = tail["items"][0]["seq"]
    assert tail["items"][-1]["seq"] >= newest
    same = world.call("GET", f"/v1/events?after={first - 1}&limit=3", role="admin").json()["items"]
    assert tail["items"] == same
    assert tail["next_cursor"] is None
    assert world.call("GET", "/v1/events?tail=3&after=1", role="admin").status in (400, 422)
