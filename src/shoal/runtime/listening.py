"""Where the server of a replica listens: a port that is held for it, a socket in a folder of its own, or a
port in a network of its own, which a door leads to.

The folder lies in SHOAL_HOME under a short name, since a socket's path may not be long. Only the job's user
may enter that of a socket, and only we that of a door: whoever starts data planes reaches the server, and
nobody else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from typing import IO, Protocol

from shoal.errors import ShoalError
from shoal.runtime import removal
from shoal.runtime.confine import firewall
from shoal.runtime.ports import hold_port
from shoal.socket_file import MAX_BYTES, handed_over, pinned
from shoal.wire import Order, Probe

REMOVE_S = 5.0
BACKLOG = 1024
LOOPBACK = "127.0.0.1"
OWN_PORT = 8000
"""In a network of its own every port is free."""
CLAIMS = "sockets/ports"


class CannotListen(ShoalError):
    """The server would have nowhere to listen."""

    code = "runtime.listening"


class Listening(Protocol):
    address: str
    """As data planes are told."""
    host: str
    """As it is asked by."""
    variables: dict[str, str]
    """What the server is told."""

    def connect(self, timeout_s: float) -> socket.socket:
        """`OSError`: nobody listens there."""
        ...


class OnPort:
    """Holds the port from birth on. `OSError` when it is taken.

    `claims`: the folder that says which ports replicas of this home hold. Who asks for a port by its number
    could bind beside one of them until its server listens.
    """

    def __init__(self, address: str, port: int | None, claims: str | None = None) -> None:
        self._held = hold_port(address, port)
        self._at = (address, int(self._held.getsockname()[1]))
        try:
            self._claim = _claimed(claims, self._at[1]) if claims is not None else None
        except OSError:
            self._held.close()
            raise
        host = f"[{address}]" if ":" in address else address
        self.port = self._at[1]
        self.address = self.host = f"{host}:{self.port}"
        self.variables = dict.fromkeys(("PORT", "SHOAL_PORT"), str(self.port))
        self._is_named = port is not None
        self._server_uid: int | None = None

    def connect(self, timeout_s: float) -> socket.socket:
        return socket.create_connection(self._at, timeout_s)

    def protect(self, server_uid: int, *, is_open: bool) -> None:
        """Let this user alone answer there, and unless it `is_open`, answer Shoal's own user alone, for
        `firewall.PORT_S`. May be repeated.

        `FirewallFailed`: everybody on the node can.
        """
        self._server_uid = server_uid
        firewall.protect(self.port, server_uid, is_open=is_open, is_named=self._is_named)

    def release(self) -> None:
        """The server has ended for good. May be repeated."""
        self._held.close()
        if self._claim is not None:
            self._claim.close()
        if self._server_uid is not None:
            with contextlib.suppress(firewall.FirewallFailed):  # then the rule ends by itself
                firewall.release(self.port, self._server_uid, is_named=self._is_named)


def _claimed(folder: str, port: int) -> IO[bytes]:
    """The lock of this port, held until it is closed. `OSError`: a replica of this home has it.

    Machines may share the home, and each has its own ports; so has each container on one of them.
    """
    os.makedirs(folder, 0o700, exist_ok=True)
    where = f"{os.uname().nodename}-{os.stat('/proc/self/ns/net').st_ino}"
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.fdopen(os.open(f"{folder}/{where}-{port}", flags, 0o600), "r+b", buffering=0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise OSError(errno.EADDRINUSE, f"port {port} is taken by another replica") from None
    return lock


class OnSocket:
    """The folder is there before: whoever confines the server makes it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.address = f"unix:{path}"
        self.host = "localhost"
        self.variables = {"SHOAL_SOCKET": path}

    def connect(self, timeout_s: float) -> socket.socket:
        return _connected(self._path, timeout_s)


class BehindDoor:
    """`listener` is for the door, which somebody has to start inside, and `close` here when it has."""

    def __init__(self, path: str, port: int) -> None:
        self._path = path
        self.port = port
        self.address = f"door:{path}"
        self.host = f"localhost:{port}"
        self.variables = dict.fromkeys(("PORT", "SHOAL_PORT"), str(port))
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen(BACKLOG)

    def connect(self, timeout_s: float) -> socket.socket:
        return through(self._path, timeout_s)


def through(path: str, timeout_s: float) -> socket.socket:
    """A connection in the network behind that door. `OSError`: there is none."""
    with _connected(path, timeout_s) as link:
        fresh, address = handed_over(link)
    try:
        fresh.settimeout(timeout_s)
        fresh.connect(address)
    except OSError:
        fresh.close()
        raise
    return fresh


def _connected(path: str, timeout_s: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout_s)
        with pinned(path) as name:
            link.connect(name)
    except OSError:
        link.close()
        raise
    return link


def folder(order: Order, home: str) -> str | None:
    """Of the share's socket or door; None: it has none."""
    if order.probe is None or order.node_rank > 0:
        return None
    if not order.probe.is_socket and not order.probe.has_own_network:
        return None
    # An id begins with its moment of birth; what tells two of them apart is at the end: 60 bits.
    return f"{home}/sockets/{order.attempt_id[-12:]}"


def own_folder(order: Order, home: str) -> str | None:
    """The same, if the program itself listens there."""
    return folder(order, home) if order.probe is not None and order.probe.is_socket else None


def path_in(directory: str) -> str:
    """Of the socket. `CannotListen`: none can have so long a path."""
    path = f"{directory}/http"
    if len(os.fsencode(path)) >= MAX_BYTES:
        raise CannotListen(
            f"a socket at `{path}` would have a path of {len(os.fsencode(path))} bytes, and {MAX_BYTES - 1} "
            "is the most",
            hint="choose a shorter SHOAL_HOME, such as /var/lib/shoal, or leave out `port: socket`",
        )
    return path


def place_of(order: Order, home: str, probe: Probe, *, has_porch: bool = False) -> Listening:
    """`OSError`: the port that it needs is taken. Behind a porch, nobody but this node is to reach it."""
    directory = folder(order, home)
    if directory is None:
        return OnPort(LOOPBACK if has_porch else order.master_addr, probe.port, f"{home}/{CLAIMS}")
    path = path_in(directory)
    return OnSocket(path) if probe.is_socket else BehindDoor(path, probe.port or OWN_PORT)


def make(order: Order, home: str, uid: int | None) -> None:
    """The share's folder, if it has one, empty: that user's where its program listens there, else ours."""
    directory = folder(order, home)
    if directory is None:
        return
    path_in(directory)
    os.makedirs(os.path.dirname(directory), 0o700, exist_ok=True)
    removal.remove(directory, timeout_s=REMOVE_S)
    os.mkdir(directory, 0o700)
    if uid is not None and own_folder(order, home) is not None:
        os.chown(directory, uid, uid, follow_symlinks=False)


def give_back(order: Order, home: str) -> None:
    """Nothing of the share runs any more. May be repeated."""
    directory = folder(order, home)
    if directory is not None:
        removal.remove(directory, timeout_s=REMOVE_S)
