"""The Slurm engine: keepers by `sbatch` and `srun`, everything else at the desk."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import anyio

from shoal.clock import Clock
from shoal.engines.desk import DeskShare
from shoal.engines.remote import Glimpses, Reach, RemoteEngine
from shoal.engines.slurm.client import SlurmClient
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.parse import SlurmNode, parse_jobs, parse_nodes, parse_topology
from shoal.engines.slurm.render import batch_script, comment, job_name, sbatch_arguments
from shoal.engines.slurm.states import BOOT_MARGIN_S, OVER, RESTARTED, Job, glimpse
from shoal.model.node import NodeFacts
from shoal.wire import Order, Summons

JOBS_S, NODES_S = 1.0, 5.0
"""How old an answer of `squeue` and `scontrol` may be: one for all attempts."""


class SlurmEngine(RemoteEngine):
    """One per home. A lost share is begun anew in a job of its own, named after attempt and incarnation."""

    name = "slurm"
    devices_from = "CUDA_VISIBLE_DEVICES"

    def __init__(
        self,
        home: Path,
        *,
        clock: Clock,
        reach: Reach,
        config: SlurmConfig,
        client: SlurmClient | None = None,
        term: int = 0,
    ) -> None:
        super().__init__(home, clock=clock, reach=reach, term=term)
        self._config = config
        self._client = client or SlurmClient(config.ssh, config.ssh_options)
        self._jobs: dict[tuple[str, str], Job] = {}
        """By name and comment: the newest that is not over, or else the newest."""
        self._jobs_at = self._nodes_at = -NODES_S
        self._nodes: dict[str, SlurmNode] = {}
        self._racks: dict[str, str] | None = None
        self._answers_since: dict[tuple[str, int, str], float] = {}
        """By attempt, incarnation and node of a job that is over: since when its node has answered."""
        self._asking = anyio.Lock()

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        name = job_name(summons.attempt_id, summons.incarnation)
        folder = Path(self._config.shared) / "slurm"
        # Below /tmp of a node anybody could lay a link with that name.
        output = f"{folder}/{name}.out" if self._config.shared else "/dev/null"
        arguments = sbatch_arguments(self._config, orders, output)
        script = batch_script(self._config, summons, len(orders))

        def submit() -> str:
            if self._config.shared:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._client.submit(arguments, script)

        try:
            await self.on_thread(submit)
        finally:
            self._jobs_at = -NODES_S  # what was seen before is too old now

    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        await self._refresh()
        now, seen, watched = self._clock.monotonic(), {}, set()
        for share in shares:
            order = share.order
            key = order.attempt_id, order.incarnation
            job = self._jobs.get((job_name(*key), comment(*key)))
            node = self._nodes.get(order.node)
            rebooted = _has_rebooted(share, node)
            if job is None:
                if rebooted:
                    seen[order.attempt_id, order.node] = RESTARTED
                continue
            spot = (*key, order.node)
            if job.state in OVER and node is not None and node.answers:
                watched.add(spot)
            since = self._answers_since.setdefault(spot, now) if spot in watched else now
            seen[order.attempt_id, order.node] = glimpse(job, settled_s=now - since, rebooted=rebooted)
        self._answers_since = {s: at for s, at in self._answers_since.items() if s in watched}
        return seen

    async def end(self, attempt_id: str) -> None:
        names = {job_name(attempt_id, s.order.incarnation) for s in self.desk.find(attempt_id).values()}
        for name in sorted(names):
            await self.on_thread(lambda name=name: self._client.cancel(name))  # type: ignore[misc]

    async def nodes(self) -> list[NodeFacts]:
        async with self._asking:
            await self._refresh_nodes()
        return self.reached([node.facts for node in self._nodes.values()])

    async def _refresh(self) -> None:
        async with self._asking:
            if self._clock.monotonic() - self._jobs_at >= JOBS_S:
                asked_at = self._clock.monotonic()
                found = parse_jobs(await self.on_thread(self._client.jobs))
                self._jobs = {}
                for job in sorted(found, key=lambda job: (job.is_active, _number(job.job_id))):
                    self._jobs[job.name, job.comment] = job
                self._jobs_at = asked_at
            await self._refresh_nodes()

    async def _refresh_nodes(self) -> None:
        if self._clock.monotonic() - self._nodes_at < NODES_S:
            return
        if self._racks is None:
            self._racks = parse_topology(await self.on_thread(self._client.topology))
        text = await self.on_thread(self._client.nodes)
        found = parse_nodes(text, self._racks, self._config.partition)
        self._nodes = {node.facts.name: node for node in found}
        self._nodes_at = self._clock.monotonic()


def _has_rebooted(share: DeskShare, node: SlurmNode | None) -> bool:
    """Whether the node was started after the share had begun: nothing outlives that."""
    if share.taken is None or node is None or node.booted_at is None or not node.answers:
        return False
    return node.booted_at > share.taken.at + BOOT_MARGIN_S


def _number(job_id: str) -> int:
    return int(job_id) if job_id.isdigit() else 0
