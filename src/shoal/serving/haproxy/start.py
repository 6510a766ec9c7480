"""A folder, a program and room for connections: what HAProxy needs before it can be started."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from shoal.serving.haproxy.files import Files
from shoal.serving.haproxy.plane import HaproxyPlane
from shoal.serving.haproxy.render import Place

SPARE_FILES = 200
"""Beside two for each connection: servers' idle connections, checks, its own."""
SYSTEM = "/usr/local/sbin:/usr/sbin:/sbin"
"""Where Debian has it, which is in few people's PATH."""


def find_haproxy(program: str = "haproxy") -> str | None:
    """Its path."""
    return shutil.which(program) or shutil.which(program, path=SYSTEM)


@contextlib.asynccontextmanager
async def running(
    program: str,
    listener: socket.socket,
    *,
    tls: tuple[Path, Path] | None = None,
    num_threads: int = 0,
    max_connections: int = 10_000,
) -> AsyncIterator[HaproxyPlane]:
    """A data plane that is not started yet, with a folder of its own while this lasts."""
    place = Place(
        listener=listener.fileno(),
        max_connections=min(max_connections, _room()),
        num_threads=num_threads,
        has_tls=tls is not None,
    )
    with tempfile.TemporaryDirectory(prefix="shoal-haproxy-") as folder:
        yield HaproxyPlane(Files(program, Path(folder), place, tls))


def _room() -> int:
    """Connections of callers for which this process and its children may open enough files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = os.sysconf("SC_OPEN_MAX")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(100, (hard - SPARE_FILES) // 2)
