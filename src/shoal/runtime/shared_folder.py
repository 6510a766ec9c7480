"""One working folder for all nodes of an attempt, in the directory of the job that they all have.

Each node unpacks the job's files beside it and then puts them in its place with one rename: the first one has
made the folder, the others throw theirs away. So no node waits for another, a node that dies at it leaves
nothing half done, and a share in place of a lost one finds the folder as it is. Each attempt has its own: a
node of an older attempt that still writes disturbs nobody. Runs as the job's user.
"""

from __future__ import annotations

import contextlib
import errno
import os

from shoal.errors import SpecError
from shoal.runtime import removal
from shoal.runtime.unpack import unpack

MADE = ".shoal-made"
"""In every such folder, so that none is ever empty: an empty one could be taken away by a rename."""
REMOVE_S = 30.0


def make(fd: int | None, digest: str | None, final: str) -> None:
    """See that the attempt's folder is there, with the files of the open archive if there is one. May be run
    by all nodes at once, and again. `SpecError`: it cannot be made.
    """
    above, attempt_id = os.path.split(final)
    os.makedirs(above, mode=0o700, exist_ok=True)
    if not os.path.isfile(f"{final}/{MADE}"):
        _make(fd, digest, above, final)
    if not os.path.isfile(f"{final}/{MADE}"):
        raise SpecError(f"the folder that nodes share cannot be made: {final} is something else")
    for name in os.listdir(above):
        # Of older attempts, also what they left half done: ids sort by birth.
        if name.removeprefix(".") < attempt_id:
            removal.remove(f"{above}/{name}", timeout_s=REMOVE_S)


def _make(fd: int | None, digest: str | None, above: str, final: str) -> None:
    draft = f"{above}/.{os.path.basename(final)}.{os.urandom(8).hex()}"
    os.mkdir(draft, 0o700)
    try:
        if fd is not None and digest is not None:
            unpack(fd, digest, draft)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(f"{draft}/{MADE}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        os.rename(draft, final)
    except OSError as error:
        # Another node was first; whether that is so, the caller looks. Over NFS a rename that was done may
        # be told as one that failed.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise SpecError(f"the folder that nodes share cannot be made: {error}") from error
    finally:
        removal.remove(draft, timeout_s=REMOVE_S)
