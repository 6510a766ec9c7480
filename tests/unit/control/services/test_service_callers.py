"""Which callers a service accepts, and how soon data planes know: before the reply to the request that
changed it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.lowlevel import checkpoint
from structlog.testing import capture_logs

from shoal.control.services import serving_table
from shoal.control.services.commands import ServiceRequest
from shoal.model.people import Role, User
from shoal.serving.scaling.traffic import FRESH_S
from shoal.serving.table import ServingReport
from shoal.spec.parse import parse_service
from shoal.store import Tx
from tests.support.planes.commands import Commands
from tests.support.planes.world import ROOT, open_plane
from tests.support.serving.data_plane_lab import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these tests have no data plane that could confirm a table."""
    monkeypatch.setattr(serving_table, "CONFIRM_S", 0.05)


async def served(plane: Commands) -> User:
    """A service `chat` of project `vision`, and a member of the project."""
    for project in ("vision", "speech"):
        await plane.create_project(ROOT, project, {})
    await plane.create_user(ROOT, "root", Role.ADMIN)
    ana = await plane.create_user(ROOT, "ana")
    await plane.set_member(ROOT, "vision", "ana", Role.VIEWER)
    spec = parse_service({"name": "chat", "run": "serve"})
    await plane.serve(ROOT, ServiceRequest(spec=spec, project="vision", owner=ana))
    return ana


def digests(plane: Commands) -> set[str]:
    return {caller.digest for chat in plane.core.services.table.services for caller in chat.callers}


async def token(plane: Commands, user: User, **more: Any) -> str:
    created, _ = await plane.create_token(ROOT, user, **{"label": "", "scope": Role.ADMIN, **more})
    return created.secret_hash.hex()


async def test_token_is_in_the_table_when_it_is_returned_and_gone_when_revoked(tmp_path: Path) -> None:
    async with open_plane(tmp_path) as plane:
        ana = await served(plane)
        created, _ = await plane.create_token(ROOT, ana, label="", scope=Role.VIEWER)
        assert digests(plane) == {created.secret_hash.hex()}
        await plane.revoke_token(ROOT, created.token_id)
        assert digests(plane) == set()


async def test_membership_change_takes_effect_before_the_reply(
    tmp_path: Path,
) -> None:
    async with open_plane(tmp_path) as plane:
        await served(plane)
        bo = await plane.create_user(ROOT, "bo")
        bo_token = await token(plane, bo)
        assert digests(plane) == set()
        await plane.set_member(ROOT, "vision", "bo", Role.MEMBER)
        assert digests(plane) == {bo_token}
        await plane.update_user(ROOT, "bo", {"is_active": False})
        assert digests(plane) == set()
        await plane.update_user(ROOT, "bo", {"is_active": True})
        await plane.remove_member(ROOT, "vision", "bo")
        assert digests(plane) == set()


async def test_role_of_another_project_opens_no_service_whatever_the_token(tmp_path: Path) -> None:
    async with open_plane(tmp_path) as plane:
        ana = await served(plane)
        lead = await plane.create_user(ROOT, "lea")
        await plane.set_member(ROOT, "speech", "lea", Role.LEAD)
        operator = await plane.create_user(ROOT, "olaf", Role.OPERATOR)
        for scope in (Role.VIEWER, Role.LEAD, Role.ADMIN):
            await token(plane, lead, scope=scope)
            await token(plane, lead, scope=scope, project="vision")
            await token(plane, lead, scope=scope, project="vision", service="chat")
            await token(plane, ana, scope=scope, project="speech")
            await token(plane, ana, scope=scope, project="vision", service="other")
            await token(plane, operator, scope=scope, project="speech")
        assert digests(plane) == set()
        good = {
            await token(plane, ana, scope=Role.VIEWER),
            await token(plane, ana, project="vision"),
            await token(plane, ana, project="vision", service="chat"),
            await token(plane, operator, scope=Role.VIEWER),
            await token(plane, operator, project="vision"),
        }
        assert digests(plane) == good


async def test_token_is_returned_once_every_data_plane_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_table, "CONFIRM_S", 60.0)
    async with open_plane(tmp_path) as plane:
        ana = await served(plane)
        state, created = plane.core.services, []

        def say(process: str, version: int) -> None:
            state.note_report(
                ServingReport(process_id=process, version=version), plane.core.records.clock.monotonic()
            )

        async def create() -> None:
            created.append(await token(plane, ana))

        state.note_report(
            ServingReport(process_id="one", version=1), plane.core.records.clock.monotonic() - FRESH_S
        )
        say("two", 1)
        async with anyio.create_task_group() as group:
            group.start_soon(create)
            await until(lambda: bool(digests(plane)))
            say("one", state.table.version)
            for _ in range(5):
                await checkpoint()
            assert created == [], "the other one does not know it yet"
            say("two", state.table.version)
        assert digests(plane) == set(created)


async def test_token_is_returned_although_a_data_plane_is_silent(
    tmp_path: Path,
) -> None:
    async with open_plane(tmp_path) as plane:
        ana = await served(plane)
        plane.core.services.note_report(
            ServingReport(process_id="one", version=1), plane.core.records.clock.monotonic()
        )
        with anyio.fail_after(30):
            created = await token(plane, ana)
        assert digests(plane) == {created}


@pytest.mark.parametrize(
    ("heard_s", "confirms", "is_confirmed"),
    [
        ((), False, False),
        ((FRESH_S,), True, True),
        ((4 * FRESH_S, 2 * FRESH_S), False, False),
        ((0.0,), True, False),
    ],
    ids=["control plane just started", "all know it", "one is silent", "one just came"],
)
async def test_revocation_says_whether_every_data_plane_has_confirmed_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard_s: tuple[float, ...],
    confirms: bool,
    is_confirmed: bool,
) -> None:
    async with open_plane(tmp_path) as plane:
        ana = await served(plane)
        created, _ = await plane.create_token(ROOT, ana, label="", scope=Role.VIEWER)
        monkeypatch.setattr(serving_table, "CONFIRM_S", 60.0 if is_confirmed else 0.5)
        state, clock = plane.core.services, plane.core.records.clock
        for ago_s in heard_s:
            state.note_report(ServingReport(process_id="one", version=1), clock.monotonic() - ago_s)
        confirmed = []

        async def revoke() -> None:
            confirmed.append((await plane.revoke_token(ROOT, created.token_id))[1])

        async with anyio.create_task_group() as group:
            group.start_soon(revoke)
            await until(lambda: not digests(plane))
            if confirms:
                state.note_report(
                    ServingReport(process_id="one", version=state.table.version), clock.monotonic()
                )
        assert confirmed == [is_confirmed]


async def test_change_is_confirmed_although_no_table_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_plane(tmp_path, is_running=False) as plane:
        ana = await served(plane)
        created, _ = await plane.create_token(ROOT, ana, label="", scope=Role.VIEWER)

        def broken(*_: object) -> None:
            raise AssertionError("of a table")

        monkeypatch.setattr(serving_table, "make_table", broken)
        with capture_logs() as logs:
            revoked, is_everywhere = await plane.revoke_token(ROOT, created.token_id)
        assert revoked.token.revoked_at is not None
        assert not is_everywhere
        late = [
            entry for entry in logs if entry["event"] == "table.late"
        ]  # other planes may live in this process
        assert [(entry["log_level"], entry["exc_info"]) for entry in late] == [("error", True)]


async def test_older_table_never_follows_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_plane(tmp_path, is_running=False) as plane:
        ana = await served(plane)
        created, _ = await plane.create_token(ROOT, ana, label="", scope=Role.VIEWER)
        read, gate = plane.core.records.store.read, anyio.Event()

        async def slow(fn: Any) -> Any:
            result = await read(fn)
            await gate.wait()
            return result

        def is_revoked(tx: Tx) -> bool:
            return any(held.revoked_at for held in tx.tokens.all())

        async with anyio.create_task_group() as group:
            with monkeypatch.context() as patched:
                patched.setattr(plane.core.records.store, "read", slow)
                group.start_soon(serving_table.publish, plane.core.serving)
                await anyio.sleep(0.05)
            group.start_soon(plane.revoke_token, ROOT, created.token_id)
            with anyio.fail_after(30):
                while not await read(is_revoked):
                    await checkpoint()
            gate.set()
        assert digests(plane) == set()


async def test_table_marks_a_service_whose_replicas_keep_failing(tmp_path: Path) -> None:
    async with open_plane(tmp_path) as plane:
        await served(plane)

        def fail(count: int) -> Callable[[Tx], None]:
            def change(tx: Tx) -> None:
                [chat] = tx.services.all()
                tx.services.update(msgspec.structs.replace(chat, failures=count, version=chat.version + 1))

            return change

        for count, expected in ((2, False), (3, True), (0, False)):
            await plane.core.records.store.write(fail(count))
            await serving_table.publish(plane.core.serving)
            [chat] = plane.core.services.table.services
            assert chat.is_failing is expected
