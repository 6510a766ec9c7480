"""The index of the spool: which attempts and tasks it has, and what cannot change about them any more.

    spool/live/<attempt_id>/<node>/   accepted and not forgotten
    spool/archived/<attempt_id>/<node>/   forgotten: logs and outcomes stay
    spool/standby/                    standby supervisors (`runtime/standby`)
    spool/draft/<term>/               half made; nothing there runs
    spool/trash/                      half removed; nothing there runs

An attempt appears in `live` whole, by one rename, and leaves it by another. The leader removes the drafts
of earlier terms, so a control plane that was deposed and does not know it cannot make anything appear.
"""

# The spool names its files by strings: a supervisor starts without pathlib.
# ruff: noqa: PTH104

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import threading
from pathlib import Path

import msgspec
import structlog

from shoal.clock import BootClock
from shoal.engines.base import Observation
from shoal.engines.disk import begin_term
from shoal.engines.local.states import TaskKey
from shoal.engines.refusal import is_name
from shoal.runtime.files import removal, spool
from shoal.runtime.standby.slot import FOLDER, reap
from shoal.wire import TaskOutcome, TaskSpec

log = structlog.get_logger()
CLOCK = BootClock()
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)
REMOVAL_S = 0.5
"""How long one call may spend on the files that a job left, even ten million. `sweep` continues later."""


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
                    self.key.attempt_id, self.key.node, self.task_spec.epoch, self.task_spec.replacement
                )
        return self.task_spec

    def port(self) -> int | None:
        """Return the port its ranks may use; None once it is over, or if its task spec cannot be read."""
        if self.final_observation is not None:
            return None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            task_spec = self.read_task_spec()
            return task_spec.master_port if task_spec else None
        return None


LocalTasks = dict[str, LocalTask]


class SpoolIndex:
    """The tasks in the spool of one home. All methods block and are safe to use from several threads."""

    def __init__(self, home: Path, term: int = 0) -> None:
        """Open the spool. `term`: of the leading control plane. `Deposed`: a later term has opened it
        before.
        """
        root = home / "spool"
        self.live, self.archived, self.draft, self.trash = (
            root / name for name in ("live", "archived", "draft", "trash")
        )
        self.standby = root / FOLDER
        for folder in (home, root, self.live, self.archived, self.draft, self.trash):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._attempts: dict[str, LocalTasks] = {}
        self._guard = threading.Lock()
        self._numbers = itertools.count(1)

        self._unreaped: set[Path] = set()
        self._is_read = False
        self.draft = begin_term(self.draft, self.trash, term)

    def sweep(self) -> None:
        """Remove more of the trash and of what a crash or a standby left half removed."""
        removal.empty(str(self.trash), timeout_s=REMOVAL_S)
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
            log.warning("engine.standby_not_buried", path=str(place), because=str(error))

    def read_tasks(self) -> list[LocalTask]:
        """Return every task that was accepted and not forgotten, oldest attempt first."""
        with self._guard:
            with os.scandir(self.live) as entries:
                names = sorted(entry.name for entry in entries if is_name(entry.name))
            self._attempts = {name: self._tasks(name) for name in names}
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
        if not is_name(attempt_id) or not (self.live / attempt_id).is_dir():
            return {}
        with self._guard:
            tasks = self._attempts[attempt_id] = self._tasks(attempt_id)
            return tasks

    def is_archived(self, attempt_id: str) -> bool:
        """Return whether the attempt was here and has been forgotten."""
        return is_name(attempt_id) and (self.archived / attempt_id).is_dir()

    def task_files(self, attempt_id: str, node: str) -> spool.SpoolTask | None:
        """Return a task's files, live or archived."""
        if is_name(attempt_id) and is_name(node):
            # Forgetting moves the task from the first folder to the second, so look in that order.
            for folder in (self.live, self.archived):
                directory = folder / attempt_id / node
                if directory.is_dir():
                    return spool.SpoolTask(directory)
        return None

    def add(self, task_specs: tuple[TaskSpec, ...], archive_path: str | None) -> LocalTasks:
        """Write every task spec durably. The attempt appears with all of them or not at all."""
        attempt_id = task_specs[0].attempt_id
        draft = self.draft / f"{attempt_id}.{next(self._numbers)}"
        draft.mkdir(mode=0o700)
        try:
            for task_spec in task_specs:
                (draft / task_spec.node).mkdir(mode=0o700)
                task = spool.SpoolTask(draft / task_spec.node)
                if archive_path is not None:
                    _link_or_copy(archive_path, task.archive)
                spool.write_task_spec(task, task_spec)
            spool.sync_directory(draft)
            draft.rename(self.live / attempt_id)
        except OSError as error:
            removal.remove(str(draft), timeout_s=REMOVAL_S)
            if error.errno not in TAKEN:
                raise
        spool.sync_directory(self.live)
        return self.find(attempt_id)

    def replace(self, task_spec: TaskSpec, archive_path: str | None) -> None:
        """Put a new task where one has ended, or where none was. Its log continues in the same file.

        After a crash in between there is no task, nothing that could start, and the log.
        """
        above, number = self.live / task_spec.attempt_id, next(self._numbers)
        directory, draft = (
            above / task_spec.node,
            self.draft / f"{task_spec.attempt_id}.{task_spec.node}.{number}",
        )
        log = above / f"{task_spec.node}.log"
        draft.mkdir(mode=0o700)
        old, new = spool.SpoolTask(directory), spool.SpoolTask(draft)
        try:
            if archive_path is not None:
                _link_or_copy(archive_path, new.archive)
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                os.link(old.log, log)
            with contextlib.suppress(FileNotFoundError):
                os.link(log, new.log)
            spool.write_task_spec(new, task_spec)
        except OSError:
            removal.remove(str(draft), timeout_s=REMOVAL_S)
            raise
        old_place = draft.with_name(f"{draft.name}.old")
        with contextlib.suppress(FileNotFoundError):
            # The target is our own folder for drafts. If it is gone, another control plane leads, and both
            # renames fail.
            directory.rename(old_place)
        draft.rename(directory)
        log.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            # `sweep` removes it, so that the ranks do not wait for that.
            old_place.rename(self.trash / f"{draft.name}.{os.urandom(6).hex()}")
        spool.sync_directory(above)
        with self._guard:
            local_task = LocalTask(task_spec.attempt_id, task_spec.node, directory)
            self._attempts[task_spec.attempt_id] = {
                **self._tasks(task_spec.attempt_id),
                task_spec.node: local_task,
            }

    def archive(self, attempt_id: str) -> None:
        """Move an attempt from `live` to `archived` and remove the files its ranks worked in. May be
        repeated.
        """
        rubbish = []
        for node, local_task in self.find(attempt_id).items():
            task = local_task.files
            for path in (task.work, task.scratch, task.stand_ins, task.archive):
                thrown = self.trash / f"{attempt_id}.{node}.{os.urandom(6).hex()}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path, thrown)
                    rubbish.append(thrown)
        with contextlib.suppress(FileNotFoundError):
            (self.live / attempt_id).rename(self.archived / attempt_id)
        with self._guard:
            self._attempts.pop(attempt_id, None)
        for thrown in rubbish:
            removal.remove(str(thrown), timeout_s=REMOVAL_S)

    def prune(self, older_than: float, max_bytes: int) -> int:
        """Remove archived attempts last written before `older_than`, then the oldest until the rest fits.

        Return the number. An attempt leaves `archived` whole, by one rename.
        """
        entries = sorted((*_age_and_size(entry), entry) for entry in self.archived.iterdir())
        total = sum(size for _, size, _ in entries)
        pruned = 0
        for written_at, size, entry in entries:
            if written_at >= older_than and total <= max_bytes:
                break
            self.discard(entry)
            total -= size
            pruned += 1
        return pruned

    def discard(self, path: Path) -> None:
        """Move `path` to the trash at once, then remove it. After a crash in between it stays in the
        trash.
        """
        thrown = self.trash / f"{path.name}.{os.urandom(6).hex()}"
        with contextlib.suppress(FileNotFoundError):
            path.rename(thrown)
        removal.remove(str(thrown), timeout_s=REMOVAL_S)

    def _flat(self) -> list[LocalTask]:
        return [task for tasks in self._attempts.values() for task in tasks.values()]

    def _tasks(self, attempt_id: str) -> LocalTasks:
        cached = self._attempts.get(attempt_id)
        if cached:
            return cached
        try:
            with os.scandir(self.live / attempt_id) as entries:
                nodes = sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {node: LocalTask(attempt_id, node, self.live / attempt_id / node) for node in nodes}


def _age_and_size(path: Path) -> tuple[float, int]:
    """Return the time of the last write in the folder and its size in bytes. Follows no link."""
    written_at, total = 0.0, 0
    for above, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                facts = Path(above, name).lstat()
                written_at, total = max(written_at, facts.st_mtime), total + facts.st_size
    return written_at, total


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)
