"""The job's checkpoint directory as its ranks find it: opened without following links, linked where asked.

Whether it exists is the engine's business; what is in it, the job's.
"""

from __future__ import annotations

import contextlib
import errno
import os

from shoal.errors import SpecError


def open_directory(path: str) -> int:
    """The directory itself, as a descriptor that can only be mounted. `SpecError`: it is none of ours."""
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        if os.access(path, os.R_OK | os.X_OK):
            return fd
        os.close(fd)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except PermissionError as error:
        # The checkpoint of another job, which a replica serves: that job may have run as somebody else.
        raise SpecError(
            f"user {os.getuid()} may not read the checkpoint directory `{path}`, which is another user's: "
            "its owner lets others read it with `chmod -R o+rX`, from the job's directory on",
            hint=f"chmod -R o+rX {_of_job(path)}",
        ) from error
    except OSError as error:
        raise SpecError(
            f"the checkpoint directory `{path}` cannot be used: {error.strerror}",
            hint="submit the job again",
        ) from error


def _of_job(path: str) -> str:
    """The job's own folder, of which `path` is a part, or which it is."""
    above, _, rest = path.rpartition("/checkpoints/")
    return f"{above}/checkpoints/{rest.split('/')[0]}" if above else path


def link(directory: str, path: str, begins_in: str) -> None:
    """Make `path`, below the directory where ranks begin, lead to `directory`. Runs as the job's user. May be
    repeated, also by several nodes at once.

    Empty folders from the snapshot make room. `SpecError`: something else is there already.
    """
    os.chdir(begins_in)
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
    """Remove a folder that has nothing but folders. `OSError`: it has more, is none, or is not there.

    No link is followed: where `path` is one already, nothing behind it is looked at.
    """
    for _, inner, _, fd in os.fwalk(path, topdown=False):
        for name in inner:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=fd)
    os.rmdir(path)
