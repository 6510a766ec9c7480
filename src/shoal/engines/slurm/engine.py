"""The Slurm engine: keepers by `sbatch` and `srun`, everything else at the desk."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import anyio
import structlog

from shoal.clock import Clock
from shoal.engines.desk import DeskShare
from shoal.engines.remote import Glimpses, Reach, RemoteEngine, Stage
from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.door import Door, open_door
from shoal.engines.slurm.nodes import SlurmNode, slurm_nodes
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.render import batch_script, job_name, job_prefix, num_cpus, request
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

log = structlog.get_logger()

JOBS_S, QUIET_S, NODES_S, CONFIG_S = 1.0, 30.0, 10.0, 600.0
"""How long after an answer, whoever asks, `squeue` is asked again while somebody waits or is silent, and
else; `scontrol` about nodes, and about how Slurm is set up. One for all attempts."""
EASE = 4.0
"""How many times as long as its answer took Slurm is left in peace: a list of all jobs may be long."""
PAST_S = 60.0
"""How long it may be until accounting is asked again about what nobody else has a trace of."""
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
        door: Door | None = None,
        term: int = 0,
    ) -> None:
        # All jobs run as one user, who can read each batch script, and the ticket in it.
        only_project = None if config.has_shared_trust else config.project
        super().__init__(home, clock=clock, reach=reach, term=term, only_project=only_project)
        self._config = config
        self._door = door or open_door(config)
        self._jobs: dict[str, Job] = {}
        """By name, which holds the attempt's id: the newest that is not over, or else the newest."""
        self._jobs_at = self._nodes_at = self._config_at = self._past_at = -math.inf
        self._jobs_took = 0.0
        self._jobs_failed: EngineUnreachable | None = None
        self._handed: dict[tuple[str, int], float] = {}
        """By attempt and incarnation: when `sbatch` was done with it, until `squeue` has been asked since."""
        self._nodes: dict[str, SlurmNode] = {}
        self._facts = SlurmFacts()
        self._past: dict[str, Job] = {}
        """By name: what accounting said of jobs that are forgotten otherwise."""
        self._cancelled_at: dict[str, float] = {}
        """By name, monotonic."""
        self._answers_since: dict[tuple[str, int, str], float] = {}
        """By attempt, incarnation and node of a job that is over: since when its node has answered."""
        self._asking = anyio.Lock()

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        name = job_name(summons.attempt_id, summons.incarnation)
        folder = Path(self._config.shared) / "slurm"
        # Below /tmp of a node anybody could lay a link with that name.
        output = f"{folder}/{name}.out" if self._config.shared else "/dev/null"
        async with self._asking:
            await self._refresh_config()
            await self._refresh_nodes()
        kinds = {name: node.gpu_kinds for name, node in self._nodes.items()}
        longest = self._facts.longest.get(self._config.partition, "")
        script = batch_script(self._config, summons, len(orders), num_cpus(orders))
        asked = request(self._config, orders, kinds, output, script, longest)

        def submit() -> str:
            if self._config.shared:
                self.make_folder(str(folder))
            return self._door.submit(asked)

        try:
            await self.on_thread(submit)
        finally:
            self._handed[summons.attempt_id, summons.incarnation] = self._clock.monotonic()

    def make_folder(self, path: str) -> None:
        """Over SSH on the login node: this machine need not have the directory."""
        self._door.make_folder(path)

    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        is_news_due = self._handed or self._jobs_failed is not None
        is_urgent = is_news_due or any(share.is_waiting or self.is_deaf(share) for share in shares)
        async with self._asking:
            await self._refresh_jobs(JOBS_S if is_urgent else QUIET_S)
            await self._refresh_config()
            await self._refresh_nodes()
            await self._remember([share for share in shares if share.taken is not None])
        now, seen, watched = self._clock.monotonic(), {}, set()
        for share in shares:
            order = share.order
            if (order.attempt_id, share.launch) in self._handed:  # what was seen before is too old
                seen[order.attempt_id, order.node] = HANDED
                continue
            name = job_name(order.attempt_id, share.launch)
            job = self._jobs.get(name) or self._past.get(name)
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
        await self._cancel(names)

    async def take_back(self, attempt_id: str) -> None:
        async with self._asking:
            await self._refresh_jobs(QUIET_S)
        prefix = job_prefix(attempt_id)
        await self._cancel(
            {
                name
                for name, job in self._jobs.items()
                if name.startswith(prefix) and stage_of(job.state) is Stage.QUEUED
            }
        )

    async def _cancel(self, names: Collection[str]) -> None:
        """Not more often than now and then: what does not end by it is asked about again and again."""
        now = self._clock.monotonic()
        self._cancelled_at = {name: at for name, at in self._cancelled_at.items() if now - at < AGAIN_S}
        due = [name for name in names if name not in self._cancelled_at]
        if due:
            await self.on_thread(lambda: self._door.cancel(due))
            self._cancelled_at |= dict.fromkeys(due, now)

    async def nodes(self) -> list[NodeFacts]:
        async with self._asking:
            await self._refresh_config()
            await self._refresh_nodes()
        return self.reached([node.facts for node in self._nodes.values()])

    async def _refresh_jobs(self, age_s: float) -> None:
        if self._clock.monotonic() - self._jobs_at >= max(age_s, EASE * self._jobs_took):
            await self._ask_for_jobs()
        if self._jobs_failed is not None:
            raise self._jobs_failed

    async def _ask_for_jobs(self) -> None:
        asked_at = self._clock.monotonic()
        try:
            found = await self.on_thread(self._door.jobs)
        except EngineUnreachable as error:
            self._jobs_failed = error
            return
        finally:
            self._jobs_at = self._clock.monotonic()
            self._jobs_took = self._jobs_at - asked_at
        self._jobs_failed = None
        self._handed = {key: at for key, at in self._handed.items() if at >= asked_at}
        self._jobs = {job.name: job for job in sorted(found, key=_weight)}

    async def _remember(self, taken: list[DeskShare]) -> None:
        """Ask accounting about shares that began and that nobody has a trace of: seldom, and for all at once.

        What it says is worth what `squeue` says; while it cannot be asked there is no trace, as without it.
        """
        known = {job_name(share.order.attempt_id, share.launch) for share in taken if self.is_deaf(share)}
        lost = known - self._jobs.keys()
        open_ends = {name for name in lost if name not in self._past or self._past[name].is_active}
        if not open_ends or self._clock.monotonic() - self._past_at < PAST_S:
            return
        self._past_at = self._clock.monotonic()
        try:
            found = await self.on_thread(lambda: self._door.past(open_ends))
        except EngineUnreachable as error:
            log.info("slurm.accounting_away", error=error.message)
            return
        kept = {name: job for name, job in self._past.items() if name in lost}
        self._past = kept | {job.name: job for job in sorted(found, key=_weight) if job.name in open_ends}

    async def _refresh_config(self) -> None:
        if self._clock.monotonic() - self._config_at < CONFIG_S:
            return
        self._facts = await self.on_thread(self._door.facts)
        self._config_at = self._clock.monotonic()

    async def _refresh_nodes(self) -> None:
        if self._clock.monotonic() - self._nodes_at < NODES_S:
            return
        raw = await self.on_thread(self._door.nodes)
        found = slurm_nodes(raw, self._facts.racks, self._config.partition)
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


def _weight(job: Job) -> tuple[bool, int]:
    """Of several with one name: the newest that is not over, or else the newest, counts most."""
    return job.is_active, int(job.job_id) if job.job_id.isdigit() else 0
