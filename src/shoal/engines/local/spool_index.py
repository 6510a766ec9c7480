"""The index of the spool: which attempts and tasks it has, and what cannot change about them any more.

The files are below `spool/`, as `SpoolDirectory` says, and standby supervisors (`runtime/standby`) have their
own folder there, `spool/standby/`.
"""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from pathlib import Path

import msgspec
import structlog

from shoal.clock import BootClock
from shoal.engines.base import LogChunk, Observation
from shoal.engines.local.states import TaskKey
from shoal.engines.refusal import is_name
from shoal.engines.spool_directory import REMOVAL_S, SpoolDirectory, move_to_trash
from shoal.runtime.files import removal, spool
from shoal.runtime.standby.slot import FOLDER, reap
from shoal.wire import TaskOutcome, TaskSpec

log = structlog.get_logger()
CLOCK = BootClock()


class LocalTask:
    """One task and the facts about it that cannot change any more. Every user of it holds `guard`."""

    def __init__(self, attempt_id: str, node: str, directory: Path) -> None:
        self.files = spool.SpoolTask(directory)
        self.key = TaskKey(attempt_id, node)
        self.guard = threading.Lock()
        self.task_spec: TaskSpec | None = None
        self.started: spool.RanksStarted | None = None
        self.is_claimed = self.is_followed = False
        self.supervisor_pid: int | None = None
        """The process id of the supervisor that this process started last."""
        self.claim_deadline = 0.0
        """Monotonic time at which that supervisor is given up."""
        self.num_failed_starts = 0
        """How many of our supervisors ended before they claimed the task."""
        self.next_start_at = 0.0
        """Monotonic time before which the next is not started."""
        self.kill_at: float | None = None
        """Monotonic time at which a stop becomes a kill."""
        self.is_stuck = False
        """A process of the task did not die while we waited for it."""
        self.lost_outcome: TaskOutcome | None = None
        """The outcome that we determined, on disk or not."""
        self.final_observation: Observation | None = None
        """Set once the end is on disk: nothing about the task changes any more."""

    def read_task_spec(self) -> TaskSpec | None:
        """Return the task spec, read at most once. `msgspec.DecodeError`: the file is not a task spec."""
        if self.task_spec is None:
            self.task_spec = spool.read_task_spec(self.files)
            if self.task_spec is not None:
                self.key = TaskKey(
                    self.key.attempt_id,
                    self.key.node,
                    self.task_spec.identity.epoch,
                    self.task_spec.identity.replacement,
                )
        return self.task_spec

    def port(self) -> int | None:
        """Return the port its ranks may use; None once it is over, or if its task spec cannot be read."""
        if self.final_observation is not None:
            return None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            task_spec = self.read_task_spec()
            return task_spec.ranks.master_port if task_spec else None
        return None


LocalTasks = dict[str, LocalTask]


class SpoolIndex:
    """The tasks in the spool of one home. All methods block and are safe to use from several threads."""

    def __init__(self, home: Path, term: int = 0) -> None:
        """Open the spool. `term`: of the leading control plane. `Deposed`: a later term has opened it
        before.
        """
        self.directory = SpoolDirectory(home / "spool", term)
        self.standby = home / "spool" / FOLDER
        self._attempts: dict[str, LocalTasks] = {}
        self._guard = threading.Lock()
        self._unreaped: set[Path] = set()
        self._is_read = False

    def sweep(self) -> None:
        """Remove more of the trash and of what a crash or a standby left half removed."""
        self.directory.sweep()
        deadline = CLOCK.monotonic() + REMOVAL_S
        try:
            places = list(self.standby.iterdir())
        except OSError as error:
            self._warn_unreaped(self.standby, error)
            return
        random.shuffle(places)  # a standby that does not die must not always come first
        for place in places:
            left_s = deadline - CLOCK.monotonic()
            if left_s <= 0:
                return
            try:
                reap(str(place), timeout_s=left_s)  # this removes nothing of a standby that lives
            except OSError as error:
                self._warn_unreaped(place, error)

    def _warn_unreaped(self, place: Path, error: OSError) -> None:
        """Log each failure once: every sweep tries again, and nothing else depends on it."""
        if error.errno != errno.ENOENT and place not in self._unreaped:
            self._unreaped.add(place)
            log.warning("engine.standby_not_reaped", path=str(place), because=str(error))

    def read_tasks(self) -> list[LocalTask]:
        """Return every task that was accepted and not forgotten, oldest attempt first."""
        with self._guard:
            self._attempts = {name: self._tasks(name) for name in self.directory.attempts()}
            self._is_read = True
            return self._flat()

    def cached_tasks(self) -> list[LocalTask]:
        """As `read_tasks`, from memory. It misses only what another process did to the directory."""
        with self._guard:
            if self._is_read:
                return self._flat()
        return self.read_tasks()

    def find(self, attempt_id: str) -> LocalTasks:
        """Return the attempt's tasks by node; empty if it is unknown or forgotten."""
        if not is_name(attempt_id) or not (self.directory.live / attempt_id).is_dir():
            return {}
        with self._guard:
            tasks = self._attempts[attempt_id] = self._tasks(attempt_id)
            return tasks

    def is_archived(self, attempt_id: str) -> bool:
        """Return whether the attempt was here and has been forgotten."""
        return self.directory.is_archived(attempt_id)

    def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        """As `Engine.read_log`."""
        return self.directory.read_log(attempt_id, node, offset, limit)

    def add(self, task_specs: tuple[TaskSpec, ...], archive_path: str | None) -> LocalTasks:
        """Write every task spec durably. The attempt appears with all of them or not at all."""
        self.directory.add(task_specs, archive_path)
        return self.find(task_specs[0].identity.attempt_id)

    def replace(self, task_spec: TaskSpec, archive_path: str | None) -> None:
        """Put a new task where one has ended, or where none was. Its log continues in the same file.

        `sweep` removes the old one, so that the ranks do not wait for that.
        """
        self.directory.replace(task_spec, archive_path)
        identity = task_spec.identity
        directory = self.directory.live / identity.attempt_id / identity.node
        with self._guard:
            local_task = LocalTask(identity.attempt_id, identity.node, directory)
            self._attempts[identity.attempt_id] = {
                **self._tasks(identity.attempt_id),
                identity.node: local_task,
            }

    def archive(self, attempt_id: str) -> None:
        """Move an attempt from `live` to `archived` and remove the files its ranks worked in. May be
        repeated.
        """
        rubbish = [
            move_to_trash(Path(path), self.directory.trash)
            for task in self.find(attempt_id).values()
            for path in (task.files.work, task.files.scratch, task.files.stand_ins, task.files.archive)
        ]
        with contextlib.suppress(FileNotFoundError):
            self.directory.archive(attempt_id)
        with self._guard:
            self._attempts.pop(attempt_id, None)
        for thrown in rubbish:
            removal.remove(str(thrown), timeout_s=REMOVAL_S)

    def prune(self, older_than: float, max_bytes: int) -> int:
        """Remove archived attempts last written before `older_than`, then the oldest until the rest fits.

        Return the number.
        """
        prunable = self.directory.prunable(older_than, max_bytes)
        for attempt_id in prunable:
            self.directory.discard(self.directory.archived / attempt_id)
        return len(prunable)

    def _flat(self) -> list[LocalTask]:
        return [task for tasks in self._attempts.values() for task in tasks.values()]

    def _tasks(self, attempt_id: str) -> LocalTasks:
        cached = self._attempts.get(attempt_id)
        if cached:
            return cached
        return {
            directory.name: LocalTask(attempt_id, directory.name, directory)
            for directory in self.directory.tasks(attempt_id)
        }
