"""What a supervisor hands its sidecar: a socket to listen on, and this struct on standard input."""

from __future__ import annotations

import os

import msgspec

from shoal.wire import TlsIdentity

LISTENER_FD = 3
"""The descriptor of that socket in the sidecar."""


class SidecarConfig(msgspec.Struct, frozen=True, kw_only=True):
    tls_identity: TlsIdentity
    server: str
    """Where the server listens: `127.0.0.1:30000`, `unix:/PATH` or `broker:/PATH` (a socket broker)."""
    supervisor_pid: int
    """The supervisor's process: the sidecar dies with it."""


def memory_file(config: SidecarConfig) -> int:
    """Return the config as a file in memory. The caller closes it."""
    fd = os.memfd_create("sidecar", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(msgspec.json.encode(config))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
