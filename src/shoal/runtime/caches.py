"""A project's caches on a node: what its programs download and compile outlives the attempt that did.

One directory for each project and user, never shared between projects: `<home>/caches/<project>-<uid>`. Its
content belongs to the jobs, and nothing of ours believes it. Beside it lies a lock, which every share of the
project holds: a share that holds it alone may clear what a killed process has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Mapping

from shoal.clock import BootClock
from shoal.runtime import build_locks, cache_trim, removal
from shoal.wire import Order

CLOCK = BootClock()
KEEP_S = 30 * 86400.0
"""The caches of a project that has not run on the node for so long are removed."""
TRIM_EVERY_S = 3600.0
REMOVE_S = 2.0
MAX_TRIM_S = 20
WAIT_S, AGAIN_S = 10.0, 0.05
"""How long a job waits while another one trims the cache. Afterwards it runs without a cache."""
"""The tree may be anything: nothing that a job made keeps its project's next start waiting for longer."""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
BY_XDG = {
    "XDG_CACHE_HOME": "",
    "HF_HOME": "huggingface",
    "TORCH_HOME": "torch",
    "PIP_CACHE_DIR": "pip",
    "UV_CACHE_DIR": "uv",
    "NUMBA_CACHE_DIR": "numba",
    "MPLCONFIGDIR": "matplotlib",
}
"""What follows XDG_CACHE_HOME where a job sets that. PyTorch's extensions do, too: they lie below it by
version of Python and CUDA, which TORCH_EXTENSIONS_DIR would mix."""
BY_HOME = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "nv",
}


def variables(directory: str | None, own: Mapping[str, str]) -> dict[str, str]:
    """Where programs find their caches. `own`: what the job sets itself, which is stronger: a HOME or an
    XDG_CACHE_HOME of its own means that the caches are there.
    """
    if directory is None or "HOME" in own:
        return {}
    names = BY_HOME if "XDG_CACHE_HOME" in own else {**BY_XDG, **BY_HOME}
    return {name: f"{directory}/{inner}".rstrip("/") for name, inner in names.items() if name not in own}


class ProjectCache:
    """Of one share, for as long as it lives. `directory`: None where there is none, and jobs do without."""

    def __init__(self, order: Order, home: str, uid: int | None) -> None:
        self.directory: str | None = None
        self._max_bytes = order.cache_max_bytes
        self._uid = os.geteuid() if uid is None else uid
        self._root = f"{home}/caches"
        self._lock = -1
        name = f"{order.project}-{self._uid}"
        if self._max_bytes > 0 and "/" not in name and not name.startswith("."):
            # A full disk, a file in its place: a cache is no reason to end a job.
            try:
                self._open(name)
            except OSError:
                self._let_go()

    def _open(self, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._root, 0o700)
        root = os.open(self._root, DIRECTORY)
        try:
            if os.fstat(root).st_uid != os.geteuid():
                raise PermissionError(self._root)
            self._lock = _hold(root, f"{name}.lock")
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=root)
            own = os.open(name, DIRECTORY, dir_fd=root)
            try:
                self._make_own(own)
            finally:
                os.close(own)
        finally:
            os.close(root)
        os.utime(self._lock)
        self.directory = f"{self._root}/{name}"

    def _let_go(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _make_own(self, own: int) -> None:
        """Give a new directory to the job's user. `PermissionError`: it is another user's."""
        if os.fstat(own).st_uid != self._uid:
            with os.scandir(own) as entries:
                if next(entries, None) is not None:
                    raise PermissionError(self._root)
            os.fchown(own, self._uid, self._uid)
        os.fchmod(own, 0o700)

    def clear_builds(self) -> None:
        """Have no rank wait for a build that was killed. Call it when ranks are about to begin."""
        if self.directory is not None:
            with contextlib.suppress(OSError):
                build_locks.clear(self.directory, self._uid)

    def trim(self) -> None:
        """Remove what is old or too much, now and then. Call it when nothing of the share runs any more, and
        nobody waits for us: it blocks for some seconds.
        """
        if self.directory is None:
            return
        mark = f"{self.directory}.trimmed"
        with contextlib.suppress(OSError):
            if os.path.exists(mark) and 0 <= CLOCK.now() - os.stat(mark).st_mtime < TRIM_EVERY_S:
                return
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            os.utime(mark)
            self._trim_as_owner(is_alone=_try_alone(self._lock))
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            _remove_unused(self._root)

    def _trim_as_owner(self, *, is_alone: bool) -> None:
        """In a process of the job's user: whatever the job's tree is, nothing else is within reach."""
        assert self.directory is not None
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            return
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(MAX_TRIM_S)
            os.chdir(self.directory)  # what lies above it is not for that user to pass through
            if os.geteuid() != self._uid:
                os.setgroups([])
                os.setresgid(self._uid, self._uid, self._uid)
                os.setresuid(self._uid, self._uid, self._uid)
            cache_trim.trim(".", self._max_bytes, is_alone=is_alone)
        finally:
            os._exit(0)


def _hold(root: int, name: str) -> int:
    """The lock of that name, held with the others."""
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=root)
        try:
            _share(fd)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == os.stat(name, dir_fd=root, follow_symlinks=False).st_ino:
                    return fd
        except TimeoutError:
            os.close(fd)
            raise
        os.close(fd)  # who removed the caches took this one along


def _try_alone(fd: int) -> bool:
    """Whether the lock is ours alone now. If it is not, we have none: what was held before is let go, too."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _share(fd: int) -> None:
    """Hold the lock with the others. `TimeoutError`: another job has had it alone for `WAIT_S`."""
    deadline = CLOCK.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if CLOCK.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(AGAIN_S)
        else:
            return


def _remove_unused(root: str) -> None:
    """Caches of projects that have not run here for long: nobody holds their lock."""
    before = CLOCK.now() - KEEP_S
    for name in os.listdir(root):
        path = f"{root}/{name}"
        if not name.endswith(".lock") or os.lstat(path).st_mtime > before:
            continue
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            own = path.removesuffix(".lock")
            if _try_alone(fd) and removal.remove(own, timeout_s=REMOVE_S):
                removal.remove(f"{own}.trimmed", timeout_s=REMOVE_S)
                os.unlink(path)
        finally:
            os.close(fd)
