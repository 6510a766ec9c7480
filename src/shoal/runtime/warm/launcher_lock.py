"""Allow one program of a rank at a time behind a launcher, and one in the job's process group.

A rank has one number and one rendezvous address. Two programs side by side (`torchrun a.py & torchrun b.py &
wait`, or the same with `python`) would both join there under that number, and `a.py` of one rank might form a
group with `b.py` of another.
"""

from __future__ import annotations

import errno
import fcntl
import os

from . import launchers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

BEHIND_LAUNCHER = "SHOAL_LAUNCHED"
"""Set for the program behind a launcher and all its children. Launchers that they start take no lock."""
MAX_RANKS = 1 << 32
HINT = "start one after the other, or submit each as a job of its own (`shoal run --array`)"
_held_locks: dict[int, int] = {}
"""The descriptor of the group lock, by pid: of this process, or of one that it was forked from."""


class RankLocked(Exception):
    """Another process of this rank holds the lock."""


class LauncherClaim:
    """The claim of this process to be the one launcher of its rank.

    The constructor locks this rank's byte. The lock lasts until the process ends: `execv` keeps it, and a
    process that this one forks does not hold it. The supervisor reads the lock, too: a rank whose launcher
    still runs has not finished (`unfinished_launchers.py`). So a launcher makes its claim before it does
    anything slow. Otherwise a script can end before its launcher in the background is seen.
    """

    def __init__(self, folder: str, environment: Mapping[str, str]) -> None:
        self._path = os.path.join(folder, launchers.LAUNCHING)
        self._environment = environment
        self._has_lock = False
        self._is_refused = not self._try_lock()

    def settle(self, *, is_real: bool) -> None:
        """Raise `LauncherRefused` if another launcher of the rank holds the lock.

        In the only rank of a job several launchers may run, each with a group of its own. `is_real`: this
        process becomes a launcher that is not Shoal's, which meets the others at its own address.
        """
        if is_real or self._environment.get("SHOAL_WORLD_SIZE", "1") == "1":
            return
        # The launcher that held the lock may have been refused in the meantime.
        if self._is_refused and not self._try_lock():
            raise launchers.LauncherRefused(
                "another launcher of this rank is still running: both would have one number among the ranks",
                HINT,
                launchers.SECOND,
            )
        if self._has_lock:
            os.environ[BEHIND_LAUNCHER] = "1"

    def _try_lock(self) -> bool:
        """Return False if another launcher holds the lock."""
        if BEHIND_LAUNCHER in self._environment:
            return True
        try:
            fd = _lock_rank(self._path, self._environment)
        except RankLocked:
            return False
        if fd is not None:
            os.set_inheritable(fd, True)  # noqa: FBT003 - it outlasts `execv`
            self._has_lock = True
        return True


def hold_step(folder: str, environment: Mapping[str, str]) -> None:
    """Mark this process as a step of `srun` until it ends. Any number of steps may run at once in a rank."""
    try:
        fd = _lock_rank(os.path.join(folder, launchers.STEPS), environment, fcntl.LOCK_SH)
    except RankLocked:
        return  # a lock that is no step's: nothing here depends on it
    if fd is not None:
        os.set_inheritable(fd, True)  # noqa: FBT003 - it outlasts `execv`


def join(folder: str, arguments: Mapping[str, Any]) -> None:
    """Lock this rank's place in the job's process group until `leave`.

    Does nothing if `init_process_group` with these arguments forms another group. `RuntimeError`: another
    process of the rank is a member of the job's group and has not left it.
    """
    environment = dict(os.environ)
    if environment.get("SHOAL_WORLD_SIZE", "1") == "1" or os.getpid() in _held_locks:
        return
    place = (environment.get("SHOAL_MASTER_PORT"), environment.get("SHOAL_RANK"))
    if (_port(arguments, environment), _rank(arguments, environment)) != place:
        return  # the program's own group, at another address or under another number
    try:
        fd = _lock_rank(os.path.join(folder, launchers.MEMBERS), environment)
    except RankLocked:
        launchers.append_report(folder, launchers.SECOND)
        raise RuntimeError(
            f"another process of rank {place[1]} is in the job's process group: both would have one number "
            f"among the ranks; {HINT}"
        ) from None
    if fd is not None:
        _held_locks[os.getpid()] = fd


def leave() -> None:
    """Release the lock: the process has left the group, or has never joined it."""
    fd = _held_locks.pop(os.getpid(), None)
    if fd is not None:
        os.close(fd)


def _port(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    method, store = arguments.get("init_method"), arguments.get("store")
    if store is not None:
        return str(getattr(store, "port", None))
    if method is None or str(method).startswith("env:"):
        return environment.get("MASTER_PORT")
    return str(method).partition("?")[0].rpartition(":")[2]


def _rank(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    rank = arguments.get("rank", -1)
    return environment.get("RANK") if rank < 0 else str(rank)


def _lock_rank(path: str, environment: Mapping[str, str], mode: int = fcntl.LOCK_EX) -> int | None:
    """Lock this rank's byte of a file and return the descriptor. Raise `RankLocked`.

    Return None for a process that needs no lock, and where the file cannot be made.
    """
    if "SHOAL_RANK" not in environment:
        return None  # a spare process, which is no rank yet
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # The program has removed the folder, or the disk is full. Neither may fail a program that trains.
        return None
    try:
        # A POSIX lock belongs to the process: it survives `execv`, and forked children do not hold it.
        fcntl.lockf(fd, mode | fcntl.LOCK_NB, 1, lock_offset(environment))
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise RankLocked from None
        return None
    return fd


def lock_offset(environment: Mapping[str, str]) -> int:
    """Return the offset of this rank's byte. Each round has its own, because an old round may end slowly."""
    return int(environment.get("SHOAL_RENDEZVOUS_ROUND", "0")) * MAX_RANKS + int(environment["SHOAL_RANK"])
