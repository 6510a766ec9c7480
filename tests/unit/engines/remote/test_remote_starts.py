"""How many starts are under way at once, and who holds up whom."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from shoal.engines.base import Submission
from shoal.engines.fake import VirtualClock
from shoal.engines.remote.agent_launcher import STARTS_AT_ONCE
from shoal.wire import LaunchRequest, TaskSpec
from tests.support.fakes.remote_engine import ScriptedEngine
from tests.support.runtime.task_specs import change_task_spec
from tests.unit.engines.remote.test_mailbox_terms import ORDER

pytestmark = pytest.mark.anyio


class Held(ScriptedEngine):
    """Whoever starts something of ana's is stopped by her, until she lets go."""

    def __init__(self, home: Path, clock: VirtualClock) -> None:
        super().__init__(home, clock)
        self.let_go = anyio.Event()
        self.started: list[str] = []

    async def launch(self, launch_request: LaunchRequest, task_specs: tuple[TaskSpec, ...]) -> None:
        self.started.append(launch_request.attempt_id)
        if task_specs[0].identity.owner.startswith("ana"):
            await self.let_go.wait()


def owned(attempt_id: str, owner: str) -> Submission:
    mine = change_task_spec(ORDER, attempt_id=attempt_id, owner=owner)
    return Submission(attempt_id=attempt_id, epoch=1, task_specs=(mine,), bootstrap_token="t")


async def test_hanging_launch_blocks_only_its_owner(tmp_path: Path, clock: VirtualClock) -> None:
    engine = Held(tmp_path, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.submit, owned("att_1", "ana"))
        tasks.start_soon(engine.submit, owned("att_2", "ana"))
        while len(engine.mailbox.tasks()) < 2:  # noqa: ASYNC110 - as long as it takes
            await anyio.sleep(0.01)
        with anyio.fail_after(10.0):
            await engine.submit(owned("att_3", "bo"))
        assert len(engine.started) == 2
        engine.let_go.set()
    assert sorted(engine.started) == ["att_1", "att_2", "att_3"]


async def test_number_of_concurrent_launches_is_limited(tmp_path: Path, clock: VirtualClock) -> None:
    engine = Held(tmp_path, clock)
    async with anyio.create_task_group() as tasks:
        for number in range(STARTS_AT_ONCE + 2):
            tasks.start_soon(engine.submit, owned(f"att_{number}", f"ana-{number}"))
        with anyio.fail_after(10.0):
            while len(engine.started) < STARTS_AT_ONCE or len(engine.mailbox.tasks()) < STARTS_AT_ONCE + 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await anyio.wait_all_tasks_blocked()
        assert len(engine.started) == STARTS_AT_ONCE
        engine.let_go.set()
    assert len(engine.started) == STARTS_AT_ONCE + 2
