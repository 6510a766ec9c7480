"""What the contract must know of an engine whose shares are at a desk, whoever starts keepers."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from shoal.engines.base import Sight, Submission
from shoal.engines.remote import RemoteEngine
from shoal.identity import ticket
from shoal.runtime import spool, tree
from tests.contract.engine_contract import FOREVER, Program, World
from tests.contract.test_engine_local import LocalWorld
from tests.support.networks import Networks
from tests.support.remote import KEY, DeskServer


class DeskWorld(World):
    engine: RemoteEngine

    def __init__(self, root: Path, host: str = "127.0.0.1") -> None:
        self.home, self.spool = root / "home", root / "spool"
        self.server = DeskServer(self.home, host)

    @abstractmethod
    def open(self) -> RemoteEngine: ...

    def run_line(self, program: Program) -> str:
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
        shares = (self.home / "desk").glob(f"*/{attempt_id}/*")
        return sum(Path(spool.Share(share).started).exists() for share in shares)

    def submission(
        self,
        program: Program = FOREVER,
        *,
        num_nodes: int = 1,
        ranks_per_node: int = 1,
        attempt_id: str | None = None,
    ) -> Submission:
        made = super().submission(
            program, num_nodes=num_nodes, ranks_per_node=ranks_per_node, attempt_id=attempt_id
        )
        return msgspec.structs.replace(made, ticket=ticket(KEY, made.attempt_id))

    async def hands_in_all_after_a_cut(self, lab: Networks) -> None:
        """Of its first node from us: what it began there goes on, and is known when the cut is over."""
        node, made = self.node_names[0], self.submission()
        shown = "for i in 1 2 3 4 5 6; do echo line $i; sleep 0.5; done"
        orders = tuple(msgspec.structs.replace(order, run=shown) for order in made.orders)
        await self.started(msgspec.structs.replace(made, orders=orders))
        await anyio.to_thread.run_sync(lab.cut, node)
        share = self.share(made.attempt_id, node)
        with anyio.fail_after(120):
            while not await anyio.Path(share.outcome).exists():  # noqa: ASYNC110
                await anyio.sleep(0.1)
        assert self.engine.desk.find(made.attempt_id)[node].outcome is None
        await anyio.to_thread.run_sync(lab.heal, node)
        await self.until(made.attempt_id, Sight.ENDED)
        log = await self.whole_log(made.attempt_id, node)
        assert [line.split(b" ", 3)[3] for line in log.splitlines()] == [
            f"line {i}".encode() for i in range(1, 7)
        ]

    def share(self, attempt_id: str, node: str) -> spool.Share:
        """Of the first incarnation, on the node's disk."""
        return spool.Share(self.spool / "spool" / "live" / attempt_id / node)
