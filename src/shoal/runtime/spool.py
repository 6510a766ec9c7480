"""One share's directory: what an engine and a supervisor leave each other on disk.

Both sides go through these functions, so that the order of writes, the lock and the claim mean the same
to both. Nothing here starts a process.
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
from shoal.runtime import listening, shared_memory, tree
from shoal.wire import NodeOutcome, Order

T = TypeVar("T")
MAX_RECORD = 64 << 20
"""Bytes of one file of the spool, which is the job's own where its supervisor runs as its owner."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who took the share. `start_ticks` with `boot_id` tells the process from a later one with its pid."""

    pid: int
    boot_id: str
    start_ticks: int
    at: float
    device: int
    inode: int
    """Of the share's directory. A copy of the claim lies in another one."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks run: their pids (each leads a session) and the cgroups they are in."""

    at: float
    pids: tuple[int, ...] = ()
    cgroups: tuple[str, ...] = ()


class Cgroups(msgspec.Struct, frozen=True, kw_only=True):
    """What was made for the share in this directory. A copy of the file lies in another one."""

    paths: tuple[str, ...]
    device: int
    inode: int


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """The engine wants the share to end."""

    grace_s: float
    at: float
    because: str = ""
    """Who else than the control plane wants it, in words."""
    is_unasked: bool = False
    """It is that somebody, and nobody of ours, who wants it."""


# Made here, once and by one thread. What msgspec knows of a type it finds out at the first use, and a second
# thread that came along meanwhile would use what is not finished: with msgspec 0.22 the process was gone.
_CLAIM = msgspec.json.Decoder(Claim)
_ORDER = msgspec.json.Decoder(Order)
_STARTED = msgspec.json.Decoder(Started)
_STOP = msgspec.json.Decoder(Stop)
_OUTCOME = msgspec.json.Decoder(NodeOutcome)
_CGROUPS = msgspec.json.Decoder(Cgroups)


class Share:
    """Paths of one node's share of one attempt: `$SHOAL_HOME/spool/live/<attempt_id>/<node>/`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # Plain strings: pathlib would add milliseconds to the start of every supervisor.
        self.directory = os.path.abspath(directory)
        self.order = f"{self.directory}/order.json"
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
        """What stands in front on the ranks' PATH. Not in `work`: `git clone` wants that to be empty."""
        self.archive = f"{self.directory}/archive.tar"
        """The workdir's snapshot: the engine links or copies it here before it writes an order that has
        an `archive_digest`. The supervisor checks the digest and lets the job's user unpack it."""
        self.errors = f"{self.directory}/supervisor.err"

    @property
    def home(self) -> str:
        """What ranks must not see: SHOAL_HOME, or the share's parent outside the usual layout."""
        above, node = os.path.split(self.directory)
        live, _ = os.path.split(above)
        spool, live_name = os.path.split(live)
        is_usual = node and live_name in ("live", "kept") and os.path.basename(spool) == "spool"
        return os.path.dirname(spool) if is_usual else above


def durable_write(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file's content; after it returns the new content survives a power cut.

    After it raises (`OSError`: no space, read-only) the old content is still there, whole. One writer per
    path at a time.
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


def take_lock(share: Share) -> int | None:
    """The share's lock as an open file descriptor, or None while somebody else holds it.

    Held until the descriptor is closed or its process dies; children that exec do not inherit it.
    """
    fd = os.open(share.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return fd


def shelter(share: Share) -> int:
    """Keep whoever sweeps old files away out of the share's directory, for as long as the descriptor is open.

    systemd-tmpfiles, which takes away what has lain in /tmp for days, leaves alone what somebody has locked,
    and all below it (tmpfiles.d(5)). Waits for one that is there just now.
    """
    fd = os.open(share.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_there(share: Share) -> bool:
    """Whether it has a directory. `OSError` where nobody can say: not to see it is no evidence."""
    try:
        return stat.S_ISDIR(os.stat(share.directory).st_mode)
    except FileNotFoundError:
        return False


def is_locked(share: Share) -> bool:
    """Whether somebody holds the lock: a supervisor lives, or an engine is closing the share.

    Takes the lock for an instant. A supervisor that starts in that instant waits for it, because the
    share is not claimed yet.
    """
    fd = take_lock(share)
    if fd is None:
        return True
    os.close(fd)
    return False


def claim(share: Share, at: float) -> bool:
    """Take the share for this process, for ever. False: it was claimed before, and must not be run.

    Call it with the lock held. The claim appears whole or not at all; `OSError` before it appeared
    leaves the share unclaimed.
    """
    facts = os.stat(share.directory)
    mine = Claim(
        pid=os.getpid(),
        boot_id=boot_id(),
        start_ticks=start_ticks(os.getpid()) or 0,
        at=at,
        device=facts.st_dev,
        inode=facts.st_ino,
    )
    return write_once(share.claimed, msgspec.json.encode(mine))


def write_once(path: str, data: bytes) -> bool:
    """Make the file, whole and durably. False: it is there already, and stays as it is."""
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


def read_claim(share: Share) -> Claim | None:
    """Who claimed the share; None while nobody has."""
    return _read(share.claimed, _CLAIM)


def is_copied(share: Share) -> bool:
    """Whether the share was claimed in another directory, as that of a home that was copied since.

    Its claim, cgroups and marks then name processes of the original, which are not ours to signal.
    """
    try:
        claimed, facts = read_claim(share), os.stat(share.directory)
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    return claimed is not None and (claimed.device, claimed.inode) != (facts.st_dev, facts.st_ino)


def write_order(share: Share, order: Order) -> None:
    """Durably; before the first spawn."""
    durable_write(share.order, msgspec.json.encode(order))


def read_order(share: Share) -> Order | None:
    """The order, None when there is none. `msgspec.ValidationError`: the file is not an order."""
    return _read(share.order, _ORDER)


def write_started(share: Share, started: Started) -> None:
    """Durably, once the ranks run."""
    durable_write(share.started, msgspec.json.encode(started))


def read_started(share: Share) -> Started | None:
    """When and what was started; None before."""
    return _read(share.started, _STARTED)


def write_stop(share: Share, stop: Stop) -> None:
    """Ask the supervisor, living or future, to end the share. The last one written counts."""
    durable_write(share.stop, msgspec.json.encode(stop))


def read_stop(share: Share) -> Stop | None:
    """The request to stop; None when there is none."""
    return _read(share.stop, _STOP)


def can_take_stop(share: Share) -> bool:
    """Whether somebody who wanted the share to end could have written so: the disk takes as much now."""
    trial = f"{share.stop}.trial"
    try:
        _write_synced(trial, msgspec.json.encode(Stop(grace_s=0.0, at=0.0)))
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(trial)
    return True


def write_cgroups(share: Share, paths: tuple[str, ...]) -> None:
    """Durably, before the first process is put in any of them."""
    facts = os.stat(share.directory)
    record = Cgroups(paths=paths, device=facts.st_dev, inode=facts.st_ino)
    durable_write(share.cgroups, msgspec.json.encode(record))


def read_cgroups(share: Share) -> tuple[str, ...]:
    """Every cgroup ever made for this share; none where the record was copied from elsewhere."""
    record = _read(share.cgroups, _CGROUPS)
    if record is None:
        return ()
    facts = os.stat(share.directory)
    return record.paths if (record.device, record.inode) == (facts.st_dev, facts.st_ino) else ()


def write_outcome(share: Share, outcome: NodeOutcome) -> None:
    """Durably. Call it with the lock held, when nothing of the share runs any more."""
    durable_write(share.outcome, msgspec.json.encode(outcome))


def read_outcome(share: Share) -> NodeOutcome | None:
    """How the share ended; None while it has not, or while nobody has said so."""
    return _read(share.outcome, _OUTCOME)


def signal_supervisor(share: Share, signum: int = signal.SIGTERM) -> bool:
    """Send a signal to the supervisor if it certainly is the process that claimed the share.

    False: nothing was sent, since nobody claimed it or that process is gone.
    """
    claimed = read_claim(share)
    if claimed is None or claimed.boot_id != boot_id() or claimed.pid == os.getpid() or is_copied(share):
        return False
    try:
        pidfd = os.pidfd_open(claimed.pid)
    except OSError:
        return False
    try:
        # The descriptor pins the process, so what holds after it was opened cannot change under us.
        if start_ticks(claimed.pid) != claimed.start_ticks or not is_locked(share):
            return False
        signal.pidfd_send_signal(pidfd, signum)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def kill_supervisors(share: Share) -> None:
    """Kill whoever was started to supervise the share, claimed or not, by what its command line says."""
    name = f"shoal.runtime.supervisor\0{share.directory}".encode()
    for pid in tree.all_pids():
        with contextlib.suppress(OSError), bounded_file.plain_file(f"/proc/{pid}/cmdline") as fd:
            # Pinned before it is read: the process that is killed is the one that was looked at.
            pidfd = os.pidfd_open(pid)
            try:
                # One that took the name over has all the room of its first command line behind it.
                if bounded_file.read_fd(fd, tree.MAX_WORDS).rstrip(b"\0").endswith(name):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def kill_leftovers(
    directory: str | os.PathLike[str], order: Order | None = None, *, timeout_s: float = 10.0
) -> bool:
    """Kill everything of this share that still runs and remove its cgroups. Call it with the lock held, or
    as the parent of its supervisor, which has ended.

    `order`: for who has it; else it is the one on disk. True: nothing of it runs. False: something did not
    die within `timeout_s` (a process stuck in the kernel, or not ours to kill), or a cgroup is busy after as
    long again, or the order is gone from a share that is there, so that nobody knows what to look for; ask
    again later. Of a copied share nothing is killed or removed, and False means that the original runs. May
    be repeated.
    """
    share = Share(directory)
    order = order or read_order(share)
    if order is None:
        return not is_there(share)
    cgroups = read_cgroups(share)
    marks = frozenset((f"SHOAL_ATTEMPT_ID={order.attempt_id}".encode(), f"SHOAL_NODE={order.node}".encode()))
    work = os.path.realpath(share.work)
    if is_copied(share):
        return not tree.marked(marks, work, None)
    for path in cgroups:
        tree.unthrottle(path)
    is_clean = tree.kill_until_gone(
        lambda: tree.pids_in(cgroups) | tree.marked(marks, work, order.uid), timeout_s=timeout_s
    )
    if not is_clean:
        return False  # and nobody waits for cgroups that are still in use
    shared_memory.give_back(order)
    listening.give_back(order, os.path.realpath(share.home))
    return tree.remove_cgroups(cgroups, timeout_s=min(2.0, timeout_s))


def boot_id() -> str:
    """Changes with every start of the machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process."""
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
    except (UnicodeError, RecursionError) as error:  # where supervisors run as jobs' owners, these write it
        raise msgspec.DecodeError(str(error)) from error
