"""The very first start, cut at any point; and the anchor that shows when the log lost its tail."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from shoal import home_identity
from shoal.clock import SystemClock
from shoal.control import project_uids
from shoal.control.bootstrap import (
    claim_database,
    ensure_admin,
    first_token_path,
    load_signing_key,
    register_name,
    token_request_path,
)
from shoal.control.commands.audit import verify_audit
from shoal.control.core import Core
from shoal.control.loops.anchor import anchor_path, drop_anchor
from shoal.control.record import record_event
from shoal.control.restored import settle_restored
from shoal.engines.fake import FakeCluster, FakeEngine
from shoal.errors import HomeMissing, StateError, StoreUnavailable
from shoal.identity import parse_user_token
from shoal.ids import id_factory
from shoal.model.people import Role
from shoal.settings import Settings
from shoal.store import Store, Tx, open_memory_store
from tests.support.planes.bench import ANA


def ask_to_restore(home: Path) -> None:
    word = home_identity.RestoreRequest(
        runs_again=False, directory=home_identity.identify(home), site_id="22bb"
    )
    (home / home_identity.REQUEST).write_bytes(home_identity.encode_record(word))


def fresh_core(home: Path, store: Store) -> Core:
    clock = SystemClock()
    return Core(
        store=store,
        engine=FakeEngine(FakeCluster([], clock=clock)),
        clock=clock,
        new_id=id_factory(clock.now),
        settings=Settings(home=home),
        key=bytes(32),
    )


async def start(core: Core) -> None:
    await ensure_admin(core.records, core.sealing, core.settings, "root")


async def restore(core: Core, request: home_identity.RestoreRequest) -> None:
    await settle_restored(core.records, core.sealing, core.settings, request)


async def is_good(core: Core) -> bool:
    """Whether the token in the file is valid."""
    halves = parse_user_token(first_token_path(core.settings.home).read_text())
    assert halves is not None
    return halves.matches(await core.records.store.read(lambda tx: tx.tokens.get(halves.token_id)))


async def test_the_first_start_makes_an_admin_a_project_and_a_token(tmp_path: Path) -> None:
    core = fresh_core(tmp_path, open_memory_store())
    await ensure_admin(core.records, core.sealing, core.settings, "root")
    (admin,) = await core.records.store.read(lambda tx: tx.people.users())
    assert (admin.name, admin.cluster_role) == ("root", Role.ADMIN)
    membership = await core.records.store.read(lambda tx: tx.people.membership(admin.user_id, "default"))
    assert membership is not None
    assert await is_good(core)
    assert stat.S_IMODE(first_token_path(tmp_path).stat().st_mode) == 0o600


async def test_the_next_start_makes_nothing_more(tmp_path: Path) -> None:
    core = fresh_core(tmp_path, open_memory_store())
    await ensure_admin(core.records, core.sealing, core.settings, "root")
    token = first_token_path(tmp_path).read_text()
    await ensure_admin(core.records, core.sealing, core.settings, "somebody")
    assert first_token_path(tmp_path).read_text() == token
    assert len(await core.records.store.read(lambda tx: tx.people.users())) == 1


async def test_owner_of_the_home_without_a_token_gets_another(tmp_path: Path) -> None:
    core = fresh_core(tmp_path, open_memory_store())
    await ensure_admin(core.records, core.sealing, core.settings, "root")
    first = first_token_path(tmp_path).read_text()
    first_token_path(tmp_path).unlink()
    token_request_path(tmp_path).touch()
    await ensure_admin(core.records, core.sealing, core.settings, "somebody")
    assert await is_good(core)
    assert first_token_path(tmp_path).read_text() != first
    (admin,) = await core.records.store.read(lambda tx: tx.people.users())
    tokens = await core.records.store.read(lambda tx: tx.tokens.all())
    assert [(token.user_id, token.revoked_at) for token in tokens] == [(admin.user_id, None)] * 2
    (event,) = [
        event
        for event in await core.records.store.read(lambda tx: tx.events.page(0, limit=100))
        if event.kind == "token.created"
    ]
    assert event.data["user"] == "root"
    first_token_path(tmp_path).unlink()
    await ensure_admin(core.records, core.sealing, core.settings, "root")
    assert not first_token_path(tmp_path).exists(), "it was asked for once"


async def test_token_request_of_another_user_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = fresh_core(tmp_path, open_memory_store())
    await ensure_admin(core.records, core.sealing, core.settings, "root")
    first_token_path(tmp_path).unlink()
    token_request_path(tmp_path).touch()
    other = os.geteuid() + 1
    monkeypatch.setattr("shoal.control.bootstrap.os.geteuid", lambda: other)
    await ensure_admin(core.records, core.sealing, core.settings, "root")
    assert not first_token_path(tmp_path).exists()


class FailsOnce:
    """A store whose first write never reaches the disk."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.read = inner.read

    async def write(self, fn: Callable[[Tx], object]) -> object:
        raise StoreUnavailable("killed here")

    def on_commit(self, callback: Callable[[int], None]) -> None:
        """No caller waits for a commit."""

    async def close(self) -> None:
        await self._inner.close()


async def test_start_killed_between_token_file_and_commit_makes_another_token(
    tmp_path: Path,
) -> None:
    disk = open_memory_store()
    killed = fresh_core(tmp_path, FailsOnce(disk))  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        await ensure_admin(killed.records, killed.sealing, killed.settings, "root")
    orphan = first_token_path(tmp_path).read_text()
    core = fresh_core(tmp_path, disk)
    assert not await is_good(core)
    await ensure_admin(core.records, core.sealing, core.settings, "root")
    assert await is_good(core)
    assert first_token_path(tmp_path).read_text() != orphan
    assert len(await core.records.store.read(lambda tx: tx.tokens.all())) == 1


def test_the_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    key = load_signing_key(tmp_path)
    assert len(key) == 32
    assert load_signing_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "keys" / "signing.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_half_written_key_of_a_killed_start_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "keys" / "signing.part").write_bytes(b"half")
    assert len(load_signing_key(tmp_path)) == 32


async def test_a_database_belongs_to_the_home_that_opened_it_first(tmp_path: Path) -> None:
    store, home, other = open_memory_store(), tmp_path / "home", tmp_path / "other"
    await claim_database(store, home)
    await claim_database(store, home)
    await claim_database(open_memory_store(), other)
    with pytest.raises(StateError, match=f"another SHOAL_HOME .* not to {other}") as caught:
        await claim_database(store, other)
    assert not isinstance(caught.value, HomeMissing)
    assert stat.S_IMODE((home / "home-id").stat().st_mode) == 0o600
    await claim_database(store, home)
    assert caught.value.hint is not None
    command, restored = caught.value.hint.split("`")[1::2][:2]
    assert restored == "shoal up --restored"
    await anyio.run_process(command)  # the hint helps
    with pytest.raises(home_identity.CopiedHome, match="went on with another copy"):
        await claim_database(store, other)
    ask_to_restore(other)
    assert await claim_database(store, other) is not None


async def test_unmounted_home_gets_no_id(tmp_path: Path) -> None:
    store, home = open_memory_store(), tmp_path / "home"
    await claim_database(store, home)
    home.rename(tmp_path / "unmounted")
    home.mkdir()
    with pytest.raises(HomeMissing, match=f"not to {home} .id none"):
        await claim_database(store, home)
    assert list(home.iterdir()) == []
    home.rmdir()
    (tmp_path / "unmounted").rename(home)
    await claim_database(store, home)


async def test_copied_home_is_refused_without_a_restore_request(tmp_path: Path) -> None:
    store, home, copy = open_memory_store(), tmp_path / "home", tmp_path / "copy"
    await claim_database(store, home)
    shutil.copytree(home, copy)
    with pytest.raises(home_identity.CopiedHome, match=f"{copy} is a copy of {home}") as caught:
        await claim_database(store, copy)
    assert "`shoal up --restored`" in str(caught.value.hint)
    ask_to_restore(home)
    shutil.copy2(home / home_identity.REQUEST, copy)
    with pytest.raises(home_identity.CopiedHome):
        await claim_database(store, copy)  # the request was about another directory
    with pytest.raises(StateError, match="is no copy"):
        await claim_database(store, home)
    ask_to_restore(copy)
    assert await claim_database(store, copy) is not None
    shutil.rmtree(copy)
    home.rename(copy)
    assert await claim_database(store, copy) is None, "a home that was renamed is no copy"
    (copy / home_identity.FILE).unlink()
    with pytest.raises(home_identity.CopiedHome, match="a restored backup, or a home that an older Shoal"):
        await claim_database(store, copy)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's homes are noted")
async def test_restore_drill_on_the_machine_of_production_leaves_its_uids_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, home, copy = tmp_path / "uids", tmp_path / "home", tmp_path / "copy"
    monkeypatch.setattr(project_uids, "REGISTRY", registry)
    store = open_memory_store()
    await claim_database(store, home)
    await start(fresh_core(home, store))
    (noted,) = registry.iterdir()
    of_production = noted.read_text()
    shutil.copytree(home, copy)
    ask_to_restore(copy)
    request = await claim_database(store, copy)
    assert request is not None
    await start(fresh_core(copy, store))
    await restore(fresh_core(copy, store), request)
    with capture_logs() as logs:
        await start(fresh_core(copy, store))
    assert logs == [], "no project of the copy has a user of production's"
    assert noted.read_text() == of_production
    of_copy = {path.read_text().splitlines()[1] for path in registry.iterdir() if path != noted}
    assert of_copy == {str(copy)}
    shutil.rmtree(copy)
    assert project_uids.keep_blocks([int(noted.name)], home, register_name(home)) == []
    assert list(registry.iterdir()) == [noted]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's homes are noted")
async def test_restored_home_takes_over_the_uids_of_an_original_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, home, copy = tmp_path / "uids", tmp_path / "home", tmp_path / "copy"
    monkeypatch.setattr(project_uids, "REGISTRY", registry)
    store = open_memory_store()
    await claim_database(store, home)
    await start(fresh_core(home, store))
    (noted,) = registry.iterdir()
    shutil.copytree(home, copy)
    shutil.rmtree(home)
    ask_to_restore(copy)
    request = await claim_database(store, copy)
    assert request is not None
    await start(fresh_core(copy, store))
    await restore(fresh_core(copy, store), request)
    assert noted.read_text().splitlines()[1] == str(copy)


async def test_copy_that_begins_with_an_empty_database_is_settled_at_its_first_start(tmp_path: Path) -> None:
    """At a later start, jobs that it has accepted meanwhile would end."""
    home, copy = tmp_path / "home", tmp_path / "copy"
    await claim_database(open_memory_store(), home)
    shutil.copytree(home, copy)
    ask_to_restore(copy)
    store = open_memory_store()
    for _ in range(2):  # the first one may be killed before it is done
        request = await claim_database(store, copy)
        assert request is not None
    identity = home_identity.read_identity(copy)
    assert identity is not None
    assert not home_identity.is_same(identity.directory, home_identity.identify(copy)), (
        "`finish_restore` says so, and no earlier step"
    )


async def test_restore_request_for_a_new_home_is_refused_and_removed(tmp_path: Path) -> None:
    ask_to_restore(tmp_path)
    store = open_memory_store()
    with pytest.raises(StateError, match="is no copy"):
        await claim_database(store, tmp_path)
    for _ in range(2):
        assert await claim_database(store, tmp_path) is None


async def test_unreadable_home_gets_no_id(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.symlink_to(home)
    with pytest.raises(OSError, match="symbolic links"):
        await claim_database(open_memory_store(), home)


async def test_home_may_start_with_another_database(tmp_path: Path) -> None:
    await claim_database(open_memory_store(), tmp_path)
    await claim_database(open_memory_store(), tmp_path)


async def add_events(store: Store, count: int) -> None:
    for _ in range(count):
        await store.write(lambda tx: record_event(tx, "access.denied", 1.0, ANA))


async def test_an_empty_log_leaves_no_anchor(tmp_path: Path) -> None:
    core = fresh_core(tmp_path, open_memory_store())
    await drop_anchor(core.anchors, core.records.store)
    assert not anchor_path(core.anchors).exists()
    assert (await verify_audit(core.anchors, core.records.store)).is_intact


async def test_a_log_that_grew_since_its_anchor_is_sound(tmp_path: Path) -> None:
    core = fresh_core(tmp_path, open_memory_store())
    await add_events(core.records.store, 3)
    await drop_anchor(core.anchors, core.records.store)
    await add_events(core.records.store, 3)
    assert (await verify_audit(core.anchors, core.records.store)).is_intact


async def test_an_anchor_is_written_only_when_there_is_something_new(tmp_path: Path) -> None:
    core = fresh_core(tmp_path, open_memory_store())
    await add_events(core.records.store, 1)
    await drop_anchor(core.anchors, core.records.store)
    anchor_path(core.anchors).unlink()
    await drop_anchor(core.anchors, core.records.store)
    assert not anchor_path(core.anchors).exists()


async def test_log_shorter_than_its_anchor_is_refused_and_the_anchor_kept(tmp_path: Path) -> None:
    core = fresh_core(tmp_path, open_memory_store())
    await add_events(core.records.store, 5)
    await drop_anchor(core.anchors, core.records.store)
    restored = fresh_core(tmp_path, open_memory_store())
    await add_events(restored.records.store, 3)
    before = anchor_path(core.anchors).read_bytes()
    with pytest.raises(StateError, match="the event log ends at entry 3"):
        await drop_anchor(restored.anchors, restored.records.store)
    assert anchor_path(core.anchors).read_bytes() == before
    assert (await verify_audit(restored.anchors, restored.records.store)).flaw is not None
