"""Reach a Unix socket by its file, where somebody else may write in the folder that it lies in.

A leaf. Who can put a link there must not have us speak to another's socket with the rights that we have.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

MAX_BYTES = 107
"""Of a path that a program can listen at: Linux has room for so many."""


@contextlib.contextmanager
def pinned(path: str) -> Iterator[str]:
    """A short name of the very socket at `path`, to connect to while in here. `OSError`: there is none.

    Links are not followed. Linux alone.
    """
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), path)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
