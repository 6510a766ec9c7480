"""Numbers of laboratories. One is ours while this process lives; what the dead have left is swept.

Whoever takes a number holds a lock on its file, which the kernel lets go with the process, and writes down
who that is. Networks and interfaces are named after kind and number; processes that are outside of these
networks bear the claim's mark in their environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.host.processes import ip, is_alive, process_identity

NUMBERS = 250
TAGS = {"0": "sh", "1": "sr", "m": "shoalm"}
"""By kind: what names begin with, before the number."""
LOCKS = Path("/tmp")
MARK = "SHOAL_TEST_LAB"
KILL_S = 10.0


class LabLock:
    """Of a number below `NUMBERS` that nobody else on this machine has, until `release`."""

    def __init__(self, kind: str, number: int, lock: int) -> None:
        self.number = number
        self.tag = f"{TAGS[kind]}{number}"
        self.mark = {MARK: f"{self.tag} {process_identity(os.getpid())}"}
        """For the environment of what is started outside of its networks."""
        self._lock: int | None = lock
        os.truncate(lock, 0)
        os.pwrite(lock, self.mark[MARK].encode(), 0)

    def release(self) -> None:
        """Once nothing is left of it. May be repeated."""
        if self._lock is not None:
            os.truncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None


def take_number(kind: str, network_of: Callable[[int], str]) -> LabLock:
    """What others left behind is swept where they are dead, and else passed over. `net_of`: the beginning of
    all addresses of a number.
    """
    sweep_dead_labs()
    taken = ip("-o", "-4", "addr", "show", check=False)
    first = os.getpid() % NUMBERS
    for number in (*range(first, NUMBERS), *range(first)):
        lock = _lock(_file(kind, number), os.O_CREAT)
        if lock is not None and f" {network_of(number)}." not in taken:
            return LabLock(kind, number, lock)
        if lock is not None:
            os.close(lock)
    raise AssertionError(f"{NUMBERS} networks of tests are on this machine: `ip netns` shows them")


def sweep_dead_labs() -> None:
    """End what laboratories have left whose process is dead, and who said so: a file that somebody has taken
    away says nothing about who lives, and one of another number nothing about this one.
    """
    for kind, prefix in TAGS.items():
        for file in LOCKS.glob(_file(kind, "*").name):
            lock = _lock(file)
            if lock is None:
                continue
            mark = os.pread(lock, 200, 0).decode(errors="replace")
            said = re.fullmatch(rf"({prefix}(\d+)) ((\d+) \d+)", mark)
            if (
                said is not None
                and file == _file(kind, said[2])
                and process_identity(int(said[4])) != said[3]
            ):
                _remove(said[1], mark)
                os.truncate(lock, 0)
            os.close(lock)


def _file(kind: str, number: object) -> Path:
    return LOCKS / f"shoal-lab-{kind}-{number}.lock"


def _lock(file: Path, more: int = 0) -> int | None:
    """None: somebody has it, or it is gone, or not ours: in `LOCKS` everybody may lay files and links."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW | more, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        told = os.fstat(lock)
        if told.st_uid == os.getuid() and stat.S_ISREG(told.st_mode):
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _remove(tag: str, mark: str) -> None:
    spaces = re.findall(rf"^{tag}-\S+", ip("netns", "list", check=False), re.MULTILINE)
    deadline = time.monotonic() + KILL_S
    while (left := list(_surviving_pids(spaces, mark))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    links = re.findall(rf"^\d+: ({tag}(?:[a-z]\d*)?)[@:]", ip("-o", "link", check=False), re.MULTILINE)
    for link in links:  # with its namespace it would go later, and be in the way of the next laboratory
        ip("link", "del", link, check=False)
    for space in spaces:
        ip("netns", "del", space, check=False)


def _surviving_pids(spaces: list[str], mark: str) -> Iterator[int]:
    for space in spaces:
        for word in ip("netns", "pids", space, check=False).split():
            if is_alive(int(word)):
                yield int(word)
    marked = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marked in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
