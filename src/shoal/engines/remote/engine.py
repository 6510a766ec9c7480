"""An engine for clusters of other machines: the engine's operations over a mailbox, and an interface for
clusters.

Task specs wait in the mailbox. The cluster starts node agents (`shoal.runtime.agent.node_agent`) on the
nodes, and they fetch the task specs. `TaskObserver` knows the state of a task from its node agent. What the
cluster says is a reason to look and to explain, and `ClusterObservation.evidence` is what it proves. If a
cluster loses a submission, `AgentLauncher` submits again, which is safe because the mailbox gives every task
spec to one process.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from shoal.clock import Clock
from shoal.engines.base import CLUSTER_UNREACHABLE, LogChunk, Observation, SavedCheckpoints, Submission
from shoal.engines.checkpoint_folder import CheckpointFolder
from shoal.engines.disk import on_thread
from shoal.engines.refusal import is_name, missing_resource, refuse_foreign_projects, refuse_malformed
from shoal.engines.remote.agent_launcher import AgentLauncher
from shoal.engines.remote.cluster_observation import (
    NO_TRACE,
    Boot,
    ClusterObservation,
    ClusterObservations,
    ClusterTaskState,
)
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.remote.mailbox import Mailbox, MailboxTask
from shoal.engines.remote.task_observer import REPLACED, TaskObserver
from shoal.errors import EngineRefused, EngineUnreachable, NodeGone
from shoal.model.node import NodeFacts
from shoal.wire import EndKind, LaunchRequest, TaskSpec

T = TypeVar("T")
log = structlog.get_logger()

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Below Linux's ephemeral ports (32768 on), which any outgoing connection may take at any time."""


class QueryTimes(msgspec.Struct, frozen=True):
    """Monotonic times at which a query began and its reply had come."""

    asked_at: float
    answered_at: float


class RemoteEngine(ABC):
    """Base class of the engines of clusters. A new instance finds everything in the mailbox again."""

    name: str
    can_replace_tasks = True
    devices_from = ""
    sharing_hint = "`shoal connect --help`"
    can_follow = False
    """Whether a node agent may fetch the task spec that replaces a lost task: see `LaunchRequest`."""
    stays_in_cgroup = False
    """For all tasks: see `TaskSpec`."""

    def __init__(
        self,
        home: Path,
        *,
        clock: Clock,
        access: ControlPlaneAccess,
        term: int = 0,
        only_project: str | None = None,
    ) -> None:
        """Open the mailbox. `only_project`: the project whose jobs may run; None: jobs of every project."""
        self._only_project = only_project
        self.mailbox = Mailbox(home, clock, term)
        self._home = home
        self._clock = clock
        self._access = access
        self._use_shared_directory(access.shared)
        self.observer = TaskObserver(self.mailbox, clock, self.native_id)
        self._launcher = AgentLauncher(self, self.mailbox, clock, access)
        self._reaped_uncancelled: set[str] = set()
        """Attempts that were reaped while the cluster could not be reached."""

    def _use_shared_directory(self, shared: str) -> None:
        """Keep the checkpoints of all jobs below this directory of the nodes; empty: there is none."""
        self._checkpoint_root = Path(shared) / "checkpoints" if shared else None
        self._checkpoint_folder = (
            CheckpointFolder(self._checkpoint_root, self._clock)
            if self._checkpoint_root is not None
            else None
        )

    @abstractmethod
    async def launch(self, launch_request: LaunchRequest, task_specs: tuple[TaskSpec, ...]) -> None:
        """Have the cluster start one node agent for each of these tasks, all of one replacement number.

        `EngineRefused`: the cluster will never do it; the message has its reason. `EngineUnreachable`:
        unknown.
        """

    @abstractmethod
    async def observe_tasks(self, tasks: Collection[MailboxTask]) -> ClusterObservations:
        """Return what the cluster says of exactly these tasks and their replacement numbers.

        A task of which the cluster has no trace is missing or has no state. The result must not be older
        than the last `launch`. May raise `EngineUnreachable`.
        """

    @abstractmethod
    async def cancel_launched(self, attempt_id: str) -> None:
        """Cancel in the cluster what was started for the attempt. The mailbox tells the node agents."""

    async def clear_queue(self, attempt_id: str) -> None:
        """Remove an attempt that has ended from the cluster's own queue, if it has one.

        May be repeated. `EngineUnreachable`: the result is unknown.
        """
        return

    async def resolve_task_spec(self, task_spec: TaskSpec) -> TaskSpec:
        """Return the task spec as stored, if the cluster's nodes keep their addresses."""
        return task_spec

    @abstractmethod
    async def nodes(self) -> list[NodeFacts]: ...

    async def submit(self, submission: Submission) -> str:
        """Store the task specs and start node agents for those that no process has."""
        attempt_id = submission.attempt_id
        is_new = not self.mailbox.find(attempt_id)
        if is_new:
            if await self.on_thread(lambda: self.mailbox.is_archived(attempt_id)):
                return self.native_id(attempt_id)
            await self._accept(submission)
        else:
            await self._replace_tasks(submission)
        await self._launcher.launch(submission, is_new=is_new)
        return self.native_id(attempt_id)

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        tasks = self.mailbox.find(attempt_id)
        if not tasks:
            return
        await self.on_thread(lambda: self.mailbox.stop(attempt_id, grace_s))
        # Either no node agent has begun and none can, so there is no need to wait in a queue. Or the grace
        # is over, and a silent node agent does not hear the stop; one that reports hears it from the
        # mailbox and may still deliver the rest of its log.
        if all(task.assignment is None or not task.assignment.process for task in tasks.values()) or any(
            self.observer.is_silent(task) and self._is_grace_over(task) for task in tasks.values()
        ):
            await self.cancel_launched(attempt_id)

    async def reap(self, attempt_id: str) -> None:
        """Accept the end of the attempt, which the control plane recorded after a fence or on an operator's
        word.

        Silent tasks are over here, too. Tasks that still report are stopped.
        """
        try:
            await self.cancel(attempt_id, 0.0)  # the cluster ends node agents that do not hear us
        except EngineUnreachable:
            self._reaped_uncancelled.add(attempt_id)  # the recorded end does not depend on the cluster
        message = "its attempt had ended, and nothing was heard from it since"
        for task in self.mailbox.find(attempt_id).values():
            if self.observer.is_silent(task):
                await self.on_thread(lambda task=task: self.mailbox.reap(task, EndKind.FENCED, message))  # type: ignore[misc]

    def _is_grace_over(self, task: MailboxTask) -> bool:
        if task.stop is None or task.stop_seen_at is None:
            return False
        return self._clock.monotonic() >= task.stop_seen_at + task.stop.grace_s

    async def list_owned(self) -> list[Observation]:
        tasks = self.mailbox.tasks()
        await self.on_thread(lambda: self.observer.end_replaced(tasks))
        open_tasks = [task for task in tasks if task.outcome is None]
        observations, default = await self._observe_cluster(open_tasks)
        # On a thread, because ends are written to disk; on one thread for all, because there may be
        # hundreds.
        return await self.on_thread(lambda: self.observer.observe(tasks, observations, default))

    async def _observe_cluster(
        self, tasks: Collection[MailboxTask]
    ) -> tuple[ClusterObservations, ClusterObservation]:
        """Return what the cluster says of these tasks, and the default for the others.

        While the cluster cannot be asked, the mailbox still knows which node agents report. A task that no
        process has may still be in the cluster's queue.
        """
        try:
            return (await self.observe_tasks(tasks) if tasks else {}), NO_TRACE
        except EngineUnreachable as error:
            log.warning("cluster.unreachable", engine=self.name, error=error.message)
            # Not the cluster's own text, which may name machines: every reader of the job sees this.
            return {}, ClusterObservation(state=ClusterTaskState.AWAY, raw=CLUSTER_UNREACHABLE)

    async def forget(self, attempt_id: str) -> None:
        if is_name(attempt_id):
            if any(task.outcome is not None for task in self.mailbox.find(attempt_id).values()):
                if attempt_id in self._reaped_uncancelled:
                    await self.cancel_launched(attempt_id)
                await self.clear_queue(attempt_id)
            self._reaped_uncancelled.discard(attempt_id)
            await self.on_thread(lambda: self.mailbox.forget(attempt_id))
            if not self.mailbox.find(attempt_id):
                self._launcher.forget(attempt_id)
                self.observer.forget(attempt_id)

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        return await self.on_thread(lambda: self.mailbox.read_log(attempt_id, node, offset, limit))

    async def close(self) -> None:
        """Release the engine's resources. Running jobs keep running."""
        self.mailbox.on_change = None

    def notify_changes(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a task began or ended, so that the control plane observes at once."""
        self.mailbox.on_change = callback

    async def prune(self, older_than: float, max_bytes: int) -> int:
        old = await self.on_thread(lambda: self.mailbox.prunable(older_than, max_bytes))
        is_tidy = await self.tidy(old)
        await self.on_thread(lambda: self.mailbox.remove(old, will_be_repeated=not is_tidy))
        return len(old)

    async def tidy(self, old: Collection[str]) -> bool:
        """Remove what the cluster has left of forgotten attempts; of those in `old`, whose logs go next,
        everything.

        May be repeated. False: that failed for now, and the names in `old` must stay known until it
        succeeds.
        """
        return True

    async def checkpoints(self) -> list[str]:
        """Return the jobs with checkpoints on the shared directory, including those of other homes that
        share it.
        """
        return await self._checkpoint_folder.jobs() if self._checkpoint_folder is not None else []

    async def inspect_checkpoints(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        return (
            SavedCheckpoints()
            if self._checkpoint_folder is None
            else await self._checkpoint_folder.inspect(job_id, verify_s)
        )

    def checkpoint_dir(self, job_id: str) -> str | None:
        return str(self._checkpoint_root / job_id) if self._checkpoint_root is not None else None

    async def drop_checkpoint(self, job_id: str) -> None:
        if self._checkpoint_folder is not None:
            await self._checkpoint_folder.drop(job_id)

    async def has_rebooted(self, task: MailboxTask, boot: Boot | None, query: QueryTimes) -> bool:
        """Return whether the node was restarted after the last report of the task's node agent.

        `boot`: the boot that was reported when `query` ran; None: the cluster reports none now. A node
        agent that reports later than that lives in this very boot, whatever date was recorded before. Only
        a change while it is silent is evidence. The reply to a query from before the task may be of an
        earlier boot. A node agent reports only from the machine on which it began.
        """
        if task.assignment is None or task.assignment_seen_at is None or boot is None:
            return False
        if task.boot is not None and not task.boot.is_on(boot.machine):
            return False  # another machine has the name now, and its boot proves nothing about the first
        if task.last_report_at is not None and task.last_report_at >= query.answered_at:
            if query.asked_at >= task.assignment_seen_at and not boot.is_like(task.boot):
                await self.on_thread(lambda: self.mailbox.record_boot(task, boot))
            return False
        return task.boot is not None and boot.follows(task.boot)

    def native_id(self, attempt_id: str) -> str:
        return f"{self.name}:{attempt_id}"

    async def on_thread(self, work: Callable[[], T]) -> T:
        return await on_thread(work, f"the {self.name} engine could not use {self._home}")

    async def _accept(self, submission: Submission) -> None:
        refuse_foreign_projects(submission.task_specs, self.name, self._only_project)
        nodes = {facts.name: facts for facts in await self.nodes()}
        refuse_malformed(submission, nodes)
        task_specs = self._complete_task_specs(submission, nodes)
        await self._make_folders(task_specs)
        await self.on_thread(lambda: self.mailbox.add(task_specs, _archive_of(submission)))

    async def _replace_tasks(self, submission: Submission) -> None:
        """Store the task specs of tasks that replace an ended one or are new on their node."""
        tasks = self.mailbox.find(submission.attempt_id)
        replacements = {node: task.identity.replacement for node, task in tasks.items()}
        missing = {
            identity.node
            for identity in (task_spec.identity for task_spec in submission.task_specs)
            if identity.replacement > replacements.get(identity.node, 0)
        }
        if not missing:
            return
        nodes = {facts.name: facts for facts in await self.nodes()}
        for task_spec in submission.task_specs:
            identity = task_spec.identity
            gone = missing_resource(task_spec, nodes) if identity.node in missing else None
            if gone is not None:
                raise NodeGone(gone, hint="shoal nodes", node=identity.node)
            before = tasks.get(identity.node) if identity.node in missing else None
            if before is None or before.outcome is not None:
                continue
            if not self.observer.is_silent(before):
                raise EngineUnreachable(f"{identity.node} still has the task that is to be replaced")
            await self.on_thread(lambda before=before: self.mailbox.reap(before, EndKind.LOST, REPLACED))  # type: ignore[misc]
        task_specs = self._complete_task_specs(submission, nodes)
        await self._make_folders(task_specs)
        for task_spec in task_specs:
            if task_spec.identity.node in missing:
                await self.on_thread(
                    lambda task_spec=task_spec: self.mailbox.replace(task_spec, _archive_of(submission))  # type: ignore[misc]
                )

    def _complete_task_specs(
        self, submission: Submission, nodes: dict[str, NodeFacts]
    ) -> tuple[TaskSpec, ...]:
        """Return the task specs with the values that this cluster decides, such as ports and paths."""
        first = submission.task_specs[0]
        used = {task.task_spec.ranks.master_port for task in self.mailbox.tasks() if task.outcome is None}
        begin = zlib.crc32(submission.attempt_id.encode())
        ports = (FIRST_PORT + (begin + step) % NUM_PORTS for step in range(NUM_PORTS))
        port = next(port for port in ports if port not in used)
        address = nodes[first.identity.node].address if len(submission.task_specs) > 1 else "127.0.0.1"
        return tuple(self._complete(task_spec, address, port) for task_spec in submission.task_specs)

    def _complete(self, task_spec: TaskSpec, master_addr: str, master_port: int) -> TaskSpec:
        replace, job_id, folders = msgspec.structs.replace, task_spec.identity.job_id, task_spec.folders
        control_url = None if task_spec.lease.control_url is None else self._access.urls[0]
        return replace(
            task_spec,
            ranks=replace(
                task_spec.ranks,
                master_addr=master_addr,
                master_port=master_port if task_spec.identity.replacement == 0 else 0,
            ),
            lease=replace(task_spec.lease, control_url=control_url),
            folders=replace(
                folders,
                checkpoint_dir=self._on_shared(folders.checkpoint_dir, job_id),
                model_dir=self._on_shared(folders.model_dir, job_id),
            ),
            isolation=replace(task_spec.isolation, uid=None, stays_in_cgroup=self.stays_in_cgroup),
        )

    def make_folder(self, path: str) -> None:
        """Make a folder of the shared directory, unless it exists. Blocks."""
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)

    async def _make_folders(self, task_specs: Collection[TaskSpec]) -> None:
        for path in sorted(
            {task_spec.folders.checkpoint_dir for task_spec in task_specs if task_spec.folders.checkpoint_dir}
        ):
            await self.on_thread(lambda path=path: self.make_folder(path))  # type: ignore[misc]

    def _on_shared(self, path: str | None, job_id: str) -> str | None:
        """Return the shared directory's path for a path below the home's checkpoints."""
        if path is None:
            return None
        if self._checkpoint_root is None:
            raise EngineRefused(
                f"job {job_id} keeps checkpoints, and this cluster has no directory that all nodes share",
                hint=f"leave out `checkpoint`, or let an operator type {self.sharing_hint}",
            )
        return str(self._checkpoint_root / Path(path).relative_to(self._home / "checkpoints"))


def _archive_of(submission: Submission) -> str | None:
    digest, path = submission.task_specs[0].program.archive_digest, submission.archive_path
    if digest is None:
        return None
    if path is None or not Path(path).is_file():
        raise EngineRefused(
            f"attempt {submission.attempt_id} needs the archive {digest}, which is not at {path}",
            hint="submit the job again",
        )
    return path
