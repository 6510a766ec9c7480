"""Rows 20 and 39: the audit counts what it leaves out, and shows which callers ask for things of other
projects.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from shoal.api.http.limits import STRANGERS_BURST
from shoal.control.commands.audit import write_refusals
from shoal.control.memory.refusals import MAX_STRANGERS
from shoal.errors import StoreUnavailable
from shoal.store import open_store
from tests.attacks.inventory import UNKNOWN_ID
from tests.support.planes.bench import ANA
from tests.support.planes.world import ApiWorld, open_plane, open_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ApiWorld]:
    with open_world(tmp_path) as opened:
        yield opened


def denied(world: ApiWorld) -> list[Any]:
    """Return as an operator sees it everything that was refused until now."""
    entries = world.call("GET", "/v1/audit?limit=1000", role="operator").json()["items"]
    return [entry for entry in entries if entry["kind"] == "access.denied"]


def counted(world: ApiWorld) -> list[Any]:
    return [entry for entry in denied(world) if "count" in entry["data"]]


def test_noise_hides_nothing(world: ApiWorld) -> None:
    for number in range(60):
        data = {"name": f"noise-{number}"}
        assert world.call("POST", "/v1/users", role="member", data=data).status == 403
    assert world.call("DELETE", "/v1/nodes/node-1", role="member").status == 403
    events = denied(world)
    alone = [entry for entry in events if "count" not in entry["data"]]
    (rest,) = [entry for entry in events if "count" in entry["data"]]
    assert len(alone) <= 25
    assert len(alone) + rest["data"]["count"] == 61
    assert rest["actor"] == "user:ben"
    assert rest["data"]["routes"]["DELETE /v1/nodes/{name} 403"] == 1
    assert rest["data"]["until"] >= rest["data"]["since"]


def test_many_addresses_do_not_flood_the_audit(world: ApiWorld) -> None:
    for number in range(600):
        client = (f"10.0.0.{number % 60}", 50000)
        assert world.call("DELETE", "/v1/users/ben", token="shl_wrong", client=client).status == 401
    events = denied(world)
    alone = [entry for entry in events if "count" not in entry["data"]]
    rest = [entry for entry in events if "count" in entry["data"]]
    assert len(alone) <= STRANGERS_BURST + 25
    assert len(rest) <= MAX_STRANGERS + 1
    assert len(alone) + sum(entry["data"]["count"] for entry in rest) == 600


def test_request_for_things_of_another_project_is_recorded(world: ApiWorld) -> None:
    theirs = world.jobs["speech"]
    for _ in range(3):
        assert world.call("POST", f"/v1/jobs/{theirs}/stop", role="member", data={}).status == 404
    for path in (f"/v1/jobs/{theirs}", f"/v1/jobs/{theirs}/logs", "/v1/jobs?project=speech"):
        assert world.call("GET", path, role="member").status == 404
    (entry,) = counted(world)
    data = entry["data"]
    assert (entry["actor"], data["elsewhere"], data["count"]) == ("user:ben", 6, 6)
    assert data["routes"] == {
        "GET /v1/jobs 404": 1,
        "GET /v1/jobs/{job_id} 404": 1,
        "GET /v1/jobs/{job_id}/logs 404": 1,
        "POST /v1/jobs/{job_id}/stop 404": 3,
    }
    assert f"/v1/jobs/{theirs}/stop" in data["paths"]


def test_missing_thing_gets_the_same_reply_and_no_entry(world: ApiWorld) -> None:
    def refused(job_id: str) -> dict[str, Any]:
        answer = world.call("POST", f"/v1/jobs/{job_id}/stop", role="member", data={})
        body = answer.json()
        return {"status": answer.status, **{key: body[key] for key in body if key != "request_id"}}

    nowhere = refused(UNKNOWN_ID)
    assert counted(world) == []
    assert refused(world.jobs["speech"]) == nowhere
    (entry,) = counted(world)
    assert (entry["data"]["elsewhere"], entry["data"]["nowhere"]) == (1, 1)


def test_nothing_is_written_while_the_prober_waits_for_the_answer(world: ApiWorld) -> None:
    """A write would take longer than no write, and so reveal what exists."""
    before = world.read(lambda tx: tx.events.head().seq)
    assert world.call("GET", f"/v1/jobs/{world.jobs['speech']}", role="member").status == 404
    kinds = world.read(lambda tx: [event.kind for event in tx.events.page(before)])
    assert "access.denied" not in kinds


def test_a_token_that_reads_other_peoples_tokens_by_their_id_is_seen(world: ApiWorld) -> None:
    created = world.call("POST", "/v1/tokens", role="lead", data={}).json()
    assert world.call("DELETE", f"/v1/tokens/{created['id']}", role="member").status == 404
    (entry,) = counted(world)
    assert entry["data"]["routes"] == {"DELETE /v1/tokens/{token_id} 404": 1}


def test_wrong_tokens_and_refused_reads_are_counted(world: ApiWorld) -> None:
    for _ in range(5):
        assert world.call("GET", "/v1/me", token="shl_wrong").status == 401
    for _ in range(2):
        assert world.call("GET", "/v1/users", role="viewer").status == 403
    routes_by_actor = {entry["actor"]: entry["data"]["routes"] for entry in counted(world)}
    assert routes_by_actor == {"unknown:127.0.0.1": {"GET any 401": 5}, "user:cy": {"GET /v1/users 403": 2}}


def test_counted_refusals_are_written_when_the_control_plane_ends(tmp_path: Path) -> None:
    with open_world(tmp_path, is_durable=True) as world:
        world.call("GET", f"/v1/jobs/{world.jobs['speech']}", role="member")
        clock, url = world.plane.core.records.clock, world.plane.settings.store_url

    async def read() -> list[Any]:
        store = open_store(url, clock=clock)
        try:
            events = await store.read(lambda tx: tx.events.latest(50))
        finally:
            await store.close()
        return [event.data for event in events if event.kind == "access.denied"]

    (data,) = anyio.run(read)
    assert data["elsewhere"] == 1


async def test_refusals_that_cannot_be_written_now_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("the disk is full")

    async with open_plane(tmp_path, is_running=False) as plane:
        core = plane.core
        core.refusals.count(ANA, "GET /v1/users 403", "/v1/users")
        with monkeypatch.context() as patched:
            patched.setattr(core.records.store, "write", away)
            await write_refusals(core.records, core.refusals, is_all=True)
        core.refusals.count(ANA, "GET /v1/users 403", "/v1/users")
        await write_refusals(core.records, core.refusals, is_all=True)
        (event,) = await core.records.store.read(lambda tx: tx.events.page(0))
        assert event.data["count"] == 2
