"""A task of a running attempt that is begun anew by the local engine: its files, its log, who is told."""

# What is tested is files and processes: polling for them and touching them is the point.
# ruff: noqa: ASYNC110, ASYNC240

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import anyio
import msgspec
import pytest

from shoal.engines.base import Observation, Submission
from shoal.errors import EngineUnreachable
from shoal.model.evidence import Evidence
from shoal.runtime.files import spool
from tests.support.fakes.local_engine import LocalEngineLab
from tests.support.runtime.task_specs import change_task_spec

pytestmark = pytest.mark.anyio
LOST = "sim-02"


def anew(submission: Submission, replacement: int = 1) -> Submission:
    task_specs = tuple(
        change_task_spec(task_spec, replacement=replacement) if task_spec.identity.node == LOST else task_spec
        for task_spec in submission.task_specs
    )
    return msgspec.structs.replace(submission, task_specs=task_specs)


async def look(local: LocalEngineLab) -> dict[str, Observation]:
    return {seen.node: seen for seen in await local.engine.list_owned()}


async def until(local: LocalEngineLab, node: str, evidence: Evidence) -> Observation:
    with anyio.fail_after(30):
        while (seen := (await look(local))[node]).evidence is not evidence:
            await anyio.sleep(0.01)
    return seen


async def lose(local: LocalEngineLab) -> Submission:
    """A gang whose second supervisor was killed, and found dead."""
    submission = local.submission("is deaf", num_nodes=2)
    await local.engine.submit(submission)
    for node in ("sim-01", LOST):
        await until(local, node, Evidence.ALIVE)
    claim = spool.read_claim(local.spool_task(node=LOST))
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)
    await until(local, LOST, Evidence.ENDED)
    return submission


async def test_log_of_a_lost_share_goes_on_in_the_one_that_replaces_it(local: LocalEngineLab) -> None:
    submission = await lose(local)
    before = Path(local.spool_task(node=LOST).log).read_bytes()
    assert b"died without an outcome" in before
    await local.engine.submit(anew(submission))
    seen = await until(local, LOST, Evidence.ALIVE)
    assert seen.replacement == 1
    assert Path(local.spool_task(node=LOST).log).read_bytes().startswith(before)
    assert (await look(local))["sim-01"].evidence is Evidence.ALIVE


async def test_crash_between_taking_the_old_share_away_and_putting_the_new_one_is_repaired(
    local: LocalEngineLab,
) -> None:
    submission = await lose(local)
    task = local.spool_task(node=LOST)
    before = Path(task.log).read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        rename = Path.rename

        def dies(self: Path, target: Path) -> Path:
            if str(target) == task.directory:
                raise OSError(errno.EIO, "killed here")
            return rename(self, target)

        patch.setattr(Path, "rename", dies)
        with pytest.raises(EngineUnreachable):
            await local.engine.submit(anew(submission))
    local.restart()
    assert LOST not in await look(local), "nothing is there that could be started"
    await local.engine.submit(anew(submission))
    assert (await until(local, LOST, Evidence.ALIVE)).replacement == 1
    assert Path(task.log).read_bytes().startswith(before)


async def test_living_task_is_not_replaced(local: LocalEngineLab) -> None:
    submission = local.submission("is deaf", num_nodes=2)
    await local.engine.submit(submission)
    await until(local, LOST, Evidence.ALIVE)
    with pytest.raises(EngineUnreachable, match="still has the task"):
        await local.engine.submit(anew(submission))
    assert (await look(local))[LOST].replacement == 0


async def test_older_order_brings_no_older_share_back(local: LocalEngineLab) -> None:
    submission = await lose(local)
    await local.engine.submit(anew(submission))
    await until(local, LOST, Evidence.ALIVE)
    await local.engine.submit(submission)
    assert (await look(local))[LOST].replacement == 1


async def test_supervisor_of_a_gang_that_dies_is_noticed_at_once(local: LocalEngineLab) -> None:
    noticed = anyio.Event()
    async with anyio.from_thread.BlockingPortal() as portal:
        local.engine.notify_changes(lambda: portal.call(noticed.set))
        submission = local.submission("is deaf", num_nodes=2)
        await local.engine.submit(submission)
        await until(local, LOST, Evidence.ALIVE)
        claim = spool.read_claim(local.spool_task(node=LOST))
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)
        with anyio.fail_after(30):
            await noticed.wait()
        local.engine._exit_notifier.close()
