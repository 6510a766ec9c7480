"""The real server on a real port, in a thread of this process, over the fake engine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.api.connections import ConnectionSlots
from shoal.api.protocol import ConnectionLimits
from shoal.api.server import make_server, open_socket
from tests.support.world import World, eventually, open_world


@contextmanager
def open_server(
    home: Path,
    limits: ConnectionLimits | None = None,
    slots: ConnectionSlots | None = None,
    keep_alive_s: float | None = None,
) -> Iterator[tuple[World, int]]:
    """A world whose application also listens; the port is the second value."""
    with open_world(home, use_uvloop=True) as world:  # as the control plane does
        listener = open_socket(world.plane.settings)
        port = listener.getsockname()[1]
        server = make_server(world.app, world.plane.settings)
        server.config.timeout_keep_alive = keep_alive_s or server.config.timeout_keep_alive  # type: ignore[assignment]
        server.limits, server.slots = limits or server.limits, slots or server.slots
        done = world.portal.start_task_soon(server.serve, [listener])
        eventually(lambda: server.started)
        try:
            yield world, port
        finally:
            server.should_exit = True
            done.result(timeout=20)


def connect(port: int, timeout_s: float = 20.0, *, receive_bytes: int | None = None) -> socket.socket:
    """A connection; `receive_bytes`: what the kernel takes in for a client that does not read."""
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_bytes is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    link.settimeout(timeout_s)
    link.connect(("127.0.0.1", port))
    return link
