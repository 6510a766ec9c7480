"""A local engine over a home of its own, whose supervisors are stand-ins."""

# ruff: noqa: ASYNC110 - processes and files are waited for by looking

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio

from shoal.engines.base import Observation, Submission
from shoal.engines.fake import VirtualClock
from shoal.engines.local import LocalEngine, SimulatedNodes
from shoal.ids import id_factory
from shoal.model.evidence import Evidence
from shoal.runtime.files import spool
from shoal.runtime.process import tree
from shoal.wire import TaskCredentials
from tests.support.runtime.task_specs import task_spec_of

STAND_IN = str(Path(__file__).parent / "stand_in_supervisor.py")
SECRET = "hunter2-hunter2"
new_id = id_factory(time.time)


def credentials(node: str) -> TaskCredentials:
    """Of another length for every node, so that one can tell which arrived."""
    return TaskCredentials(proof_key=SECRET + node * int(node[-1]), secrets={"KEY": SECRET})


class LocalEngineLab:
    """An engine over a home of its own, whose supervisors are stand-ins."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.clock = VirtualClock(time.time())
        self.prefix = new_id("att")
        """Leftovers are found by attempt id, so no two tests on one machine may share one."""
        self.children: set[int] = set()
        self.engine = self.restart()

    def restart(self, num_nodes: int = 2, term: int = 0) -> LocalEngine:
        nodes = SimulatedNodes(count=num_nodes, gpus_per_node=0)
        self.engine = LocalEngine(
            self.home,
            clock=self.clock,
            server_file=self.home / "server.json",
            simulated=nodes,
            has_fork_server=False,  # it forks real supervisors alone
            term=term,
        )
        spawn = self.engine._supervisors.spawn

        def noted(*args: Any) -> int:
            pid = spawn(*args)
            self.children.add(pid)
            return pid

        self.engine._supervisors.spawn = noted  # type: ignore[method-assign,assignment]
        return self.engine

    def id(self, number: int = 1) -> str:
        return f"{self.prefix}-{number}"

    def submission(self, run: str, number: int = 1, num_nodes: int = 1, **fields: Any) -> Submission:
        attempt_id = self.id(number)
        nodes = ("sim-01", "sim-02")[:num_nodes]
        orders = tuple(
            task_spec_of(
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
                cpus=1,
                **fields,
            )
            for rank, node in enumerate(nodes)
        )
        secret = {node: credentials(node) for node in nodes}
        return Submission(attempt_id=attempt_id, epoch=3, task_specs=orders, credentials=secret)

    def spool_task(self, number: int = 1, node: str = "sim-01") -> spool.SpoolTask:
        return spool.SpoolTask(self.home / "spool" / "live" / self.id(number) / node)

    async def observe(self, number: int = 1) -> Observation:
        return next(o for o in await self.engine.list_owned() if o.attempt_id == self.id(number))

    async def until(self, evidence: Evidence, number: int = 1) -> Observation:
        with anyio.fail_after(30):
            while (seen := await self.observe(number)).evidence is not evidence:
                await anyio.sleep(0.01)
        return seen

    async def until_started(self) -> Observation:
        with anyio.fail_after(30):
            while (seen := await self.observe()).started_at is None:
                await anyio.sleep(0.01)
        return seen

    def marked_pids(self) -> set[int]:
        return tree.marked(frozenset([f"SHOAL_ATTEMPT_ID={self.id()}".encode()]), "/nowhere", None)
