"""The real server on a real port, in a thread of this process, over the fake engine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.api.server import make_server, open_socket
from tests.support.world import World, eventually, open_world


@contextmanager
def open_server(home: Path) -> Iterator[tuple[World, int]]:
    """A world whose application also listens; the port is the second value."""
    with open_world(home) as world:
        listener = open_socket(world.plane.settings)
        port = listener.getsockname()[1]
        server = make_server(world.app, world.plane.settings)
        done = world.portal.start_task_soon(server.serve, [listener])
        eventually(lambda: server.started)
        try:
            yield world, port
        finally:
            server.should_exit = True
            done.result(timeout=20)


def connect(port: int, timeout_s: float = 20.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
