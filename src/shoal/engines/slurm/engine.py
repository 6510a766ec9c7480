"""The Slurm engine: keepers by `sbatch` and `srun`, everything else at the desk."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import structlog

from shoal.clock import Clock
from shoal.engines.desk import DeskShare
from shoal.engines.glimpses import Glimpses, Stage
from shoal.engines.reach import Reach
from shoal.engines.remote import Asked, RemoteEngine
from shoal.engines.sightings import SILENT_S
from shoal.engines.slurm.accounts import fit_account
from shoal.engines.slurm.client import CommandDoor
from shoal.engines.slurm.config import SlurmConfig, load_config
from shoal.engines.slurm.door import Door, open_door
from shoal.engines.slurm.nodes import (
    SlurmNode,
    by_name,
    foreign_since,
    mute_since,
    slurm_nodes,
    what_changed,
    what_shuts,
)
from shoal.engines.slurm.outputs import output_name, unneeded
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import Parts, is_asked, limit_for, partition_for
from shoal.engines.slurm.render import batch_script, is_name_of, job_name, num_cpus, request
from shoal.engines.slurm.rights import parts_of, rights_of
from shoal.engines.slurm.states import (
    BELIEFS,
    HANDED,
    OVER,
    SETTLE_S,
    Job,
    forgotten,
    glimpse,
    is_about_nodes,
    is_barred,
    stage_of,
)
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone, SpecError
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
SLOW_S = 5.0
"""A question that failed sooner keeps nobody: what else is asked is tried by itself."""


Key = tuple[str, str]
"""A job's name (`render.job_name`), and whose it is; empty: ours, where all are."""


class SlurmEngine(RemoteEngine):
    """One per home. A lost share is begun anew in a job of its own, named after attempt and incarnation."""

    name = "slurm"
    own_queue = "Slurm"
    devices_from = "CUDA_VISIBLE_DEVICES"
    to_share = (
        "`shoal down`, then `shoal connect slurm` with the flags that it had and `--shared DIR`, "
        "then `shoal up`"
    )
    can_follow = True
    """A new job on the same node would wait for the one that the lost share has its place in."""
    stays_in_cgroup = True
    """Slurm kills, limits and counts what is in its task's, and of version 2 not even what is below."""

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
        # All run as one user, who can read each batch script, and the ticket in it, unless each has its own.
        only_project = None if config.has_shared_trust or config.as_owners else config.project
        super().__init__(home, clock=clock, reach=reach, term=term, only_project=only_project)
        self._config = config
        made = {file.stem for file in (home / "clusters").glob("*.yaml")}
        if config.ssh and config.cluster in made:  # `shoal cluster create` made it, and knows the other flags
            self.to_share = f"`shoal cluster create --name {config.cluster} --shared DIR`"
        self._door = door or open_door(config, home / "ssh")
        self._owners = self._door if config.as_owners and isinstance(self._door, CommandDoor) else None
        """The same door, where each job is its owner's."""
        self._jobs: dict[Key, Job] = {}
        """Of several with one name that which counts most: see `_weight`."""
        self._jobs_at = self._nodes_at = self._config_at = self._past_at = -math.inf
        self._nodes_asked = Asked(-math.inf, -math.inf)
        """The question whose answer `_nodes` is."""
        self._jobs_took = self._nodes_took = 0.0
        self._jobs_failed: EngineUnreachable | None = None
        self._nodes_failed: EngineUnreachable | None = None
        self._failed_at = -math.inf
        """When Slurm could not be asked about its nodes: see `_refresh_nodes`."""
        self._handed: dict[tuple[str, int], float] = {}
        """By attempt and incarnation: when `sbatch` was done with it, until `squeue` has been asked since."""
        self._nodes: dict[str, SlurmNode] = {}
        self._mute_since: dict[str, float] = {}
        """By node: since when Slurm says, each time it is asked, that its slurmd does not answer."""
        self._foreign_since: dict[str, float] = {}
        """By node: since when jobs run on it and none of them is ours, each time Slurm was asked."""
        self._parts = Parts()
        self._facts = SlurmFacts()
        self._past: dict[Key, Job] = {}
        """By name: what accounting said of jobs that are forgotten otherwise."""
        self._barred: set[tuple[str, str]] = set()
        """Ids and reasons of jobs that wait, Slurm says, for nodes that take no work."""
        self._cancelled_at: dict[str, float] = {}
        """By name, monotonic."""
        self._uncancelled: EngineUnreachable | None = None
        self._uncancelled_at, self._uncancelled_took = -math.inf, 0.0
        """When Slurm could not be told to cancel something: see `_cancel`."""
        self._cancelling = anyio.Lock()
        self._answers_since: dict[tuple[str, int, str], float] = {}
        """By attempt, incarnation and node of a job that is over: since when its node has answered."""
        self._asking = anyio.Lock()

    async def start(self, summons: Summons, orders: tuple[Order, ...]) -> None:
        async with self._asking:
            await self._refresh_nodes()
        shared = self._config.shared
        folder = Path(self._outputs) / self._user(orders[0])
        # Below /tmp of a node anybody could lay a link with that name.
        output_path = str(folder / output_name(summons.attempt_id, summons.incarnation))
        output = output_path if shared else "/dev/null"
        kinds = {name: node.gpu_kinds for name, node in self._nodes.items()}
        nodes_of = {name: node.partitions for name, node in self._nodes.items()}
        rights = rights_of(self._config, self._facts, orders[0].project)
        partition = partition_for(self._parts, nodes_of, orders, rights)
        summons = msgspec.structs.replace(summons, time_limit_s=limit_for(orders[0], partition))
        can_bind = self._facts.can_bind
        script = batch_script(self._config, summons, len(orders), num_cpus(orders), can_bind=can_bind)
        asked = request(self._config, orders, kinds, output, script, partition)

        def submit() -> str:
            if self._owners is None:
                if shared:
                    self.make_folder(str(folder))
                return self._door.submit(asked)
            owner = orders[0].owner
            account = fit_account(owner, self._owners.account(owner), self._config.system_accounts)
            if shared:
                self._owners.give(shared, self._folders(orders[0]), account)
            return self._owners.submit(asked, account)

        before = self._nodes
        try:
            await self.on_thread(submit)
        except EngineRefused as error:
            if is_about_nodes(error.message):
                await self._refuse_changed(orders, before, error.message)
            raise
        finally:
            self._handed[summons.attempt_id, summons.incarnation] = self._clock.monotonic()

    async def _refuse_changed(
        self, orders: Collection[Order], before: Mapping[str, SlurmNode], said: str
    ) -> None:
        """`NodeGone` where one of their nodes, which we chose, is not what it was: elsewhere they may run."""
        async with self._asking:
            await self._refresh_nodes(0.0)
        for order in orders:
            changed = what_changed(order, before.get(order.node), self._nodes.get(order.node))
            if changed is not None:
                raise NodeGone(f"{changed}; {said}", hint="shoal nodes", node=order.node)

    @property
    def _outputs(self) -> str:
        """Where Slurm writes what keepers say; in it, where each job is its owner's, a folder for each."""
        return str(Path(self._config.shared) / "slurm")

    async def tidy(self, old: Collection[str]) -> bool:
        """A file for each Slurm job is on the shared directory: in most of them is nothing."""
        if not self._config.shared:
            return True

        def drop() -> None:
            found = self._door.outputs(self._outputs)
            self._door.drop_outputs(self._outputs, unneeded(found, self.desk.kept(), old))

        try:
            await self.on_thread(drop)
        except EngineUnreachable as error:  # logs go all the same: there is room for so many of them
            log.warning("slurm.outputs_stay", folder=self._outputs, error=error.message)
            return False
        return True

    def make_folder(self, path: str) -> None:
        """Over SSH on the login node: this machine need not have the directory. An owner's folders are made
        in `start`, when it is known who that is there.
        """
        if self._owners is None:
            self._door.make_folder(path)

    async def look(self, shares: Collection[DeskShare]) -> Glimpses:
        is_news_due = self._handed or self._jobs_failed is not None
        is_urgent = is_news_due or any(share.is_waiting or self.sightings.is_deaf(share) for share in shares)
        async with self._asking:
            await self._refresh_jobs(JOBS_S if is_urgent else QUIET_S)
            await self._refresh_nodes()
            await self._remember([share for share in shares if share.taken is not None])
        nodes, nodes_asked = self._nodes, self._nodes_asked
        now, seen, watched = self._clock.monotonic(), {}, set()
        for share in shares:
            order = share.order
            if (order.attempt_id, share.launch) in self._handed:  # what was seen before is too old
                seen[order.attempt_id, order.node] = HANDED
                continue
            key = self._key(order, share.launch)
            job = self._jobs.get(key) or self._past.get(key)
            node = nodes.get(order.node)
            unkilled, is_clear = (node.unkilled, node.tells) if node is not None else ("", False)
            rebooted = await self.has_rebooted(share, node.boot if node else None, nodes_asked)
            if job is None:
                seen[order.attempt_id, order.node] = forgotten(
                    rebooted=rebooted, unkilled=unkilled, is_clear=is_clear
                )
                continue
            spot = order.attempt_id, order.incarnation, order.node
            # Another machine that has got the name answers for nothing that began on the one before.
            is_there = node is not None and (share.boot is None or share.boot.is_on(node.facts.address))
            # What a Shoal from before has begun may have left the job's cgroup, as root may.
            sees_all = self._facts.has_cgroups and order.stays_in_cgroup
            if job.state in OVER and is_clear and is_there and sees_all:
                watched.add(spot)
            since = self._answers_since.setdefault(spot, now) if spot in watched else now
            is_settled = now - since >= SETTLE_S + self._facts.kill_wait_s
            seen[order.attempt_id, order.node] = glimpse(
                job,
                is_settled=is_settled,
                rebooted=rebooted,
                now=self._clock.now(),
                shut=what_shuts(order.node, node),
                mute=self._what_mutes(order.node, node),
                unkilled=unkilled,
                is_clear=is_clear,
            )
        # Of shares that nobody asked about now, it stays: others have asked, and will.
        asked = {(s.order.attempt_id, s.order.incarnation, s.order.node) for s in shares} - watched
        self._answers_since = {
            spot: at
            for spot, at in self._answers_since.items()
            if spot not in asked and self.desk.find(spot[0])
        }
        return seen

    def _what_mutes(self, name: str, node: SlurmNode | None) -> str:
        """That nothing has begun on this node for long, or will before it answers, in words; empty: it may.

        By two answers of Slurm's that are as far apart, and none in between that says otherwise: one that has
        been away itself calls nodes mute that it has not asked yet.
        """
        since = self._mute_since.get(name)
        if node is None or since is None or self._nodes_at - since < SILENT_S:
            return ""
        return f"`{name}` has not answered Slurm for {self._nodes_at - since:.0f} s: {node.mute}"

    async def end(self, attempt_id: str) -> None:
        shares = self.desk.find(attempt_id).values()
        names = {job_name(s.order, number) for s in shares for number in (s.order.incarnation, s.launch)}
        await self._cancel(names, attempt_id)

    async def as_given(self, order: Order) -> Order:
        """With the address that its first node has now: one that Slurm woke for it had another, or none.

        While Slurm cannot be asked, with the one that is known, which few nodes change. `EngineUnreachable`:
        nor was it known before, as the node slept.
        """
        if len(order.nodes) == 1:
            return order
        first = self._nodes.get(order.nodes[0])
        if first is None or not first.answers:
            try:
                async with self._asking:
                    await self._refresh_nodes(JOBS_S)
            except EngineUnreachable as error:
                if first is not None and first.is_asleep:
                    raise
                log.info("slurm.address_not_asked", node=order.nodes[0], error=error.message)
            first = self._nodes.get(order.nodes[0])
        if first is None:
            return order
        return msgspec.structs.replace(order, master_addr=first.facts.address)

    async def take_back(self, attempt_id: str) -> None:
        async with self._asking:
            await self._refresh_jobs(QUIET_S)
        shares = self.desk.find(attempt_id).values()
        closed = {job_name(share.order, share.order.incarnation) for share in shares if share.is_closed}
        # What Slurm calls running and nobody had an order of is on a node that does not answer; and what it
        # does not list may be in its queue all the same.
        unbegun = closed - {job_name(share.order, share.launch) for share in shares if not share.is_closed}
        if self._queued(attempt_id):  # half a minute ago: it may have begun since, and ended well
            async with self._asking:
                await self._refresh_jobs(JOBS_S)
        await self._cancel(self._queued(attempt_id) | unbegun | self._unfinished(attempt_id), attempt_id)

    def _queued(self, attempt_id: str) -> set[str]:
        """Names of the attempt's jobs that were in Slurm's queue when it was asked."""
        return {job.name for job in self._jobs_of(attempt_id) if stage_of(job.state) is Stage.QUEUED}

    def _jobs_of(self, attempt_id: str) -> list[Job]:
        """The attempt's jobs of every incarnation that Slurm listed when it was asked."""
        order = next((share.order for share in self.desk.find(attempt_id).values()), None)
        if order is None:
            return []
        user = self._user(order)
        return [job for (name, of), job in self._jobs.items() if of == user and is_name_of(order, name)]

    def _unfinished(self, attempt_id: str) -> set[str]:
        """The jobs that Slurm still has of it, where a share was begun anew by another job of Slurm's, on
        another node or on the same one after a restart, and all of it is over: a job that lost a node and
        went on does not end by itself, as its `srun` waits for that node.
        """
        shares = self.desk.find(attempt_id).values()
        is_of_one_job = all(share.launch == 0 for share in shares)  # keepers that stay take the next order
        if is_of_one_job or any(share.outcome is None for share in shares):
            return set()
        return {job.name for job in self._jobs_of(attempt_id) if job.is_active}

    async def _cancel(self, names: Collection[str], attempt_id: str) -> None:
        """Not more often than now and then: what does not end by it is asked about again and again.

        `EngineUnreachable` at once while Slurm has just not answered: `scancel` takes as long as `squeue` to
        find that out, hundreds may be stopping, and what watches all jobs tells of one after the other.
        """
        users = {self._user(share.order) for share in self.desk.find(attempt_id).values()}
        async with self._cancelling:
            now = self._clock.monotonic()
            self._cancelled_at = {name: at for name, at in self._cancelled_at.items() if now - at < AGAIN_S}
            due = [name for name in names if name not in self._cancelled_at]
            for user in users if due else ():
                self._refuse_away(now)
                try:
                    await self.on_thread(lambda user=user: self._door.cancel(due, user))  # type: ignore[misc]
                except EngineUnreachable as error:
                    self._uncancelled, self._uncancelled_at = error, self._clock.monotonic()
                    self._uncancelled_took = self._uncancelled_at - now
                    raise
                self._uncancelled = None
                self._cancelled_at |= dict.fromkeys(due, now)

    def _refuse_away(self, now: float) -> None:
        """For as long as the newest question of a kind was in vain, and took until somebody knew that.

        What failed at once is no sign of a Slurm that hangs: `squeue` alone may be refused for days.
        """
        for failed, at, took_s, least_s in (
            (self._jobs_failed, self._jobs_at, self._jobs_took, SLOW_S),
            (self._nodes_failed, self._failed_at, self._nodes_took, SLOW_S),
            (self._uncancelled, self._uncancelled_at, self._uncancelled_took, 0.0),
        ):
            if failed is not None and took_s >= least_s and now - at < max(JOBS_S, took_s):
                raise failed.with_traceback(None)

    def _key(self, order: Order, incarnation: int) -> Key:
        return job_name(order, incarnation), self._user(order)

    def _key_of(self, job: Job) -> Key:
        return job.name, job.user if self._owners is not None else ""

    def _user(self, order: Order) -> str:
        """The Unix account whose job it is at Slurm; empty: ours, and then no other's are listed."""
        return order.owner if self._owners is not None else ""

    def _folders(self, order: Order) -> list[str]:
        """What is to be its owner's below the shared directory."""
        kept = [Path(order.checkpoint_dir).relative_to(self._config.shared)] if order.checkpoint_dir else []
        return [f"slurm/{order.owner}", *map(str, kept)]

    def part_level(self, require: Mapping[str, str], pools: Collection[str]) -> str | None:
        """A job is in one partition: its nodes share a pool, unless it names a partition, or there is one."""
        return "pool" if len(pools) > 1 and not is_asked(require) else None

    def how_to_clear(self, node: str) -> str:
        if node not in self._nodes:
            return ""
        return (
            "where Slurm has drained it for them (`Kill task failed`), once there are none: "
            f"`scontrol update nodename={node} state=resume`"
        )

    async def nodes(self) -> list[NodeFacts]:
        async with self._asking:
            await self._refresh_nodes()
        # Said once only, it may be of a job of ours that has just ended.
        busy = {name for name, since in self._foreign_since.items() if since < self._nodes_at}
        replace = msgspec.structs.replace
        return self.sightings.reached(
            [replace(node.facts, is_busy=name in busy) for name, node in self._nodes.items()]
        )

    async def _refresh_jobs(self, age_s: float) -> None:
        if self._clock.monotonic() - self._jobs_at >= max(age_s, EASE * self._jobs_took):
            await self._ask_for_jobs()
        if self._jobs_failed is not None:
            raise self._jobs_failed.with_traceback(None)

    async def _ask_for_jobs(self) -> None:
        asked_at = self._clock.monotonic()
        try:
            found = await self.on_thread(self._door.jobs)
        except EngineUnreachable as error:
            self._jobs_failed = error
            self._mute_since = {}
            return
        finally:
            self._jobs_at = self._clock.monotonic()
            self._jobs_took = self._jobs_at - asked_at
        self._jobs_failed = None
        self._handed = {key: at for key, at in self._handed.items() if at >= asked_at}
        self._jobs = {self._key_of(job): job for job in sorted(found, key=_weight)}
        barred = {(job.job_id, job.reason) for job in self._jobs.values() if is_barred(job)}
        if barred - self._barred:  # what is known of its node may be older than what Slurm says of the job
            self._nodes_at = -math.inf
        self._barred = barred

    async def _remember(self, taken: list[DeskShare]) -> None:
        """Ask accounting about shares that began and that nobody has a trace of: seldom, and for all at once.

        What it says is worth what `squeue` says; while it cannot be asked there is no trace, as without it.
        """
        known = {self._key(share.order, share.launch) for share in taken if self.sightings.is_deaf(share)}
        lost = known - self._jobs.keys()
        open_ends = {key for key in lost if key not in self._past or self._past[key].is_active}
        if not open_ends or self._clock.monotonic() - self._past_at < PAST_S:
            return
        self._past_at = self._clock.monotonic()
        try:
            found = await self.on_thread(lambda: self._door.past({name for name, _ in open_ends}))
        except EngineUnreachable as error:
            log.info("slurm.accounting_away", error=error.message)
            return
        kept = {key: job for key, job in self._past.items() if key in lost}
        told = {self._key_of(job): job for job in sorted(found, key=_weight)}
        self._past = kept | {key: job for key, job in told.items() if key in open_ends}

    async def _refresh_nodes(self, age_s: float = NODES_S) -> None:
        """Know how Slurm is set up, and its nodes, as of `age_s` ago at the most.

        After a question that failed it is left in peace for as long as that took: whoever needs the answer
        holds up all the others meanwhile, and with them what watches jobs.
        """
        asked_at = self._clock.monotonic()
        if self._nodes_failed is not None and asked_at - self._failed_at < max(JOBS_S, self._nodes_took):
            raise self._nodes_failed.with_traceback(None)
        try:
            await self._ask_for_config()
            if asked_at - self._nodes_at >= age_s:
                await self._ask_for_nodes()
                await self._find_shared()
        except EngineUnreachable as error:
            self._nodes_failed, self._failed_at = error, self._clock.monotonic()
            self._nodes_took, self._mute_since = self._failed_at - asked_at, {}
            raise
        self._nodes_failed = None

    async def _ask_for_config(self) -> None:
        if self._clock.monotonic() - self._config_at < CONFIG_S:
            return
        facts = await self.on_thread(self._door.facts)
        known = self._config.cluster_id
        found = msgspec.structs.replace(known, name=facts.cluster, heads=facts.heads)
        is_told = facts.cluster or facts.heads or not (known.name or known.heads)
        if found.is_other(known) or not is_told:  # by another SLURM_CONF, or behind the same name
            raise EngineUnreachable(
                f"{found} answers, and {known} was connected: what it says is not about our jobs",
                hint="if it is the same: `shoal down`, then `shoal connect slurm --same-cluster`",
            )
        self._facts = facts
        self._config_at = self._clock.monotonic()

    async def _ask_for_nodes(self) -> None:
        asked_at = self._clock.monotonic()
        raw, partitions = await self.on_thread(lambda: (self._door.nodes(), self._door.partitions()))
        self._parts = parts_of(self._config, self._facts, partitions, raw)
        found = slurm_nodes(raw, self._facts.places, self._parts)
        self._nodes = by_name(found, self._nodes)
        self._nodes_at = self._clock.monotonic()
        self._nodes_asked = Asked(asked_at, self._nodes_at)
        self._mute_since = mute_since(found, self._mute_since, self._nodes_at)
        ours = {share.order.node for share in self.desk.shares() if share.taken and share.outcome is None}
        self._foreign_since = foreign_since(found, ours, self._foreign_since, self._nodes_at)

    async def _find_shared(self) -> None:
        """Take up a directory that nodes have come to share since, as `shoal cluster create` writes it down.

        One that there is stays until the next start: jobs have their checkpoints in it.
        """
        if self._config.shared:
            return
        with suppress(SpecError, EngineUnreachable):  # what is wrong with that file the next start says
            written = await self.on_thread(lambda: load_config(self._home))
            if written.cluster_id == self._config.cluster_id:
                self._config = msgspec.structs.replace(self._config, shared=written.shared)
                self._share(written.shared)


def _weight(job: Job) -> tuple[int, int]:
    """Of several with one name one that is not over counts most, then one that Slurm only believes to be: a
    share may have begun in it, whatever became of its twins. Of equals the newest.
    """
    rank = 2 if job.is_active else 1 if job.state in BELIEFS else 0
    return rank, int(job.job_id) if job.job_id.isdigit() else 0
