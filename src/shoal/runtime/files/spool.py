"""The directory of one task: the files that an engine and a supervisor leave each other on disk.

Both sides use these functions, so the order of writes, the lock and the claim mean the same to both. Nothing
here starts a process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
from typing import TypeVar

import msgspec

from shoal import bounded_file
from shoal.runtime.files import checkpoint_storage
from shoal.runtime.process import tree
from shoal.runtime.replica import listeners
from shoal.wire import TaskOutcome, TaskSpec

T = TypeVar("T")
MAX_RECORD = 64 << 20
"""Limit in bytes for one file. If a supervisor runs as the job's owner, the job can write its files."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The process that took the task. `start_ticks` and `boot_id` tell it from a later process with
    its pid.
    """

    pid: int
    boot_id: str
    start_ticks: int
    at: float
    device: int
    inode: int
    """Inode of the task's directory. A copy of the claim lies in a directory with another one."""


class RanksStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks run: their pids, each of which leads a session, and their cgroups."""

    at: float
    pids: tuple[int, ...] = ()
    cgroups: tuple[str, ...] = ()


class CgroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The cgroups made for the task in this directory. A copy of the file lies in another directory."""

    paths: tuple[str, ...]
    device: int
    inode: int


class SpoolStop(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the supervisor to end the task."""

    grace_s: float
    at: float
    because: str = ""
    """Why the task must end, if the control plane did not ask for it."""
    is_external_stop: bool = False
    """Whether the stop came from outside of Shoal."""


# Made here, once and by one thread. msgspec examines a type at its first use, and a second thread at that
# moment would use the unfinished result: with msgspec 0.22 that ended the process.
_CLAIM = msgspec.json.Decoder(Claim)
_TASK_SPEC = msgspec.json.Decoder(TaskSpec)
_STARTED = msgspec.json.Decoder(RanksStarted)
_STOP = msgspec.json.Decoder(SpoolStop)
_OUTCOME = msgspec.json.Decoder(TaskOutcome)
_CGROUPS = msgspec.json.Decoder(CgroupRecord)


class SpoolTask:
    """The paths of one task of one attempt: `$SHOAL_HOME/spool/live/<attempt_id>/<node>/`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # Plain strings: pathlib would add milliseconds to the start of every supervisor.
        self.directory = os.path.abspath(directory)
        self.task_spec = f"{self.directory}/task_spec.json"
        self.lock = f"{self.directory}/lock"
        self.claimed = f"{self.directory}/claimed"
        self.started = f"{self.directory}/started"
        self.cgroups = f"{self.directory}/cgroups"
        self.stop = f"{self.directory}/stop"
        self.log = f"{self.directory}/log"
        self.outcome = f"{self.directory}/outcome.json"
        self.work = f"{self.directory}/work"
        self.scratch = f"{self.directory}/scratch"
        """The ranks' private /tmp; the supervisor removes it before it writes the outcome."""
        self.stand_ins = f"{self.directory}/stand-ins"
        """Stand-ins for launchers, first on the ranks' PATH. Not in `work`, because `git clone` needs
        that empty.
        """
        self.archive = f"{self.directory}/archive.tar"
        """The workdir's snapshot. The engine links or copies it here before it writes a task spec that has an
        `archive_digest`. The supervisor checks the digest and has the job's user unpack it.
        """
        self.errors = f"{self.directory}/supervisor.err"

    @property
    def home(self) -> str:
        """The directory that ranks must not see: SHOAL_HOME, or the task's parent in an unusual layout."""
        above, node = os.path.split(self.directory)
        live, _ = os.path.split(above)
        spool, live_name = os.path.split(live)
        is_usual = node and live_name in ("live", "archived") and os.path.basename(spool) == "spool"
        return os.path.dirname(spool) if is_usual else above


def durable_write(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file's content. After this returns, the new content survives a power cut.

    If this raises (`OSError`: no space, read-only), the whole old content is still there. One writer per path
    at a time.
    """
    target = os.fspath(path)
    draft = f"{target}.new"
    try:
        _write_synced(draft, data)
        os.rename(draft, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    sync_directory(os.path.dirname(target) or ".")


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make created, renamed and removed names in this directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_synced(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def take_lock(task: SpoolTask) -> int | None:
    """Take the task's lock and return its descriptor. None: another process holds the lock.

    The lock is held until the descriptor is closed or its process dies. Children that exec do not inherit it.
    """
    fd = os.open(task.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return fd


def lock_directory(task: SpoolTask) -> int:
    """Keep programs that sweep old files out of the task's directory, for as long as the descriptor is open.

    systemd-tmpfiles removes what has been in /tmp for days, but skips a locked directory and all below it
    (tmpfiles.d(5)). Waits for a sweep that is in the directory now.
    """
    fd = os.open(task.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:
        os.close(fd)
        raise
    return fd


def has_directory(task: SpoolTask) -> bool:
    """Whether the task has a directory. `OSError` if that cannot be told, because not seeing it is no
    evidence.
    """
    try:
        return stat.S_ISDIR(os.stat(task.directory).st_mode)
    except FileNotFoundError:
        return False


def is_locked(task: SpoolTask) -> bool:
    """Whether a process holds the lock: a supervisor lives, or an engine is closing the task.

    This takes the lock for an instant. A supervisor that starts in that instant waits for it, because the
    task is not claimed yet.
    """
    fd = take_lock(task)
    if fd is None:
        return True
    os.close(fd)
    return False


def claim(task: SpoolTask, at: float) -> bool:
    """Take the task for this process, for ever. False: it was claimed before, and must not be run.

    Call this with the lock held. The claim appears whole or not at all. If `OSError` comes before it appears,
    the task is still unclaimed.
    """
    facts = os.stat(task.directory)
    mine = Claim(
        pid=os.getpid(),
        boot_id=boot_id(),
        start_ticks=start_ticks(os.getpid()) or 0,
        at=at,
        device=facts.st_dev,
        inode=facts.st_ino,
    )
    return write_once(task.claimed, msgspec.json.encode(mine))


def write_once(path: str, data: bytes) -> bool:
    """Make the file, whole and durably. False: it exists already and stays as it is."""
    draft = f"{path}.{os.urandom(6).hex()}.new"
    _write_synced(draft, data)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)
    sync_directory(os.path.dirname(path))
    return True


def read_claim(task: SpoolTask) -> Claim | None:
    """Return the claim. None: no supervisor has claimed the task."""
    return _read(task.claimed, _CLAIM)


def is_copied(task: SpoolTask) -> bool:
    """Whether the task was claimed in another directory, for example in a home that was copied since.

    Its claim, cgroups and marks then name processes of the original, which we must not signal.
    """
    try:
        claimed, facts = read_claim(task), os.stat(task.directory)
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    return claimed is not None and (claimed.device, claimed.inode) != (facts.st_dev, facts.st_ino)


def write_task_spec(task: SpoolTask, task_spec: TaskSpec) -> None:
    """Write the task spec durably. Call this before the first spawn."""
    durable_write(task.task_spec, msgspec.json.encode(task_spec))


def read_task_spec(task: SpoolTask) -> TaskSpec | None:
    """Return the task spec, or None if there is none. `msgspec.ValidationError`: the file is no task spec."""
    return _read(task.task_spec, _TASK_SPEC)


def write_started(task: SpoolTask, started: RanksStarted) -> None:
    """Note durably that the ranks run."""
    durable_write(task.started, msgspec.json.encode(started))


def read_started(task: SpoolTask) -> RanksStarted | None:
    """Return when and what was started. None: not started."""
    return _read(task.started, _STARTED)


def write_stop(task: SpoolTask, stop: SpoolStop) -> None:
    """Ask the supervisor, running or future, to end the task. The last request counts."""
    durable_write(task.stop, msgspec.json.encode(stop))


def read_stop(task: SpoolTask) -> SpoolStop | None:
    """Return the request to stop. None: there is none."""
    return _read(task.stop, _STOP)


def can_write_stop(task: SpoolTask) -> bool:
    """Whether a stop could have been written: whether the disk takes as much now."""
    trial = f"{task.stop}.trial"
    try:
        _write_synced(trial, msgspec.json.encode(SpoolStop(grace_s=0.0, at=0.0)))
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(trial)
    return True


def write_cgroups(task: SpoolTask, paths: tuple[str, ...]) -> None:
    """Record the cgroups durably, before the first process is put into any of them."""
    facts = os.stat(task.directory)
    record = CgroupRecord(paths=paths, device=facts.st_dev, inode=facts.st_ino)
    durable_write(task.cgroups, msgspec.json.encode(record))


def read_cgroups(task: SpoolTask) -> tuple[str, ...]:
    """Return every cgroup ever made for this task. None, if the record was copied from another directory."""
    record = _read(task.cgroups, _CGROUPS)
    if record is None:
        return ()
    facts = os.stat(task.directory)
    return record.paths if (record.device, record.inode) == (facts.st_dev, facts.st_ino) else ()


def write_outcome(task: SpoolTask, outcome: TaskOutcome) -> None:
    """Write the outcome durably. Call this with the lock held, when nothing of the task runs any more."""
    durable_write(task.outcome, msgspec.json.encode(outcome))


def read_outcome(task: SpoolTask) -> TaskOutcome | None:
    """Return how the task ended. None: it has not ended, or no outcome was written."""
    return _read(task.outcome, _OUTCOME)


def signal_supervisor(task: SpoolTask, signum: int = signal.SIGTERM) -> bool:
    """Send a signal to the supervisor if it is certainly the process that claimed the task.

    False: nothing was sent, because there is no claim or that process is gone.
    """
    claimed = read_claim(task)
    if claimed is None or claimed.boot_id != boot_id() or claimed.pid == os.getpid() or is_copied(task):
        return False
    try:
        pidfd = os.pidfd_open(claimed.pid)
    except OSError:
        return False
    try:
        # The descriptor pins the process, so what is checked after it was opened cannot change.
        if start_ticks(claimed.pid) != claimed.start_ticks or not is_locked(task):
            return False
        signal.pidfd_send_signal(pidfd, signum)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def kill_supervisors(task: SpoolTask) -> None:
    """Kill every supervisor of the task, with or without a claim, by its command line."""
    name = f"shoal.runtime.supervisor\0{task.directory}".encode()
    for pid in tree.all_pids():
        with contextlib.suppress(OSError), bounded_file.plain_file(f"/proc/{pid}/cmdline") as fd:
            # Opened before the command line is read, so the process that is killed is the one examined.
            pidfd = os.pidfd_open(pid)
            try:
                # A renamed supervisor leaves the rest of its first command line as padding behind the name.
                if bounded_file.read_fd(fd, tree.MAX_COMMAND_LINE_BYTES).rstrip(b"\0").endswith(name):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def kill_leftovers(
    directory: str | os.PathLike[str], task_spec: TaskSpec | None = None, *, timeout_s: float = 10.0
) -> bool:
    """Kill every process of this task and remove its cgroups.

    Call this with the lock held, or as the parent of the supervisor after it ended. `task_spec`: the one on
    disk by default. May be repeated.

    True: nothing of the task runs. False: something did not die within `timeout_s` (a process is stuck in the
    kernel, or is not ours to kill), a cgroup is busy after as long again, or the task has a directory but no
    task spec, so it is unknown what to look for. Ask again later. Of a copied task nothing is killed or
    removed, and False means that the original runs.
    """
    task = SpoolTask(directory)
    task_spec = task_spec or read_task_spec(task)
    if task_spec is None:
        return not has_directory(task)
    cgroups = read_cgroups(task)
    marks = frozenset(
        (
            f"SHOAL_ATTEMPT_ID={task_spec.identity.attempt_id}".encode(),
            f"SHOAL_NODE={task_spec.identity.node}".encode(),
        )
    )
    work = os.path.realpath(task.work)
    if is_copied(task):
        return not tree.marked(marks, work, None)
    for path in cgroups:
        tree.unthrottle(path)
    is_clean = tree.kill_until_gone(
        lambda: tree.pids_in_cgroups(cgroups) | tree.marked(marks, work, task_spec.isolation.uid),
        timeout_s=timeout_s,
    )
    if not is_clean:
        return False  # without waiting for cgroups that are still in use
    checkpoint_storage.remove_memory_folder(task_spec.identity, task_spec.isolation.uid)
    listeners.remove_socket_folder(task_spec, os.path.realpath(task.home))
    return tree.remove_cgroups(cgroups, timeout_s=min(2.0, timeout_s))


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def start_ticks(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot. None: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _read(path: str, decoder: msgspec.json.Decoder[T]) -> T | None:
    try:
        data = bounded_file.read_whole(path, MAX_RECORD)
    except FileNotFoundError:
        return None
    try:
        return decoder.decode(data)
    except (UnicodeError, RecursionError) as error:  # a job's owner may write it if supervisors run as owners
        raise msgspec.DecodeError(str(error)) from error
