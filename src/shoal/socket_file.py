"""Reach a server by a socket's file, where somebody else may write in the folder that it lies in.

A leaf. Who can put a link there must not have us speak to another's socket with the rights that we have.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Iterator

MAX_BYTES = 107
"""Of a path that a program can listen at: Linux has room for so many."""
PORT = re.compile(rb"[1-9][0-9]{0,4}")
MAX_PORT = 65535


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


def handed_over(link: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
    """What a door gives: a socket of the network behind it, and where to connect it to.

    `OSError`: nothing, or something else. Who is behind it may have put another door there.
    """
    said, descriptors, _, _ = socket.recv_fds(link, 16, 1)
    if not descriptors:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the door gave no socket")
    try:
        fresh = socket.socket(fileno=descriptors[0])
    except OSError:
        os.close(descriptors[0])
        raise
    is_of_its_kind = (fresh.family, fresh.type) == (socket.AF_INET, socket.SOCK_STREAM)
    if not is_of_its_kind or PORT.fullmatch(said) is None or int(said) > MAX_PORT:
        fresh.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the door gave something else than a socket")
    return fresh, ("127.0.0.1", int(said))
