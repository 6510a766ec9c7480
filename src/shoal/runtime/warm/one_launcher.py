"""Let a rank be one program at a time: behind one launcher, and in the job's process group.

A rank has one number, and one address at which it meets the others. Two programs side by side
(`torchrun a.py & torchrun b.py & wait`, or the same with `python`) would both go there under that number, and
`a.py` of one rank may form a group with `b.py` of another.
"""

from __future__ import annotations

import errno
import fcntl
import os

from . import launchers, names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

BEHIND = "SHOAL_LAUNCHED"
"""Set for the program behind a launcher and all that it starts: launchers in there are its own affair."""
MAX_RANKS = 1 << 32
HINT = "start one after the other, or submit each as a job of its own (`shoal run --array`)"
_member: dict[int, int] = {}
"""By which descriptor a process, this one or one that it was forked from, holds its place in the group."""


class Taken(Exception):
    """Another process of this rank holds the place."""


def claim(folder: str, environment: dict[str, str], *, is_real: bool = False) -> None:
    """Hold this rank's place behind a launcher until this process ends. Raise `Refused` if another launcher
    holds it. Several may run in the only rank of a job, each with a group of its own.

    The supervisor reads the lock, too: a rank whose launcher still runs has not finished (`cut_off.py`).
    `is_real`: the process becomes a launcher that is not Shoal's, which meets the others at its own address.
    """
    is_alone = is_real or environment.get("SHOAL_WORLD_SIZE", "1") == "1"
    if BEHIND in environment:
        return
    try:
        fd = _hold(os.path.join(folder, names.LAUNCHING), environment)
    except Taken:
        if is_alone:
            return
        raise launchers.Refused(
            "another launcher of this rank is still running: both would have one number among the ranks",
            HINT,
            names.SECOND,
        ) from None
    if fd is not None:
        os.set_inheritable(fd, True)  # noqa: FBT003 - it outlasts `execv`
        if not is_alone:
            os.environ[BEHIND] = "1"


def join(folder: str, given: Mapping[str, Any]) -> None:
    """Hold this rank's place in the job's process group until `leave`, if that is where `init_process_group`
    goes with these arguments. `RuntimeError`: another process of the rank is a member, and has not left.
    """
    environment = dict(os.environ)
    if environment.get("SHOAL_WORLD_SIZE", "1") == "1" or os.getpid() in _member:
        return
    place = (environment.get("SHOAL_MASTER_PORT"), environment.get("SHOAL_RANK"))
    if (_port(given, environment), _rank(given, environment)) != place:
        return  # a group of the program's own, at another address or under another number
    try:
        fd = _hold(os.path.join(folder, names.MEMBERS), environment)
    except Taken:
        launchers.tell(folder, names.SECOND)
        raise RuntimeError(
            f"another process of rank {place[1]} is in the job's process group: both would have one number "
            f"among the ranks; {HINT}"
        ) from None
    if fd is not None:
        _member[os.getpid()] = fd


def leave() -> None:
    """The process has left the group, or never got into it."""
    fd = _member.pop(os.getpid(), None)
    if fd is not None:
        os.close(fd)


def _port(given: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    method, store = given.get("init_method"), given.get("store")
    if store is not None:
        return str(getattr(store, "port", None))
    if method is None or str(method).startswith("env:"):
        return environment.get("MASTER_PORT")
    return str(method).partition("?")[0].rpartition(":")[2]


def _rank(given: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    rank = given.get("rank", -1)
    return environment.get("RANK") if rank < 0 else str(rank)


def _hold(path: str, environment: Mapping[str, str]) -> int | None:
    """Lock this rank's byte of a file. None: it needs none, or there can be none. Raise `Taken`."""
    if "SHOAL_RANK" not in environment:
        return None  # a spare process, which waits beside the ranks until it is one
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # The program has removed the folder, or the disk is full: no reason to fail a program that trains.
        return None
    try:
        # A lock of the process itself: it outlasts `execv`, and what the process forks does not hold it.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place_of(environment))
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise Taken from None
        return None
    return fd


def place_of(environment: Mapping[str, str]) -> int:
    """Which byte is this rank's. Each group of ranks has its own: the one before may take its time to end."""
    return int(environment.get("SHOAL_GENERATION", "0")) * MAX_RANKS + int(environment["SHOAL_RANK"])
