"""What a supervisor hands the porch that it starts: a socket to listen on, and words on standard input."""

from __future__ import annotations

import os

import msgspec

from shoal.wire import Papers

LISTENER = 3
"""The number of the socket in the porch."""


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    papers: Papers
    server: str
    """Where the server listens: `127.0.0.1:30000`, `unix:/PATH` or `door:/PATH`."""
    supervisor: int
    """Its process, to die with."""


def in_memory(brief: Brief) -> int:
    """It as a file that is on no disk, for the caller to close."""
    fd = os.memfd_create("porch", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(msgspec.json.encode(brief))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
