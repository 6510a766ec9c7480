"""The Slurm engine: starts node agents by `sbatch` and `srun`; the mailbox does the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import structlog

from shoal.clock import Clock
from shoal.engines.remote.cluster_observation import ClusterObservations, ClusterTaskState
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.remote.engine import QueryTimes, RemoteEngine
from shoal.engines.remote.mailbox import MailboxTask
from shoal.engines.remote.task_observer import SILENT_S
from shoal.engines.slurm.client import CommandTransport
from shoal.engines.slurm.config import SlurmConfig, load_config, partition_rights, usable_partitions
from shoal.engines.slurm.nodes import (
    SlurmNode,
    by_name,
    describe_change,
    explain_unusable,
    foreign_since,
    slurm_nodes,
    unresponsive_since,
)
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import (
    UsablePartitions,
    choose_partition,
    requires_partition,
    shortened_time_limit,
)
from shoal.engines.slurm.render import batch_script, is_name_of, job_name, job_request, num_cpus
from shoal.engines.slurm.shared_files import check_account, output_name, unneeded_outputs
from shoal.engines.slurm.states import (
    JUST_SUBMITTED,
    OVER,
    SETTLE_S,
    UNCONFIRMED_ENDS,
    SlurmJob,
    forgotten_observation,
    is_about_nodes,
    is_blocked,
    job_observation,
    task_state_of,
)
from shoal.engines.slurm.transport import SlurmTransport, open_transport
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone, SpecError
from shoal.model.node import NodeFacts
from shoal.wire import LaunchRequest, TaskIdentity, TaskSpec

log = structlog.get_logger()

JOBS_S, QUIET_S, NODES_S, CONFIG_S = 1.0, 30.0, 10.0, 600.0
"""Seconds between queries: of `squeue` while a task waits or is silent, and else; of nodes by `scontrol`;
and of Slurm's configuration. One query serves all attempts."""
EASE = 4.0
"""How many times the duration of a query Slurm is left in peace after it: a list of all jobs may be long."""
ACCOUNTING_S = 60.0
"""Seconds between queries of accounting about jobs of which Slurm has no other trace."""
AGAIN_S = 30.0
"""Seconds between two `scancel` of the same job."""
SLOW_S = 5.0
"""A query that failed faster than this blocks no other: other kinds of queries are still tried."""


SlurmJobKey = tuple[str, str]
"""A job's name (`render.job_name`) and its owner's account; empty if all jobs are ours."""


class SlurmEngine(RemoteEngine):
    """One per home. A lost task is started again in a new Slurm job, named by attempt and replacement
    number.
    """

    name = "slurm"
    own_queue = "Slurm"
    devices_from = "CUDA_VISIBLE_DEVICES"
    sharing_hint = (
        "`shoal down`, then `shoal connect slurm` with the flags that it had and `--shared DIR`, "
        "then `shoal up`"
    )
    can_follow = True
    """A new job on the same node would wait for the job in which the lost task still has its place."""
    stays_in_cgroup = True
    """Slurm kills, limits and counts what is in its task's cgroup; with cgroup v2, not even cgroups below
    it."""

    def __init__(
        self,
        home: Path,
        *,
        clock: Clock,
        access: ControlPlaneAccess,
        config: SlurmConfig,
        transport: SlurmTransport | None = None,
        term: int = 0,
    ) -> None:
        # All jobs run as one user, who can read each batch script and its bootstrap token, unless each job
        # runs as its owner.
        only_project = None if config.has_shared_trust or config.as_owners else config.project
        super().__init__(home, clock=clock, access=access, term=term, only_project=only_project)
        self._config = config
        clusters = {file.stem for file in (home / "clusters").glob("*.yaml")}
        if (
            config.ssh and config.cluster in clusters
        ):  # `shoal cluster create` made it and has the other flags
            self.sharing_hint = f"`shoal cluster create --name {config.cluster} --shared DIR`"
        self._transport = transport or open_transport(config, home / "ssh")
        self._owner_transport = (
            self._transport if config.as_owners and isinstance(self._transport, CommandTransport) else None
        )
        """The same transport, if each job runs as its owner."""
        self._jobs: dict[SlurmJobKey, SlurmJob] = {}
        """Of several jobs with one name, the one that counts most: see `_weight`."""
        self._jobs_at = self._nodes_at = self._config_at = self._accounting_at = -math.inf
        self._nodes_asked = QueryTimes(-math.inf, -math.inf)
        """The query whose result `_nodes` is."""
        self._jobs_took = self._nodes_took = 0.0
        self._jobs_failed: EngineUnreachable | None = None
        self._nodes_failed: EngineUnreachable | None = None
        self._failed_at = -math.inf
        """When the last query of nodes failed: see `_refresh_nodes`."""
        self._submitted_at: dict[tuple[str, int], float] = {}
        """By attempt and replacement: when `sbatch` returned, until the next `squeue`."""
        self._nodes: dict[str, SlurmNode] = {}
        self._unresponsive_since: dict[str, float] = {}
        """By node: since when Slurm says, in each query, that its slurmd does not respond."""
        self._foreign_since: dict[str, float] = {}
        """By node: since when, in each query, jobs run on it and none of them is ours."""
        self._partitions = UsablePartitions()
        self._facts = SlurmFacts()
        self._accounting_jobs: dict[SlurmJobKey, SlurmJob] = {}
        """By name: what accounting said of jobs that `squeue` has forgotten."""
        self._blocked: set[tuple[str, str]] = set()
        """Ids and reasons of jobs that wait, as Slurm says, for nodes that take no work."""
        self._cancelled_at: dict[str, float] = {}
        """By name: the monotonic time of the last `scancel`."""
        self._uncancelled: EngineUnreachable | None = None
        self._uncancelled_at, self._uncancelled_took = -math.inf, 0.0
        """When the last `scancel` failed: see `_cancel`."""
        self._cancelling = anyio.Lock()
        self._responding_since: dict[tuple[str, int, str], float] = {}
        """By attempt, replacement and node of a job that is over: since when its node has responded."""
        self._asking = anyio.Lock()

    async def launch(self, launch_request: LaunchRequest, task_specs: tuple[TaskSpec, ...]) -> None:
        async with self._asking:
            await self._refresh_nodes()
        shared = self._config.shared
        folder = Path(self._outputs) / self._user(task_specs[0].identity)
        # Below a node's /tmp, any user could place a link with that name.
        output_path = str(folder / output_name(launch_request.attempt_id, launch_request.replacement))
        output = output_path if shared else "/dev/null"
        kinds = {name: node.gpu_kinds for name, node in self._nodes.items()}
        nodes_of = {name: node.partitions for name, node in self._nodes.items()}
        rights = partition_rights(self._config, self._facts, task_specs[0].identity.project)
        partition = choose_partition(self._partitions, nodes_of, task_specs, rights)
        launch_request = msgspec.structs.replace(
            launch_request, time_limit_s=shortened_time_limit(task_specs[0].resources, partition)
        )
        can_bind = self._facts.can_bind
        script = batch_script(
            self._config, launch_request, len(task_specs), num_cpus(task_specs), can_bind=can_bind
        )
        request = job_request(self._config, task_specs, kinds, output, script, partition)

        def submit() -> str:
            if self._owner_transport is None:
                if shared:
                    self.make_folder(str(folder))
                return self._transport.submit(request)
            owner = task_specs[0].identity.owner
            account = check_account(owner, self._owner_transport.account(owner), self._config.system_accounts)
            if shared:
                self._owner_transport.create_owner_folders(shared, self._folders(task_specs[0]), account)
            return self._owner_transport.submit(request, account)

        before = self._nodes
        try:
            await self.on_thread(submit)
        except EngineRefused as error:
            if is_about_nodes(error.message):
                await self._refuse_changed(task_specs, before, error.message)
            raise
        finally:
            self._submitted_at[launch_request.attempt_id, launch_request.replacement] = (
                self._clock.monotonic()
            )

    async def _refuse_changed(
        self, task_specs: Collection[TaskSpec], before: Mapping[str, SlurmNode], message: str
    ) -> None:
        """Raise `NodeGone` if one of the nodes we chose has changed: the attempt may run on other nodes."""
        async with self._asking:
            await self._refresh_nodes(0.0)
        for task_spec in task_specs:
            identity = task_spec.identity
            changed = describe_change(task_spec, before.get(identity.node), self._nodes.get(identity.node))
            if changed is not None:
                raise NodeGone(f"{changed}; {message}", hint="shoal nodes", node=identity.node)

    @property
    def _outputs(self) -> str:
        """The folder of the output files of node agents; with a folder for each owner, if jobs run as their
        owners.
        """
        return str(Path(self._config.shared) / "slurm")

    async def tidy(self, old: Collection[str]) -> bool:
        """Remove the outputs of Slurm jobs from the shared directory. Most of these files are empty."""
        if not self._config.shared:
            return True

        def drop() -> None:
            outputs = self._transport.outputs(self._outputs)
            self._transport.drop_outputs(
                self._outputs, unneeded_outputs(outputs, self.mailbox.archived(), old)
            )

        try:
            await self.on_thread(drop)
        except EngineUnreachable as error:  # logs are removed all the same: this folder has room
            log.warning("slurm.outputs_stay", folder=self._outputs, error=error.message)
            return False
        return True

    def make_folder(self, path: str) -> None:
        """Create the folder over SSH on the login node, as this machine need not have the directory.

        An owner's folders are created in `launch`, when the owner's account there is known.
        """
        if self._owner_transport is None:
            self._transport.make_folder(path)

    async def observe_tasks(self, tasks: Collection[MailboxTask]) -> ClusterObservations:
        is_news_due = self._submitted_at or self._jobs_failed is not None
        is_urgent = is_news_due or any(task.is_waiting or self.observer.is_silent(task) for task in tasks)
        async with self._asking:
            await self._refresh_jobs(JOBS_S if is_urgent else QUIET_S)
            await self._refresh_nodes()
            await self._ask_accounting([task for task in tasks if task.assignment is not None])
        nodes, nodes_asked = self._nodes, self._nodes_asked
        now, observations, watched = self._clock.monotonic(), {}, set()
        for task in tasks:
            task_spec = task.task_spec
            identity, name = task_spec.identity, task_spec.identity.node
            if (identity.attempt_id, task.launch_replacement) in self._submitted_at:  # the queries are older
                observations[task.key] = JUST_SUBMITTED
                continue
            key = self._key(identity, task.launch_replacement)
            job = self._jobs.get(key) or self._accounting_jobs.get(key)
            node = nodes.get(name)
            unkilled, is_clear = (node.unkilled, node.reports_unkilled) if node is not None else ("", False)
            rebooted = await self.has_rebooted(task, node.boot if node else None, nodes_asked)
            if job is None:
                observations[task.key] = forgotten_observation(
                    rebooted=rebooted, unkilled=unkilled, is_clear=is_clear
                )
                continue
            place = identity.attempt_id, identity.replacement, name
            # Another machine that took over the name knows nothing of what began on the one before.
            is_there = node is not None and (task.boot is None or task.boot.is_on(node.facts.address))
            # A task that an older Shoal began may have left the job's cgroup, as root may.
            sees_all = self._facts.has_cgroups and task_spec.isolation.stays_in_cgroup
            if job.state in OVER and is_clear and is_there and sees_all:
                watched.add(place)
            since = self._responding_since.setdefault(place, now) if place in watched else now
            is_settled = now - since >= SETTLE_S + self._facts.kill_wait_s
            observations[task.key] = job_observation(
                job,
                is_settled=is_settled,
                rebooted=rebooted,
                now=self._clock.now(),
                unusable=explain_unusable(name, node),
                unresponsive=self._unresponsive_reason(name, node),
                unkilled=unkilled,
                is_clear=is_clear,
            )
        # Keep the times of tasks that are not in this query, because other queries have them.
        queried = {
            (task.identity.attempt_id, task.identity.replacement, task.identity.node) for task in tasks
        } - watched
        self._responding_since = {
            place: at
            for place, at in self._responding_since.items()
            if place not in queried and self.mailbox.find(place[0])
        }
        return observations

    def _unresponsive_reason(self, name: str, node: SlurmNode | None) -> str:
        """Return, in words, that nothing has begun on this node for long and nothing will; empty: it may
        begin.

        It takes two replies of Slurm that far apart, and none in between that contradicts. A Slurm that was
        away itself calls nodes unresponsive that it has not asked.
        """
        since = self._unresponsive_since.get(name)
        if node is None or since is None or self._nodes_at - since < SILENT_S:
            return ""
        return (
            f"`{name}` has not answered Slurm for {self._nodes_at - since:.0f} s: {node.unresponsive_reason}"
        )

    async def cancel_launched(self, attempt_id: str) -> None:
        tasks = self.mailbox.find(attempt_id).values()
        names = {
            job_name(s.identity, number)
            for s in tasks
            for number in (s.identity.replacement, s.launch_replacement)
        }
        await self._cancel(names, attempt_id)

    async def resolve_task_spec(self, task_spec: TaskSpec) -> TaskSpec:
        """Return the task spec with the current address of its first node, which changes when Slurm wakes
        the node.

        While Slurm cannot be asked, it has the known address, which few nodes change. `EngineUnreachable`:
        the address was never known, because the node slept.
        """
        if len(task_spec.ranks.nodes) == 1:
            return task_spec
        first = self._nodes.get(task_spec.ranks.nodes[0])
        if first is None or not first.is_responding:
            try:
                async with self._asking:
                    await self._refresh_nodes(JOBS_S)
            except EngineUnreachable as error:
                if first is not None and first.is_asleep:
                    raise
                log.info("slurm.address_not_asked", node=task_spec.ranks.nodes[0], error=error.message)
            first = self._nodes.get(task_spec.ranks.nodes[0])
        if first is None:
            return task_spec
        ranks = msgspec.structs.replace(task_spec.ranks, master_addr=first.facts.address)
        return msgspec.structs.replace(task_spec, ranks=ranks)

    async def clear_queue(self, attempt_id: str) -> None:
        async with self._asking:
            await self._refresh_jobs(QUIET_S)
        tasks = self.mailbox.find(attempt_id).values()
        closed = {job_name(task.identity, task.identity.replacement) for task in tasks if task.is_closed}
        # A job that Slurm calls running and whose task specs no process had is on a node that does not
        # respond. A job that Slurm does not list may still be in its queue.
        unstarted = closed - {
            job_name(task.identity, task.launch_replacement) for task in tasks if not task.is_closed
        }
        if self._queued(attempt_id):  # that list may be 30 s old: the job may have begun and ended well
            async with self._asking:
                await self._refresh_jobs(JOBS_S)
        await self._cancel(self._queued(attempt_id) | unstarted | self._unfinished(attempt_id), attempt_id)

    def _queued(self, attempt_id: str) -> set[str]:
        """Return the names of the attempt's jobs that were in Slurm's queue at the last query."""
        return {
            job.name
            for job in self._jobs_of(attempt_id)
            if task_state_of(job.state) is ClusterTaskState.QUEUED
        }

    def _jobs_of(self, attempt_id: str) -> list[SlurmJob]:
        """Return the attempt's jobs of every replacement that Slurm listed at the last query."""
        identity = next((task.identity for task in self.mailbox.find(attempt_id).values()), None)
        if identity is None:
            return []
        user = self._user(identity)
        return [job for (name, of), job in self._jobs.items() if of == user and is_name_of(identity, name)]

    def _unfinished(self, attempt_id: str) -> set[str]:
        """Return jobs that Slurm still has of an attempt that is all over and had a task restarted in
        another Slurm job.

        The restart was on another node, or on the same node after its reboot. A job that lost a node and
        continued does not end by itself, because its `srun` waits for that node.
        """
        tasks = self.mailbox.find(attempt_id).values()
        # A node agent that stays takes the next task spec.
        is_of_one_job = all(task.launch_replacement == 0 for task in tasks)
        if is_of_one_job or any(task.outcome is None for task in tasks):
            return set()
        return {job.name for job in self._jobs_of(attempt_id) if job.is_active}

    async def _cancel(self, names: Collection[str], attempt_id: str) -> None:
        """Cancel jobs by name, each at most every 30 s: jobs that do not end are cancelled again and again.

        Raises `EngineUnreachable` at once while Slurm has just failed to respond: `scancel` takes as long
        as `squeue` to find that out, hundreds of jobs may be stopping, and the watcher cancels one after
        the other.
        """
        users = {self._user(task.identity) for task in self.mailbox.find(attempt_id).values()}
        async with self._cancelling:
            now = self._clock.monotonic()
            self._cancelled_at = {name: at for name, at in self._cancelled_at.items() if now - at < AGAIN_S}
            due = [name for name in names if name not in self._cancelled_at]
            for user in users if due else ():
                self._raise_if_unreachable(now)
                try:
                    await self.on_thread(lambda user=user: self._transport.cancel(due, user))  # type: ignore[misc]
                except EngineUnreachable as error:
                    self._uncancelled, self._uncancelled_at = error, self._clock.monotonic()
                    self._uncancelled_took = self._uncancelled_at - now
                    raise
                self._uncancelled = None
                self._cancelled_at |= dict.fromkeys(due, now)

    def _raise_if_unreachable(self, now: float) -> None:
        """Raise while the newest query of a kind failed less than its own duration ago.

        A query that failed at once is no sign of a Slurm that hangs: `squeue` alone may be refused for
        days.
        """
        for failed, at, took_s, least_s in (
            (self._jobs_failed, self._jobs_at, self._jobs_took, SLOW_S),
            (self._nodes_failed, self._failed_at, self._nodes_took, SLOW_S),
            (self._uncancelled, self._uncancelled_at, self._uncancelled_took, 0.0),
        ):
            if failed is not None and took_s >= least_s and now - at < max(JOBS_S, took_s):
                raise failed.with_traceback(None)

    def _key(self, identity: TaskIdentity, replacement: int) -> SlurmJobKey:
        return job_name(identity, replacement), self._user(identity)

    def _key_of(self, job: SlurmJob) -> SlurmJobKey:
        return job.name, job.user if self._owner_transport is not None else ""

    def _user(self, identity: TaskIdentity) -> str:
        """Return the Unix account that owns the job in Slurm; empty: our own, and then only our jobs are
        listed.
        """
        return identity.owner if self._owner_transport is not None else ""

    def _folders(self, task_spec: TaskSpec) -> list[str]:
        """Return the folders below the shared directory that the owner gets."""
        checkpoint_dirs = (
            [Path(task_spec.folders.checkpoint_dir).relative_to(self._config.shared)]
            if task_spec.folders.checkpoint_dir
            else []
        )
        return [f"slurm/{task_spec.identity.owner}", *map(str, checkpoint_dirs)]

    def common_label(self, require: Mapping[str, str], pools: Collection[str]) -> str | None:
        """Return `pool` if a gang must share one: a Slurm job is in one partition. None if it names one, or
        there is one.
        """
        return "pool" if len(pools) > 1 and not requires_partition(require) else None

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
        # One reply alone may be about a job of ours that has just ended.
        busy = {name for name, since in self._foreign_since.items() if since < self._nodes_at}
        replace = msgspec.structs.replace
        return self.observer.mark_silent_nodes(
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
            jobs = await self.on_thread(self._transport.jobs)
        except EngineUnreachable as error:
            self._jobs_failed = error
            self._unresponsive_since = {}
            return
        finally:
            self._jobs_at = self._clock.monotonic()
            self._jobs_took = self._jobs_at - asked_at
        self._jobs_failed = None
        self._submitted_at = {key: at for key, at in self._submitted_at.items() if at >= asked_at}
        self._jobs = {self._key_of(job): job for job in sorted(jobs, key=_weight)}
        blocked = {(job.job_id, job.reason) for job in self._jobs.values() if is_blocked(job)}
        if blocked - self._blocked:  # our facts about its node may be older than Slurm's about the job
            self._nodes_at = -math.inf
        self._blocked = blocked

    async def _ask_accounting(self, assigned_tasks: list[MailboxTask]) -> None:
        """Ask accounting about tasks that began and of which Slurm has no trace: rarely, and for all at
        once.

        Its replies count as much as those of `squeue`. While it cannot be asked, there is no trace, as
        without it.
        """
        silent_keys = {
            self._key(task.identity, task.launch_replacement)
            for task in assigned_tasks
            if self.observer.is_silent(task)
        }
        lost = silent_keys - self._jobs.keys()
        open_ends = {
            key for key in lost if key not in self._accounting_jobs or self._accounting_jobs[key].is_active
        }
        if not open_ends or self._clock.monotonic() - self._accounting_at < ACCOUNTING_S:
            return
        self._accounting_at = self._clock.monotonic()
        try:
            jobs = await self.on_thread(
                lambda: self._transport.accounting_jobs({name for name, _ in open_ends})
            )
        except EngineUnreachable as error:
            log.info("slurm.accounting_away", error=error.message)
            return
        remembered = {key: job for key, job in self._accounting_jobs.items() if key in lost}
        by_key = {self._key_of(job): job for job in sorted(jobs, key=_weight)}
        self._accounting_jobs = remembered | {key: job for key, job in by_key.items() if key in open_ends}

    async def _refresh_nodes(self, age_s: float = NODES_S) -> None:
        """Refresh Slurm's configuration and nodes, unless they are younger than `age_s`.

        After a failed query, Slurm is left in peace for as long as that query took, because a caller that
        waits blocks all others and the watcher of jobs.
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
            self._nodes_took, self._unresponsive_since = self._failed_at - asked_at, {}
            raise
        self._nodes_failed = None

    async def _ask_for_config(self) -> None:
        if self._clock.monotonic() - self._config_at < CONFIG_S:
            return
        facts = await self.on_thread(self._transport.facts)
        configured = self._config.cluster_id
        answering = msgspec.structs.replace(configured, name=facts.cluster, heads=facts.heads)
        is_identified = facts.cluster or facts.heads or not (configured.name or configured.heads)
        # another SLURM_CONF, or another cluster behind the same name
        if answering.is_other(configured) or not is_identified:
            raise EngineUnreachable(
                f"{answering} answers, and {configured} was connected: what it says is not about our jobs",
                hint="if it is the same: `shoal down`, then `shoal connect slurm --same-cluster`",
            )
        self._facts = facts
        self._config_at = self._clock.monotonic()

    async def _ask_for_nodes(self) -> None:
        asked_at = self._clock.monotonic()
        raw, partitions = await self.on_thread(
            lambda: (self._transport.nodes(), self._transport.partitions())
        )
        self._partitions = usable_partitions(self._config, self._facts, partitions, raw)
        nodes_now = slurm_nodes(raw, self._facts.switch_labels, self._partitions)
        self._nodes = by_name(nodes_now, self._nodes)
        self._nodes_at = self._clock.monotonic()
        self._nodes_asked = QueryTimes(asked_at, self._nodes_at)
        self._unresponsive_since = unresponsive_since(nodes_now, self._unresponsive_since, self._nodes_at)
        ours = {
            task.identity.node for task in self.mailbox.tasks() if task.assignment and task.outcome is None
        }
        self._foreign_since = foreign_since(nodes_now, ours, self._foreign_since, self._nodes_at)

    async def _find_shared(self) -> None:
        """Start using a directory that the nodes share by now, which `shoal cluster create` writes to the
        configuration.

        An existing directory stays until the next start, because jobs have their checkpoints in it.
        """
        if self._config.shared:
            return
        with suppress(SpecError, EngineUnreachable):  # the next start reports what is wrong with that file
            written = await self.on_thread(lambda: load_config(self._home))
            if written.cluster_id == self._config.cluster_id:
                self._config = msgspec.structs.replace(self._config, shared=written.shared)
                self._use_shared_directory(written.shared)


def _weight(job: SlurmJob) -> tuple[int, int]:
    """Return the weight of a job among jobs of one name.

    A job that is not over counts most, then one whose end Slurm only assumes, because a task may have begun
    in it, whatever happened to its twins. Of equal ones the newest counts.
    """
    rank = 2 if job.is_active else 1 if job.state in UNCONFIRMED_ENDS else 0
    return rank, int(job.job_id) if job.job_id.isdigit() else 0
