"""An engine with a desk over a cluster that answers as a test tells it to: nothing is started."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from shoal.engines.desk import DeskShare
from shoal.engines.fake import VirtualClock
from shoal.engines.glimpses import Glimpses
from shoal.engines.reach import Reach
from shoal.engines.remote import RemoteEngine
from shoal.errors import EngineRefused, EngineUnreachable
from shoal.model.node import NodeFacts
from shoal.wire import Order, Summons


class Lent(RemoteEngine):
    """A cluster whose controller can go away."""

    name = "lent"
    is_away = False
    is_full = False
    names: tuple[str, ...] = ("n1", "n2")
    refusal = ""

    def __init__(self, home: Path, clock: VirtualClock, shared: str = "") -> None:
        reach = Reach(urls=("https://login:1",), ca="ca", shared=shared)
        super().__init__(home, clock=clock, reach=reach)
        self.ended: list[str] = []
        self.seen: Glimpses = {}

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        if self.is_full:
            raise EngineUnreachable("sbatch said: job submit limit")
        if self.refusal:
            raise EngineRefused(self.refusal)

    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        if self.is_away:
            raise EngineUnreachable("squeue: unable to contact slurm controller")
        return self.seen

    async def end(self, attempt_id: str) -> None:
        if self.is_away:
            raise EngineUnreachable("scancel: unable to contact slurm controller")
        self.ended.append(attempt_id)

    async def nodes(self) -> list[NodeFacts]:
        return self.sightings.reached(
            [NodeFacts(name=n, cpus=4.0, memory_bytes=8 << 30, disk_bytes=1 << 30) for n in self.names]
        )
