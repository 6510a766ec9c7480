"""What a home's records say: which cluster it uses, which attempts are unfinished, and what a restore closed.

A task that an engine does not list does not run, and a node that was restarted has ended its tasks. Both
are evidence about the cluster that was asked and about no other cluster. So before the control plane opens
an engine, it checks here whether the unfinished work belongs to that cluster. These functions read and
write files and query nothing.

`set_aside` closes everything that the records of a restored home call alive, without a signal to any
process: such processes belong to the home that the copy was made of. Logs stay readable. It may be
repeated after a crash at any point.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.engines.refusal import is_name
from shoal.engines.spool_directory import complete_archiving, move_to_trash
from shoal.runtime.files import spool
from shoal.wire import EndKind, TaskIdentity, TaskOutcome

FILE = "cluster.json"
LOCAL = "local"
SPOOL, MAILBOX = "spool", "mailbox"


class ClusterId(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies a cluster. Two equal ids may be two clusters; if `is_other` is true, they are two."""

    engine: str
    name: str = ""
    """The name that the cluster gives itself; empty if unknown."""
    heads: tuple[str, ...] = ()
    """The hosts that control it, any of them; empty if unknown."""
    endpoint: str = ""
    """The address at which it is queried, which may change. It counts only if both ids have nothing else."""

    @property
    def folder(self) -> str:
        """The folder of the home through which the engine and its supervisors exchange files."""
        return SPOOL if self.engine == LOCAL else MAILBOX

    def is_other(self, other: ClusterId) -> bool:
        if self.engine != other.engine:
            return True
        names = {cluster.name for cluster in (self, other) if cluster.name}
        if len(names) > 1:
            return True
        if self.heads and other.heads:
            return not set(self.heads) & set(other.heads)
        return not (self.name and other.name) and self.endpoint != other.endpoint

    def __str__(self) -> str:
        if self.engine == LOCAL:
            return f"the machine {self.name[:8]}" if self.name else "this machine"
        name = f" `{self.name}`" if self.name else ""
        at = ", ".join(self.heads) or self.endpoint
        return f"the {self.engine.capitalize()}{name}{f' ({at})' if at else ''}"


class UnfinishedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that is in the live folder and not forgotten."""

    attempt_id: str
    job: str
    """The job's name for people; the attempt's id if the name cannot be read."""
    outcomes: dict[str, TaskOutcome | None]
    """By node: how the task ended; None if no end is recorded."""

    @property
    def open_nodes(self) -> list[str]:
        return [node for node, outcome in self.outcomes.items() if outcome is None]

    def __str__(self) -> str:
        return f"{self.job} on {', '.join(self.open_nodes)}"


def this_machine(*, is_shared: bool) -> ClusterId:
    """Return the id of this machine. `is_shared`: control planes on other machines may read the same home."""
    machine_id = ""
    with contextlib.suppress(OSError):
        machine_id = Path("/etc/machine-id").read_text(encoding="ascii").strip() if is_shared else ""
    return ClusterId(engine=LOCAL, name=machine_id)


def read_cluster(home: Path) -> ClusterId | None:
    """Return the cluster that the last leader used; None if no leader has recorded one."""
    try:
        return msgspec.json.decode((home / FILE).read_bytes(), type=ClusterId)
    except FileNotFoundError:
        return None


def write_cluster(home: Path, cluster: ClusterId) -> None:
    """Record the cluster durably."""
    spool.durable_write(home / FILE, msgspec.json.encode(cluster))


def unfinished_attempts(home: Path, folder: str) -> Iterator[UnfinishedAttempt]:
    """Yield everything in that folder, oldest first."""
    live = home / folder / "live"
    for entry in sorted(live.iterdir()) if live.is_dir() else ():
        if is_name(entry.name):
            yield unfinished_attempt(home, folder, entry.name)


def unfinished_attempt(home: Path, folder: str, attempt_id: str) -> UnfinishedAttempt:
    """Return what that folder has of one attempt: no tasks if it was never stored, or is forgotten."""
    attempt, job, tasks = home / folder / "live" / attempt_id, attempt_id, dict[str, TaskOutcome | None]()
    for directory in sorted(path for path in attempt.glob("*") if path.is_dir()):
        files = spool.SpoolTask(directory)
        tasks[directory.name] = None
        with contextlib.suppress(msgspec.DecodeError):
            task_spec, outcome = spool.read_task_spec(files), spool.read_outcome(files)
            if task_spec is not None:
                job = f"{task_spec.identity.project}/{task_spec.identity.job_number}"
                # A deposed control plane wrote the outcome of another replacement late.
                is_own = outcome is not None and outcome.replacement == task_spec.identity.replacement
                tasks[directory.name] = outcome if is_own else None
    return UnfinishedAttempt(attempt_id=attempt_id, job=job, outcomes=tasks)


RESTORED_MESSAGE = "this home was restored from a copy; what became of the original is not known here"
Outcomes = dict[str, TaskOutcome]
"""By node."""


def set_aside(home: Path, now: float) -> None:
    """Move live tasks to the archived ones; standbys, sockets and the mailbox's records to the trash.

    `OSError`: that failed, and no engine may open the home.
    """
    root = home / SPOOL
    live, archived, trash = root / "live", root / "archived", root / "trash"
    for folder in (live, archived, trash):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for drafts in root.glob("draft/*"):
        complete_archiving(drafts, archived)
    for attempt in sorted(live.iterdir()):
        for directory in attempt.iterdir() if attempt.is_dir() else ():
            if directory.is_dir():
                _end_task(spool.SpoolTask(directory), now, trash)
        if (archived / attempt.name).exists():
            move_to_trash(attempt, trash)
        else:
            attempt.rename(archived / attempt.name)
    # The mailbox's folders name jobs of a cluster that the original home still uses. Without a record of
    # them, this home neither cancels nor adopts them.
    for rest in (root / "standby", home / "sockets", home / MAILBOX / "live", home / MAILBOX / "draft"):
        move_to_trash(rest, trash)


def outcomes_of(home: Path, attempt_id: str) -> Outcomes:
    """Return how the tasks of an attempt ended that was set aside, as far as the copy has outcomes."""
    outcomes: Outcomes = {}
    attempt = home / SPOOL / "archived" / attempt_id
    for directory in sorted(attempt.iterdir()) if attempt.is_dir() else ():
        with contextlib.suppress(msgspec.DecodeError, NotADirectoryError):
            outcome = spool.read_outcome(spool.SpoolTask(directory))
            if outcome is not None and outcome.attempt_id == attempt_id:
                outcomes[outcome.node] = outcome
    return outcomes


def _end_task(task: spool.SpoolTask, now: float, trash: Path) -> None:
    """Write an outcome, because readers of the log wait for one, and move the work files to the trash."""
    with contextlib.suppress(msgspec.DecodeError):
        task_spec = spool.read_task_spec(task)
        if task_spec is not None and spool.read_outcome(task) is None:
            spool.write_outcome(task, _lost_outcome(task_spec.identity, now))
    for path in (task.work, task.scratch, task.stand_ins, task.archive):
        move_to_trash(Path(path), trash)


def _lost_outcome(identity: TaskIdentity, now: float) -> TaskOutcome:
    return TaskOutcome(
        attempt_id=identity.attempt_id,
        epoch=identity.epoch,
        node=identity.node,
        kind=EndKind.LOST,
        ended_at=now,
        message=RESTORED_MESSAGE,
        replacement=identity.replacement,
    )
