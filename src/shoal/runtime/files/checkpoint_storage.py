"""Where the checkpoints of a job lie on a node: in memory, in its directory, and when it last saved.

The memory folder outlives the ranks, so that the next rank group finds it, and is removed with the task. In a
sandbox it is the sandbox's own and ends with that.

The job's checkpoint directory is opened without following links, and linked to where the job wants it. The
engine sees to it that the directory exists. What is in it is the job's business.

`LastSave` finds the newest file in the checkpoint directory that no process is writing. It looks from a
thread of its own, because a file system that hangs must not keep the lease from being renewed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading

from shoal.clock import Clock
from shoal.errors import SpecError
from shoal.runtime.files import removal
from shoal.wire import TaskIdentity

MEMORY = "/dev/shm"  # noqa: S108 - below it is a folder that only this user may enter
REMOVE_S = 5.0


def memory_folder(uid: int, attempt_id: str, node: str) -> str:
    """Return the folder of one attempt on one node.

    Nodes that are simulated on one machine have folders of their own, so removing one never hits another's.
    """
    return os.path.join(MEMORY, f"shoal-{uid}-{attempt_id}{f'-{node}' if node else ''}")


def remove_memory_folder(identity: TaskIdentity, uid: int | None) -> None:
    """Remove what this task's ranks left in memory, also those that ran as user `uid`. May be repeated.

    None of the ranks may run any more.
    """
    for owner in {os.getuid(), uid if uid is not None else os.getuid()}:
        removal.remove(memory_folder(owner, identity.attempt_id, identity.node), timeout_s=REMOVE_S)


def open_directory(path: str) -> int:
    """Open the directory as a descriptor that can only be mounted. `SpecError`: it cannot be used."""
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        if os.access(path, os.R_OK | os.X_OK):
            return fd
        os.close(fd)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except PermissionError as error:
        # A replica may serve the checkpoint of another job, which may have run as another user.
        raise SpecError(
            f"user {os.getuid()} may not read the checkpoint directory `{path}`, which is another user's: "
            "its owner lets others read it with `chmod -R o+rX`, from the job's directory on",
            hint=f"chmod -R o+rX {_job_folder(path)}",
        ) from error
    except OSError as error:
        raise SpecError(
            f"the checkpoint directory `{path}` cannot be used: {error.strerror}",
            hint="submit the job again",
        ) from error


def _job_folder(path: str) -> str:
    """Return the job's own folder, which is `path` or a folder above it."""
    above, _, rest = path.rpartition("/checkpoints/")
    return f"{above}/checkpoints/{rest.split('/')[0]}" if above else path


def link(directory: str, path: str, script_directory: str) -> None:
    """Make `path`, below the directory where ranks start, a link to `directory`. Runs as the job's user.

    May be repeated, also by several nodes at once. Empty folders from the snapshot make way. `SpecError`:
    some other file is there already.
    """
    os.chdir(script_directory)
    above = os.path.dirname(path)
    if above:
        os.makedirs(above, exist_ok=True)
    with contextlib.suppress(OSError):
        _remove_empty(path)
    try:
        os.symlink(directory, path)
    except FileExistsError as error:
        if os.path.islink(path) and os.readlink(path) == directory:
            return
        raise SpecError(
            f"`{path}` is in the snapshot of the workdir, where checkpoints should be; move it away, "
            "or give `checkpoint` another path"
        ) from error


def _remove_empty(path: str) -> None:
    """Remove a folder that holds only folders. `OSError`: it holds more, is not a folder, or is missing.

    No link is followed: if `path` is a link already, nothing behind it is touched.
    """
    for _, inner, _, fd in os.fwalk(path, topdown=False):
        for name in inner:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=fd)
    os.rmdir(path)


EVERY_S = 20.0
SETTLED_S = 20.0
"""A file that changed within this time may be half a checkpoint, so it does not count as saved."""
MAX_ENTRIES = 4096
MAX_DEPTH = 3


class LastSave:
    def __init__(self, directory: str, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._saved_at: float | None = None

    def start(self) -> None:
        """Start to look. Call once."""
        threading.Thread(target=self._run, name="saves", daemon=True).start()

    @property
    def age_s(self) -> float | None:
        """Return the age of the last save, because clocks differ. None: no save was seen."""
        return None if self._saved_at is None else max(self._clock.now() - self._saved_at, 0.0)

    def check(self) -> None:
        newest = newest_write(self._directory)
        if newest is not None and newest <= self._clock.now() - SETTLED_S:
            self._saved_at = newest

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self.check()
            pause.wait(EVERY_S)


def newest_write(directory: str) -> float | None:
    """Return when any file there was last written. Looks at a limited number of files, and follows no
    link.
    """
    newest, left, folders = -1.0, MAX_ENTRIES, [(directory, 0)]
    while folders and left > 0:
        path, depth = folders.pop()
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                left -= 1
                if left <= 0:
                    break
                if entry.is_dir(follow_symlinks=False):
                    if depth < MAX_DEPTH:
                        folders.append((entry.path, depth + 1))
                elif entry.is_file(follow_symlinks=False):
                    newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return newest if newest >= 0 else None
