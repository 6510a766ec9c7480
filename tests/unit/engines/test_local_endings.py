"""What the local engine makes of supervisors and disks that misbehave."""

# What is tested is files and processes: polling for them and touching them is the point.
# ruff: noqa: ASYNC110, ASYNC220, ASYNC222, ASYNC240

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from shoal.engines.base import Observation, Submission
from shoal.engines.local import engine as engine_module
from shoal.engines.local.watcher import MAX_STARTS, REAP_S
from shoal.errors import EngineUnreachable
from shoal.model.evidence import Evidence
from shoal.runtime.files import spool
from shoal.wire import EndKind, TaskOutcome, TaskSpec
from tests.support.fakes.local_engine import SECRET, LocalEngineLab
from tests.support.runtime.tasks import a_claim

pytestmark = pytest.mark.anyio


async def test_a_dead_supervisor_is_lost_only_once_its_leftovers_are_gone(local: LocalEngineLab) -> None:
    await local.engine.submit(local.submission("dies"))
    seen = await local.until(Evidence.ENDED)
    assert local.marked_pids() == set()
    assert seen.outcome is not None
    assert (seen.outcome.kind, seen.outcome.epoch) == (EndKind.LOST, 3)
    assert seen.outcome.started_at is not None
    assert "goodbye" in seen.outcome.message
    assert spool.read_outcome(local.spool_task()) == seen.outcome
    assert SECRET not in seen.outcome.message
    local.restart()
    assert (await local.observe()).outcome == seen.outcome


async def test_a_supervisor_that_will_not_stop_is_killed_with_everything_it_started(
    local: LocalEngineLab,
) -> None:
    await local.engine.submit(local.submission("is deaf"))
    await local.until_started()
    await local.engine.cancel(local.id(), 2.0)
    assert local.marked_pids() != set()
    local.clock.advance(11.9)
    assert (await local.observe()).evidence is Evidence.ALIVE
    local.clock.advance(0.2)
    seen = await local.until(Evidence.ENDED)
    assert local.marked_pids() == set()
    assert seen.outcome is not None
    assert "did not stop in time" in seen.outcome.message


async def test_a_new_engine_remembers_that_a_stop_was_asked(local: LocalEngineLab) -> None:
    await local.engine.submit(local.submission("is deaf"))
    await local.until_started()
    await local.engine.cancel(local.id(), 100.0)
    local.restart()
    assert (await local.observe()).evidence is Evidence.ALIVE
    await local.engine.cancel(local.id(), 1.0)
    local.clock.advance(11.1)
    await local.until(Evidence.ENDED)


async def test_unclaimed_task_is_pending_and_a_second_submit_spawns_again(
    local: LocalEngineLab,
) -> None:
    submission = local.submission("never claims")
    await local.engine.submit(submission)
    with anyio.fail_after(30):
        while Path(local.spool_task().errors).stat().st_size == 0:
            await anyio.sleep(0.01)
    assert (await local.observe()).evidence is Evidence.PENDING
    task_spec = spool.read_task_spec(local.spool_task())
    with anyio.fail_after(30):
        while Path(local.spool_task().errors).read_text().count("credentials") < 2:
            await local.engine.submit(submission)
            await anyio.sleep(0.01)
    assert spool.read_task_spec(local.spool_task()) == task_spec


async def test_failing_supervisor_is_retried_with_backoff_and_lost_with_its_last_lines(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [sys.executable, "-c", "print('\\x1b[31mred'); import no_such_module"]
    monkeypatch.setattr(engine_module, "supervisor_command", lambda _: broken)
    submission = local.submission("anything")
    began = local.clock.monotonic()
    with anyio.fail_after(60):
        while (seen := await submitted(local, submission)).evidence is Evidence.PENDING:
            local.clock.advance(0.1)
            while any(map(local.engine._supervisors.is_running, local.children)):
                await anyio.sleep(0.01)
    assert 15 <= local.clock.monotonic() - began < 30
    assert len(local.children) == MAX_STARTS
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.LOST
    assert "no supervisor began it in 6 tries" in seen.outcome.message
    assert "No module named 'no_such_module'" in seen.outcome.message
    chunk = await local.engine.read_log(local.id(), "sim-01", 0, 1 << 20)
    assert chunk.is_complete
    assert b"No module named 'no_such_module'" in chunk.data
    assert all(line.split(b" ", 3)[1:3] == [b"-", b"e"] for line in chunk.data.splitlines())
    assert b"\x1b" not in chunk.data
    assert b" [31mred" in chunk.data


async def submitted(local: LocalEngineLab, submission: Submission) -> Observation:
    await local.engine.submit(submission)
    return await local.observe()


async def test_one_start_that_failed_is_told_while_the_next_is_awaited(local: LocalEngineLab) -> None:
    submission = local.submission("never claims")
    with anyio.fail_after(30):
        while "ended before they began" not in (seen := await submitted(local, submission)).raw:
            await anyio.sleep(0.01)
    assert seen.evidence is Evidence.PENDING
    assert "credentials: " in seen.raw


async def test_stopping_a_share_nobody_claimed_keeps_it_from_ever_starting(local: LocalEngineLab) -> None:
    submission = local.submission("never claims")
    await local.engine.submit(submission)
    await local.engine.cancel(local.id(), 5.0)
    seen = await local.observe()
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.STOPPED
    assert seen.outcome.started_at is None
    assert not spool.claim(local.spool_task(), 0.0)


async def test_a_share_about_to_be_claimed_is_left_to_its_supervisor(local: LocalEngineLab) -> None:
    await local.engine.submit(local.submission("never claims"))
    lock = spool.take_lock(local.spool_task())
    assert lock is not None
    try:
        assert (await local.observe()).evidence is Evidence.PENDING
        await local.engine.cancel(local.id(), 5.0)
        assert spool.read_claim(local.spool_task()) is None
        assert spool.read_stop(local.spool_task()) is not None
    finally:
        os.close(lock)


async def test_a_foreign_process_with_the_claims_pid_is_never_signalled(local: LocalEngineLab) -> None:
    await local.engine.submit(local.submission("never claims"))
    bystander = subprocess.Popen(["sleep", "1000"])
    lock = spool.take_lock(local.spool_task())
    assert lock is not None
    try:
        foreign = a_claim(local.spool_task(), pid=bystander.pid)
        Path(local.spool_task().claimed).write_bytes(msgspec.json.encode(foreign))
        await local.engine.cancel(local.id(), 0.0)
        local.clock.advance(60)
        await local.observe()
        assert bystander.poll() is None
    finally:
        os.close(lock)
        bystander.kill()
        bystander.wait()


async def test_after_a_reboot_what_ran_is_lost(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    await local.engine.submit(local.submission("never claims"))
    before = a_claim(local.spool_task(), pid=os.getppid(), boot_id="another boot")
    Path(local.spool_task().claimed).write_bytes(msgspec.json.encode(before))
    with monkeypatch.context() as patch:
        patch.setattr(spool, "kill_leftovers", lambda *_, **__: pytest.fail("nothing can be left"))
        seen = await local.observe()
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.LOST
    assert seen.outcome.message.startswith("the machine was restarted")


async def test_what_does_not_die_is_not_called_ended(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def in_vain(*_: object, timeout_s: float) -> bool:
        waited.append(timeout_s)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(spool, "kill_leftovers", in_vain)
        await local.engine.submit(local.submission("dies"))
        seen = await local.until(Evidence.ORPHANED)
        assert "does not die" in seen.raw
        assert spool.read_outcome(local.spool_task()) is None
        assert (await local.observe()).evidence is Evidence.ORPHANED
    assert (waited[0], set(waited[1:])) == (REAP_S, {0.0})  # others are not kept waiting for it
    await local.until(Evidence.ENDED)


async def test_an_end_that_cannot_be_written_is_told_and_written_later(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool, "write_outcome", full)
        await local.engine.submit(local.submission("dies"))
        first = await local.until(Evidence.ENDED)
        local.clock.advance(5)
        again = await local.observe()
    assert first.outcome == again.outcome
    assert (await local.observe()).outcome == first.outcome
    assert spool.read_outcome(local.spool_task()) == first.outcome


@pytest.mark.parametrize("name", ["task_spec.json", "outcome.json", "cgroups"])
@pytest.mark.parametrize("content", [b"", b'{"attempt_id": "att', b"\x00\xff\x00", b"[]" * 9])
async def test_a_garbled_file_hides_no_other_share(local: LocalEngineLab, name: str, content: bytes) -> None:
    await local.engine.submit(local.submission("never claims"))
    gone = a_claim(local.spool_task(), pid=os.getpid())
    Path(local.spool_task().claimed).write_bytes(msgspec.json.encode(gone))
    (Path(local.spool_task().directory) / name).write_bytes(content)
    local.restart()
    await local.engine.submit(local.submission("dies", 2))
    good = await local.until(Evidence.ENDED, 2)
    assert good.outcome is not None
    bad = await local.observe()
    assert bad.evidence is Evidence.ORPHANED
    assert f"{name}: {content!r}" in bad.raw
    await local.engine.cancel(local.id(), 1.0)
    await local.engine.forget(local.id())
    assert (await local.observe()).evidence is Evidence.ORPHANED


@pytest.mark.parametrize("name", ["task_spec.json", "outcome.json"])
async def test_a_garbled_share_whose_supervisor_lives_is_left_to_its_fence(
    local: LocalEngineLab, name: str
) -> None:
    await local.engine.submit(local.submission("is deaf"))
    await local.until_started()
    (Path(local.spool_task().directory) / name).write_bytes(b"")
    local.restart()
    assert (await local.observe()).evidence is Evidence.UNKNOWN


async def test_a_claimed_share_without_an_order_is_never_called_ended(local: LocalEngineLab) -> None:
    await local.engine.submit(local.submission("never claims"))
    gone = a_claim(local.spool_task(), pid=os.getpid())
    Path(local.spool_task().claimed).write_bytes(msgspec.json.encode(gone))
    Path(local.spool_task().task_spec).unlink()
    local.restart()
    assert (await local.observe()).evidence is Evidence.ORPHANED


async def test_an_outcome_of_another_attempt_is_no_evidence(local: LocalEngineLab) -> None:
    await local.engine.submit(local.submission("never claims"))
    other = TaskOutcome(attempt_id="att_9", epoch=3, node="sim-01", kind=EndKind.SUCCEEDED, ended_at=0)
    spool.write_outcome(local.spool_task(), other)
    assert (await local.observe()).evidence is Evidence.UNKNOWN


async def test_without_free_file_descriptors_nothing_is_acknowledged_and_it_recovers(
    local: LocalEngineLab,
) -> None:
    await local.engine.nodes()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    hoard: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(EngineUnreachable):
            await local.engine.submit(local.submission("is deaf"))
        with pytest.raises(EngineUnreachable):
            await local.engine.list_owned()
    finally:
        for fd in hoard:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await local.engine.submit(local.submission("is deaf"))
    await local.until_started()


async def test_when_the_second_spawn_fails_submitting_again_starts_only_that_one(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = local.submission("is deaf", num_nodes=2)
    spawn = local.engine._supervisors.spawn
    directories: list[str] = []

    def failing(directory: str, *rest: Any) -> int:
        directories.append(directory)
        if len(directories) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return spawn(directory, *rest)

    monkeypatch.setattr(local.engine._supervisors, "spawn", failing)
    with pytest.raises(EngineUnreachable):
        await local.engine.submit(submission)
    await local.until_started()
    await local.engine.submit(submission)
    assert [Path(directory).name for directory in directories] == ["sim-01", "sim-02", "sim-02"]


async def test_a_full_disk_leaves_no_half_written_attempt(
    local: LocalEngineLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = spool.write_task_spec

    def full(task: spool.SpoolTask, task_spec: TaskSpec) -> None:
        if task_spec.ranks.node_rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(task, task_spec)

    submission = local.submission("is deaf", num_nodes=2)
    with monkeypatch.context() as patch:
        patch.setattr(spool, "write_task_spec", full)
        with pytest.raises(EngineUnreachable, match="No space"):
            await local.engine.submit(submission)
    assert await local.engine.list_owned() == []
    assert list(local.home.glob("spool/draft/*/*")) == []
    await local.engine.submit(submission)
    assert len(await local.engine.list_owned()) == 2


async def test_concurrent_submits_of_one_attempt_are_one_attempt(local: LocalEngineLab) -> None:
    submission = local.submission("is deaf", num_nodes=2)
    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(local.engine.submit, submission)
    task_specs = [spool.read_task_spec(local.spool_task(node=node)) for node in ("sim-01", "sim-02")]
    assert len({task_spec.ranks.master_port for task_spec in task_specs if task_spec}) == 1
    assert len(await local.engine.list_owned()) == 2
    assert list(local.home.glob("spool/draft/*/*")) == []


async def test_attempts_that_live_at_once_have_different_ports(local: LocalEngineLab) -> None:
    for number in range(5):
        await local.engine.submit(local.submission("never claims", number))
    local.restart()
    await local.engine.submit(local.submission("never claims", 5))
    task_specs = [spool.read_task_spec(local.spool_task(number)) for number in range(6)]
    assert len({task_spec.ranks.master_port for task_spec in task_specs if task_spec}) == 6


async def test_ended_supervisors_do_not_stay_as_zombies(local: LocalEngineLab) -> None:
    for number in range(3):
        await local.engine.submit(local.submission("never claims", number))
    with anyio.fail_after(30):
        while local.engine._supervisors._pids:
            await local.engine.list_owned()
            await anyio.sleep(0.01)
    for pid in local.children:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
