"""A project's caches on a node: what its programs download and compile outlives the attempt.

Each project and user has one directory, `<home>/caches/<project>-<uid>`, which projects never share. Its
content belongs to the jobs, and Shoal never trusts it. Beside it is a lock that every task of the project
holds. A task that holds the lock alone may clear what a killed process left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Mapping

from shoal.clock import BootClock
from shoal.runtime.files import cache_cleanup, removal

CLOCK = BootClock()
KEEP_S = 30 * 86400.0
"""The caches of a project are removed if it has not run on the node for this long."""
TRIM_EVERY_S = 3600.0
REMOVE_S = 2.0
MAX_TRIM_S = 20
WAIT_S, AGAIN_S = 10.0, 0.05
"""How long a job waits while another one trims the cache. After that it runs without a cache, so a huge tree
that one job made cannot delay the project's next start for longer.
"""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
HUGGING_FACE = {
    "HF_HUB_CACHE": "hub",
    "HF_XET_CACHE": "xet",
    "HF_ASSETS_CACHE": "assets",
    "HF_DATASETS_CACHE": "datasets",
    "HF_MODULES_CACHE": "modules",
    "HF_EVALUATE_CACHE": "evaluate",
}
"""The caches of Hugging Face by their folder in `HF_HOME`. They follow HF_HOME if a job sets that one.

HF_HOME itself is new in each attempt, because it holds a token and Accelerate's configuration as well. In the
cache, `accelerate config` of one job would change how all later jobs train on this node, and only there.
"""
BY_XDG = {
    "XDG_CACHE_HOME": "",
    "TORCH_HOME": "torch",
    "PIP_CACHE_DIR": "pip",
    "UV_CACHE_DIR": "uv",
    "NUMBA_CACHE_DIR": "numba",
    **{name: f"huggingface/{inner}" for name, inner in HUGGING_FACE.items()},
}
"""Variables that follow XDG_CACHE_HOME if a job sets that one. PyTorch's extensions and Matplotlib's fonts
follow it, too. TORCH_EXTENSIONS_DIR would mix the versions of Python and CUDA, and MPLCONFIGDIR would make a
job's `matplotlibrc` last.
"""
BY_HOME = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "nv",
}


def cache_variables(directory: str | None, home: str, job_variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell programs where their caches are.

    `home`: the rank's home, which is new in each attempt. `job_variables`: what the job itself sets, which is
    stronger. If it sets HOME or XDG_CACHE_HOME, the caches are there.
    """
    if directory is None or "HOME" in job_variables:
        return {}
    names = BY_HOME if "XDG_CACHE_HOME" in job_variables else {**BY_XDG, **BY_HOME}
    values = {name: f"{directory}/{inner}".rstrip("/") for name, inner in names.items()}
    if "HF_HOME" in job_variables:
        values = {name: value for name, value in values.items() if name not in HUGGING_FACE}
    elif "XDG_CACHE_HOME" not in job_variables:
        values["HF_HOME"] = f"{home}/.cache/huggingface"
    if "HUGGINGFACE_HUB_CACHE" in job_variables:  # the older name, which HF_HUB_CACHE would override
        values.pop("HF_HUB_CACHE", None)
    return {name: value for name, value in values.items() if name not in job_variables}


class ProjectCache:
    """The cache of one task, for as long as the task lives. `directory`: None if the job runs without."""

    def __init__(self, project: str, max_bytes: int, home: str, uid: int | None) -> None:
        self.directory: str | None = None
        self._max_bytes = max_bytes
        self._uid = os.geteuid() if uid is None else uid
        self._root = f"{home}/caches"
        self._lock = -1
        name = f"{project}-{self._uid}"
        if self._max_bytes > 0 and "/" not in name and not name.startswith("."):
            # A full disk or a file in the way is no reason to end a job, so it runs without a cache.
            try:
                self._open(name)
            except OSError:
                self._release_lock()

    def _open(self, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._root, 0o700)
        root = os.open(self._root, DIRECTORY)
        try:
            if os.fstat(root).st_uid != os.geteuid():
                raise PermissionError(self._root)
            self._lock = _open_lock(root, f"{name}.lock")
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=root)
            directory_fd = os.open(name, DIRECTORY, dir_fd=root)
            try:
                self._give_to_user(directory_fd)
            finally:
                os.close(directory_fd)
        finally:
            os.close(root)
        os.utime(self._lock)
        self.directory = f"{self._root}/{name}"

    def _release_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _give_to_user(self, directory_fd: int) -> None:
        """Give a new directory to the job's user. `PermissionError`: it belongs to another user."""
        if os.fstat(directory_fd).st_uid != self._uid:
            with os.scandir(directory_fd) as entries:
                if next(entries, None) is not None:
                    raise PermissionError(self._root)
            os.fchown(directory_fd, self._uid, self._uid)
        os.fchmod(directory_fd, 0o700)

    def remove_stale_locks(self) -> None:
        """Remove locks of builds that were killed, so that no rank waits for them. Call before ranks
        start.
        """
        if self.directory is not None:
            with contextlib.suppress(OSError):
                cache_cleanup.remove_stale_locks(self.directory, self._uid)

    def trim(self) -> None:
        """Remove old entries and what is over the limit, once in a while.

        Call this when nothing of the task runs any more and nothing waits for us: it blocks for some seconds.
        """
        if self.directory is None:
            return
        mark = f"{self.directory}.trimmed"
        with contextlib.suppress(OSError):
            if os.path.exists(mark) and 0 <= CLOCK.now() - os.stat(mark).st_mtime < TRIM_EVERY_S:
                return
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            os.utime(mark)
            self._trim_as_owner(is_alone=_try_lock_alone(self._lock))
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            _remove_unused(self._root)

    def _trim_as_owner(self, *, is_alone: bool) -> None:
        """Trim in a process of the job's user, which can reach nothing else, whatever the tree holds."""
        assert self.directory is not None
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            return
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(MAX_TRIM_S)
            os.chdir(self.directory)  # the user may not be allowed to pass through the directories above
            if os.geteuid() != self._uid:
                os.setgroups([])
                os.setresgid(self._uid, self._uid, self._uid)
                os.setresuid(self._uid, self._uid, self._uid)
            cache_cleanup.trim_cache(".", self._max_bytes, is_alone=is_alone)
        finally:
            os._exit(0)


def _open_lock(root: int, name: str) -> int:
    """Open the lock of that name and hold it shared."""
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=root)
        try:
            _lock_shared(fd)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == os.stat(name, dir_fd=root, follow_symlinks=False).st_ino:
                    return fd
        except TimeoutError:
            os.close(fd)
            raise
        os.close(fd)  # the process that removed the caches removed this lock as well


def _try_lock_alone(fd: int) -> bool:
    """Return whether the lock is ours alone now. If not, we hold it no longer, not even shared."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_shared(fd: int) -> None:
    """Hold the lock shared. `TimeoutError`: another job has held it alone for `WAIT_S`."""
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
    """Remove caches of projects that have not run here for long and whose lock no task holds."""
    before = CLOCK.now() - KEEP_S
    for name in os.listdir(root):
        path = f"{root}/{name}"
        if not name.endswith(".lock") or os.lstat(path).st_mtime > before:
            continue
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            directory = path.removesuffix(".lock")
            if _try_lock_alone(fd) and removal.remove(directory, timeout_s=REMOVE_S):
                removal.remove(f"{directory}.trimmed", timeout_s=REMOVE_S)
                os.unlink(path)
        finally:
            os.close(fd)
