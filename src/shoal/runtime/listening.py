"""Where the server of a replica listens: a port that is held for it, or a socket in a folder of its own.

The folder lies in SHOAL_HOME under a short name, since a socket's path may not be long, and only the job's
user may enter it: whoever starts data planes can reach the server, and nobody else.
"""

from __future__ import annotations

import os
import socket
from typing import Protocol

from shoal.errors import ShoalError
from shoal.runtime import removal
from shoal.runtime.ports import hold_port
from shoal.socket_file import MAX_BYTES, pinned
from shoal.wire import Order, Probe

REMOVE_S = 5.0


class CannotListen(ShoalError):
    """The server would have nowhere to listen."""

    code = "runtime.listening"


class Listening(Protocol):
    address: str
    """As data planes are told."""
    variables: dict[str, str]
    """What the server is told."""

    def connect(self, timeout_s: float) -> socket.socket:
        """`OSError`: nobody listens there."""
        ...


class OnPort:
    """Holds the port from birth on. `OSError` when it is taken."""

    def __init__(self, address: str, port: int | None) -> None:
        self._held = hold_port(address, port)
        self._at = (address, int(self._held.getsockname()[1]))
        host = f"[{address}]" if ":" in address else address
        self.port = self._at[1]
        self.address = f"{host}:{self.port}"
        self.variables = dict.fromkeys(("PORT", "SHOAL_PORT"), str(self.port))

    def connect(self, timeout_s: float) -> socket.socket:
        return socket.create_connection(self._at, timeout_s)


class OnSocket:
    """The folder is there before: whoever confines the server makes it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.address = f"unix:{path}"
        self.variables = {"SHOAL_SOCKET": path}

    def connect(self, timeout_s: float) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(timeout_s)
            with pinned(self._path) as name:
                link.connect(name)
        except OSError:
            link.close()
            raise
        return link


def folder(order: Order, home: str) -> str | None:
    """Of the share's socket; None: it has none."""
    if order.probe is None or not order.probe.is_socket or order.node_rank > 0:
        return None
    # An id begins with its moment of birth; what tells two of them apart is at the end: 60 bits.
    return f"{home}/sockets/{order.attempt_id[-12:]}"


def path_in(directory: str) -> str:
    """Where the server is to listen. `CannotListen`: no socket can have so long a path."""
    path = f"{directory}/http"
    if len(os.fsencode(path)) >= MAX_BYTES:
        raise CannotListen(
            f"a socket at `{path}` would have a path of {len(os.fsencode(path))} bytes, and {MAX_BYTES - 1} "
            "is the most",
            hint="choose a shorter SHOAL_HOME, such as /var/lib/shoal, or leave out `port: socket`",
        )
    return path


def place_of(order: Order, home: str, probe: Probe) -> Listening:
    """`OSError`: the port that it needs is taken."""
    directory = folder(order, home)
    if directory is not None:
        return OnSocket(path_in(directory))
    return OnPort(order.master_addr, probe.port)


def make(directory: str, uid: int | None) -> None:
    """An empty folder for that user alone."""
    path_in(directory)
    os.makedirs(os.path.dirname(directory), 0o700, exist_ok=True)
    removal.remove(directory, timeout_s=REMOVE_S)
    os.mkdir(directory, 0o700)
    if uid is not None:
        os.chown(directory, uid, uid, follow_symlinks=False)


def give_back(order: Order, home: str) -> None:
    """Nothing of the share runs any more. May be repeated."""
    directory = folder(order, home)
    if directory is not None:
        removal.remove(directory, timeout_s=REMOVE_S)
