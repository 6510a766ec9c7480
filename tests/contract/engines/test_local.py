"""The local engine keeps the contract with real supervisors and real processes."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

from shoal.clock import SystemClock
from shoal.engines.base import Submission
from shoal.engines.local import LocalEngine, SimulatedNodes
from shoal.errors import EngineUnreachable
from shoal.model.evidence import Evidence
from shoal.runtime.files import spool
from shoal.runtime.process import tree
from shoal.wire import EndKind
from tests.contract.engines.engine_contract import EngineContract, EngineWorld, RankProgram
from tests.support.runtime.task_specs import change_task_spec


class SkewedClock(SystemClock):
    """The machine's clock, but later."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class LocalWorld(EngineWorld):
    node_names = ("sim-01", "sim-02")
    engine: LocalEngine

    def __init__(self, home: Path) -> None:
        self.home = home
        self.clock = SkewedClock()
        self.engine = self._open()

    def share(self, attempt_id: str) -> spool.SpoolTask:
        return spool.SpoolTask(self.home / "spool" / "live" / attempt_id / self.node_names[0])

    def _open(self) -> LocalEngine:
        return LocalEngine(
            self.home,
            clock=self.clock,
            server_file=self.home / "server.json",
            simulated=SimulatedNodes(count=2, gpus_per_node=2),
        )

    def run_line(self, program: RankProgram) -> str:
        steps = [f"echo {shlex.quote(line)}" for line in program.lines]
        if program.is_deaf:
            steps.append("trap '' TERM")
        if program.has_children:
            steps.append("setsid sleep 1000 >/dev/null 2>&1 & sleep 1000 >/dev/null 2>&1 & :")
        if program.is_missing:
            steps.append("/no/such/program")
        elif program.signal is not None:
            steps.append(f"kill -{program.signal} $$; sleep 1000")
        elif program.exit_code is None:
            steps.append("while :; do sleep 0.1; done")
        else:
            steps.append(f"exit {program.exit_code}")
        return "\n".join(steps)

    async def pass_time(self) -> None:
        await anyio.sleep(0.02)

    async def restart(self) -> None:
        await self.engine.close()
        self.engine = self._open()

    def num_running(self, attempt_id: str) -> int:
        marks = frozenset([f"SHOAL_ATTEMPT_ID={attempt_id}".encode()])
        return len(tree.marked(marks, "/nowhere", None))

    def num_starts(self, attempt_id: str) -> int:
        tasks = (self.home / "spool").glob("*/*/*")
        return sum(s.parent.name == attempt_id and Path(spool.SpoolTask(s).started).exists() for s in tasks)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[LocalWorld]:
    world = LocalWorld(tmp_path / "home")
    yield world
    left = {o.attempt_id for o in await world.engine.list_owned() if o.evidence is not Evidence.ENDED}
    for attempt_id in left:
        await world.engine.cancel(attempt_id, 0.0)
    for attempt_id in left:
        await world.until(attempt_id, Evidence.ENDED)
        assert world.num_running(attempt_id) == 0
    await world.engine.close()


class TestLocalEngine(EngineContract):
    pass


def processes(share: spool.SpoolTask) -> set[int]:
    """Whatever runs in the task's cgroups or carries its marks, and its supervisor."""
    claim = spool.read_claim(share)
    task_spec = spool.read_task_spec(share)
    assert claim is not None
    assert task_spec is not None
    marks = frozenset([f"SHOAL_ATTEMPT_ID={task_spec.identity.attempt_id}".encode()])
    return (
        {claim.pid} | tree.pids_in_cgroups(spool.read_cgroups(share)) | tree.marked(marks, "/nowhere", None)
    )


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if tree.parent_of(pid) is not None}


HIDING = RankProgram(exit_code=None, has_children=True, is_deaf=True)


@pytest.mark.anyio
class TestLocalProcesses:
    """What only real processes can show."""

    async def test_a_killed_supervisor_takes_its_whole_tree_along(self, world: LocalWorld) -> None:
        submission = world.submission(HIDING, ranks_per_node=2)
        await world.run_until_started(submission)
        task = world.share(submission.attempt_id)
        # One supervisor, and of each rank a shell, its loop's sleep and two children.
        while len(before := processes(task)) < 1 + 2 * 3:
            await world.pass_time()
        assert spool.signal_supervisor(task, signal.SIGKILL)
        [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
        assert seen.outcome is not None
        assert seen.outcome.kind is EndKind.LOST
        assert living(before) == set()
        assert [path for path in spool.read_cgroups(task) if os.path.exists(path)] == []  # noqa: ASYNC240, PTH110

    async def test_a_frozen_supervisor_is_killed_once_its_time_is_up(self, world: LocalWorld) -> None:
        submission = world.submission(HIDING)
        await world.run_until_started(submission)
        task = world.share(submission.attempt_id)
        before = processes(task)
        assert spool.signal_supervisor(task, signal.SIGSTOP)
        await world.engine.cancel(submission.attempt_id, 1.0)
        await world.pass_time()
        assert [o.evidence for o in (await world.observe(submission.attempt_id)).values()] == [Evidence.ALIVE]
        world.clock.ahead += 12.0
        await world.until(submission.attempt_id, Evidence.ENDED)
        assert living(before) == set()

    async def test_every_rank_of_a_gang_knows_the_same_meeting_point(self, world: LocalWorld) -> None:
        submission = world.submission(num_nodes=2, ranks_per_node=2)
        shown = "echo $MASTER_ADDR:$MASTER_PORT $RANK/$WORLD_SIZE"
        task_specs = tuple(change_task_spec(task_spec, run=shown) for task_spec in submission.task_specs)
        await world.run_to_end(msgspec.structs.replace(submission, task_specs=task_specs))
        logs = [await world.whole_log(submission.attempt_id, node) for node in world.node_names]
        text = [line.split()[3:] for log in logs for line in log.splitlines()]
        assert len({meeting for meeting, _ in text}) == 1
        assert sorted(rank for _, rank in text) == [b"0/4", b"1/4", b"2/4", b"3/4"]

    async def test_a_crash_before_the_spawn_is_made_good_by_submitting_again(
        self, world: LocalWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def crash(*_: object) -> int:
            raise KeyboardInterrupt

        submission = world.submission(RankProgram(lines=("once",)), num_nodes=2)
        monkeypatch.setattr(world.engine._supervisors, "spawn", crash)
        with pytest.raises(KeyboardInterrupt):
            world.engine._submit(submission)
        await world.restart()
        assert {o.evidence for o in await world.engine.list_owned()} == {Evidence.PENDING}
        assert len(await world.run_to_end(submission)) == 2
        assert world.num_starts(submission.attempt_id) == 2

    async def test_a_storm_of_submits_cancels_and_restarts_loses_nothing(self, world: LocalWorld) -> None:
        dice = random.Random(7)
        submissions = [world.submission(RankProgram(lines=("once",))) for _ in range(8)]
        submissions += [world.submission() for _ in range(4)]

        async def submit(submission: Submission) -> None:
            while True:
                with contextlib.suppress(EngineUnreachable):  # a restart may sweep up a draft
                    await world.engine.submit(submission)
                    return

        async def live(submission: Submission) -> None:
            await anyio.sleep(dice.random() * 0.3)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(submit, submission)
                tasks.start_soon(submit, submission)
            await anyio.sleep(dice.random() * 0.3)
            if submission in submissions[8:] or dice.random() < 0.5:
                await world.engine.cancel(submission.attempt_id, 1.0)

        async with anyio.create_task_group() as tasks:
            for submission in submissions:
                tasks.start_soon(live, submission)
            for _ in range(3):
                await anyio.sleep(0.1)
                await world.restart()
        for submission in submissions:
            [seen] = await world.until(submission.attempt_id, Evidence.ENDED)
            assert seen.outcome is not None
            assert seen.outcome.kind in (EndKind.SUCCEEDED, EndKind.STOPPED)
            log = await world.whole_log(submission.attempt_id, seen.node)
            assert log.count(b"once") <= 1
            assert world.num_running(submission.attempt_id) == 0
