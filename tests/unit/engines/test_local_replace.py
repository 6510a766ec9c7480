"""A share of a running attempt that is begun anew by the local engine: its files, its log, who is told."""

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

from shoal.engines.base import Observation, Sight, Submission
from shoal.errors import EngineUnreachable
from shoal.runtime import spool
from tests.support.local_engine import Local

pytestmark = pytest.mark.anyio
LOST = "sim-02"


def anew(submission: Submission, incarnation: int = 1) -> Submission:
    orders = tuple(
        msgspec.structs.replace(order, incarnation=incarnation) if order.node == LOST else order
        for order in submission.orders
    )
    return msgspec.structs.replace(submission, orders=orders)


async def look(local: Local) -> dict[str, Observation]:
    return {seen.node: seen for seen in await local.engine.list_owned()}


async def until(local: Local, node: str, sight: Sight) -> Observation:
    with anyio.fail_after(30):
        while (seen := (await look(local))[node]).sight is not sight:
            await anyio.sleep(0.01)
    return seen


async def lose(local: Local) -> Submission:
    """A gang whose second supervisor was killed, and found dead."""
    submission = local.submission("is deaf", num_nodes=2)
    await local.engine.submit(submission)
    for node in ("sim-01", LOST):
        await until(local, node, Sight.ALIVE)
    claim = spool.read_claim(local.share(node=LOST))
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)
    await until(local, LOST, Sight.ENDED)
    return submission


async def test_log_of_a_lost_share_goes_on_in_the_one_that_replaces_it(local: Local) -> None:
    submission = await lose(local)
    before = Path(local.share(node=LOST).log).read_bytes()
    assert b"died without an outcome" in before
    await local.engine.submit(anew(submission))
    seen = await until(local, LOST, Sight.ALIVE)
    assert seen.incarnation == 1
    assert Path(local.share(node=LOST).log).read_bytes().startswith(before)
    assert (await look(local))["sim-01"].sight is Sight.ALIVE


async def test_crash_between_taking_the_old_share_away_and_putting_the_new_one_is_repaired(
    local: Local,
) -> None:
    submission = await lose(local)
    share = local.share(node=LOST)
    before = Path(share.log).read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        rename = Path.rename

        def dies(self: Path, target: Path) -> Path:
            if str(target) == share.directory:
                raise OSError(errno.EIO, "killed here")
            return rename(self, target)

        patch.setattr(Path, "rename", dies)
        with pytest.raises(EngineUnreachable):
            await local.engine.submit(anew(submission))
    local.reborn()
    assert LOST not in await look(local), "nothing is there that could be started"
    await local.engine.submit(anew(submission))
    assert (await until(local, LOST, Sight.ALIVE)).incarnation == 1
    assert Path(share.log).read_bytes().startswith(before)


async def test_share_that_lives_keeps_its_place(local: Local) -> None:
    submission = local.submission("is deaf", num_nodes=2)
    await local.engine.submit(submission)
    await until(local, LOST, Sight.ALIVE)
    with pytest.raises(EngineUnreachable, match="still has the share"):
        await local.engine.submit(anew(submission))
    assert (await look(local))[LOST].incarnation == 0


async def test_older_order_brings_no_older_share_back(local: Local) -> None:
    submission = await lose(local)
    await local.engine.submit(anew(submission))
    await until(local, LOST, Sight.ALIVE)
    await local.engine.submit(submission)
    assert (await look(local))[LOST].incarnation == 1


async def test_supervisor_of_a_gang_that_dies_is_noticed_at_once(local: Local) -> None:
    noticed = anyio.Event()
    async with anyio.from_thread.BlockingPortal() as portal:
        local.engine.notice(lambda: portal.call(noticed.set))
        submission = local.submission("is deaf", num_nodes=2)
        await local.engine.submit(submission)
        await until(local, LOST, Sight.ALIVE)
        claim = spool.read_claim(local.share(node=LOST))
        assert claim is not None
        os.kill(claim.pid, signal.SIGKILL)
        with anyio.fail_after(30):
            await noticed.wait()
        local.engine._notice.close()
