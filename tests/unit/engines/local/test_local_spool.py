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

from shoal.engines.local import engine as engine_module
from shoal.engines.local import spool_index as index_module
from shoal.engines.local.engine import CLAIM_S, INVENTORY_S
from shoal.engines.spool_directory import REMOVAL_S
from shoal.errors import EngineRefused, EngineUnreachable
from shoal.model.evidence import Evidence
from shoal.runtime.files import removal, spool
from shoal.wire import EndKind, TaskCredentials
from tests.support.fakes.local_engine import SECRET, LocalEngineLab, credentials

pytestmark = pytest.mark.anyio
NOBODY = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


async def test_secrets_reach_the_supervisor_and_no_file(local: LocalEngineLab) -> None:
    await local.engine.submit(local.submission("dies", num_nodes=2))
    with anyio.fail_after(30):
        while any(o.evidence is not Evidence.ENDED for o in await local.engine.list_owned()):
            await anyio.sleep(0.01)
    files = [path for path in local.home.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    for node in ("sim-01", "sim-02"):
        text = Path(local.spool_task(node=node).errors).read_text()
        assert f"credentials: {len(msgspec.json.encode(credentials(node)))}" in text


async def test_large_secrets_fit_and_larger_ones_are_refused(local: LocalEngineLab) -> None:
    large = {"sim-01": TaskCredentials(secrets={"KEY": "x" * 500_000})}
    await local.engine.submit(msgspec.structs.replace(local.submission("dies"), credentials=large))
    await local.until(Evidence.ENDED)
    assert "credentials: 500" in Path(local.spool_task().errors).read_text()
    larger = {"sim-01": TaskCredentials(secrets={"KEY": "x" * (1 << 20)})}
    with pytest.raises(EngineRefused, match="secrets take"):
        await local.engine.submit(msgspec.structs.replace(local.submission("dies", 2), credentials=larger))


async def test_task_of_a_removed_node_is_lost_and_never_started(local: LocalEngineLab) -> None:
    """Taken, and we were killed before its supervisor was; then this machine came back with less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.engine, "_spawn", lambda *_: None)
        await local.engine.submit(local.submission("is deaf"))
    local.restart(num_nodes=0)
    await local.engine.submit(local.submission("is deaf"))
    seen = await local.observe()
    assert seen.outcome is not None
    assert (seen.evidence, seen.outcome.kind) == (Evidence.ENDED, EndKind.LOST)
    assert "no such node" in seen.outcome.message
    assert local.children == set()


async def test_attempt_forgotten_during_a_second_submit_does_not_run_again(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = local.submission("dies")
    await local.engine.submit(submission)
    await local.until(Evidence.ENDED)
    index = local.engine._index

    def and_then_forgotten(look: Callable[[str], Any]) -> Callable[[str], Any]:
        def looked(attempt_id: str) -> Any:
            answer = look(attempt_id)
            monkeypatch.undo()
            index.archive(attempt_id)
            return answer

        return looked

    monkeypatch.setattr(index, "is_archived", and_then_forgotten(index.is_archived))
    monkeypatch.setattr(index, "find", and_then_forgotten(index.find))
    with contextlib.suppress(EngineUnreachable):  # we do not know, and ask again
        await local.engine.submit(submission)
    await local.engine.submit(submission)
    assert (await local.engine.list_owned(), len(local.children)) == ([], 1)


async def test_supervisor_that_hangs_before_its_claim_is_killed_and_replaced(
    local: LocalEngineLab,
) -> None:
    submission = local.submission("hangs")
    await local.engine.submit(submission)
    local.clock.advance(CLAIM_S - 1)
    await local.engine.submit(submission)
    assert local.engine._supervisors._pids.keys() == local.children
    local.clock.advance(1)
    with anyio.fail_after(30):
        while len(local.children) == 1:
            await local.engine.submit(submission)
            await anyio.sleep(0.01)
    assert len(local.engine._supervisors._pids) == 1
    assert (await local.observe()).raw.startswith("1 supervisors ended before they began")


async def test_stop_kills_a_supervisor_of_an_earlier_engine_that_hangs_with_the_lock(
    local: LocalEngineLab,
) -> None:
    """Started by an engine that was killed before it had handed over the credentials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.engine, "_spawn", lambda *_: None)
        await local.engine.submit(local.submission("true"))
    command = [sys.executable, "-m", "shoal.runtime.supervisor", local.spool_task().directory]
    hung = subprocess.Popen(command, stdin=subprocess.PIPE)
    with anyio.fail_after(30):
        while not spool.is_locked(local.spool_task()):
            await anyio.sleep(0.01)
    await local.engine.cancel(local.id(), 0.0)
    assert (await local.observe()).evidence is Evidence.PENDING
    local.restart()
    with anyio.fail_after(30):
        while (await local.observe()).evidence is not Evidence.ENDED:
            await local.engine.cancel(local.id(), 0.0)
            local.clock.advance(1.0)
    assert hung.wait(30) == -signal.SIGKILL
    assert hung.stdin is not None
    hung.stdin.close()


async def test_a_missing_archive_is_refused_and_a_present_one_goes_along(local: LocalEngineLab) -> None:
    submission = local.submission("dies", archive_digest="0" * 64)
    for path in (None, str(local.home / "no.tar"), str(local.home)):
        with pytest.raises(EngineRefused):
            await local.engine.submit(msgspec.structs.replace(submission, archive_path=path))
    assert await local.engine.list_owned() == []
    archive = local.home / "a.tar"
    archive.write_bytes(b"tar")
    await local.engine.submit(msgspec.structs.replace(submission, archive_path=str(archive)))
    assert Path(local.spool_task().archive).read_bytes() == b"tar"


async def test_forget_removes_files_of_ranks_and_keeps_the_log(local: LocalEngineLab, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "file").write_text("precious")
    await local.engine.submit(local.submission("dies"))
    await local.until(Evidence.ENDED)
    work = Path(local.spool_task().work)
    (work / "deep").mkdir(parents=True)
    (work / "link").symlink_to(canary)
    (work / "deep" / "file").write_text("x")
    (work / "deep").chmod(0o500)
    await local.engine.forget(local.id())
    kept = local.home / "spool" / "archived" / local.id() / "sim-01"
    assert (kept / "outcome.json").exists()
    assert not (kept / "work").exists()
    assert list((local.home / "spool" / "trash").iterdir()) == []
    assert (canary / "file").read_text() == "precious"


def test_read_only_directories_of_any_owner_are_removed() -> None:
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


async def test_drafts_and_trash_of_a_crash_are_swept(local: LocalEngineLab) -> None:
    for folder in ("draft", "trash"):
        (local.home / "spool" / folder / "att_0" / "sim-01").mkdir(parents=True)
    local.restart()
    assert await local.engine.list_owned() == []
    assert not [*local.home.glob("spool/draft/*/*"), *local.home.glob("spool/trash/*")]


async def test_a_line_cut_short_by_a_crash_is_still_read(local: LocalEngineLab) -> None:
    await local.engine.submit(local.submission("dies"))
    Path(local.spool_task().log).write_bytes(b"1.0 0 o whole\n2.0 0 o cut sho")
    await local.until(Evidence.ENDED)
    first = await local.engine.read_log(local.id(), "sim-01", 0, 20)
    assert (first.data, first.is_complete) == (b"1.0 0 o whole\n", False)
    second = await local.engine.read_log(local.id(), "sim-01", first.next_offset, 1000)
    cut, *ours = second.data.splitlines()
    assert (cut, second.is_complete) == (b"2.0 0 o cut sho", True)
    assert b"- e its supervisor died without an outcome" in ours[0]
    assert b"- e goodbye" in ours[-1]


async def test_the_spool_is_for_its_owner_alone(local: LocalEngineLab) -> None:
    await local.engine.submit(local.submission("dies"))
    for path in (local.home, local.home / "spool" / "live", Path(local.spool_task().directory)):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "methods, uid", [(("rlimits",), None), (("cgroup1", "uid"), 200_001), ((), 200_001)], ids=str
)
async def test_a_job_has_its_own_user_unless_this_machine_is_known_to_have_none(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch, methods: tuple[str, ...], uid: int | None
) -> None:
    monkeypatch.setattr(engine_module, "read_words", lambda *_: (methods, ""))
    await local.engine.submit(local.submission("never claims", uid=200_001))
    task_spec = spool.read_task_spec(local.spool_task())
    assert task_spec is not None
    assert task_spec.isolation.uid == uid


async def test_nodes_and_task_specs_name_the_confinement_of_jobs(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "read_words", lambda *_: (("rlimits", "affinity"), ""))
    assert {facts.confinement for facts in await local.engine.nodes()} == {"rlimits affinity"}
    await local.engine.submit(local.submission("dies"))
    task_spec = spool.read_task_spec(local.spool_task())
    assert task_spec is not None
    assert task_spec.isolation.confinement == ("rlimits", "affinity")


async def test_unknown_confinement_becomes_a_remark_of_the_node(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "detect_command", lambda: ["/no/such/program"])
    machine, *simulated = await local.engine.nodes()
    assert {facts.confinement for facts in (machine, *simulated)} == {"unknown"}
    assert any("not known" in remark for remark in machine.remarks)


async def test_unknown_confinement_is_detected_again_until_it_is_known(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[object] = []

    def read_words(*command: object) -> tuple[tuple[str, ...], str]:
        requested.append(command)
        return (("rlimits", "affinity"), "") if len(requested) == 2 else ((), "timed out")

    monkeypatch.setattr(engine_module, "read_words", read_words)
    for _ in range(3):
        assert {facts.confinement for facts in await local.engine.nodes()} == {"unknown"}
    for _ in range(3):
        local.clock.advance(INVENTORY_S)
        machine, *_ = await local.engine.nodes()
        assert machine.confinement == "rlimits affinity"
        assert not any("not known" in remark for remark in machine.remarks)
    assert len(requested) == 2


async def test_full_disk_does_not_prevent_a_stop(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
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
        while any(o.evidence is not Evidence.ENDED for o in await local.engine.list_owned()):
            await anyio.sleep(0.01)


async def test_standby_that_cannot_be_reaped_hides_no_task(
    local: LocalEngineLab,
) -> None:
    await local.engine.submit(local.submission("dies"))
    await local.until(Evidence.ENDED)
    places = local.home / "spool" / "standby"
    for name in ("a", "c"):
        (places / name).mkdir(parents=True)
    (places / "b").write_text("no place at all")
    with structlog.testing.capture_logs() as result:
        for _ in range(3):
            assert [seen.evidence for seen in await local.engine.list_owned()] == [Evidence.ENDED]
    assert [path.name for path in places.iterdir()] == ["b"]
    assert [line["path"] for line in result if "standby" in line["event"]] == [str(places / "b")], "once"
    shutil.rmtree(places)
    places.write_text("no folder at all")
    assert [seen.evidence for seen in await local.engine.list_owned()] == [Evidence.ENDED]


async def test_several_undying_standbys_delay_a_list_no_longer_than_one(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(index_module, "reap", bury)
    monkeypatch.setattr(index_module, "CLOCK", SimpleNamespace(monotonic=lambda: now))
    local.engine._index.sweep()
    assert sum(waited) <= REMOVAL_S
    for _ in range(200):
        local.engine._index.sweep()
    assert tried == set("abcde"), "each has its turn"
