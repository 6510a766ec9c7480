"""cgroup version 2: one directory for all controllers, where somebody delegated them to us."""

from __future__ import annotations

import contextlib
import errno
import os

from shoal.runtime.confine.cgroup import NEEDED, Hierarchy, read_number, read_sum, write
from shoal.wire import Order

PERIOD_US = 100_000
ENABLE = "+cpu +memory +pids"


class CgroupV2:
    """The cgroup of one share. Made by `make`, entered by each process itself, removed by `tree`."""

    join_file = "cgroup.procs"

    def __init__(self, base: str, name: str) -> None:
        self._path = f"{base}/shoal.{name}"
        self.paths = (self._path,)

    def make(self, order: Order) -> None:
        """Create it and set the limits. `OSError`: it may exist; removing `paths` cleans up."""
        os.makedirs(self._path, exist_ok=True)
        limits = order.limits
        write(f"{self._path}/cpu.max", f"{max(1000, int(limits.cpus * PERIOD_US))} {PERIOD_US}")
        write(f"{self._path}/pids.max", str(limits.max_processes))
        if limits.memory_bytes is not None:
            self.limit_memory(limits.memory_bytes)
            with contextlib.suppress(OSError):  # kernels without swap have no such file
                write(f"{self._path}/memory.swap.max", "0")

    def limit_memory(self, memory_bytes: int) -> None:
        """Once more, with another number. `OSError`: more than that is in use, and the old limit stands."""
        # The kernel takes any number here, and kills what is above it.
        if (self.memory_bytes() or 0) > memory_bytes:
            raise OSError(errno.EBUSY, "more memory than that is in use")
        write(f"{self._path}/memory.max", str(memory_bytes))

    def weigh(self, hundredths: int) -> None:
        """How much of the processors it gets where others want them too; 100 is what everybody has."""
        write(f"{self._path}/cpu.weight", str(hundredths))

    def oom_kills(self) -> int:
        """How often the kernel killed in here because the memory limit was hit."""
        return read_number(f"{self._path}/memory.events", "oom_kill") or 0

    def memory_bytes(self) -> int | None:
        """What cannot be taken back from processes in here: their own memory, and files in shared memory."""
        return read_sum(f"{self._path}/memory.stat", ("anon", "shmem"))

    def cpu_seconds(self) -> float | None:
        """CPU time of everything that ever ran in here."""
        used = read_number(f"{self._path}/cpu.stat", "usage_usec")
        return None if used is None else used / 1e6


def usable_base(found: list[Hierarchy], *, stays: bool = False) -> str | None:
    """The nearest cgroup at or above ours whose children have cpu, memory and pids and may be made by us.

    A cgroup with processes of its own cannot hand controllers down, so it is often our parent's. Where the
    share `stays` in ours there is none, for the same reason: we are in it.
    """
    for hierarchy in () if stays else found:
        directory = hierarchy.own
        while hierarchy.is_unified and directory.startswith(hierarchy.mount):
            if os.access(directory, os.W_OK) and _hands_down(directory):
                return directory
            directory = os.path.dirname(directory)
    return None


def _hands_down(directory: str) -> bool:
    if _words(f"{directory}/cgroup.subtree_control") >= NEEDED:
        return os.access(f"{directory}/cgroup.procs", os.W_OK)
    if not _words(f"{directory}/cgroup.controllers") >= NEEDED:
        return False
    with contextlib.suppress(OSError):
        write(f"{directory}/cgroup.subtree_control", ENABLE)
    return _words(f"{directory}/cgroup.subtree_control") >= NEEDED


def _words(path: str) -> frozenset[str]:
    try:
        with open(path, encoding="ascii") as file:
            return frozenset(file.read().split())
    except OSError:
        return frozenset()
