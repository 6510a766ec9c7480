"""The door of a network of its own: gives whoever may come to it sockets that belong to that network.

Runs inside, as the job's user. Connects to nothing and copies nothing: the data plane connects the socket
itself, and talks to the server without anybody in between.
"""

from __future__ import annotations

import contextlib
import socket


def serve(listener_fd: int, port: int) -> None:
    """Until killed. With each socket goes the number of the server's port."""
    listener = socket.socket(fileno=listener_fd)
    while True:
        link, _ = listener.accept()
        fresh = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with link, fresh, contextlib.suppress(OSError):  # who asked may be gone
            socket.send_fds(link, [b"%d" % port], [fresh.fileno()])
