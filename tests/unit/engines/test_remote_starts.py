"""How many starts are under way at once, and who holds up whom."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest

from shoal.engines.base import Submission
from shoal.engines.fake import VirtualClock
from shoal.engines.starts import STARTS_AT_ONCE
from shoal.wire import Order, Summons
from tests.support.lent import Lent
from tests.unit.engines.test_desk_terms import ORDER

pytestmark = pytest.mark.anyio


class Held(Lent):
    """Whoever starts something of ana's is stopped by her, until she lets go."""

    def __init__(self, home: Path, clock: VirtualClock) -> None:
        super().__init__(home, clock)
        self.let_go = anyio.Event()
        self.started: list[str] = []

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        self.started.append(summons.attempt_id)
        if orders[0].owner.startswith("ana"):
            await self.let_go.wait()


def owned(attempt_id: str, owner: str) -> Submission:
    mine = msgspec.structs.replace(ORDER, attempt_id=attempt_id, owner=owner)
    return Submission(attempt_id=attempt_id, epoch=1, orders=(mine,), ticket="t")


async def test_an_owner_whose_start_hangs_holds_up_their_own_alone(
    tmp_path: Path, clock: VirtualClock
) -> None:
    engine = Held(tmp_path, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.submit, owned("att_1", "ana"))
        tasks.start_soon(engine.submit, owned("att_2", "ana"))
        while len(engine.desk.shares()) < 2:  # noqa: ASYNC110 - as long as it takes
            await anyio.sleep(0.01)
        with anyio.fail_after(10.0):
            await engine.submit(owned("att_3", "bo"))
        assert len(engine.started) == 2
        engine.let_go.set()
    assert sorted(engine.started) == ["att_1", "att_2", "att_3"]


async def test_only_so_many_starts_are_under_way_at_once(tmp_path: Path, clock: VirtualClock) -> None:
    engine = Held(tmp_path, clock)
    async with anyio.create_task_group() as tasks:
        for number in range(STARTS_AT_ONCE + 2):
            tasks.start_soon(engine.submit, owned(f"att_{number}", f"ana-{number}"))
        with anyio.fail_after(10.0):
            while len(engine.started) < STARTS_AT_ONCE or len(engine.desk.shares()) < STARTS_AT_ONCE + 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await anyio.wait_all_tasks_blocked()
        assert len(engine.started) == STARTS_AT_ONCE
        engine.let_go.set()
    assert len(engine.started) == STARTS_AT_ONCE + 2
