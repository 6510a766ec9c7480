"""cgroup version 1: one directory in each controller's own hierarchy."""

from __future__ import annotations

import contextlib
import os

from shoal.runtime.confine.cgroup import NEEDED, Hierarchy, read_number, read_sum, write
from shoal.wire import Order

PERIOD_US = 100_000
NVIDIA_MAJOR = 195
NVIDIA_CONTROL_MINOR = 255


class CgroupV1:
    """The cgroups of one share. Made by `make`, entered by each process itself, removed by `tree`."""

    join_file = "tasks"
    """Writing 0 here moves the calling thread without the lock over all forks of the machine, which costs
    tens of milliseconds to take; a child that has just been forked is one thread."""

    def __init__(self, bases: dict[str, str], name: str) -> None:
        self._by_controller = {controller: f"{base}/shoal.{name}" for controller, base in bases.items()}
        self.paths = tuple(sorted(set(self._by_controller.values())))

    def make(self, order: Order) -> None:
        """Create them and set the limits. `OSError`: some may exist; removing `paths` cleans up."""
        for path in self.paths:
            os.makedirs(path, exist_ok=True)
        limits = order.limits
        cpu, pids = self._by_controller["cpu"], self._by_controller["pids"]
        write(f"{cpu}/cpu.cfs_period_us", str(PERIOD_US))
        write(f"{cpu}/cpu.cfs_quota_us", str(max(1000, int(limits.cpus * PERIOD_US))))
        write(f"{pids}/pids.max", str(limits.max_processes))
        if limits.memory_bytes is not None:
            self.limit_memory(limits.memory_bytes)
        devices = self._by_controller.get("devices")
        if devices is not None and not order.are_gpus_chosen_there:
            for minor in denied_gpus(os.listdir("/dev"), order.gpu_minors):
                write(f"{devices}/devices.deny", f"c {NVIDIA_MAJOR}:{minor} rwm")

    def limit_memory(self, memory_bytes: int) -> None:
        """Once more, with another number. `OSError`: more than that is in use, and the old limit stands."""
        memory = self._by_controller["memory"]
        path, with_swap = f"{memory}/memory.limit_in_bytes", f"{memory}/memory.memsw.limit_in_bytes"
        # The second may never be below the first: of a higher limit the first try fails. Kernels without swap
        # accounting have no such file.
        for one in (path, with_swap):
            with contextlib.suppress(OSError):
                write(one, str(memory_bytes))
        write(path, str(memory_bytes))

    def weigh(self, hundredths: int) -> None:
        """How much of the processors it gets where others want them too; 100 is what everybody has."""
        write(f"{self._by_controller['cpu']}/cpu.shares", str(hundredths * 1024 // 100))

    def oom_kills(self) -> int:
        """How often the kernel killed in here because the memory limit was hit; 0 where it does not count.

        `failcnt` will not do instead: it counts how often the limit was met, mostly by the page cache.
        """
        return read_number(f"{self._by_controller['memory']}/memory.oom_control", "oom_kill") or 0

    def memory_bytes(self) -> int | None:
        """What cannot be taken back from processes in here: their own memory, and files in shared memory."""
        return read_sum(f"{self._by_controller['memory']}/memory.stat", ("total_rss", "total_shmem"))

    def cpu_seconds(self) -> float | None:
        """CPU time of everything that ever ran in here."""
        accounting = self._by_controller.get("cpuacct")
        used = read_number(f"{accounting}/cpuacct.usage") if accounting is not None else None
        return None if used is None else used / 1e9


def usable_bases(found: list[Hierarchy]) -> dict[str, str] | None:
    """Controller to the directory under which we may make cgroups; None without cpu, memory and pids."""
    bases: dict[str, str] = {}
    for hierarchy in found:
        for controller in hierarchy.controllers & (NEEDED | {"devices", "cpuacct"}):
            if os.access(hierarchy.own, os.W_OK):
                bases[controller] = hierarchy.own
    return bases if bases.keys() >= NEEDED else None


def denied_gpus(device_names: list[str], given: tuple[int, ...]) -> list[int]:
    """Minor numbers of the NVIDIA devices that are not given to this share."""
    return [minor for minor in gpu_minors(device_names) if minor not in given]


def gpu_minors(device_names: list[str]) -> list[int]:
    """Minor numbers of the NVIDIA devices among these names of files in /dev."""
    numbers = (int(name[6:]) for name in device_names if name.startswith("nvidia") and name[6:].isdigit())
    return sorted(number for number in numbers if number != NVIDIA_CONTROL_MINOR)
