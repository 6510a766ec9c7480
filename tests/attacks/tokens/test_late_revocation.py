"""Row 9 between the head of a request and its commit: a right taken away meanwhile stops every change.

Generated from the route table: a new route that changes something is tried without an edit here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from shoal.api.routing import RouteDeclaration
from shoal.control.capabilities import Records, Sealing
from shoal.control.commands import arrays
from shoal.control.commands import submit as submitting
from shoal.control.services import serving_table
from shoal.engines.base import Engine
from shoal.identity import Permission
from shoal.model.people import Role
from tests.attacks.inventory import GUARDED, Shot, aimed, title
from tests.support.archives import tar_of
from tests.support.planes import asgi
from tests.support.planes.world import ROOT, ApiWorld, open_world

FOR_PROCESSES = {
    Permission.LEASE_RENEW,
    Permission.LOG_SHIP,
    Permission.TASK_SPEC_FETCH,
    Permission.TABLE_REPORT,
}
"""Signed by their sender, or without effect beyond this process. No token of a person opens them."""
CHANGES = [
    row for row in GUARDED if row.method not in ("GET", "HEAD") and row.permission not in FOR_PROCESSES
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiWorld]:
    """A world of its own, because what is recorded is counted here."""
    with open_world(tmp_path_factory.mktemp("late")) as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving_table, "CONFIRM_S", 0.001)  # no data plane listens that could confirm anything
        yield opened


def newcomer(world: ApiWorld, name: str) -> tuple[str, str]:
    """A token of an admin who also leads `vision`, and its id."""

    async def come() -> tuple[str, str]:
        user = await world.plane.create_user(ROOT, name, Role.ADMIN)
        await world.plane.set_member(ROOT, "vision", name, Role.LEAD)
        token, text = await world.plane.create_token(ROOT, user, label="", scope=Role.ADMIN)
        assert text is not None
        return text, token.token_id

    return world.portal.call(come)


async def revoke(world: ApiWorld, name: str, token_id: str) -> None:
    await world.plane.revoke_token(ROOT, token_id)


async def deactivate(world: ApiWorld, name: str, token_id: str) -> None:
    await world.plane.update_user(ROOT, name, {"is_active": False})


async def demote(world: ApiWorld, name: str, token_id: str) -> None:
    await world.plane.update_user(ROOT, name, {"cluster_role": None})
    await world.plane.remove_member(ROOT, "vision", name)


Loss = Callable[[ApiWorld, str, str], Awaitable[None]]
LOSSES: list[tuple[Loss, set[int]]] = [(revoke, {401}), (deactivate, {401}), (demote, {403, 404, 409})]


def fire_late(world: ApiWorld, shot: Shot, token: str, lose: Callable[[], Awaitable[None]]) -> int:
    """Send the request; the right is lost once the guard has admitted it and before the last of
    it has come.
    """
    body = asgi_body(shot)
    sent = [("host", "localhost"), ("authorization", f"Bearer {token}"), *shot.headers]
    if shot.data is not None:
        sent.append(("content-type", "application/json"))
    sent.append(("content-length", str(len(body))))
    pieces = [body[:-1], body[-1:]] if body else [b""]

    async def run() -> int:
        stream, call = asgi.AsgiStream(), world.app
        identify = call._services.authenticator.identify  # type: ignore[attr-defined]

        async def receive() -> Message:
            if len(pieces) == 1:
                await lose_once()
            if pieces:
                piece = pieces.pop(0)
                return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
            await stream.client_gone.wait()
            return {"type": "http.disconnect"}

        done: list[bool] = []

        async def lose_once() -> None:
            if not done:
                done.append(True)
                await lose()

        async def admit(text: str) -> Any:
            caller = await identify(text)
            if not body or shot.method == "DELETE":
                await lose_once()  # a request without a body loses its right directly after the guard
            return caller

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call._services.authenticator, "identify", admit)  # type: ignore[attr-defined]
            await call(asgi.scope_of(shot.method, shot.target, sent), receive, stream.send)
        assert done, "the right was never lost"
        assert stream.status is not None
        return stream.status

    return world.portal.call(run)


def asgi_body(shot: Shot) -> bytes:
    return json.dumps(shot.data).encode() if shot.data is not None else shot.body


@pytest.mark.parametrize("how", range(len(LOSSES)), ids=[loss.__name__ for loss, _ in LOSSES])
@pytest.mark.parametrize("row", CHANGES, ids=title)
def test_a_right_lost_on_the_way_stops_every_change(world: ApiWorld, row: RouteDeclaration, how: int) -> None:
    lose, statuses = LOSSES[how]
    name = f"late-{how}-{CHANGES.index(row)}"
    text, token_id = newcomer(world, name)
    shot = aimed(world, row)
    seen: list[int] = []

    async def lost() -> None:
        await lose(world, name, token_id)
        seen.append(await world.plane.core.records.store.read(lambda tx: tx.events.head().seq))

    status = fire_late(world, shot, text, lost)
    assert status in (statuses if row.path != "/v1/tokens" else statuses | {403, 409}), status
    mine = world.read(
        lambda tx: [e for e in tx.events.page(seen[0], limit=1000) if e.actor == f"user:{name}"]
    )
    assert {event.kind for event in mine} <= {"access.denied"}


@pytest.mark.parametrize("loss,statuses", LOSSES, ids=[loss.__name__ for loss, _ in LOSSES])
def test_an_upload_that_began_before_its_right_was_lost_keeps_nothing(
    world: ApiWorld, loss: Loss, statuses: set[int]
) -> None:
    name = f"uploader-{loss.__name__}"
    text, token_id = newcomer(world, name)
    body = tar_of({"big": bytes(200_000), "of": name.encode()})
    digest = hashlib.sha256(body).hexdigest()
    headers = (("content-type", "application/x-tar"),)
    shot = Shot("PUT", f"/v1/archives/{digest}?project=vision", body=body, headers=headers)

    async def lost() -> None:
        await loss(world, name, token_id)

    assert fire_late(world, shot, text, lost) in statuses
    assert not (Path(world.plane.settings.state_dir) / "archives" / f"{digest}.tar").exists()
    assert world.call("GET", f"/v1/archives/{digest}?project=vision", role="lead").status == 404


class Killed(Exception):
    """The control plane is killed between two batches."""


@pytest.mark.parametrize("is_killed", [False, True], ids=["goes on", "restarted"])
def test_array_that_was_accepted_is_recorded_whole_though_its_token_is_revoked_meanwhile(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    """As the guide to tokens says: an array is one submission, and jobs outlive tokens."""
    monkeypatch.setattr(arrays, "MAX_RECORDED", 2)
    monkeypatch.setattr(arrays, "MAX_STOPPED", 2)
    name = f"arrays-{is_killed}"
    text, token_id = newcomer(world, name)
    finish = arrays.finish_submission

    async def finish_after_revocation(records: Records, sealing: Sealing, array_id: str) -> None:
        await revoke(world, name, token_id)
        if is_killed:
            raise Killed
        await finish(records, sealing, array_id)

    with monkeypatch.context() as patch:
        patch.setattr(submitting, "finish_submission", finish_after_revocation)
        data = {"spec": {"run": "true", "name": name, "array": "0..6"}, "project": "vision"}
        answer = world.call("POST", "/v1/jobs", token=text, data=data)
    assert answer.status == (500 if is_killed else 201)
    assert world.call("POST", "/v1/jobs", token=text, data=data).status == 401
    if is_killed:
        world.portal.call(
            arrays.finish_arrays,
            world.plane.core.records,
            world.plane.core.link.engine,
            world.plane.core.sealing,
        )
    page = world.call("GET", f"/v1/jobs?project=vision&name={name}", role="lead").json()["items"]
    assert len(page) == 7
    array_id = page[0]["array"]["id"]
    assert world.call("POST", f"/v1/arrays/{array_id}/stop", token=text).status == 401
    assert world.call("POST", f"/v1/arrays/{array_id}/stop", role="lead").status == 200
    page = world.call("GET", f"/v1/jobs?project=vision&name={name}", role="lead").json()["items"]
    assert {job["status"] for job in page} <= {"stopping", "cancelled"}


def test_stop_of_an_array_that_was_accepted_ends_it_whole_though_its_token_is_revoked_meanwhile(
    world: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "MAX_STOPPED", 2)
    text, token_id = newcomer(world, "stopper")
    data = {"spec": {"run": "true", "name": "stopped", "array": "0..6"}, "project": "vision"}
    created = world.call("POST", "/v1/jobs", token=text, data=data)
    array_id = created.json()["jobs"][0]["array"]["id"]
    finish = arrays.finish_stop

    async def finish_after_revocation(records: Records, engine: Engine, array_id: str) -> None:
        await revoke(world, "stopper", token_id)
        await finish(records, engine, array_id)

    monkeypatch.setattr(arrays, "finish_stop", finish_after_revocation)
    assert world.call("POST", f"/v1/arrays/{array_id}/stop", token=text).status == 200
    page = world.call("GET", "/v1/jobs?project=vision&name=stopped", role="lead").json()["items"]
    assert len(page) == 7
    assert {job["status"] for job in page} <= {"stopping", "cancelled"}


def test_a_key_used_before_gives_no_answer_to_a_token_that_is_revoked(world: ApiWorld) -> None:
    text, token_id = newcomer(world, "repeater")
    data = {"spec": {"run": "true"}, "project": "vision"}
    headers = (("idempotency-key", "once"),)
    assert world.call("POST", "/v1/jobs", token=text, data=data, headers=headers).status == 201
    shot = Shot("POST", "/v1/jobs", data=data, headers=headers)

    async def lost() -> None:
        await revoke(world, "repeater", token_id)

    assert fire_late(world, shot, text, lost) == 401
