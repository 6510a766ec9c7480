"""The second place of the log's end: what it reveals, and that nothing stops while it is away."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import anyio
import pytest

from shoal import home_identity
from shoal.clock import SystemClock
from shoal.control.commands.audit import verify_audit
from shoal.control.core import Core
from shoal.control.loops import anchor
from shoal.control.loops.anchor import anchor_path, check_anchor, copy_path, drop_anchor
from shoal.control.record import record_event
from shoal.engines.fake import FakeCluster, FakeEngine
from shoal.errors import StateError
from shoal.ids import id_factory
from shoal.settings import Settings
from shoal.store import LogHead, Store, open_memory_store, write_anchor
from tests.support.planes.bench import ANA

KEY = bytes(32)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    place = tmp_path / "elsewhere"
    place.mkdir()
    return place


def core_with(home: Path, store: Store, elsewhere: Path | None) -> Core:
    home.mkdir(exist_ok=True)
    (home / "home-id").write_text("0123abcd\n")
    clock = SystemClock()
    return Core(
        store=store,
        engine=FakeEngine(FakeCluster([], clock=clock)),
        clock=clock,
        new_id=id_factory(clock.now),
        settings=dataclasses.replace(Settings(home=home), anchor_copy=elsewhere),
        key=KEY,
    )


def mark(home: Path, site_id: str) -> None:
    identity = home_identity.HomeIdentity(site_id=site_id, directory=home_identity.identify(home))
    (home / home_identity.FILE).write_bytes(home_identity.encode_record(identity))


async def add_events(core: Core, count: int) -> None:
    for _ in range(count):
        await core.records.store.write(lambda tx: record_event(tx, "access.denied", 1.0, ANA))


def copy_of(core: Core) -> Path:
    path = copy_path(core.anchors)
    assert path is not None
    return path


async def test_cut_tail_with_the_anchor_set_back_is_found_by_the_second_place(
    tmp_path: Path, elsewhere: Path
) -> None:
    core = core_with(tmp_path / "home", open_memory_store(), elsewhere)
    await add_events(core, 3)
    await drop_anchor(core.anchors, core.records.store)
    early = anchor_path(core.anchors).read_bytes()
    await add_events(core, 5)
    await drop_anchor(core.anchors, core.records.store)
    assert copy_of(core).parent == elsewhere
    cut = core_with(tmp_path / "home", open_memory_store(), elsewhere)
    await add_events(cut, 3)
    anchor_path(core.anchors).write_bytes(early)
    with pytest.raises(StateError, match=f"ends at event 3, but {copy_of(core)} has seen event 8"):
        await check_anchor(cut.anchors, cut.records.store)
    verdict = await verify_audit(cut.anchors, cut.records.store)
    assert verdict.flaw is not None
    assert "remembers entry 8" in verdict.flaw.reason
    alone = core_with(tmp_path / "home", cut.records.store, None)
    await check_anchor(alone.anchors, alone.records.store)  # the home alone cannot know


async def test_log_rewritten_to_the_same_length_is_refused_at_start(tmp_path: Path, elsewhere: Path) -> None:
    core = core_with(tmp_path / "home", open_memory_store(), elsewhere)
    await add_events(core, 3)
    await drop_anchor(core.anchors, core.records.store)
    other = core_with(tmp_path / "home", open_memory_store(), elsewhere)
    for _ in range(5):
        await other.records.store.write(lambda tx: record_event(tx, "job.ended", 2.0, ANA))
    with pytest.raises(StateError, match="event 3 is not the one that"):
        await check_anchor(other.anchors, other.records.store)


async def test_restored_copy_leaves_the_file_of_its_original_alone(tmp_path: Path, elsewhere: Path) -> None:
    original = core_with(tmp_path / "home", open_memory_store(), elsewhere)
    mark(tmp_path / "home", "11aa")
    await add_events(original, 5)
    await drop_anchor(original.anchors, original.records.store)
    written = copy_of(original).read_bytes()
    restored = core_with(tmp_path / "copy", open_memory_store(), elsewhere)
    mark(tmp_path / "copy", "11aa")
    await add_events(restored, 3)
    await check_anchor(
        restored.anchors, restored.records.store, is_restored=True
    )  # the original has gone on since the copy was made
    mark(tmp_path / "copy", "22bb")
    await drop_anchor(restored.anchors, restored.records.store)
    assert copy_of(original).read_bytes() == written
    assert copy_of(restored) == elsewhere / "shoal-0123abcd-22bb.anchor"
    assert copy_of(original) == elsewhere / "shoal-0123abcd-11aa.anchor"
    await check_anchor(restored.anchors, restored.records.store)


@pytest.mark.parametrize("is_copy", [False, True])
async def test_forged_anchor_is_refused_at_start_and_named(
    tmp_path: Path, elsewhere: Path, is_copy: bool
) -> None:
    core = core_with(tmp_path / "home", open_memory_store(), elsewhere)
    await add_events(core, 8)
    await drop_anchor(core.anchors, core.records.store)
    path = copy_of(core) if is_copy else anchor_path(core.anchors)
    path.unlink()
    write_anchor(path, LogHead(3, "ab" * 32), b"x" * 32)
    with pytest.raises(StateError, match="not signed with this home's key"):
        await check_anchor(core.anchors, core.records.store)
    verdict = await verify_audit(core.anchors, core.records.store)
    assert not verdict.is_intact
    assert "forged" in verdict.anchor_problem


async def test_missing_second_place_stops_nothing_and_is_reported(tmp_path: Path, elsewhere: Path) -> None:
    core = core_with(tmp_path / "home", open_memory_store(), elsewhere / "not-mounted")
    await add_events(core, 2)
    await check_anchor(core.anchors, core.records.store)
    await drop_anchor(core.anchors, core.records.store)
    assert anchor_path(core.anchors).exists()
    (failing,) = core.loop_health.failing
    assert failing.loop == "anchor-copy"
    assert "cannot be used: No such file or directory" in failing.why
    assert not (elsewhere / "not-mounted").exists(), "nothing is written below a place that is not mounted"
    (elsewhere / "not-mounted").mkdir()
    await drop_anchor(core.anchors, core.records.store)
    assert core.loop_health.failing == ()
    assert copy_of(core).exists()


async def test_hanging_second_place_times_out_and_blocks_one_thread_only(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_with(tmp_path / "home", open_memory_store(), elsewhere)
    await add_events(core, 2)
    gate, begun, calls = threading.Event(), threading.Event(), []

    def hanging(path: Path, head: LogHead, key: bytes) -> None:
        if path.parent == elsewhere:
            calls.append(path)
            begun.set()
            gate.wait(30)

    monkeypatch.setattr(anchor, "write_anchor", hanging)
    monkeypatch.setattr(anchor, "COPY_WAIT_S", 0.05)
    try:
        for why in ("no answer within 0.05 s", "an earlier attempt still waits"):
            await drop_anchor(core.anchors, core.records.store)
            assert why in core.loop_health.failing[0].why
            assert await anyio.to_thread.run_sync(begun.wait, 30), (
                "its thread may begin after it was given up"
            )
        assert len(calls) == 1
    finally:
        gate.set()
    with anchor._copy_lock:
        pass  # the thread has released the lock
    await drop_anchor(core.anchors, core.records.store)
    assert core.loop_health.failing == ()
