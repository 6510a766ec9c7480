"""Limits on CPU, memory and processes: cgroups of both versions, or rlimits and CPU affinity without cgroups.

- `hierarchies_here` finds the cgroups in which this process may create others. It creates nothing.
- `CgroupV1` makes one directory in the hierarchy of each controller.
- `CgroupV2` makes one directory for all controllers, if they are delegated to this user.
- `apply_rlimits` and `pin_cpus` limit a single process and its children. They are weaker, as `shoal nodes`
  shows: the memory limit holds for each process, not for the sum.
- `ObservedCpuTime` estimates a task's CPU time if no cgroup counts it. Most Slurm users cannot make cgroups,
  and the hang detector needs CPU times there, too. A process that lives for less than a scan is counted when
  its parent has waited for it, so the sum is never too low for long.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import zlib

import msgspec

from shoal.runtime.process import tree
from shoal.wire import TaskResources

REQUIRED_CONTROLLERS = frozenset({"cpu", "memory", "pids"})


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """One mounted cgroup hierarchy: its controllers (none for version 2) and this process's cgroup in it."""

    is_unified: bool
    controllers: frozenset[str]
    mount: str
    cgroup_dir: str
    """The directory of this process's cgroup, or the mount itself if that is not visible."""


def parse_hierarchies(mountinfo: str, cgroup_text: str) -> list[Hierarchy]:
    """Combine `/proc/self/mountinfo` and `/proc/self/cgroup`. Pure except for `isdir`."""
    places = _cgroup_paths(cgroup_text)
    hierarchies: list[Hierarchy] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        root, mount = fields[3], fields[4]
        controllers = frozenset() if kinds[0] == "cgroup2" else frozenset(kinds[2].split(",")) & set(places)
        place = places.get(min(controllers) if controllers else "", "/")
        inside = os.path.relpath(place, root) if root != "/" else place.lstrip("/")
        directory = os.path.normpath(os.path.join(mount, inside))
        is_inside = directory == mount or directory.startswith(mount + "/")
        hierarchies.append(
            Hierarchy(
                is_unified=kinds[0] == "cgroup2",
                controllers=controllers,
                mount=mount,
                cgroup_dir=directory if is_inside and os.path.isdir(directory) else mount,
            )
        )
    return hierarchies


def hierarchies_here() -> list[Hierarchy]:
    """Return the cgroup hierarchies that this process sees, or an empty list if /proc has none."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mountinfo = file.read()
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            cgroup_text = file.read()
    except OSError:
        return []
    return parse_hierarchies(mountinfo, cgroup_text)


def oom_kills(hierarchies: list[Hierarchy]) -> int:
    """Return the number of out-of-memory kills in this process's own cgroups, or 0 if it is unknown."""
    counted = [f"{one.cgroup_dir}/memory.events" for one in hierarchies if one.is_unified]
    counted += [f"{one.cgroup_dir}/memory.oom_control" for one in hierarchies if "memory" in one.controllers]
    return sum(read_number(path, "oom_kill") or 0 for path in counted)


def _cgroup_paths(cgroup_text: str) -> dict[str, str]:
    """Map each controller (empty for version 2) to the path of this process's cgroup."""
    places: dict[str, str] = {}
    for line in cgroup_text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            places[controller] = path
    return places


def write_cgroup_file(path: str, value: str) -> None:
    """Write a cgroup file in one system call. `OSError`: the kernel's reason."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def read_number(path: str, key: str | None = None) -> int | None:
    """Return the number in a cgroup file, or after `key` in a file of `key number` lines, or None."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
        if key is None:
            return int(text)
        return next((int(line.split()[1]) for line in text.splitlines() if line.split()[0] == key), None)
    except (OSError, ValueError, IndexError):
        return None


def read_sum(path: str, keys: tuple[str, ...]) -> int | None:
    """Return the sum of the numbers of these keys that exist, or None if none exists."""
    numbers = [number for key in keys if (number := read_number(path, key)) is not None]
    return sum(numbers) if numbers else None


CFS_PERIOD_US = 100_000
NVIDIA_MAJOR = 195
NVIDIA_CONTROL_MINOR = 255


class CgroupV1:
    """The cgroups of one task. `make` creates them, each process enters by itself, `tree` removes them."""

    join_file = "tasks"
    """Writing 0 here moves the calling thread without the lock over all forks of the machine, which costs
    tens of milliseconds to take; a child that has just been forked is one thread."""

    def __init__(self, bases: dict[str, str], name: str) -> None:
        self._by_controller = {controller: f"{base}/shoal.{name}" for controller, base in bases.items()}
        self.paths = tuple(sorted(set(self._by_controller.values())))

    def make(self, resources: TaskResources) -> None:
        """Create them and set the limits. `OSError`: some may exist; removing `paths` cleans up."""
        for path in self.paths:
            os.makedirs(path, exist_ok=True)
        cpu, pids = self._by_controller["cpu"], self._by_controller["pids"]
        write_cgroup_file(f"{cpu}/cpu.cfs_period_us", str(CFS_PERIOD_US))
        write_cgroup_file(f"{cpu}/cpu.cfs_quota_us", str(max(1000, int(resources.cpus * CFS_PERIOD_US))))
        write_cgroup_file(f"{pids}/pids.max", str(resources.max_processes))
        if resources.memory_bytes is not None:
            self.limit_memory(resources.memory_bytes)
        devices = self._by_controller.get("devices")
        if devices is not None and not resources.are_gpus_chosen_by_cluster:
            for minor in denied_gpus(os.listdir("/dev"), resources.gpu_minors):
                write_cgroup_file(f"{devices}/devices.deny", f"c {NVIDIA_MAJOR}:{minor} rwm")

    def limit_memory(self, memory_bytes: int) -> None:
        """Change the memory limit. `OSError`: more is in use, and the old limit still holds."""
        memory = self._by_controller["memory"]
        path, with_swap = f"{memory}/memory.limit_in_bytes", f"{memory}/memory.memsw.limit_in_bytes"
        # The second may never be below the first: of a higher limit the first try fails. Kernels without swap
        # accounting have no such file.
        for one in (path, with_swap):
            with contextlib.suppress(OSError):
                write_cgroup_file(one, str(memory_bytes))
        write_cgroup_file(path, str(memory_bytes))

    def set_cpu_weight(self, hundredths: int) -> None:
        """Set the CPU weight, which counts when other tasks want the CPUs, too. The default is 100."""
        write_cgroup_file(f"{self._by_controller['cpu']}/cpu.shares", str(hundredths * 1024 // 100))

    def oom_kills(self) -> int:
        """How often the kernel killed in here because the memory limit was hit; 0 where it does not count.

        `failcnt` will not do instead: it counts how often the limit was met, mostly by the page cache.
        """
        return read_number(f"{self._by_controller['memory']}/memory.oom_control", "oom_kill") or 0

    def memory_bytes(self) -> int | None:
        """Memory that the kernel cannot reclaim: the processes' own memory, and files in shared memory."""
        return read_sum(f"{self._by_controller['memory']}/memory.stat", ("total_rss", "total_shmem"))

    def cpu_seconds(self) -> float | None:
        """CPU time of all processes that ever ran in the cgroup."""
        accounting = self._by_controller.get("cpuacct")
        used = read_number(f"{accounting}/cpuacct.usage") if accounting is not None else None
        return None if used is None else used / 1e9


def usable_v1_bases(hierarchies: list[Hierarchy]) -> dict[str, str] | None:
    """Map each controller to the directory for new cgroups. None without cpu, memory and pids."""
    bases: dict[str, str] = {}
    for hierarchy in hierarchies:
        for controller in hierarchy.controllers & (REQUIRED_CONTROLLERS | {"devices", "cpuacct"}):
            if os.access(hierarchy.cgroup_dir, os.W_OK):
                bases[controller] = hierarchy.cgroup_dir
    return bases if bases.keys() >= REQUIRED_CONTROLLERS else None


def denied_gpus(device_names: list[str], allowed: tuple[int, ...]) -> list[int]:
    """Return the minor numbers of NVIDIA devices that are not allowed for this task."""
    return [minor for minor in gpu_minors(device_names) if minor not in allowed]


def gpu_minors(device_names: list[str]) -> list[int]:
    """Return the minor numbers of NVIDIA devices among these names of files in /dev."""
    numbers = (int(name[6:]) for name in device_names if name.startswith("nvidia") and name[6:].isdigit())
    return sorted(number for number in numbers if number != NVIDIA_CONTROL_MINOR)


PERIOD_US = 100_000
ENABLE = "+cpu +memory +pids"


class CgroupV2:
    """The cgroup of one task. `make` creates it, each process enters by itself, `tree` removes it."""

    join_file = "cgroup.procs"

    def __init__(self, base: str, name: str) -> None:
        self._path = f"{base}/shoal.{name}"
        self.paths = (self._path,)

    def make(self, resources: TaskResources) -> None:
        """Create it and set the limits. `OSError`: it may exist; removing `paths` cleans up."""
        os.makedirs(self._path, exist_ok=True)
        write_cgroup_file(
            f"{self._path}/cpu.max", f"{max(1000, int(resources.cpus * PERIOD_US))} {PERIOD_US}"
        )
        write_cgroup_file(f"{self._path}/pids.max", str(resources.max_processes))
        if resources.memory_bytes is not None:
            self.limit_memory(resources.memory_bytes)
            with contextlib.suppress(OSError):  # the file is missing in kernels without swap
                write_cgroup_file(f"{self._path}/memory.swap.max", "0")

    def limit_memory(self, memory_bytes: int) -> None:
        """Change the memory limit. `OSError`: more is in use, and the old limit still holds."""
        # The kernel accepts any number and kills processes above it, so check the usage first.
        if (self.memory_bytes() or 0) > memory_bytes:
            raise OSError(errno.EBUSY, "more memory than that is in use")
        write_cgroup_file(f"{self._path}/memory.max", str(memory_bytes))

    def set_cpu_weight(self, hundredths: int) -> None:
        """Set the CPU weight, which counts when other tasks want the CPUs, too. The default is 100."""
        write_cgroup_file(f"{self._path}/cpu.weight", str(hundredths))

    def oom_kills(self) -> int:
        """The number of out-of-memory kills in the cgroup."""
        return read_number(f"{self._path}/memory.events", "oom_kill") or 0

    def memory_bytes(self) -> int | None:
        """Memory that the kernel cannot reclaim: the processes' own memory, and files in shared memory."""
        return read_sum(f"{self._path}/memory.stat", ("anon", "shmem"))

    def cpu_seconds(self) -> float | None:
        """CPU time of all processes that ever ran in the cgroup."""
        used = read_number(f"{self._path}/cpu.stat", "usage_usec")
        return None if used is None else used / 1e6


def usable_v2_base(hierarchies: list[Hierarchy], *, stays: bool = False) -> str | None:
    """Return the nearest cgroup, from this process's upwards, below which it may make cgroups.

    Its children must have cpu, memory and pids. A cgroup with processes of its own cannot delegate
    controllers, so it is often the parent's. If the task `stays` in this process's cgroup there is none, for
    the same reason.
    """
    for hierarchy in () if stays else hierarchies:
        directory = hierarchy.cgroup_dir
        while hierarchy.is_unified and directory.startswith(hierarchy.mount):
            if os.access(directory, os.W_OK) and _delegates_controllers(directory):
                return directory
            directory = os.path.dirname(directory)
    return None


def _delegates_controllers(directory: str) -> bool:
    if _words(f"{directory}/cgroup.subtree_control") >= REQUIRED_CONTROLLERS:
        return os.access(f"{directory}/cgroup.procs", os.W_OK)
    if not _words(f"{directory}/cgroup.controllers") >= REQUIRED_CONTROLLERS:
        return False
    with contextlib.suppress(OSError):
        write_cgroup_file(f"{directory}/cgroup.subtree_control", ENABLE)
    return _words(f"{directory}/cgroup.subtree_control") >= REQUIRED_CONTROLLERS


def _words(path: str) -> frozenset[str]:
    try:
        with open(path, encoding="ascii") as file:
            return frozenset(file.read().split())
    except OSError:
        return frozenset()


def apply_rlimits(resources: TaskResources, *, is_own_user: bool) -> None:
    """Limit this process. `is_own_user`: its user runs nothing else, so a limit per user is possible."""
    if resources.memory_bytes is not None:
        # RLIMIT_AS is not used, because CUDA and some allocators reserve far more address space than they
        # use.
        _lower(resource.RLIMIT_DATA, resources.memory_bytes)
    if is_own_user:
        _lower(resource.RLIMIT_NPROC, resources.max_processes)


def pin_cpus(wanted: float, seed: str) -> None:
    """Pin this process to this number of CPUs. The tasks of different seeds get different CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, chosen_cpus(cpus, wanted, seed))


def chosen_cpus(cpus: list[int], wanted: float, seed: str) -> set[int]:
    """Return neighbouring CPUs. The first one depends only on `seed`."""
    count = min(len(cpus), max(1, math.ceil(wanted)))
    start = zlib.crc32(seed.encode()) % len(cpus)
    return {cpus[(start + step) % len(cpus)] for step in range(count)}


def _lower(resource_id: int, limit: int) -> None:
    _, hard = resource.getrlimit(resource_id)
    value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource_id, (value, value))


SCAN_S = 1.0
"""Interval of the scans for the task's processes among all of the machine. No shorter silence is a hang."""


class ObservedCpuTime:
    """Main thread only."""

    def __init__(self) -> None:
        self._scanned_at = float("-inf")
        self._pids: set[int] = set()
        self._ticks_by_process: dict[tuple[int, int], int] = {}
        """CPU ticks by pid and start time, because pids are reused."""
        self._ticks = 0

    def seconds(self) -> float:
        """Return the sum, which never decreases, even after processes have ended."""
        now = tree.CLOCK.monotonic()
        if now > self._scanned_at + SCAN_S:
            self._scanned_at = now
            with contextlib.suppress(OSError):  # no descriptor is left, say: those that are known do, for now
                self._pids = tree.descendants(os.getpid())
        ticks_by_process = {}
        for pid in self._pids:
            if (num_ticks := tree.ticks_of(pid)) is not None:
                began, ticks = num_ticks
                ticks_by_process[pid, began] = ticks
                self._ticks += max(0, ticks - self._ticks_by_process.get((pid, began), 0))
        self._ticks_by_process = ticks_by_process
        return self._ticks / os.sysconf("SC_CLK_TCK")
