"""Find and kill every process of a task, however it forked, and remove its cgroups.

Processes are found by cgroup, by descent and by the marks that Shoal put in their environment. No other
process is ever signalled. The caller decides whether a task is over.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable

from shoal import bounded_file
from shoal.clock import BootClock

CLOCK = BootClock()
PATIENCE_S = 0.01
ENDED = (b"Z", b"X")
"""The states of a thread that has ended."""
MAX_COMMAND_LINE_BYTES = 8 << 20
"""Limit in bytes for a process's command line or environment. `execve` takes 6 MiB of both, but later a
process may declare any part of its memory, up to 128 TiB, as either one (`PR_SET_MM`).
"""


def kill_until_gone(
    find: Callable[[], set[int]], *, timeout_s: float, after_round: Callable[[], object] = lambda: None
) -> bool:
    """Send SIGKILL to what `find` returns until it returns nothing twice in a row. False: time ran out.

    `after_round` runs after every round. A caller with children reaps them there.
    """
    deadline = CLOCK.monotonic() + timeout_s
    clean_looks = 0
    while True:
        pids = find() - {os.getpid()}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        after_round()
        is_clean = not pids and can_read_proc()
        clean_looks = clean_looks + 1 if is_clean else 0
        if clean_looks == 2:
            return True
        if not is_clean and CLOCK.monotonic() > deadline:
            return False
        if not is_clean:
            time.sleep(PATIENCE_S)


def can_read_proc() -> bool:
    """Whether files can be opened. Without a free descriptor, it would look as if no process existed."""
    try:
        with open("/proc/self/stat", "rb"), open("/proc/self/stat", "rb"):
            return True
    except OSError:
        return False


def pids_in_cgroups(cgroups: Iterable[str]) -> set[int]:
    """Return every process in these cgroups and in those that ranks made inside. A missing one has none."""
    pids: set[int] = set()
    for path in cgroups:
        for inner, _, _ in os.walk(path):
            with contextlib.suppress(OSError), open(f"{inner}/cgroup.procs", "rb") as file:
                pids.update(int(line) for line in file)
    pids.discard(0)
    return pids


def unthrottle(path: str) -> None:
    """Let a cgroup's processes die quickly: allow no new ones, and lift the CPU quota."""
    for name, value in (
        ("pids.max", "0"),
        ("cpu.cfs_quota_us", "-1"),
        ("cpu.max", "max"),
        ("cgroup.kill", "1"),
    ):
        with contextlib.suppress(OSError):
            fd = os.open(f"{path}/{name}", os.O_WRONLY)
            try:
                os.write(fd, value.encode())
            finally:
                os.close(fd)


def remove_cgroups(paths: Iterable[str], *, timeout_s: float = 2.0) -> bool:
    """Remove empty cgroups and those that ranks made inside. False: one is still busy."""
    deadline = CLOCK.monotonic() + timeout_s
    waiting = list(paths)
    while waiting:
        waiting = [path for path in waiting if not _remove_cgroup(path)]
        if waiting and CLOCK.monotonic() > deadline:
            return False
        if waiting:
            time.sleep(PATIENCE_S)
    return True


def _remove_cgroup(path: str) -> bool:
    try:
        for inner, _, _ in os.walk(path, topdown=False):
            os.rmdir(inner)
    except OSError as error:
        return error.errno == errno.ENOENT
    return not os.path.exists(path)


def descendants(root: int) -> set[int]:
    """Return every living process below this one. Orphans count, because they return to their subreaper."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        parent = parent_of(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    pids: set[int] = set()
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in pids:
                pids.add(pid)
                waiting.append(pid)
    return pids


def all_pids() -> list[int]:
    """Return every process that this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def parent_of(pid: int) -> int | None:
    """Return the parent of a living process. None: the process is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or _is_zombie(fields) else int(fields[1])


def _is_zombie(fields: list[bytes]) -> bool:
    """Whether nothing of the process runs.

    Its first thread alone says little. After a SIGKILL that thread has ended and the process looks like a
    zombie, while another thread may be stuck in a driver.
    """
    return fields[0] in ENDED and int(fields[17]) <= 1


def stopped_or_traced(pids: Iterable[int]) -> set[int]:
    """Return the processes that a signal stopped, or that are traced. They do nothing until continued."""
    return {pid for pid in pids if (fields := _stat(pid)) is not None and fields[0] in (b"T", b"t")}


def stopped_by_signal(pids: Iterable[int]) -> set[int]:
    """Return the processes that a signal stopped. A traced one may work between two stops."""
    return {pid for pid in pids if (fields := _stat(pid)) is not None and fields[0] == b"T"}


def is_any_in_kernel(pids: Iterable[int]) -> bool:
    """Whether a thread of theirs waits inside the kernel, most likely for a disk, which counts as work."""
    places = (place for pid in pids for place in (f"/proc/{pid}", *_threads(pid)))
    return any((fields := _stat(place)) is not None and fields[0] == b"D" for place in places)


def are_all_stopped(pids: Iterable[int]) -> bool:
    """Whether none of the processes does any work of its own.

    Each is stopped, gone, or waits inside the kernel for something that no signal ends, and stops when it
    leaves the kernel.
    """
    return all((fields := _stat(pid)) is None or fields[0] not in (b"R", b"S") for pid in pids)


def usage(pids: Iterable[int]) -> tuple[float, int]:
    """Return CPU seconds and bytes of memory of living processes. Shared memory counts for each of them."""
    ticks = pages = 0
    for pid in pids:
        fields = _stat(pid)
        if fields is not None:
            ticks += int(fields[11]) + int(fields[12])
            pages += int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def ticks_of(pid: int) -> tuple[int, int] | None:
    """Return the start time, and the CPU time including children that were waited for. None: it is gone."""
    fields = _stat(pid)
    return None if fields is None else (int(fields[19]), sum(map(int, fields[11:15])))


def session_ids(pids: Iterable[int]) -> dict[int, int]:
    """Return each process's session, which is the pid of its first process. No new process gets that pid."""
    stats = ((pid, _stat(pid)) for pid in pids)
    return {pid: int(fields[3]) for pid, fields in stats if fields is not None}


def start_ticks_of(pids: Iterable[int]) -> dict[int, int]:
    """Return the start time of each living process, which tells it from a later one with its pid."""
    stats = ((pid, _stat(pid)) for pid in pids)
    return {pid: int(fields[19]) for pid, fields in stats if fields is not None and not _is_zombie(fields)}


def writing_to(pids: Iterable[int], pipes: Collection[int]) -> set[int]:
    """Return the processes whose standard output or error is one of these pipes, given by inode."""
    names = {f"pipe:[{inode}]" for inode in pipes}
    return {pid for pid in pids if not names.isdisjoint(map(_link_target, (f"{pid}/fd/1", f"{pid}/fd/2")))}


def _link_target(link: str) -> str:
    try:
        return os.readlink(f"/proc/{link}")
    except OSError:
        return ""


def _stat(task: int | str) -> list[bytes] | None:
    """Read the `stat` file of a process by number, or of a thread by path."""
    place = f"/proc/{task}" if isinstance(task, int) else task
    try:
        with open(f"{place}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def marked(marks: frozenset[bytes], work: str, uid: int | None) -> set[int]:
    """Return living processes that carry all `marks` in their environment, or are `uid`'s and work below
    `work`.

    If ranks share their user with people, a working directory alone proves nothing.
    """
    return {
        pid
        for pid, places in _living_processes().items()
        if any(
            _has_marks(place, marks) or (uid is not None and _works_in(place, work, uid)) for place in places
        )
    }


def doubtful(work: str, since_ticks: int) -> set[int]:
    """Return living processes of this user, started since then, that may belong to a task without its marks.

    They work below `work` or hide their environment. Shoal's own processes hide theirs as well, and are told
    apart by their names.
    """
    return {
        pid
        for pid, places in _living_processes(since_ticks).items()
        if any(
            _works_in(place, work, os.getuid()) or (_hides(place) and not _is_shoal_process(place))
            for place in places
        )
    }


def _living_processes(since_ticks: int = 0) -> dict[int, list[str]]:
    """Return every other living process started since then, with the paths below which to read about it.

    These are its own path or, if its first thread has ended and so has no environment or directory any more,
    those of its other threads.
    """
    threads: dict[int, list[str]] = {}
    for pid in all_pids():
        fields = _stat(pid)
        if fields is None or _is_zombie(fields) or int(fields[19]) < since_ticks or pid == os.getpid():
            continue
        threads[pid] = _threads(pid) if fields[0] in ENDED else [f"/proc/{pid}"]
    return threads


def _threads(pid: int) -> list[str]:
    """Return all threads but the first."""
    with contextlib.suppress(OSError):
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task") if name != str(pid)]
    return []


def _has_marks(place: str, marks: frozenset[bytes]) -> bool:
    try:
        return marks <= set(_environment(place).split(b"\0"))
    except OSError:
        return False


def _hides(place: str) -> bool:
    """Whether it belongs to this user, who still may not read it."""
    try:
        if os.stat(place).st_uid == os.getuid():
            _environment(place)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _environment(place: str) -> bytes:
    return bounded_file.read_start(f"{place}/environ", MAX_COMMAND_LINE_BYTES)


def _is_shoal_process(place: str) -> bool:
    with contextlib.suppress(OSError):
        return b"\0-m\0shoal.runtime." in bounded_file.read_start(f"{place}/cmdline", MAX_COMMAND_LINE_BYTES)
    return False


def _works_in(place: str, work: str, uid: int) -> bool:
    try:
        directory = os.readlink(f"{place}/cwd")
        owner = os.stat(place).st_uid
    except OSError:
        return False
    return owner == uid and (directory == work or directory.startswith(work + "/"))
