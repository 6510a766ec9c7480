"""Find and kill every process of a share, whatever it forked, and remove its cgroups.

Processes are found by cgroup, by descent and by the marks Shoal put in their environment; nothing else
is ever signalled. Whether a share is over is for the caller to know.
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
MAX_WORDS = 8 << 20
"""Bytes of a process's command line or environment. `execve` takes 6 MiB of both, but afterwards a process
may name any part of its memory, up to 128 TiB, as either (`PR_SET_MM`)."""


def kill_until_gone(
    find: Callable[[], set[int]], *, timeout_s: float, between: Callable[[], object] = lambda: None
) -> bool:
    """SIGKILL what `find` returns until it returns nothing twice in a row. False: time ran out.

    `between` runs after every round; a caller with children of its own reaps them there.
    """
    deadline = CLOCK.monotonic() + timeout_s
    clean_looks = 0
    while True:
        found = find() - {os.getpid()}
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        between()
        is_clean = not found and can_look()
        clean_looks = clean_looks + 1 if is_clean else 0
        if clean_looks == 2:
            return True
        if not is_clean and CLOCK.monotonic() > deadline:
            return False
        if not is_clean:
            time.sleep(PATIENCE_S)


def can_look() -> bool:
    """Whether files can be opened. To who has no descriptor left every process looks like none."""
    try:
        with open("/proc/self/stat", "rb"), open("/proc/self/stat", "rb"):
            return True
    except OSError:
        return False


def pids_in(cgroups: Iterable[str]) -> set[int]:
    """Every process in these cgroups, and in those that ranks made inside; one that is gone has none."""
    found: set[int] = set()
    for path in cgroups:
        for inner, _, _ in os.walk(path):
            with contextlib.suppress(OSError), open(f"{inner}/cgroup.procs", "rb") as file:
                found.update(int(line) for line in file)
    found.discard(0)
    return found


def unthrottle(path: str) -> None:
    """Let a cgroup's processes die: no new ones, no CPU quota that makes dying slow."""
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
    """Remove empty cgroups, with those that ranks made inside. False: one is still busy."""
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
    """Every living process below this one, however often it forked: orphans return to their subreaper."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        parent = parent_of(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


def all_pids() -> list[int]:
    """Every process this one can see."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def parent_of(pid: int) -> int | None:
    """The parent of a living process; None for one that is gone or a zombie."""
    fields = _stat(pid)
    return None if fields is None or _is_zombie(fields) else int(fields[1])


def _is_zombie(fields: list[bytes]) -> bool:
    """Whether nothing of it runs. Its first thread alone says little: it has ended by a SIGKILL, and the
    process is shown as a zombie, while another thread that is stuck in a driver lives on.
    """
    return fields[0] in ENDED and int(fields[17]) <= 1


def stopped(pids: Iterable[int]) -> set[int]:
    """Those that somebody stopped with a signal, or traces: they do nothing until they are continued."""
    return {pid for pid in pids if (fields := _stat(pid)) is not None and fields[0] in (b"T", b"t")}


def halted(pids: Iterable[int]) -> set[int]:
    """Those that somebody stopped with a signal. One that is traced may work between two stops."""
    return {pid for pid in pids if (fields := _stat(pid)) is not None and fields[0] == b"T"}


def are_inside(pids: Iterable[int]) -> bool:
    """Whether a thread of theirs waits inside of the kernel, most likely for a disk: that is work, too."""
    places = (place for pid in pids for place in (f"/proc/{pid}", *_threads(pid)))
    return any((fields := _stat(place)) is not None and fields[0] == b"D" for place in places)


def is_still(pids: Iterable[int]) -> bool:
    """Whether none of them does anything of its own: each is stopped, gone, or waits inside of the kernel for
    something that no signal ends, and stops when it comes out of there.
    """
    return all((fields := _stat(pid)) is None or fields[0] not in (b"R", b"S") for pid in pids)


def usage(pids: Iterable[int]) -> tuple[float, int]:
    """CPU seconds and bytes of memory of those that live. What they share is counted for each of them."""
    ticks = pages = 0
    for pid in pids:
        fields = _stat(pid)
        if fields is not None:
            ticks += int(fields[11]) + int(fields[12])
            pages += int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def ticks_of(pid: int) -> tuple[int, int] | None:
    """When it began, and what it and children that it has waited for used of processors; None: it is gone."""
    fields = _stat(pid)
    return None if fields is None else (int(fields[19]), sum(map(int, fields[11:15])))


def sessions(pids: Iterable[int]) -> dict[int, int]:
    """The session of each, by the number of who began it, which nobody gets while one of them is there."""
    found = ((pid, _stat(pid)) for pid in pids)
    return {pid: int(fields[3]) for pid, fields in found if fields is not None}


def living(pids: Iterable[int]) -> dict[int, int]:
    """Those that live, and when each began, by which it is told from another of its number."""
    found = ((pid, _stat(pid)) for pid in pids)
    return {pid: int(fields[19]) for pid, fields in found if fields is not None and not _is_zombie(fields)}


def writing_to(pids: Iterable[int], pipes: Collection[int]) -> set[int]:
    """Those whose standard output or error is one of these pipes, by their inode numbers."""
    names = {f"pipe:[{inode}]" for inode in pipes}
    return {pid for pid in pids if not names.isdisjoint(map(_leads_to, (f"{pid}/fd/1", f"{pid}/fd/2")))}


def _leads_to(link: str) -> str:
    try:
        return os.readlink(f"/proc/{link}")
    except OSError:
        return ""


def _stat(task: int | str) -> list[bytes] | None:
    """Of a process by its number, or of a thread by its place."""
    place = f"/proc/{task}" if isinstance(task, int) else task
    try:
        with open(f"{place}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def marked(marks: frozenset[bytes], work: str, uid: int | None) -> set[int]:
    """Living processes that carry all `marks` in their environment, or are `uid`'s and work below `work`.

    A working directory alone proves nothing where ranks share their user with people.
    """
    return {
        pid
        for pid, places in _living().items()
        if any(
            _has_marks(place, marks) or (uid is not None and _works_in(place, work, uid)) for place in places
        )
    }


def doubtful(work: str, since_ticks: int) -> set[int]:
    """Living processes of this user, begun since then, that may be a share's though they carry no marks: they
    work below `work`, or hide their environment. Shoal's own, which do that, are told by their names.
    """
    return {
        pid
        for pid, places in _living(since_ticks).items()
        if any(
            _works_in(place, work, os.getuid()) or (_hides(place) and not _is_shoals(place))
            for place in places
        )
    }


def _living(since_ticks: int = 0) -> dict[int, list[str]]:
    """Every living process but this one, begun since then, and where to read about it: below its id, or, as a
    first thread that has ended has neither environment nor directory any more, below its other threads.
    """
    found: dict[int, list[str]] = {}
    for pid in all_pids():
        fields = _stat(pid)
        if fields is None or _is_zombie(fields) or int(fields[19]) < since_ticks or pid == os.getpid():
            continue
        found[pid] = _threads(pid) if fields[0] in ENDED else [f"/proc/{pid}"]
    return found


def _threads(pid: int) -> list[str]:
    """All but the first."""
    with contextlib.suppress(OSError):
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task") if name != str(pid)]
    return []


def _has_marks(place: str, marks: frozenset[bytes]) -> bool:
    try:
        return marks <= set(_environment(place).split(b"\0"))
    except OSError:
        return False


def _hides(place: str) -> bool:
    """Whether it is this user's, who may not read it all the same."""
    try:
        if os.stat(place).st_uid == os.getuid():
            _environment(place)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _environment(place: str) -> bytes:
    return bounded_file.read_start(f"{place}/environ", MAX_WORDS)


def _is_shoals(place: str) -> bool:
    with contextlib.suppress(OSError):
        return b"\0-m\0shoal.runtime." in bounded_file.read_start(f"{place}/cmdline", MAX_WORDS)
    return False


def _works_in(place: str, work: str, uid: int) -> bool:
    try:
        directory = os.readlink(f"{place}/cwd")
        owner = os.stat(place).st_uid
    except OSError:
        return False
    return owner == uid and (directory == work or directory.startswith(work + "/"))
