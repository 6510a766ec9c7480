"""The job's checkpoint directory as its ranks find it: opened without following links, linked where asked.

Whether it exists is the engine's business; what is in it, the job's.
"""

from __future__ import annotations

import contextlib
import os

from shoal.errors import SpecError


def open_directory(path: str) -> int:
    """The directory itself, as a descriptor that can only be mounted. `SpecError`: it is not one."""
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise SpecError(
            f"the checkpoint directory `{path}` cannot be used: {error.strerror}",
            hint="submit the job again",
        ) from error


def link(directory: str, path: str) -> None:
    """Make `path`, below the current directory, lead to `directory`. Runs as the job's user.

    An empty folder from the snapshot makes room. `SpecError`: something else is there already.
    """
    above = os.path.dirname(path)
    if above:
        os.makedirs(above, exist_ok=True)
    with contextlib.suppress(OSError):
        os.rmdir(path)
    try:
        os.symlink(directory, path)
    except FileExistsError as error:
        raise SpecError(
            f"`{path}` is in the snapshot of the workdir, where checkpoints should be; move it away, "
            "or give `checkpoint` another path"
        ) from error
