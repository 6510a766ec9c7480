"""The fake engine keeps the contract it stands in for."""

from __future__ import annotations

import pytest

from shoal.engines.fake import Act, FakeCluster, FakeEngine, VirtualClock
from shoal.model.node import NodeFacts
from shoal.wire import EndKind, TaskSpec
from tests.contract.engines.engine_contract import EngineContract, EngineWorld, RankProgram


class FakeWorld(EngineWorld):
    node_names = ("one", "two")

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.acts: dict[str, Act] = {}
        self.starts: list[str] = []
        nodes = [
            NodeFacts(name=name, cpus=8, memory_bytes=1 << 30, disk_bytes=1 << 30) for name in self.node_names
        ]
        self.cluster = FakeCluster(nodes, clock=self.clock, script=self.script)
        self.engine = FakeEngine(self.cluster)

    def script(self, order: TaskSpec) -> Act:
        self.starts.append(order.identity.attempt_id)
        return self.acts[order.program.run]

    def run_line(self, program: RankProgram) -> str:
        line = repr(program)
        kind = EndKind.SUCCEEDED if program.exit_code == 0 else EndKind.EXITED
        self.acts[line] = Act(
            claim_s=0.5,
            prepare_s=0.5,
            run_s=None if program.exit_code is None and program.signal is None else 3.0,
            kind=kind if program.signal is None else EndKind.SIGNALED,
            exit_code=program.exit_code,
            signal=program.signal,
            rank=None if kind is EndKind.SUCCEEDED else 0,
            stop_s=100.0 if program.is_deaf else 0.1,
            lines=program.lines,
        )
        return line

    async def pass_time(self) -> None:
        self.clock.advance(0.3)

    async def restart(self) -> None:
        self.engine = FakeEngine(self.cluster)

    def num_running(self, attempt_id: str) -> int:
        return sum(task_spec.identity.attempt_id == attempt_id for task_spec in self.cluster.running())

    def num_starts(self, attempt_id: str) -> int:
        return self.starts.count(attempt_id)


class TestFakeEngine(EngineContract):
    @pytest.fixture
    def world(self) -> FakeWorld:
        return FakeWorld()
