"""Where the server of a replica listens: a port that is reserved for it, a socket in a folder of its own, or
a port in a network namespace of its own.

The folder is in SHOAL_HOME under a short name, because a socket's path may not be long. Only the job's user
may enter the folder of a program's socket, and only Shoal's user that of a socket broker. So only the user
that starts data planes reaches the server.

The socket broker (`serve`) runs in a network namespace as the job's user, and hands sockets of that network
to processes that may connect to it. It connects to nothing and copies nothing. The data plane connects the
socket itself, and then talks to the server directly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from typing import IO, Protocol

from shoal.errors import ShoalError
from shoal.local_sockets import MAX_SOCKET_PATH, pinned_socket, receive_socket
from shoal.runtime.confine import firewall
from shoal.runtime.files import removal
from shoal.runtime.process.network import hold_port
from shoal.wire import ProbeSpec, TaskSpec

REMOVE_S = 5.0
BACKLOG = 1024
LOOPBACK = "127.0.0.1"
OWN_PORT = 8000
"""In a network namespace of its own, every port is free."""
PORT_CLAIMS = "sockets/ports"


class CannotListen(ShoalError):
    """The server has no place to listen."""

    code = "runtime.listening"


class ServerListener(Protocol):
    address: str
    """The address that data planes get."""
    host: str
    """The host name in requests to the server."""
    variables: dict[str, str]
    """The variables that tell the server where to listen."""

    def connect(self, timeout_s: float) -> socket.socket:
        """Connect to the server. `OSError`: nothing listens there."""
        ...


class PortListener:
    """Reserves the port from the start. `OSError`: the port is taken.

    `claims`: the folder that records which ports replicas of this home hold. Without it, a replica that asks
    for a port by number could bind beside another one whose server does not listen at that moment.
    """

    def __init__(self, address: str, port: int | None, claims: str | None = None) -> None:
        self._bound_socket = hold_port(address, port)
        self._endpoint = (address, int(self._bound_socket.getsockname()[1]))
        try:
            self._claim = _take_port_claim(claims, self._endpoint[1]) if claims is not None else None
        except OSError:
            self._bound_socket.close()
            raise
        host = f"[{address}]" if ":" in address else address
        self.port = self._endpoint[1]
        self.address = self.host = f"{host}:{self.port}"
        self.variables = dict.fromkeys(("PORT", "SHOAL_PORT"), str(self.port))
        self._is_named = port is not None
        self._server_uid: int | None = None

    def connect(self, timeout_s: float) -> socket.socket:
        return socket.create_connection(self._endpoint, timeout_s)

    def protect(self, server_uid: int, *, is_open: bool) -> None:
        """Let only this user answer at the port for `firewall.PORT_S`. May be repeated.

        Unless `is_open`, only Shoal's own user may connect to it. `FirewallFailed`: every user on the node
        can.
        """
        self._server_uid = server_uid
        firewall.protect(self.port, server_uid, is_open=is_open, is_named=self._is_named)

    def release(self) -> None:
        """Give the port up, because the server has ended for good. May be repeated."""
        self._bound_socket.close()
        if self._claim is not None:
            self._claim.close()
        if self._server_uid is not None:
            with contextlib.suppress(firewall.FirewallFailed):  # the rule also expires by itself
                firewall.release(self.port, self._server_uid, is_named=self._is_named)


def _take_port_claim(folder: str, port: int) -> IO[bytes]:
    """Take the lock of this port, held until it is closed. `OSError`: a replica of this home has it.

    Machines may share the home, and each has ports of its own. So has each container on one machine.
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


class SocketListener:
    """A socket in a folder that exists already: the code that confines the server makes it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.address = f"unix:{path}"
        self.host = "localhost"
        self.variables = {"SHOAL_SOCKET": path}

    def connect(self, timeout_s: float) -> socket.socket:
        return _connect_to_file(self._path, timeout_s)


class NamespaceListener:
    """A port in a private network. `listener` is the socket for the broker.

    The caller starts the broker inside the network, and then closes `listener` here.
    """

    def __init__(self, path: str, port: int) -> None:
        self._path = path
        self.port = port
        self.address = f"broker:{path}"
        self.host = f"localhost:{port}"
        self.variables = dict.fromkeys(("PORT", "SHOAL_PORT"), str(port))
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen(BACKLOG)

    def connect(self, timeout_s: float) -> socket.socket:
        return connect_through_broker(self._path, timeout_s)


def connect_through_broker(path: str, timeout_s: float) -> socket.socket:
    """Return a connection in the network of that broker. `OSError`: there is none."""
    with _connect_to_file(path, timeout_s) as link:
        fresh, address = receive_socket(link)
    try:
        fresh.settimeout(timeout_s)
        fresh.connect(address)
    except OSError:
        fresh.close()
        raise
    return fresh


def _connect_to_file(path: str, timeout_s: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout_s)
        with pinned_socket(path) as name:
            link.connect(name)
    except OSError:
        link.close()
        raise
    return link


def socket_folder(task_spec: TaskSpec, home: str) -> str | None:
    """Return the folder of the task's socket or broker. None: it has none."""
    probe = task_spec.program.probe
    if probe is None or task_spec.ranks.node_rank > 0:
        return None
    if not probe.is_socket and not probe.has_own_network:
        return None
    # An id starts with its time of creation. The last 12 characters, 60 bits, tell two ids apart.
    return f"{home}/sockets/{task_spec.identity.attempt_id[-12:]}"


def program_socket_folder(task_spec: TaskSpec, home: str) -> str | None:
    """Return that folder if the program itself listens there."""
    probe = task_spec.program.probe
    return socket_folder(task_spec, home) if probe is not None and probe.is_socket else None


def socket_path(directory: str) -> str:
    """Return the path of the socket. `CannotListen`: the path is too long."""
    path = f"{directory}/http"
    if len(os.fsencode(path)) >= MAX_SOCKET_PATH:
        raise CannotListen(
            f"a socket at `{path}` would have a path of {len(os.fsencode(path))} bytes, "
            f"and {MAX_SOCKET_PATH - 1} "
            "is the most",
            hint="choose a shorter SHOAL_HOME, such as /var/lib/shoal, or leave out `port: socket`",
        )
    return path


def listener_for(
    task_spec: TaskSpec, home: str, probe: ProbeSpec, *, has_sidecar: bool = False
) -> ServerListener:
    """Make the listener. `OSError`: the port is taken. Behind a sidecar, only this node may reach it."""
    directory = socket_folder(task_spec, home)
    if directory is None:
        return PortListener(
            LOOPBACK if has_sidecar else task_spec.ranks.master_addr, probe.port, f"{home}/{PORT_CLAIMS}"
        )
    path = socket_path(directory)
    return SocketListener(path) if probe.is_socket else NamespaceListener(path, probe.port or OWN_PORT)


def make_socket_folder(task_spec: TaskSpec, home: str, uid: int | None) -> None:
    """Make the task's folder, if it has one, empty. It belongs to `uid` if its program listens there."""
    directory = socket_folder(task_spec, home)
    if directory is None:
        return
    socket_path(directory)
    os.makedirs(os.path.dirname(directory), 0o700, exist_ok=True)
    removal.remove(directory, timeout_s=REMOVE_S)
    os.mkdir(directory, 0o700)
    if uid is not None and program_socket_folder(task_spec, home) is not None:
        os.chown(directory, uid, uid, follow_symlinks=False)


def remove_socket_folder(task_spec: TaskSpec, home: str) -> None:
    """Remove the folder. Nothing of the task may run any more. May be repeated."""
    directory = socket_folder(task_spec, home)
    if directory is not None:
        removal.remove(directory, timeout_s=REMOVE_S)


def serve(listener_fd: int, port: int) -> None:
    """Send each client a fresh socket and the number of the server's port, until killed."""
    listener = socket.socket(fileno=listener_fd)
    while True:
        link, _ = listener.accept()
        fresh = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with link, fresh, contextlib.suppress(OSError):  # the client may be gone
            socket.send_fds(link, [b"%d" % port], [fresh.fileno()])
