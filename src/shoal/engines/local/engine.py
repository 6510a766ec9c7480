"""The local engine: the engine's operations over the spool of one machine.

Every operation is one call to a worker thread, because disks may block. None waits for a job.
"""

# The spool names its files by strings: a supervisor starts without pathlib.
# ruff: noqa: PTH110, PTH113

from __future__ import annotations

import contextlib
import errno
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec
import structlog

from shoal.clock import Clock
from shoal.engines.base import LogChunk, Observation, SavedCheckpoints, Submission
from shoal.engines.checkpoint_folder import CheckpointFolder
from shoal.engines.disk import on_thread
from shoal.engines.local.client import ExitNotifier, ForkServer, SupervisorProcesses, free_port, read_words
from shoal.engines.local.inventory import SimulatedNodes, take_inventory
from shoal.engines.local.spool_index import LocalTask, LocalTasks, SpoolIndex
from shoal.engines.local.states import native_id
from shoal.engines.local.task_specs import (
    complete_task_specs,
    detect_command,
    fork_server_command,
    supervisor_command,
    supervisor_environment,
    with_checkpoint_dirs,
    with_model_dirs,
)
from shoal.engines.local.watcher import SpoolWatcher
from shoal.engines.refusal import missing_resource, refuse_malformed
from shoal.errors import EngineRefused, NodeGone
from shoal.model.evidence import Evidence
from shoal.model.node import NodeFacts
from shoal.runtime.standby.slot import directory_of
from shoal.wire import TaskCredentials, TaskSpec

T = TypeVar("T")
log = structlog.get_logger()

MAX_THREADS = 8
UNKNOWN = "unknown"
INVENTORY_S = 60.0
CLAIM_S = 60.0
"""A supervisor that has not claimed its task after this time hangs: a claim usually takes 50 ms."""
MAX_CREDENTIALS = 1 << 20
"""The most that an unprivileged process may put in a pipe (fs.pipe-max-size)."""


class LocalEngine:
    """One per SHOAL_HOME. A new instance finds everything in the spool again."""

    name = "local"
    can_replace_tasks = True

    def __init__(
        self,
        home: Path,
        *,
        clock: Clock,
        server_file: Path,
        simulated: SimulatedNodes | None = None,
        confinement: tuple[str, ...] | None = None,
        has_fork_server: bool = True,
        term: int = 0,
    ) -> None:
        """Open the spool.

        `confinement`: use only these ways to confine a job; None: all that work here. `term`: of the
        leading control plane, if several share the home; `Deposed`: a later one has opened it. Without a
        fork server, every supervisor is a new interpreter, which is slower and has the same result.
        """
        self._home = home.absolute()
        self._server_file = str(server_file.absolute())
        self._simulated = simulated
        self._confinement = confinement
        self._clock = clock
        self._index = SpoolIndex(self._home, term)
        self._exit_notifier = ExitNotifier()
        self._watcher = SpoolWatcher(clock, self._exit_notifier)
        environment = supervisor_environment(os.environ, self._server_file)
        self._supervisors = SupervisorProcesses(
            ForkServer(fork_server_command(), environment) if has_fork_server else None
        )
        self._threads = anyio.CapacityLimiter(MAX_THREADS)
        self._checkpoints = CheckpointFolder(home / "checkpoints", clock)
        self._guard = threading.Lock()
        self._inventory_guard = threading.Lock()
        self._promised: set[int] = set()
        self._facts: dict[str, NodeFacts] = {}
        self._next_inventory_at = 0.0
        """Monotonic time at which to look again for facts that could not be determined."""

    async def submit(self, submission: Submission) -> str:
        return await self._on_thread(lambda: self._submit(submission))

    async def cancel(self, attempt_id: str, grace_s: float) -> None:
        await self._on_thread(lambda: self._cancel(attempt_id, grace_s))

    async def list_owned(self) -> list[Observation]:
        return await self._on_thread(self._list_owned)

    async def forget(self, attempt_id: str) -> None:
        """Forget the attempt. Does nothing while a task of it may still run: then it stays listed."""
        await self._on_thread(lambda: self._forget(attempt_id))

    async def nodes(self) -> list[NodeFacts]:
        """Return this machine, then the simulated nodes.

        The hardware is inspected once, because it does not change. As long as the ways to confine jobs are
        unknown, it is inspected again every 60 s.
        """
        return list((await self._on_thread(self._refresh_nodes)).values())

    async def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        return await self._on_thread(lambda: self._index.read_log(attempt_id, node, offset, limit))

    def notify_changes(self, callback: Callable[[], None]) -> None:
        self._exit_notifier.listen(callback)

    async def prune(self, older_than: float, max_bytes: int) -> int:
        return await self._on_thread(lambda: self._index.prune(older_than, max_bytes))

    async def checkpoints(self) -> list[str]:
        return await self._checkpoints.jobs()

    async def inspect_checkpoints(self, job_id: str, verify_s: float) -> SavedCheckpoints:
        return await self._checkpoints.inspect(job_id, verify_s)

    async def drop_checkpoint(self, job_id: str) -> None:
        await self._checkpoints.drop(job_id)

    async def close(self) -> None:
        """Release the engine's resources. Supervisors need no parent and keep running."""
        self._exit_notifier.close()
        self._supervisors.close()

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await on_thread(work, f"the local engine could not use {self._home}", self._threads)

    def _submit(self, submission: Submission) -> str:
        attempt_id = submission.attempt_id
        # Forgetting moves the attempt from the first folder to the second. In this order, the search finds
        # it.
        tasks = self._index.find(attempt_id)
        if not tasks and self._index.is_archived(attempt_id):
            return native_id(attempt_id)
        tasks = self._replace_tasks(submission, tasks) if tasks else self._accept(submission)
        for task in tasks.values():
            self._spawn(task, submission.credentials.get(task.key.node, TaskCredentials()))
        return native_id(attempt_id)

    def _accept(self, submission: Submission) -> LocalTasks:
        """Check the submission and write its task specs. Starts nothing; after an error nothing will
        start.
        """
        nodes = self._nodes()
        refuse_malformed(submission, nodes)
        archive_path = _archive_of(submission)
        for credentials in submission.credentials.values():
            _refuse_large(credentials)
        address = nodes[submission.task_specs[0].identity.node].address
        port = self._promise_port(address, submission.attempt_id)
        try:
            task_specs = complete_task_specs(submission, address, port, self._confinement)
            task_specs = with_model_dirs(self._home, with_checkpoint_dirs(self._home, task_specs))
            return self._index.add(task_specs, archive_path)
        finally:
            # From here on the task spec itself shows that the port is taken.
            with self._guard:
                self._promised.discard(port)

    def _replace_tasks(self, submission: Submission, tasks: LocalTasks) -> LocalTasks:
        """Return the attempt's tasks, with new ones where a task spec replaces one that has ended."""
        missing = [
            task_spec
            for task_spec in submission.task_specs
            if _needs_new_task(task_spec, tasks.get(task_spec.identity.node))
        ]
        nodes = self._nodes()
        for task_spec in missing:
            identity = task_spec.identity
            gone = missing_resource(task_spec, nodes)
            if gone is not None:
                raise NodeGone(gone, hint="shoal nodes", node=identity.node)
            observation = self._watcher.observe(tasks[identity.node]) if identity.node in tasks else None
            if observation is not None and observation.evidence is not Evidence.ENDED:
                raise OSError(errno.EBUSY, f"{identity.node} still has the task that is to be replaced")
        if missing:
            archive_path, address = (
                _archive_of(submission),
                nodes[submission.task_specs[0].identity.node].address,
            )
            completed = with_model_dirs(
                self._home, complete_task_specs(submission, address, 0, self._confinement)
            )
            missing_nodes = {task_spec.identity.node for task_spec in missing}
            for task_spec in with_checkpoint_dirs(self._home, completed):
                if task_spec.identity.node in missing_nodes:
                    self._index.replace(task_spec, archive_path)
        return self._index.find(submission.attempt_id)

    def _promise_port(self, address: str, attempt_id: str) -> int:
        tasks = self._index.cached_tasks()
        with self._guard:
            used = {port for task in tasks if (port := task.port()) is not None}
            port = free_port(address, used | self._promised, zlib.crc32(attempt_id.encode()))
            self._promised.add(port)
            return port

    def _spawn(self, task: LocalTask, credentials: TaskCredentials) -> None:
        """Start a supervisor unless the task is claimed or one of ours is starting."""
        with task.guard:
            if os.path.exists(task.files.claimed):
                return
            if task.supervisor_pid is not None and self._supervisors.is_running(task.supervisor_pid):
                if self._clock.monotonic() >= task.claim_deadline:
                    # the next observation counts it and starts another
                    self._supervisors.kill(task.supervisor_pid)
                return
            gone = self._missing_resource(task)
            if gone is not None:
                self._watcher.give_up(task, gone)
                return
            if not self._watcher.may_start(task):
                return
            task.supervisor_pid = self._supervisors.spawn(
                task.files.directory,
                supervisor_command(task.files.directory),
                supervisor_environment(os.environ, self._server_file),
                task.files.errors,
                msgspec.json.encode(credentials),
                self._standby_of(task),
            )
            task.claim_deadline = self._clock.monotonic() + CLAIM_S

    def _standby_of(self, task: LocalTask) -> str | None:
        """Return the folder of the standby for a lost task, if there may be one. A node's first task has
        none.
        """
        with contextlib.suppress(msgspec.DecodeError):
            task_spec = task.read_task_spec()
            if task_spec is not None and task_spec.identity.replacement > 0 and task.num_failed_starts == 0:
                return directory_of(task.files)
        return None

    def _missing_resource(self, task: LocalTask) -> str | None:
        """Return what a task lacks that an earlier engine accepted, if the machine has changed since."""
        with contextlib.suppress(msgspec.DecodeError):
            task_spec = task.read_task_spec()
            return missing_resource(task_spec, self._nodes()) if task_spec is not None else None
        return None

    def _cancel(self, attempt_id: str, grace_s: float) -> None:
        failure: OSError | None = None
        for task in self._index.find(attempt_id).values():
            try:
                self._watcher.stop(task, max(grace_s, 0.0))
            except OSError as error:
                # A task that cannot be reached must not keep the others from being stopped.
                failure = error
        self._supervisors.reap()
        if failure is not None:
            raise failure

    def _list_owned(self) -> list[Observation]:
        self._supervisors.reap()
        self._index.sweep()
        observations = (self._watcher.observe(task) for task in self._index.read_tasks())
        return [observation for observation in observations if observation is not None]

    def _forget(self, attempt_id: str) -> None:
        tasks = self._index.find(attempt_id)
        observations = [self._watcher.observe(task) for task in tasks.values()]
        if tasks and all(
            observation is not None and observation.evidence is Evidence.ENDED for observation in observations
        ):
            self._index.archive(attempt_id)

    def _nodes(self) -> dict[str, NodeFacts]:
        with self._inventory_guard:
            if not self._facts:
                self._supervisors.reap()  # the fork server starts during the inventory
                self._take_inventory()
            return self._facts

    def _refresh_nodes(self) -> dict[str, NodeFacts]:
        self._nodes()
        if self._confinement is None and self._clock.monotonic() >= self._next_inventory_at:
            self._take_inventory()  # without the lock, because submissions would wait for it
        return self._facts

    def _take_inventory(self) -> None:
        unknown = self._choose_confinement()
        walls = UNKNOWN if unknown else " ".join(self._confinement or ())
        inventory = take_inventory(self._home, walls)
        machine = msgspec.structs.replace(inventory, remarks=(*inventory.remarks, *unknown))
        simulated = self._simulated.facts(walls) if self._simulated else []
        for remark in machine.remarks:
            log.info("engine.remark", engine=self.name, node=machine.name, told=remark)
        self._facts = {facts.name: facts for facts in (machine, *simulated)}
        self._next_inventory_at = self._clock.monotonic() + INVENTORY_S

    def _choose_confinement(self) -> tuple[str, ...]:
        """Detect which ways to confine a job work here, so that no supervisor has to. Return remarks on a
        failure.
        """
        if self._confinement is not None:
            return ()
        environment = supervisor_environment(os.environ, self._server_file)
        methods, reason = read_words(detect_command(), environment)
        # Without a result the task specs name none, and every supervisor detects them itself.
        self._confinement = methods or None
        return () if methods else (f"what confines jobs here is not known: {reason}",)


def _needs_new_task(task_spec: TaskSpec, task: LocalTask | None) -> bool:
    """Return whether the task spec asks for a new task in place of a lost one, here or on another node."""
    old_spec = task.read_task_spec() if task is not None else None
    return task_spec.identity.replacement > (old_spec.identity.replacement if old_spec is not None else 0)


def _archive_of(submission: Submission) -> str | None:
    """Return the path of the snapshot; `EngineRefused` if the task specs need one that does not exist."""
    digest, path = submission.task_specs[0].program.archive_digest, submission.archive_path
    if digest is None:
        return None
    if path is None or not os.path.isfile(path):
        raise EngineRefused(
            f"attempt {submission.attempt_id} needs the archive {digest}, which is not at {path}",
            hint="submit the job again",
        )
    return path


def _refuse_large(credentials: TaskCredentials) -> None:
    size = len(msgspec.json.encode(credentials))
    if size > MAX_CREDENTIALS:
        raise EngineRefused(
            f"the job's secrets take {size} bytes; the most is {MAX_CREDENTIALS}",
            hint="put large secrets in a file and mount it",
        )
