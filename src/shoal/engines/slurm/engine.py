"""The Slurm engine: keepers by `sbatch` and `srun`, everything else at the desk."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import anyio

from shoal.clock import Clock
from shoal.engines.desk import DeskShare
from shoal.engines.remote import Glimpses, Reach, RemoteEngine, Stage
from shoal.engines.slurm.accounts import Account, fit_account
from shoal.engines.slurm.client import SlurmClient
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.parse import (
    SlurmFacts,
    SlurmNode,
    parse_config,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_topology,
)
from shoal.engines.slurm.render import batch_script, job_name, job_prefix, num_cpus, sbatch_arguments
from shoal.engines.slurm.states import (
    BOOT_MARGIN_S,
    HANDED,
    OVER,
    RESTARTED,
    SETTLE_S,
    Job,
    glimpse,
    stage_of,
)
from shoal.errors import EngineUnreachable
from shoal.model.node import NodeFacts
from shoal.wire import Order, Summons

JOBS_S, QUIET_S, NODES_S, CONFIG_S = 1.0, 30.0, 10.0, 600.0
"""How long after an answer, whoever asks, `squeue` is asked again while somebody waits or is silent, and
else; `scontrol` about nodes, and about how Slurm is set up. One for all attempts."""
AGAIN_S = 30.0
"""Between two `scancel` of the same job."""


class SlurmEngine(RemoteEngine):
    """One per home. A lost share is begun anew in a job of its own, named after attempt and incarnation."""

    name = "slurm"
    devices_from = "CUDA_VISIBLE_DEVICES"
    can_follow = True
    """A new job on the same node would wait for the one that the lost share has its place in."""

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
        self._client = client or SlurmClient(config.ssh, config.ssh_options, as_owners=config.as_owners)
        self._jobs: dict[tuple[str, str], Job] = {}
        """By name, which holds the attempt's id, and whose they are: the newest that is not over, or else the
        newest."""
        self._jobs_at = self._nodes_at = self._config_at = -math.inf
        self._jobs_failed: EngineUnreachable | None = None
        self._handed: dict[tuple[str, int], float] = {}
        """By attempt and incarnation: when `sbatch` was done with it, until `squeue` has been asked since."""
        self._nodes: dict[str, SlurmNode] = {}
        self._racks: dict[str, str] = {}
        self._facts = SlurmFacts()
        self._longest: dict[str, str] = {}
        """By partition: what a job without a limit asks for."""
        self._cancelled_at: dict[str, float] = {}
        """By name, monotonic."""
        self._answers_since: dict[tuple[str, int, str], float] = {}
        """By attempt, incarnation and node of a job that is over: since when its node has answered."""
        self._asking = anyio.Lock()

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        name = job_name(summons.attempt_id, summons.incarnation)
        folder = Path(self._config.shared) / "slurm" / self._user(orders[0])
        # Below /tmp of a node anybody could lay a link with that name.
        output = f"{folder}/{name}.out" if self._config.shared else "/dev/null"
        async with self._asking:
            await self._refresh_config()
        longest = self._longest.get(self._config.partition, "")
        arguments = sbatch_arguments(self._config, orders, output, longest)
        script = batch_script(self._config, summons, len(orders), num_cpus(orders))

        def submit() -> str:
            account = self._account(orders[0])
            if account is not None and self._config.shared:
                self._client.give(self._config.shared, self._folders(orders[0]), account)
            elif self._config.shared:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._client.submit(arguments, script, account)

        try:
            await self.on_thread(submit)
        finally:
            self._handed[summons.attempt_id, summons.incarnation] = self._clock.monotonic()

    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        is_news_due = self._handed or self._jobs_failed is not None
        is_urgent = is_news_due or any(share.is_waiting or self.is_deaf(share) for share in shares)
        async with self._asking:
            await self._refresh_jobs(JOBS_S if is_urgent else QUIET_S)
            await self._refresh_config()
            await self._refresh_nodes()
        now, seen, watched = self._clock.monotonic(), {}, set()
        for share in shares:
            order = share.order
            if (order.attempt_id, share.launch) in self._handed:  # what was seen before is too old
                seen[order.attempt_id, order.node] = HANDED
                continue
            job = self._jobs.get((job_name(order.attempt_id, share.launch), self._user(order)))
            node = self._nodes.get(order.node)
            rebooted = await self._has_rebooted(share, node)
            if job is None:
                if rebooted:
                    seen[order.attempt_id, order.node] = RESTARTED
                continue
            spot = order.attempt_id, order.incarnation, order.node
            if job.state in OVER and node is not None and node.answers and self._facts.has_cgroups:
                watched.add(spot)
            since = self._answers_since.setdefault(spot, now) if spot in watched else now
            is_settled = now - since >= SETTLE_S + self._facts.kill_wait_s
            seen[order.attempt_id, order.node] = glimpse(job, is_settled=is_settled, rebooted=rebooted)
        # Of shares that nobody asked about now, it stays: others have asked, and will.
        asked = {(s.order.attempt_id, s.order.incarnation, s.order.node) for s in shares} - watched
        self._answers_since = {
            spot: at
            for spot, at in self._answers_since.items()
            if spot not in asked and self.desk.find(spot[0])
        }
        return seen

    async def end(self, attempt_id: str) -> None:
        shares = self.desk.find(attempt_id).values()
        names = {job_name(attempt_id, number) for s in shares for number in (s.order.incarnation, s.launch)}
        await self._cancel(names, attempt_id)

    async def take_back(self, attempt_id: str) -> None:
        async with self._asking:
            await self._refresh_jobs(QUIET_S)
        prefix = job_prefix(attempt_id)
        await self._cancel(
            {
                name
                for (name, _), job in self._jobs.items()
                if name.startswith(prefix) and stage_of(job.state) is Stage.QUEUED
            },
            attempt_id,
        )

    async def _cancel(self, names: Collection[str], attempt_id: str) -> None:
        """Not more often than now and then: what does not end by it is asked about again and again."""
        users = {self._user(share.order) for share in self.desk.find(attempt_id).values()}
        now = self._clock.monotonic()
        self._cancelled_at = {name: at for name, at in self._cancelled_at.items() if now - at < AGAIN_S}
        due = [name for name in names if name not in self._cancelled_at]
        for user in users if due else ():
            await self.on_thread(lambda user=user: self._client.cancel(due, user))  # type: ignore[misc]
            self._cancelled_at |= dict.fromkeys(due, now)

    def make_shared(self, place: Path) -> None:
        """An owner's folders are made in `start`, when it is known who that is here."""
        if not self._config.as_owners:
            super().make_shared(place)

    def _user(self, order: Order) -> str:
        """The Unix account whose job it is at Slurm; empty: ours, and then no other's are listed."""
        return order.owner if self._config.as_owners else ""

    def _account(self, order: Order) -> Account | None:
        """As whom to submit it; None: as ourselves. Blocking. `EngineRefused`: its owner has none."""
        if not self._config.as_owners:
            return None
        return fit_account(order.owner, self._client.account(order.owner), self._config.system_accounts)

    def _folders(self, order: Order) -> list[str]:
        """What is to be its owner's below the shared directory."""
        kept = [Path(order.checkpoint_dir).relative_to(self._config.shared)] if order.checkpoint_dir else []
        return [f"slurm/{order.owner}", *map(str, kept)]

    async def nodes(self) -> list[NodeFacts]:
        async with self._asking:
            await self._refresh_config()
            await self._refresh_nodes()
        return self.reached([node.facts for node in self._nodes.values()])

    async def _refresh_jobs(self, age_s: float) -> None:
        if self._clock.monotonic() - self._jobs_at >= age_s:
            await self._ask_for_jobs()
        if self._jobs_failed is not None:
            raise self._jobs_failed

    async def _ask_for_jobs(self) -> None:
        asked_at = self._clock.monotonic()
        try:
            found = parse_jobs(await self.on_thread(self._client.jobs))
        except EngineUnreachable as error:
            self._jobs_failed = error
            return
        finally:
            self._jobs_at = self._clock.monotonic()
        self._jobs_failed = None
        self._handed = {key: at for key, at in self._handed.items() if at >= asked_at}
        self._jobs = {}
        for job in sorted(found, key=lambda job: (job.is_active, _number(job.job_id))):
            self._jobs[job.name, job.user if self._config.as_owners else ""] = job

    async def _refresh_config(self) -> None:
        if self._clock.monotonic() - self._config_at < CONFIG_S:
            return
        self._facts = parse_config(await self.on_thread(self._client.config))
        self._longest = parse_partitions(await self.on_thread(self._client.partitions))
        self._racks = parse_topology(await self.on_thread(self._client.topology))
        self._config_at = self._clock.monotonic()

    async def _refresh_nodes(self) -> None:
        if self._clock.monotonic() - self._nodes_at < NODES_S:
            return
        text = await self.on_thread(self._client.nodes)
        found = parse_nodes(text, self._racks, self._config.partition)
        self._nodes = {node.facts.name: node for node in found}
        self._nodes_at = self._clock.monotonic()

    async def _has_rebooted(self, share: DeskShare, node: SlurmNode | None) -> bool:
        """Whether the node was started anew since the share was first seen there: nothing outlives that.

        By two dates of slurmctld's alone: clocks of two machines may be minutes apart.
        """
        if share.taken is None or node is None or node.booted_at is None or not node.answers:
            return False
        booted_at = node.booted_at
        if share.booted_at is None:
            if not self.is_deaf(share):
                await self.on_thread(lambda: self.desk.mark_boot(share, booted_at))
            return False
        return booted_at > share.booted_at + BOOT_MARGIN_S


def _number(job_id: str) -> int:
    return int(job_id) if job_id.isdigit() else 0
