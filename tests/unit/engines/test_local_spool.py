"""What the local engine keeps in its spool, for whom, and what it removes."""

# What is tested is files and processes: polling for them and touching them is the point.
# ruff: noqa: ASYNC110, ASYNC220, ASYNC240

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
import structlog

from shoal.engines.base import Sight
from shoal.engines.local import book as book_module
from shoal.engines.local import engine as engine_module
from shoal.engines.local.engine import CLAIM_S, LOOK_AGAIN_S
from shoal.errors import EngineRefused, EngineUnreachable
from shoal.runtime import removal, spool
from shoal.wire import Credentials, EndKind
from tests.support.local_engine import SECRET, Local, credentials

pytestmark = pytest.mark.anyio
NOBODY = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


async def test_secrets_reach_the_supervisor_and_no_file(local: Local) -> None:
    await local.engine.submit(local.submission("dies", num_nodes=2))
    with anyio.fail_after(30):
        while any(o.sight is not Sight.ENDED for o in await local.engine.list_owned()):
            await anyio.sleep(0.01)
    files = [path for path in local.home.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    for node in ("sim-01", "sim-02"):
        told = Path(local.share(node=node).errors).read_text()
        assert f"credentials: {len(msgspec.json.encode(credentials(node)))}" in told


async def test_large_secrets_fit_and_larger_ones_are_refused(local: Local) -> None:
    large = {"sim-01": Credentials(secrets={"KEY": "x" * 500_000})}
    await local.engine.submit(msgspec.structs.replace(local.submission("dies"), credentials=large))
    await local.until(Sight.ENDED)
    assert "credentials: 500" in Path(local.share().errors).read_text()
    larger = {"sim-01": Credentials(secrets={"KEY": "x" * (1 << 20)})}
    with pytest.raises(EngineRefused, match="secrets take"):
        await local.engine.submit(msgspec.structs.replace(local.submission("dies", 2), credentials=larger))


async def test_what_nobody_began_before_its_node_went_is_lost_and_not_started(local: Local) -> None:
    """Taken, and we were killed before its supervisor was; then this machine came back with less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.engine, "_spawn", lambda *_: None)
        await local.engine.submit(local.submission("is deaf"))
    local.reborn(num_nodes=0)
    await local.engine.submit(local.submission("is deaf"))
    seen = await local.look()
    assert seen.outcome is not None
    assert (seen.sight, seen.outcome.kind) == (Sight.ENDED, EndKind.LOST)
    assert "no such node" in seen.outcome.message
    assert local.children == set()


async def test_what_is_forgotten_while_it_is_submitted_again_does_not_run_again(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = local.submission("dies")
    await local.engine.submit(submission)
    await local.until(Sight.ENDED)
    book = local.engine._book

    def and_then_forgotten(look: Callable[[str], Any]) -> Callable[[str], Any]:
        def looked(attempt_id: str) -> Any:
            answer = look(attempt_id)
            monkeypatch.undo()
            book.keep(attempt_id)
            return answer

        return looked

    monkeypatch.setattr(book, "is_kept", and_then_forgotten(book.is_kept))
    monkeypatch.setattr(book, "find", and_then_forgotten(book.find))
    with contextlib.suppress(EngineUnreachable):  # we do not know, and ask again
        await local.engine.submit(submission)
    await local.engine.submit(submission)
    assert (await local.engine.list_owned(), len(local.children)) == ([], 1)


async def test_a_supervisor_that_hangs_before_its_claim_is_killed_and_another_is_tried(local: Local) -> None:
    submission = local.submission("hangs")
    await local.engine.submit(submission)
    local.clock.advance(CLAIM_S - 1)
    await local.engine.submit(submission)
    assert local.engine._children._pids.keys() == local.children
    local.clock.advance(1)
    with anyio.fail_after(30):
        while len(local.children) == 1:
            await local.engine.submit(submission)
            await anyio.sleep(0.01)
    assert len(local.engine._children._pids) == 1
    assert (await local.look()).raw.startswith("1 supervisors ended before they began")


async def test_a_supervisor_of_another_that_hangs_with_the_lock_does_not_outlive_a_stop(local: Local) -> None:
    """Started by an engine that was killed before it had handed over the credentials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.engine, "_spawn", lambda *_: None)
        await local.engine.submit(local.submission("true"))
    command = [sys.executable, "-m", "shoal.runtime.supervisor", local.share().directory]
    hung = subprocess.Popen(command, stdin=subprocess.PIPE)
    with anyio.fail_after(30):
        while not spool.is_locked(local.share()):
            await anyio.sleep(0.01)
    await local.engine.cancel(local.id(), 0.0)
    assert (await local.look()).sight is Sight.PENDING
    local.reborn()
    with anyio.fail_after(30):
        while (await local.look()).sight is not Sight.ENDED:
            await local.engine.cancel(local.id(), 0.0)
            local.clock.advance(1.0)
    assert hung.wait(30) == -signal.SIGKILL
    assert hung.stdin is not None
    hung.stdin.close()


async def test_a_missing_archive_is_refused_and_a_present_one_goes_along(local: Local) -> None:
    submission = local.submission("dies", archive_digest="0" * 64)
    for path in (None, str(local.home / "no.tar"), str(local.home)):
        with pytest.raises(EngineRefused):
            await local.engine.submit(msgspec.structs.replace(submission, archive_path=path))
    assert await local.engine.list_owned() == []
    archive = local.home / "a.tar"
    archive.write_bytes(b"tar")
    await local.engine.submit(msgspec.structs.replace(submission, archive_path=str(archive)))
    assert Path(local.share().archive).read_bytes() == b"tar"


async def test_forgetting_removes_what_ranks_left_and_nothing_else(local: Local, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "file").write_text("precious")
    await local.engine.submit(local.submission("dies"))
    await local.until(Sight.ENDED)
    work = Path(local.share().work)
    (work / "deep").mkdir(parents=True)
    (work / "link").symlink_to(canary)
    (work / "deep" / "file").write_text("x")
    (work / "deep").chmod(0o500)
    await local.engine.forget(local.id())
    kept = local.home / "spool" / "kept" / local.id() / "sim-01"
    assert (kept / "outcome.json").exists()
    assert not (kept / "work").exists()
    assert list((local.home / "spool" / "trash").iterdir()) == []
    assert (canary / "file").read_text() == "precious"


def test_read_only_directories_are_removed_by_whoever_owns_them() -> None:
    top = Path(tempfile.mkdtemp())
    (top / "deep" / "deeper").mkdir(parents=True)
    (top / "deep" / "deeper" / "file").write_text("x")
    (top / "link").symlink_to("/")
    for path in (top / "deep" / "deeper", top / "deep", top):
        path.chmod(0o500)
        os.chown(path, *NOBODY)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setuid(NOBODY[0])  # as root nothing is read-only
            removal.remove(str(top), timeout_s=10.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert not top.exists()


async def test_what_a_crash_left_half_made_or_half_removed_is_swept(local: Local) -> None:
    for folder in ("draft", "trash"):
        (local.home / "spool" / folder / "att_0" / "sim-01").mkdir(parents=True)
    local.reborn()
    assert await local.engine.list_owned() == []
    assert not [*local.home.glob("spool/draft/*/*"), *local.home.glob("spool/trash/*")]


async def test_a_line_cut_short_by_a_crash_is_still_read(local: Local) -> None:
    await local.engine.submit(local.submission("dies"))
    Path(local.share().log).write_bytes(b"1.0 0 o whole\n2.0 0 o cut sho")
    await local.until(Sight.ENDED)
    first = await local.engine.read_log(local.id(), "sim-01", 0, 20)
    assert (first.data, first.is_complete) == (b"1.0 0 o whole\n", False)
    second = await local.engine.read_log(local.id(), "sim-01", first.next_offset, 1000)
    cut, *ours = second.data.splitlines()
    assert (cut, second.is_complete) == (b"2.0 0 o cut sho", True)
    assert b"- e its supervisor died without an outcome" in ours[0]
    assert b"- e goodbye" in ours[-1]


async def test_the_spool_is_for_its_owner_alone(local: Local) -> None:
    await local.engine.submit(local.submission("dies"))
    for path in (local.home, local.home / "spool" / "live", Path(local.share().directory)):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "words, uid", [(("rlimits",), None), (("cgroup1", "uid"), 200_001), ((), 200_001)], ids=str
)
async def test_a_job_has_its_own_user_unless_this_machine_is_known_to_have_none(
    local: Local, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], uid: int | None
) -> None:
    monkeypatch.setattr(engine_module, "read_words", lambda *_: (words, ""))
    await local.engine.submit(local.submission("never claims", uid=200_001))
    order = spool.read_order(local.share())
    assert order is not None
    assert order.uid == uid


async def test_nodes_say_what_confines_jobs_and_orders_name_it(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "read_words", lambda *_: (("rlimits", "affinity"), ""))
    assert {facts.confinement for facts in await local.engine.nodes()} == {"rlimits affinity"}
    await local.engine.submit(local.submission("dies"))
    order = spool.read_order(local.share())
    assert order is not None
    assert order.confinement == ("rlimits", "affinity")


async def test_where_nobody_can_tell_what_confines_jobs_that_is_said(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "detect_command", lambda: ["/no/such/program"])
    machine, *simulated = await local.engine.nodes()
    assert {facts.confinement for facts in (machine, *simulated)} == {"unknown"}
    assert any("not known" in remark for remark in machine.remarks)


async def test_what_confines_jobs_is_looked_for_again_until_it_is_known(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def read_words(*command: object) -> tuple[tuple[str, ...], str]:
        asked.append(command)
        return (("rlimits", "affinity"), "") if len(asked) == 2 else ((), "timed out")

    monkeypatch.setattr(engine_module, "read_words", read_words)
    for _ in range(3):
        assert {facts.confinement for facts in await local.engine.nodes()} == {"unknown"}
    for _ in range(3):
        local.clock.advance(LOOK_AGAIN_S)
        machine, *_ = await local.engine.nodes()
        assert machine.confinement == "rlimits affinity"
        assert not any("not known" in remark for remark in machine.remarks)
    assert len(asked) == 2


async def test_a_full_disk_keeps_no_share_from_being_stopped(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    await local.engine.submit(local.submission("stops when told", num_nodes=2))
    with anyio.fail_after(30):
        while any(o.started_at is None for o in await local.engine.list_owned()):
            await anyio.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(spool, "write_stop", full)
        with pytest.raises(EngineUnreachable, match="No space"):
            await local.engine.cancel(local.id(), 5.0)
    with anyio.fail_after(30):
        while any(o.sight is not Sight.ENDED for o in await local.engine.list_owned()):
            await anyio.sleep(0.01)


async def test_place_of_a_standby_that_cannot_be_buried_hides_no_share(
    local: Local,
) -> None:
    await local.engine.submit(local.submission("dies"))
    await local.until(Sight.ENDED)
    places = local.home / "spool" / "standby"
    for name in ("a", "c"):
        (places / name).mkdir(parents=True)
    (places / "b").write_text("no place at all")
    with structlog.testing.capture_logs() as told:
        for _ in range(3):
            assert [seen.sight for seen in await local.engine.list_owned()] == [Sight.ENDED]
    assert [path.name for path in places.iterdir()] == ["b"]
    assert [line["path"] for line in told if "standby" in line["event"]] == [str(places / "b")], "once"
    shutil.rmtree(places)
    places.write_text("no folder at all")
    assert [seen.sight for seen in await local.engine.list_owned()] == [Sight.ENDED]


async def test_standbys_that_do_not_die_hold_up_a_look_no_longer_than_one(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcde":
        (local.home / "spool" / "standby" / name).mkdir(parents=True)
    now, waited, tried = 0.0, [], set()

    def bury(place: str, *, timeout_s: float) -> bool:
        nonlocal now
        now += timeout_s
        waited.append(timeout_s)
        tried.add(Path(place).name)
        return False

    monkeypatch.setattr(book_module, "bury", bury)
    monkeypatch.setattr(book_module, "CLOCK", SimpleNamespace(monotonic=lambda: now))
    local.engine._book.sweep()
    assert sum(waited) <= book_module.REMOVAL_S
    for _ in range(200):
        local.engine._book.sweep()
    assert tried == set("abcde"), "each has its turn"
