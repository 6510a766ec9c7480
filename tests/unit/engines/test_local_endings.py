"""What the local engine makes of supervisors and disks that misbehave."""

# What is tested is files and processes: polling for them and touching them is the point.
# ruff: noqa: ASYNC110, ASYNC220, ASYNC222, ASYNC240

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from shoal.engines.base import Observation, Sight, Submission
from shoal.engines.fake import VirtualClock
from shoal.engines.local import LocalEngine, SimulatedNodes
from shoal.engines.local import engine as engine_module
from shoal.engines.local.engine import CLAIM_S, LOOK_AGAIN_S
from shoal.engines.local.watch import MAX_STARTS
from shoal.errors import EngineRefused, EngineUnreachable
from shoal.ids import id_factory
from shoal.runtime import removal, spool, tree
from shoal.wire import Credentials, EndKind, Limits, NodeOutcome, Order

pytestmark = pytest.mark.anyio
STAND_IN = str(Path(__file__).parents[2] / "support" / "stand_in_supervisor.py")
SECRET = "hunter2-hunter2"
NOBODY = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
new_id = id_factory(time.time)


def credentials(node: str) -> Credentials:
    """Of another length for every node, so that one can tell which arrived."""
    return Credentials(proof_key=SECRET + node * int(node[-1]), secrets={"KEY": SECRET})


class Local:
    """An engine over a home of its own, whose supervisors are stand-ins."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.clock = VirtualClock(time.time())
        self.prefix = new_id("att")
        """Leftovers are found by attempt id, so no two tests on one machine may share one."""
        self.children: set[int] = set()
        self.engine = self.reborn()

    def reborn(self, num_nodes: int = 2) -> LocalEngine:
        nodes = SimulatedNodes(count=num_nodes, gpus_per_node=0)
        self.engine = LocalEngine(
            self.home,
            clock=self.clock,
            server_file=self.home / "server.json",
            simulated=nodes,
            has_nursery=False,  # it forks real supervisors alone
        )
        spawn = self.engine._children.spawn

        def noted(*args: Any) -> int:
            pid = spawn(*args)
            self.children.add(pid)
            return pid

        self.engine._children.spawn = noted  # type: ignore[method-assign,assignment]
        return self.engine

    def id(self, number: int = 1) -> str:
        return f"{self.prefix}-{number}"

    def submission(self, run: str, number: int = 1, num_nodes: int = 1, **fields: Any) -> Submission:
        attempt_id = self.id(number)
        nodes = ("sim-01", "sim-02")[:num_nodes]
        orders = tuple(
            Order(
                attempt_id=attempt_id,
                epoch=3,
                job_id="job_1",
                job_number=1,
                job_name="j",
                project="p",
                node=node,
                node_rank=rank,
                nodes=nodes,
                ranks_per_node=1,
                run=run,
                limits=Limits(cpus=1),
                **fields,
            )
            for rank, node in enumerate(nodes)
        )
        secret = {node: credentials(node) for node in nodes}
        return Submission(attempt_id=attempt_id, epoch=3, orders=orders, credentials=secret)

    def share(self, number: int = 1, node: str = "sim-01") -> spool.Share:
        return spool.Share(self.home / "spool" / "live" / self.id(number) / node)

    async def look(self, number: int = 1) -> Observation:
        return next(o for o in await self.engine.list_owned() if o.attempt_id == self.id(number))

    async def until(self, sight: Sight, number: int = 1) -> Observation:
        with anyio.fail_after(30):
            while (seen := await self.look(number)).sight is not sight:
                await anyio.sleep(0.01)
        return seen

    async def until_started(self) -> Observation:
        with anyio.fail_after(30):
            while (seen := await self.look()).started_at is None:
                await anyio.sleep(0.01)
        return seen

    def marked(self) -> set[int]:
        return tree.marked(frozenset([f"SHOAL_ATTEMPT_ID={self.id()}".encode()]), "/nowhere", None)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setattr(engine_module, "supervisor_command", lambda d: [sys.executable, STAND_IN, d])
    local = Local(tmp_path / "home")
    yield local
    for pid in local.children:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for directory in local.home.glob("spool/*/*/*"):
        with contextlib.suppress(msgspec.DecodeError):
            spool.kill_leftovers(directory)


async def test_a_dead_supervisor_is_lost_only_once_its_leftovers_are_gone(local: Local) -> None:
    await local.engine.submit(local.submission("dies"))
    seen = await local.until(Sight.ENDED)
    assert local.marked() == set()
    assert seen.outcome is not None
    assert (seen.outcome.kind, seen.outcome.epoch) == (EndKind.LOST, 3)
    assert seen.outcome.started_at is not None
    assert "goodbye" in seen.outcome.message
    assert spool.read_outcome(local.share()) == seen.outcome
    assert SECRET not in seen.outcome.message
    local.reborn()
    assert (await local.look()).outcome == seen.outcome


async def test_a_supervisor_that_will_not_stop_is_killed_with_everything_it_started(local: Local) -> None:
    await local.engine.submit(local.submission("is deaf"))
    await local.until_started()
    await local.engine.cancel(local.id(), 2.0)
    assert local.marked() != set()
    local.clock.advance(11.9)
    assert (await local.look()).sight is Sight.ALIVE
    local.clock.advance(0.2)
    seen = await local.until(Sight.ENDED)
    assert local.marked() == set()
    assert seen.outcome is not None
    assert "did not stop in time" in seen.outcome.message


async def test_a_new_engine_remembers_that_a_stop_was_asked(local: Local) -> None:
    await local.engine.submit(local.submission("is deaf"))
    await local.until_started()
    await local.engine.cancel(local.id(), 100.0)
    local.reborn()
    assert (await local.look()).sight is Sight.ALIVE
    await local.engine.cancel(local.id(), 1.0)
    local.clock.advance(11.1)
    await local.until(Sight.ENDED)


async def test_a_share_nobody_claimed_is_pending_and_submitting_again_spawns_again(local: Local) -> None:
    submission = local.submission("never claims")
    await local.engine.submit(submission)
    with anyio.fail_after(30):
        while Path(local.share().errors).stat().st_size == 0:
            await anyio.sleep(0.01)
    assert (await local.look()).sight is Sight.PENDING
    order = spool.read_order(local.share())
    with anyio.fail_after(30):
        while Path(local.share().errors).read_text().count("credentials") < 2:
            await local.engine.submit(submission)
            await anyio.sleep(0.01)
    assert spool.read_order(local.share()) == order


async def test_a_supervisor_that_cannot_start_is_tried_ever_more_slowly_and_then_lost_with_its_last_words(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [sys.executable, "-c", "print('\\x1b[31mred'); import no_such_module"]
    monkeypatch.setattr(engine_module, "supervisor_command", lambda _: broken)
    submission = local.submission("anything")
    began = local.clock.monotonic()
    with anyio.fail_after(60):
        while (seen := await submitted(local, submission)).sight is Sight.PENDING:
            local.clock.advance(0.1)
            while any(map(local.engine._children.is_running, local.children)):
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


async def submitted(local: Local, submission: Submission) -> Observation:
    await local.engine.submit(submission)
    return await local.look()


async def test_one_start_that_failed_is_told_while_the_next_is_awaited(local: Local) -> None:
    submission = local.submission("never claims")
    with anyio.fail_after(30):
        while "ended before they began" not in (seen := await submitted(local, submission)).raw:
            await anyio.sleep(0.01)
    assert seen.sight is Sight.PENDING
    assert "credentials: " in seen.raw


async def test_stopping_a_share_nobody_claimed_keeps_it_from_ever_starting(local: Local) -> None:
    submission = local.submission("never claims")
    await local.engine.submit(submission)
    await local.engine.cancel(local.id(), 5.0)
    seen = await local.look()
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.STOPPED
    assert seen.outcome.started_at is None
    assert not spool.claim(local.share(), 0.0)


async def test_a_share_about_to_be_claimed_is_left_to_its_supervisor(local: Local) -> None:
    await local.engine.submit(local.submission("never claims"))
    lock = spool.take_lock(local.share())
    assert lock is not None
    try:
        assert (await local.look()).sight is Sight.PENDING
        await local.engine.cancel(local.id(), 5.0)
        assert spool.read_claim(local.share()) is None
        assert spool.read_stop(local.share()) is not None
    finally:
        os.close(lock)


async def test_a_foreign_process_with_the_claims_pid_is_never_signalled(local: Local) -> None:
    await local.engine.submit(local.submission("never claims"))
    bystander = subprocess.Popen(["sleep", "1000"])
    lock = spool.take_lock(local.share())
    assert lock is not None
    try:
        foreign = spool.Claim(pid=bystander.pid, boot_id=spool.boot_id(), start_ticks=1, at=0.0)
        Path(local.share().claimed).write_bytes(msgspec.json.encode(foreign))
        await local.engine.cancel(local.id(), 0.0)
        local.clock.advance(60)
        await local.look()
        assert bystander.poll() is None
    finally:
        os.close(lock)
        bystander.kill()
        bystander.wait()


async def test_after_a_reboot_what_ran_is_lost(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    await local.engine.submit(local.submission("never claims"))
    before = spool.Claim(pid=os.getppid(), boot_id="another boot", start_ticks=1, at=0.0)
    Path(local.share().claimed).write_bytes(msgspec.json.encode(before))
    with monkeypatch.context() as patch:
        patch.setattr(spool, "kill_leftovers", lambda *_, **__: pytest.fail("nothing can be left"))
        seen = await local.look()
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.LOST
    assert seen.outcome.message.startswith("the machine was restarted")


async def test_what_does_not_die_is_not_called_ended(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(spool, "kill_leftovers", lambda *_, **__: False)
        await local.engine.submit(local.submission("dies"))
        seen = await local.until(Sight.ORPHANED)
        assert "does not die" in seen.raw
        assert spool.read_outcome(local.share()) is None
    await local.until(Sight.ENDED)


async def test_an_end_that_cannot_be_written_is_told_and_written_later(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool, "write_outcome", full)
        await local.engine.submit(local.submission("dies"))
        first = await local.until(Sight.ENDED)
        local.clock.advance(5)
        again = await local.look()
    assert first.outcome == again.outcome
    assert (await local.look()).outcome == first.outcome
    assert spool.read_outcome(local.share()) == first.outcome


@pytest.mark.parametrize("name", ["order.json", "outcome.json", "cgroups"])
@pytest.mark.parametrize("content", [b"", b'{"attempt_id": "att', b"\x00\xff\x00", b"[]" * 9])
async def test_a_garbled_file_hides_no_other_share(local: Local, name: str, content: bytes) -> None:
    await local.engine.submit(local.submission("never claims"))
    gone = spool.Claim(pid=os.getpid(), boot_id=spool.boot_id(), start_ticks=1, at=0.0)
    Path(local.share().claimed).write_bytes(msgspec.json.encode(gone))
    (Path(local.share().directory) / name).write_bytes(content)
    local.reborn()
    await local.engine.submit(local.submission("dies", 2))
    good = await local.until(Sight.ENDED, 2)
    assert good.outcome is not None
    bad = await local.look()
    assert bad.sight is Sight.ORPHANED
    assert f"{name}: {content!r}" in bad.raw
    await local.engine.cancel(local.id(), 1.0)
    await local.engine.forget(local.id())
    assert (await local.look()).sight is Sight.ORPHANED


@pytest.mark.parametrize("name", ["order.json", "outcome.json"])
async def test_a_garbled_share_whose_supervisor_lives_is_left_to_its_fence(local: Local, name: str) -> None:
    await local.engine.submit(local.submission("is deaf"))
    await local.until_started()
    (Path(local.share().directory) / name).write_bytes(b"")
    local.reborn()
    assert (await local.look()).sight is Sight.UNKNOWN


async def test_a_claimed_share_without_an_order_is_never_called_ended(local: Local) -> None:
    await local.engine.submit(local.submission("never claims"))
    gone = spool.Claim(pid=os.getpid(), boot_id=spool.boot_id(), start_ticks=1, at=0.0)
    Path(local.share().claimed).write_bytes(msgspec.json.encode(gone))
    Path(local.share().order).unlink()
    local.reborn()
    assert (await local.look()).sight is Sight.ORPHANED


async def test_an_outcome_of_another_attempt_is_no_evidence(local: Local) -> None:
    await local.engine.submit(local.submission("never claims"))
    other = NodeOutcome(attempt_id="att_9", epoch=3, node="sim-01", kind=EndKind.SUCCEEDED, ended_at=0)
    spool.write_outcome(local.share(), other)
    assert (await local.look()).sight is Sight.UNKNOWN


async def test_without_free_file_descriptors_nothing_is_acknowledged_and_it_recovers(local: Local) -> None:
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
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = local.submission("is deaf", num_nodes=2)
    spawn = local.engine._children.spawn
    directories: list[str] = []

    def failing(directory: str, *rest: Any) -> int:
        directories.append(directory)
        if len(directories) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return spawn(directory, *rest)

    monkeypatch.setattr(local.engine._children, "spawn", failing)
    with pytest.raises(EngineUnreachable):
        await local.engine.submit(submission)
    await local.until_started()
    await local.engine.submit(submission)
    assert [Path(directory).name for directory in directories] == ["sim-01", "sim-02", "sim-02"]


async def test_a_full_disk_leaves_no_half_written_attempt(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = spool.write_order

    def full(share: spool.Share, order: Order) -> None:
        if order.node_rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(share, order)

    submission = local.submission("is deaf", num_nodes=2)
    with monkeypatch.context() as patch:
        patch.setattr(spool, "write_order", full)
        with pytest.raises(EngineUnreachable, match="No space"):
            await local.engine.submit(submission)
    assert await local.engine.list_owned() == []
    assert list((local.home / "spool" / "draft").iterdir()) == []
    await local.engine.submit(submission)
    assert len(await local.engine.list_owned()) == 2


async def test_concurrent_submits_of_one_attempt_are_one_attempt(local: Local) -> None:
    submission = local.submission("is deaf", num_nodes=2)
    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(local.engine.submit, submission)
    orders = [spool.read_order(local.share(node=node)) for node in ("sim-01", "sim-02")]
    assert len({order.master_port for order in orders if order}) == 1
    assert len(await local.engine.list_owned()) == 2
    assert list((local.home / "spool" / "draft").iterdir()) == []


async def test_attempts_that_live_at_once_have_different_ports(local: Local) -> None:
    for number in range(5):
        await local.engine.submit(local.submission("never claims", number))
    local.reborn()
    await local.engine.submit(local.submission("never claims", 5))
    orders = [spool.read_order(local.share(number)) for number in range(6)]
    assert len({order.master_port for order in orders if order}) == 6


async def test_ended_supervisors_do_not_stay_as_zombies(local: Local) -> None:
    for number in range(3):
        await local.engine.submit(local.submission("never claims", number))
    with anyio.fail_after(30):
        while local.engine._children._pids:
            await local.engine.list_owned()
            await anyio.sleep(0.01)
    for pid in local.children:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


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
    assert not [*local.home.glob("spool/draft/*"), *local.home.glob("spool/trash/*")]


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
