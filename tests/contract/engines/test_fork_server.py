"""The fork server makes starts quicker and changes nothing else, whatever happens to it."""

# What is tested is files and processes: polling for them and touching them is the point.
# ruff: noqa: ASYNC110, ASYNC221, ASYNC240

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from shoal.engines.local import client
from shoal.engines.local.client import MAX_LOSSES, ForkServer
from shoal.engines.local.task_specs import fork_server_command, supervisor_environment
from shoal.model.evidence import Evidence
from shoal.runtime.files import spool
from shoal.runtime.process import tree
from shoal.wire import EndKind
from tests.contract.engines.engine_contract import RankProgram
from tests.contract.engines.test_local import LocalWorld

pytestmark = pytest.mark.anyio
ENDLESS = RankProgram(exit_code=None)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[LocalWorld]:
    world = LocalWorld(tmp_path / "home")
    await warm(world)
    yield world
    for seen in await world.engine.list_owned():
        await world.engine.cancel(seen.attempt_id, 0.0)
        await world.until(seen.attempt_id, Evidence.ENDED)
    await world.engine.close()


async def warm(world: LocalWorld) -> None:
    await world.engine.nodes()
    fork_server = world.engine._supervisors._fork_server
    assert fork_server is not None
    with anyio.fail_after(20):
        while not fork_server.is_ready():
            await anyio.sleep(0.01)


def nursery_of(world: LocalWorld) -> int:
    fork_server = world.engine._supervisors._fork_server
    assert fork_server is not None
    assert fork_server._pid is not None
    return fork_server._pid


def supervisor_of(world: LocalWorld, attempt_id: str) -> int:
    claim = spool.read_claim(world.share(attempt_id))
    assert claim is not None
    return claim.pid


async def test_a_forked_supervisor_is_as_free_as_an_executed_one(world: LocalWorld) -> None:
    submission = world.submission(ENDLESS)
    await world.run_until_started(submission)
    task = world.share(submission.attempt_id)
    pid = supervisor_of(world, submission.attempt_id)
    proc = Path(f"/proc/{pid}")
    assert tree.parent_of(pid) == nursery_of(world)
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert str((proc / "cwd").readlink()) == "/"
    assert (proc / "cgroup").read_text() == Path("/proc/self/cgroup").read_text()
    open_files = {fd.name: str(fd.readlink()) for fd in (proc / "fd").iterdir()}
    assert open_files["0"].startswith("pipe:")
    assert open_files["1"] == open_files["2"] == task.errors
    fork_server = {str(fd.readlink()) for fd in Path(f"/proc/{tree.parent_of(pid)}/fd").iterdir()}
    ours = {str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    assert not {name for name in open_files.values() if name.startswith("socket:")} & (fork_server | ours)
    parts = (proc / "cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    assert parts[-2:] == ["shoal.runtime.supervisor", task.directory]
    environ = dict(item.split("=", 1) for item in (proc / "environ").read_text().rstrip("\0").split("\0"))
    assert environ == supervisor_environment(os.environ, str(world.home / "server.json"))
    assert signals(proc, "SigIgn") & 1 << (signal.SIGCHLD - 1) == 0


def signals(proc: Path, name: str) -> int:
    lines = (proc / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1], 16)


async def test_a_killed_nursery_ends_no_job_and_holds_up_no_start(world: LocalWorld) -> None:
    before, after = world.submission(ENDLESS), world.submission(ENDLESS)
    await world.run_until_started(before)
    first = nursery_of(world)
    os.kill(first, signal.SIGKILL)
    await world.engine.submit(after)
    while spool.read_claim(world.share(after.attempt_id)) is None:
        await world.pass_time()
    assert tree.parent_of(supervisor_of(world, after.attempt_id)) == os.getpid()
    assert {seen.evidence for seen in await world.engine.list_owned()} == {Evidence.ALIVE}
    assert nursery_of(world) != first
    await warm(world)
    last = world.submission(RankProgram(lines=("once",)))
    [seen] = await world.run_to_end(last)
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.SUCCEEDED
    assert world.num_starts(last.attempt_id) == 1


async def test_a_nursery_that_hangs_is_given_up_and_killed(
    world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FORK_S", 0.3)
    await world.restart()
    await warm(world)
    await world.run_to_end(world.submission(RankProgram()))
    hung = nursery_of(world)
    os.kill(hung, signal.SIGSTOP)
    submission = world.submission(RankProgram(lines=("once",)))
    [seen] = await world.run_to_end(submission)
    assert seen.outcome is not None
    assert seen.outcome.kind is EndKind.SUCCEEDED
    assert world.num_starts(submission.attempt_id) == 1
    assert tree.parent_of(hung) is None


async def test_fork_server_dies_with_its_starter_and_supervisors_do_not(
    world: LocalWorld, tmp_path: Path
) -> None:
    submission = world.submission(ENDLESS)
    await world.run_until_started(submission)
    code = (
        "import os, signal\nfrom shoal.engines.local.client import ForkServer\n"
        f"nursery = ForkServer({fork_server_command()!r}, {supervisor_environment(os.environ, 'x')!r})\n"
        "nursery.ensure_running()\nprint(nursery._pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    orphan = int(done.stdout)
    with anyio.fail_after(20):
        while (
            command := Path(f"/proc/{orphan}/cmdline")
        ).exists() and b"fork_server" in command.read_bytes():
            await anyio.sleep(0.02)
    await world.engine.close()
    assert tree.parent_of(supervisor_of(world, submission.attempt_id)) is not None
    await world.restart()


async def test_broken_fork_server_is_not_restarted_for_ever(tmp_path: Path) -> None:
    witness = tmp_path / "starts"
    fork_server = ForkServer(["/bin/sh", "-c", f"echo >> {witness}"], {"PATH": os.defpath})
    with anyio.fail_after(20):
        while fork_server._num_losses < MAX_LOSSES:
            fork_server.ensure_running()
            assert fork_server.fork("/nowhere", 0, 0) is None
            await anyio.sleep(0.01)
    fork_server.ensure_running()
    assert fork_server._pid is None
    assert len(witness.read_text()) == MAX_LOSSES
    fork_server.close()


async def test_a_nursery_that_cannot_be_started_is_no_error(tmp_path: Path) -> None:
    fork_server = ForkServer([str(tmp_path / "missing")], {})
    fork_server.ensure_running()
    assert fork_server.fork("/nowhere", 0, 0) is None
    fork_server.close()
