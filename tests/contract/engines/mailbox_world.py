"""What the contract must know of an engine whose tasks are at a mailbox, whoever starts node agents."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from shoal.engines.base import Submission
from shoal.engines.remote.engine import RemoteEngine
from shoal.identity import bootstrap_token
from shoal.model.evidence import Evidence
from shoal.runtime.files import spool
from shoal.runtime.process import tree
from tests.contract.engines.engine_contract import FOREVER, EngineWorld, RankProgram
from tests.contract.engines.test_local import LocalWorld
from tests.support.fakes.remote_engine import KEY, MailboxServer
from tests.support.host.cluster_lab import NodeNetworks
from tests.support.runtime.task_specs import change_task_spec


class MailboxWorld(EngineWorld):
    engine: RemoteEngine

    def __init__(self, root: Path, host: str = "127.0.0.1") -> None:
        self.home, self.spool = root / "home", root / "spool"
        self.server = MailboxServer(self.home, host)

    @abstractmethod
    def open(self) -> RemoteEngine: ...

    def run_line(self, program: RankProgram) -> str:
        return LocalWorld.run_line(self, program)  # type: ignore[arg-type]

    async def pass_time(self) -> None:
        await anyio.sleep(0.05)

    async def restart(self) -> None:
        await self.engine.close()
        self.engine = self.open()
        self.server.replace(self.engine)

    def num_running(self, attempt_id: str) -> int:
        marks = frozenset([f"SHOAL_ATTEMPT_ID={attempt_id}".encode()])
        return len(tree.marked(marks, "/nowhere", None))

    def num_starts(self, attempt_id: str) -> int:
        tasks = (self.home / "mailbox").glob(f"*/{attempt_id}/*")
        return sum(Path(spool.SpoolTask(task).started).exists() for task in tasks)

    def submission(
        self,
        program: RankProgram = FOREVER,
        *,
        num_nodes: int = 1,
        ranks_per_node: int = 1,
        attempt_id: str | None = None,
    ) -> Submission:
        created = super().submission(
            program, num_nodes=num_nodes, ranks_per_node=ranks_per_node, attempt_id=attempt_id
        )
        return msgspec.structs.replace(created, bootstrap_token=bootstrap_token(KEY, created.attempt_id))

    async def check_delivery_after_cut(self, lab: NodeNetworks) -> None:
        """Of its first node from us: what it began there goes on, and is known when the cut is over."""
        node, created = self.node_names[0], self.submission()
        shown = "for i in 1 2 3 4 5 6; do echo line $i; sleep 0.5; done"
        task_specs = tuple(change_task_spec(task_spec, run=shown) for task_spec in created.task_specs)
        await self.run_until_started(msgspec.structs.replace(created, task_specs=task_specs))
        await anyio.to_thread.run_sync(lab.cut, node)
        task = self.spool_task(created.attempt_id, node)
        with anyio.fail_after(120):
            while not await anyio.Path(task.outcome).exists():  # noqa: ASYNC110
                await anyio.sleep(0.1)
        assert self.engine.mailbox.find(created.attempt_id)[node].outcome is None
        await anyio.to_thread.run_sync(lab.heal, node)
        await self.until(created.attempt_id, Evidence.ENDED)
        log = await self.whole_log(created.attempt_id, node)
        assert [line.split(b" ", 3)[3] for line in log.splitlines()] == [
            f"line {i}".encode() for i in range(1, 7)
        ]

    def spool_task(self, attempt_id: str, node: str) -> spool.SpoolTask:
        """Of the first replacement, on the node's disk."""
        return spool.SpoolTask(self.spool / "spool" / "live" / attempt_id / node)
