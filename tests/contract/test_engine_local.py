"""The local engine keeps the contract with real supervisors and real processes."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.engines.base import Sight
from shoal.engines.local import LocalEngine, SimulatedNodes
from shoal.runtime import spool, tree
from tests.contract.engine_contract import EngineContract, Program, World


class LocalWorld(World):
    node_names = ("sim-01", "sim-02")

    def __init__(self, home: Path) -> None:
        self.home = home
        self.engine = self._open()

    def _open(self) -> LocalEngine:
        return LocalEngine(
            self.home,
            clock=SystemClock(),
            server_file=self.home / "server.json",
            simulated=SimulatedNodes(count=2, gpus_per_node=2),
        )

    def run_line(self, program: Program) -> str:
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
        shares = (self.home / "spool").glob("*/*/*")
        return sum(s.parent.name == attempt_id and Path(spool.Share(s).started).exists() for s in shares)


class TestLocalEngine(EngineContract):
    @pytest.fixture
    async def world(self, tmp_path: Path) -> AsyncIterator[LocalWorld]:
        world = LocalWorld(tmp_path / "home")
        yield world
        left = {o.attempt_id for o in await world.engine.list_owned() if o.sight is not Sight.ENDED}
        for attempt_id in left:
            await world.engine.cancel(attempt_id, 0.0)
        for attempt_id in left:
            await world.until(attempt_id, Sight.ENDED)
            assert world.num_running(attempt_id) == 0
