"""The mailbox: task specs go out to supervisors on other machines, logs and outcomes come in.

It serves engines whose nodes have other disks. The engine stores the task specs of an attempt here (`add`).
A process that comes with a bootstrap token gets one task spec, once, and no other process ever does
(`assign`). Until then the engine may close the task for good (`close`), so that a node agent that the
cluster starts too late finds nothing to do. All functions block and are safe to use from threads.

The files are below `mailbox/`, as `SpoolDirectory` says.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from shoal import bounded_file
from shoal.clock import Clock
from shoal.engines.base import LogChunk
from shoal.engines.remote.cluster_observation import Boot
from shoal.engines.spool_directory import REMOVAL_S, SpoolDirectory
from shoal.errors import NotFound, StateError
from shoal.runtime.files import removal, spool
from shoal.wire import (
    MAX_OUTCOME_MESSAGE,
    EndKind,
    StatusReply,
    StatusReport,
    TaskIdentity,
    TaskOutcome,
    TaskSpec,
    TaskSpecRequest,
)

SUCCESSOR_S = 5.0
"""How long the lost task's node agent has to fetch the replacement's task spec before another is started."""
MAX_LOG_SLACK = 1 << 20
"""Room above the task spec's log limit, for Shoal's own last lines."""


class AssignmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The permanent record of the process that has the task spec. An empty `process` means that the engine
    closed the task, and no process will ever get it.
    """

    process: str
    at: float
    log_base: int = 0
    """Offset of this task's log in the mailbox's file, which continues over replacements."""
    launch_replacement: int = 0
    """The replacement number that the process's node agent was started for; a closed task has its own."""


class MailboxTask:
    """One task in the mailbox. Engines read its fields; only this module writes them."""

    def __init__(self, task_spec: TaskSpec, directory: Path) -> None:
        self.task_spec = task_spec
        self.identity = task_spec.identity
        self.files = spool.SpoolTask(directory)
        self.assignment: AssignmentRecord | None = None
        self.assignment_seen_at: float | None = None
        """Monotonic time at which this control plane learned of the assignment; never before the
        assignment."""
        self.started_at: float | None = None
        self.stop: spool.SpoolStop | None = None
        self.stop_seen_at: float | None = None
        """Monotonic time at which this control plane learned of `stop`, whose own date may be wrong."""
        self.outcome: TaskOutcome | None = None
        self.last_report_at: float | None = None
        """Monotonic time of the last report of its node agent to this control plane."""
        self.boot: Boot | None = None
        """The boot of its machine, as the cluster reported it while the node agent lived: see
        `record_boot`."""
        self.leftovers = ""
        """Processes that do not die, as last reported. On disk, because a dead node agent repeats no
        report."""
        self.has_successor = False
        """Its node agent will fetch the task spec of the replacement."""
        self.successor_until: float | None = None
        """Monotonic time until which the node agent on the node may fetch the task spec before another is
        started."""

    @property
    def key(self) -> tuple[str, str]:
        """The attempt's id and the node."""
        return self.identity.attempt_id, self.identity.node

    @property
    def is_waiting(self) -> bool:
        return self.assignment is None and self.outcome is None

    @property
    def launch_replacement(self) -> int:
        """The replacement number under which the cluster knows the task."""
        return self.identity.replacement if self.assignment is None else self.assignment.launch_replacement

    @property
    def is_closed(self) -> bool:
        """No process has its task spec, and none ever will."""
        return self.assignment is not None and not self.assignment.process


@runtime_checkable
class SupportsMailbox(Protocol):
    """An engine whose supervisors run on other machines."""

    mailbox: Mailbox

    async def resolve_task_spec(self, task_spec: TaskSpec) -> TaskSpec:
        """Return the task spec with values that are known only when it is fetched. `EngineUnreachable`: not
        now.
        """


class Mailbox:
    """One mailbox per home. A new instance reads everything from disk except the times of the last
    reports.
    """

    def __init__(self, home: Path, clock: Clock, term: int = 0) -> None:
        """Open the mailbox. `Deposed`: a control plane of a later `term` has opened it."""
        self._directory = SpoolDirectory(home / "mailbox", term)
        self._directory.sweep()
        self._clock = clock
        self._guard = threading.RLock()
        self._attempts: Mapping[str, Mapping[str, MailboxTask]] = {}
        """Replaced, never changed: readers must not wait for `_guard` while a disk is slow or hangs."""
        self._attempts = {
            attempt_id: {
                task.task_spec.identity.node: task for task in _load_tasks(self._directory.tasks(attempt_id))
            }
            for attempt_id in self._directory.attempts()
        }
        for task in self.tasks():
            task.assignment_seen_at = None if task.assignment is None else self._clock.monotonic()
            task.stop_seen_at = None if task.stop is None else self._clock.monotonic()
            self._end_if_closed(task)
        self.on_change: Callable[[], None] | None = None
        """Called, from any thread, when a task began or ended."""

    def tasks(self) -> list[MailboxTask]:
        """Return all tasks that are stored and not forgotten, oldest attempt first. Does not block."""
        return [task for tasks in self._attempts.values() for task in tasks.values()]

    def find(self, attempt_id: str) -> Mapping[str, MailboxTask]:
        """Return the attempt's tasks by node; empty if it is unknown or forgotten. Does not block."""
        return self._attempts.get(attempt_id, {})

    def is_archived(self, attempt_id: str) -> bool:
        """Return whether the attempt was here and has been forgotten."""
        return self._directory.is_archived(attempt_id)

    def add(self, task_specs: tuple[TaskSpec, ...], archive_path: str | None) -> None:
        """Store the task specs durably: all of them or none. A repeated call changes nothing."""
        attempt_id = task_specs[0].identity.attempt_id
        with self._guard:
            if attempt_id in self._attempts:
                return
            self._directory.add(task_specs, archive_path)
            directory = self._directory.live / attempt_id
            tasks = {
                task_spec.identity.node: MailboxTask(task_spec, directory / task_spec.identity.node)
                for task_spec in task_specs
            }
            self._attempts = {**self._attempts, attempt_id: tasks}

    def replace(self, task_spec: TaskSpec, archive_path: str | None) -> None:
        """Store a task spec in place of a task that has ended, or where none was. The log continues."""
        identity = task_spec.identity
        with self._guard:
            replaced = self._directory.replace(task_spec, archive_path)
            directory = self._directory.live / identity.attempt_id / identity.node
            tasks, task = self._attempts[identity.attempt_id], MailboxTask(task_spec, directory)
            before = tasks.get(identity.node)
            if before is not None and before.has_successor:
                task.successor_until = self._clock.monotonic() + SUCCESSOR_S
            self._attempts = {**self._attempts, identity.attempt_id: {**tasks, identity.node: task}}
        removal.remove(str(replaced), timeout_s=REMOVAL_S)

    def withdraw(self, attempt_id: str) -> None:
        """Remove an attempt as if it had never been stored, unless a process has one of its task specs."""
        with self._guard:
            tasks = self._attempts.get(attempt_id, {})
            if tasks and all(task.is_waiting for task in tasks.values()):
                self._directory.withdraw(attempt_id)
                self._drop(attempt_id)

    def assign(self, request: TaskSpecRequest) -> MailboxTask:
        """Give the task spec to the asking process. `NotFound`: no such task waits. `StateError`: it is
        taken or closed.
        """
        with self._guard:
            task = self._attempts.get(request.attempt_id, {}).get(request.node)
            if task is None or not matches_request(task.task_spec, request):
                raise NotFound(f"no task spec waits here for {request.attempt_id} on {request.node}")
            if task.assignment is None and task.outcome is None:
                base = os.stat(task.files.log).st_size if os.path.exists(task.files.log) else 0  # noqa: PTH110, PTH116
                self._write_assignment(task, request.process, base, request.replacement)
                self._end_if_closed(task)
            if (
                task.outcome is not None
                or task.assignment is None
                or task.assignment.process != request.process
            ):
                raise StateError(
                    f"the task spec for {request.attempt_id} on {request.node} "
                    "was given to another, or taken back",
                )
            task.last_report_at = self._clock.monotonic()
            return task

    def receive(self, report: StatusReport, piece: bytes) -> StatusReply:
        """Record a node agent's report. It is on disk when this returns, except the log, which is synced
        with the outcome.

        `StateError`: the sender does not have this task, or no longer, or means another message.
        """
        with self._guard:
            task = self._attempts.get(report.attempt_id, {}).get(report.node)
            if task is None and self.is_archived(report.attempt_id):
                return StatusReply(is_recorded=True, stop_grace_s=0.0)
            if task is None:  # not ours to stop: it may be another mailbox's
                raise NotFound(f"this mailbox does not know {report.attempt_id} on {report.node}")
            assignment, now = task.assignment or self._read_assignment(task), self._clock.monotonic()
            if assignment is None or not assignment.process or assignment.process != report.process:
                raise StateError(f"another process has the task of {report.attempt_id} on {report.node}")
            if any(
                _identity(message) != _identity(task.identity)
                for message in (report, report.outcome or report)
            ):
                raise StateError(f"the report is not about the task of {report.attempt_id} on {report.node}")
            is_first = task.last_report_at is None
            task.last_report_at = now
            size = self._append(task, assignment.log_base + report.offset, piece) - assignment.log_base
            is_news = self._record_leftovers(task, report.leftovers[:MAX_OUTCOME_MESSAGE]) or is_first
            if report.started_at is not None and task.started_at is None:
                spool.write_started(task.files, spool.RanksStarted(at=report.started_at))
                task.started_at, is_news = report.started_at, True
            if report.outcome is not None and task.outcome is None and report.offset + len(piece) == size:
                message = report.outcome.message[:MAX_OUTCOME_MESSAGE]
                self._end(task, msgspec.structs.replace(report.outcome, message=message))
                task.has_successor, is_news = report.will_replace, True
            is_over = task.outcome is not None and report.outcome is None
            stop_s = 0.0 if is_over else task.stop.grace_s if task.stop is not None else None
            reply = StatusReply(
                size=size,
                stop_grace_s=stop_s,
                is_recorded=task.outcome is not None,
            )
        if is_news and self.on_change is not None:
            self.on_change()
        return reply

    def _record_leftovers(self, task: MailboxTask, leftovers: str) -> bool:
        """Record the leftovers of a task. Return whether they have changed."""
        if leftovers == task.leftovers:
            return False
        if leftovers:
            spool.durable_write(_leftovers_file(task.files), leftovers.encode(errors="replace"))
        else:
            Path(_leftovers_file(task.files)).unlink(missing_ok=True)
        task.leftovers = leftovers
        return True

    def stop(self, attempt_id: str, grace_s: float) -> None:
        """Stop the attempt: close task specs that no process has; node agents of the others get the stop."""
        with self._guard:
            for task in self._attempts.get(attempt_id, {}).values():
                if task.outcome is not None:
                    continue
                is_sooner = task.stop is None or grace_s < task.stop.grace_s
                if not self.close(task, EndKind.STOPPED, "stopped before it began") and is_sooner:
                    task.stop = spool.SpoolStop(grace_s=max(grace_s, 0.0), at=self._clock.now())
                    task.stop_seen_at = self._clock.monotonic()
                    spool.write_stop(task.files, task.stop)

    def close(self, task: MailboxTask, kind: EndKind, message: str) -> bool:
        """End a task whose task spec no process has, so that none will get it. False: a process has it, or
        it ended.
        """
        with self._guard:
            if task.is_waiting:
                self._write_assignment(task, "", 0, task.identity.replacement)
            if task.outcome is not None or not task.is_closed:
                return False  # a deposed control plane may have given it out
            self._end(task, self.make_outcome(task, kind, message))
            return True

    def close_unstarted(self, attempt_id: str, launch_replacement: int, kind: EndKind, message: str) -> bool:
        """Close all tasks that the cluster was to start together. False: one is assigned or has ended;
        nothing changed.
        """
        with self._guard:
            tasks = [
                task
                for task in self.find(attempt_id).values()
                if task.launch_replacement == launch_replacement
            ]
            is_unstarted = all(task.is_waiting for task in tasks)
            for task in tasks if is_unstarted else ():
                self.close(task, kind, message)
            return is_unstarted

    def record_boot(self, task: MailboxTask, boot: Boot) -> None:
        """Record the boot of the machine that its node agent lives on. A later boot means the task's end."""
        with self._guard:
            spool.durable_write(_boot_file(task.files), msgspec.json.encode(boot))
            task.boot = boot

    def reap(self, task: MailboxTask, kind: EndKind, message: str) -> None:
        """End a task on evidence that nothing of it runs. Later reports of its node agent change nothing."""
        with self._guard:
            if task.outcome is None:
                self._end(task, self.make_outcome(task, kind, message))

    def make_outcome(self, task: MailboxTask, kind: EndKind, message: str) -> TaskOutcome:
        """Return the outcome of a task for which no supervisor will write one."""
        task_spec = task.task_spec
        return TaskOutcome(
            attempt_id=task_spec.identity.attempt_id,
            epoch=task_spec.identity.epoch,
            node=task_spec.identity.node,
            kind=kind,
            ended_at=self._clock.now(),
            message=message[:MAX_OUTCOME_MESSAGE],
            started_at=task.started_at,
            replacement=task_spec.identity.replacement,
        )

    def forget(self, attempt_id: str) -> None:
        """Keep the attempt's logs and outcomes and nothing else. Does nothing while a task of it may run."""
        with self._guard:
            tasks = self._attempts.get(attempt_id)
            if tasks is None or any(task.outcome is None for task in tasks.values()):
                return
            self._directory.archive(attempt_id)
            self._drop(attempt_id)
            for node in tasks:
                files = spool.SpoolTask(self._directory.archived / attempt_id / node)
                Path(files.archive).unlink(missing_ok=True)

    def _drop(self, attempt_id: str) -> None:
        self._attempts = {key: tasks for key, tasks in self._attempts.items() if key != attempt_id}

    def read_log(self, attempt_id: str, node: str, offset: int, limit: int) -> LogChunk:
        """As `Engine.read_log`."""
        return self._directory.read_log(attempt_id, node, offset, limit)

    def archived(self) -> frozenset[str]:
        """Return the forgotten attempts whose logs are here."""
        return frozenset(entry.name for entry in self._directory.archived.iterdir())

    def prunable(self, older_than: float, max_bytes: int) -> list[str]:
        """Return the forgotten attempts that may go, oldest first, by the rule of `SupportsPrune.prune`."""
        return self._directory.prunable(older_than, max_bytes)

    def remove(self, attempt_ids: Collection[str], *, will_be_repeated: bool = False) -> None:
        """Remove the archive of these attempts. May be repeated.

        `will_be_repeated`: keep the empty folders, so that `prunable` names them again.
        """
        self._directory.sweep()
        for attempt_id in attempt_ids:
            archived = self._directory.archived / attempt_id
            if will_be_repeated:
                removal.empty(str(archived), timeout_s=REMOVAL_S)
            else:
                self._directory.discard(archived)

    def _write_assignment(
        self, task: MailboxTask, process: str, log_base: int, launch_replacement: int
    ) -> None:
        """Record the assignment, once. The record of a faster, deposed control plane stands."""
        mine = AssignmentRecord(
            process=process, at=self._clock.now(), log_base=log_base, launch_replacement=launch_replacement
        )
        if spool.write_once(task.files.claimed, msgspec.json.encode(mine)):
            self._set_assignment(task, mine)
        else:
            self._read_assignment(task)

    def _read_assignment(self, task: MailboxTask) -> AssignmentRecord | None:
        self._set_assignment(task, _load_assignment(task.files))
        return task.assignment

    def _set_assignment(self, task: MailboxTask, assignment: AssignmentRecord | None) -> None:
        task.assignment = assignment
        if assignment is not None and task.assignment_seen_at is None:
            task.assignment_seen_at = self._clock.monotonic()

    def _end_if_closed(self, task: MailboxTask) -> None:
        """Write the outcome if the control plane that closed the task could not."""
        if task.is_closed and task.outcome is None:
            self._end(
                task, self.make_outcome(task, EndKind.LOST, "its task spec was withdrawn before it began")
            )

    def _append(self, task: MailboxTask, at: int, piece: bytes) -> int:
        """Append what the log does not have. Return its size. A piece from beyond its end is ignored.

        A log that is full counts the bytes but does not store them, so that its end can be reported.
        """
        fd = os.open(task.files.log, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(fd).st_size
            max_size = (
                task.task_spec.resources.max_log_bytes
                + MAX_LOG_SLACK
                + (task.assignment.log_base if task.assignment else 0)
            )
            if size >= max_size:
                return max(size, at + len(piece))
            new = piece[size - at :] if at <= size else b""
            if new and task.outcome is None:
                _write_whole(fd, new[: max_size - size], size)
                size += len(new)
            return size
        finally:
            os.close(fd)

    def _end(self, task: MailboxTask, outcome: TaskOutcome) -> None:
        """Record the outcome, once. If another control plane has recorded one for this task, that one
        stands.
        """
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(task.files.log, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        if not spool.write_once(task.files.outcome, msgspec.json.encode(outcome)):
            recorded = spool.read_outcome(task.files)
            if recorded is None or recorded.replacement < task.identity.replacement:
                # It is of the task before this: see `_load_tasks`. If we are deposed, the outcome there may
                # be the other control plane's record of this task, or of a later one.
                with contextlib.suppress(FileNotFoundError):
                    self._directory.replace_file(task.files.outcome, msgspec.json.encode(outcome))
            elif recorded.replacement == task.identity.replacement:
                outcome = recorded
            # Else another task has taken this one's place and ended: we are deposed, and no caller uses
            # our value.
        task.outcome = outcome


def _write_whole(fd: int, data: bytes, at: int) -> None:
    """Write all of `data`. `OSError`: what a full disk took is there, and counts when the rest is sent
    again.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _identity(message: TaskIdentity | StatusReport | TaskOutcome) -> tuple[str, int, str, int]:
    return message.attempt_id, message.epoch, message.node, message.replacement


def matches_request(task_spec: TaskSpec, request: TaskSpecRequest) -> bool:
    if request.previous_replacement is not None:
        return task_spec.identity.replacement > request.previous_replacement
    return task_spec.identity.replacement == request.replacement


def _load_tasks(directories: list[Path]) -> Iterator[MailboxTask]:
    """Yield an attempt's tasks as they are on disk."""
    for directory in directories:
        files = spool.SpoolTask(directory)
        task_spec = spool.read_task_spec(files)
        if task_spec is None:
            continue
        task = MailboxTask(task_spec, directory)
        task.assignment = _load_assignment(files)
        started = spool.read_started(files)
        task.started_at = started.at if started is not None else None
        task.stop, outcome = spool.read_stop(files), spool.read_outcome(files)
        # A deposed control plane wrote the outcome of another replacement late.
        task.outcome = (
            outcome if outcome is None or outcome.replacement == task.identity.replacement else None
        )
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            boot = bounded_file.read_whole(_boot_file(files), spool.MAX_RECORD)
            task.boot = msgspec.json.decode(boot, type=Boot)
        with contextlib.suppress(FileNotFoundError):
            leftovers = bounded_file.read_whole(_leftovers_file(files), spool.MAX_RECORD)
            task.leftovers = leftovers.decode(errors="replace")
        yield task


def _boot_file(files: spool.SpoolTask) -> str:
    """Not `booted`, in which older versions kept a date that was never updated when a clock was set."""
    return f"{files.directory}/boot"


def _leftovers_file(files: spool.SpoolTask) -> str:
    return f"{files.directory}/left"


def _load_assignment(files: spool.SpoolTask) -> AssignmentRecord | None:
    try:
        return msgspec.json.decode(
            bounded_file.read_whole(files.claimed, spool.MAX_RECORD), type=AssignmentRecord
        )
    except FileNotFoundError:
        return None
