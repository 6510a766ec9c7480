"""One connection through a sidecar: the handshake, the connection to the server, then bytes both ways.

Nothing here blocks. Each direction holds at most one chunk, so the tunnel does not read for a side that does
not read. It passes an orderly end on as an end, and a break as a break.

`ServerConnection` connects to the server by its port, by its socket's file, or through a socket broker.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from select import EPOLLIN, EPOLLOUT

from shoal.local_sockets import pinned_socket, receive_socket
from shoal.sidecar_tls import ALPN, READY_BYTE, is_data_plane


class ServerConnection:
    """One connection in the making. If any method raises `OSError`, it failed and nothing is left open.

    Wait for `fd` until it can be written, or if `is_at_broker`, until it can be read.
    """

    def __init__(self, address: str) -> None:
        self.is_at_broker = address.startswith("broker:")
        self.is_connected = False
        if address.startswith(("unix:", "broker:")):
            self._link = _unconnected(socket.AF_UNIX)
            self._connect_by_file(address.partition(":")[2])
            self.is_connected = not self.is_at_broker
        else:
            host, _, port = address.rpartition(":")
            self._link = _unconnected(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._connect((host.strip("[]"), int(port)))

    @property
    def fd(self) -> int:
        return self._link.fileno()

    def continue_connecting(self) -> None:
        """Go on after `fd` was ready. `is_connected` says whether the connection is complete."""
        if not self.is_at_broker:
            number = self._link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self.close()
                raise OSError(number, os.strerror(number))
            self.is_connected = True
            return
        try:
            fresh, address = receive_socket(self._link)
        finally:
            self.close()
        self.is_at_broker = False
        self._link = fresh
        self._link.setblocking(False)  # noqa: FBT003 - the standard library's own
        self._connect(address)

    def detach(self) -> socket.socket:
        """Return the connection. The caller closes it."""
        if self._link.family != socket.AF_UNIX:
            self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._link

    def close(self) -> None:
        self._link.close()

    def _connect(self, address: tuple[str, int]) -> None:
        number = self._link.connect_ex(address)
        if number not in (0, errno.EINPROGRESS):
            self.close()
            raise OSError(number, os.strerror(number))

    def _connect_by_file(self, path: str) -> None:
        # The program owns the folder and may have put any link there, so no link is followed.
        try:
            with pinned_socket(path) as name:
                self._link.connect(name)  # connects at once or fails: EAGAIN is a full backlog
        except OSError:
            self.close()
            raise


def _unconnected(family: int) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)  # noqa: FBT003 - the standard library's own
    return connection


PIECE = 1 << 16
_WANTS = {ssl.SSLWantReadError: EPOLLIN, ssl.SSLWantWriteError: EPOLLOUT}
_LATER = tuple(_WANTS)


class TunnelBroken(Exception):
    """The tunnel has failed. Both sides must see a break."""


class Tunnel:
    """`wanted` says, after every `work`, what to wait for by descriptor. Empty: the tunnel is over."""

    __slots__ = (
        "_is_caller_done",
        "_is_end_told",
        "_is_server_done",
        "_is_server_told",
        "_link",
        "_outside",
        "_owed",
        "_reach",
        "_server",
        "_to_caller",
        "_to_server",
        "deadline",
        "is_stranger",
        "wanted",
    )

    def __init__(self, link: ssl.SSLSocket, server: str, deadline: float) -> None:
        self._link = link
        self._outside = link.fileno()
        self._server = server
        self._reach: ServerConnection | socket.socket | None = None
        self._to_server = self._to_caller = b""
        self._owed = 0
        """The event that TLS waits for before it takes what is held for the caller."""
        self._is_caller_done = self._is_server_told = False
        self._is_server_done = self._is_end_told = False
        self.is_stranger = True
        """Whether the caller has not proved to be a data plane."""
        self.deadline: float | None = deadline
        """When the side that the tunnel waits for must have acted; None for no limit."""
        self.wanted = {self._outside: EPOLLIN | EPOLLOUT}

    def work(self, fd: int, events: int) -> None:
        """Do what can be done now. `TunnelBroken`: nothing more can, so `close` the tunnel."""
        try:
            if self.is_stranger:
                self._handshake()
            elif isinstance(self._reach, ServerConnection):
                self._continue_connecting()
            if isinstance(self._reach, socket.socket):
                self._forward(self._reach, is_outside=fd == self._outside, events=events)
        except _LATER as later:
            self.wanted = {self._outside: _WANTS[type(later)]}
        except OSError as error:  # includes a failed handshake, and an end without TLS's closing message
            raise TunnelBroken(str(error)) from error

    def close(self) -> None:
        self._link.close()
        if self._reach is not None:
            self._reach.close()

    def _handshake(self) -> None:
        self._link.do_handshake()
        if not is_data_plane(self._link):
            raise TunnelBroken("not a data plane")
        self.is_stranger = False
        self._reach = ServerConnection(self._server)
        self._await_server()

    def _continue_connecting(self) -> None:
        assert isinstance(self._reach, ServerConnection)
        self._reach.continue_connecting()
        self._await_server()

    def _await_server(self) -> None:
        reach = self._reach
        assert isinstance(reach, ServerConnection)
        if not reach.is_connected:
            self.wanted = {reach.fd: EPOLLIN if reach.is_at_broker else EPOLLOUT}
            return
        self._reach = reach.detach()
        self.deadline = None
        self._to_caller = READY_BYTE if self._link.selected_alpn_protocol() == ALPN else b""

    @property
    def is_ending(self) -> bool:
        """Whether the server has ended and the caller knows."""
        return self._is_end_told

    def _forward(self, server: socket.socket, *, is_outside: bool, events: int) -> None:
        """Read if there is data and room, write what is held, and pass ends on."""
        if events & ~EPOLLOUT:  # an error is read as well
            if is_outside:
                self._read_caller()
            else:
                self._read_server(server)
        self._write_to_server(server)
        self._write_to_caller()
        if self._is_caller_done and self._is_end_told and not self._to_server:
            self.wanted = {}
        else:
            self.wanted = self._next(server.fileno())

    def _read_caller(self) -> None:
        if self._to_server or self._is_caller_done:
            return
        try:
            self._to_server = self._link.recv(PIECE)
        except _LATER:
            return
        except ssl.SSLZeroReturnError:  # an orderly end, after we have sent ours
            pass
        self._is_caller_done = not self._to_server

    def _read_server(self, server: socket.socket) -> None:
        if self._to_caller or self._is_server_done:
            return
        try:
            self._to_caller = server.recv(PIECE)
        except BlockingIOError:
            return
        self._is_server_done = not self._to_caller

    def _write_to_server(self, server: socket.socket) -> None:
        if self._to_server:
            try:
                self._to_server = self._to_server[server.send(self._to_server) :]
            except BlockingIOError:
                return
        if self._is_caller_done and not self._to_server and not self._is_server_told:
            self._is_server_told = True
            if not self._is_server_done:
                server.shutdown(socket.SHUT_WR)

    def _write_to_caller(self) -> None:
        self._owed = 0
        try:
            if self._to_caller:
                # After a refusal TLS wants the same bytes again. It takes them whole or not at all.
                self._link.send(self._to_caller)
                self._to_caller = b""
            if self._is_server_done and not self._is_end_told:
                self._send_end()
        except _LATER as later:
            self._owed = _WANTS[type(later)]

    def _send_end(self) -> None:
        try:
            self._link.unwrap()
        except ssl.SSLWantReadError:
            pass  # our end is sent; the caller's may come later
        else:
            self._is_caller_done = True
        self._is_end_told = True

    def _next(self, inside: int) -> dict[int, int]:
        outside, within = self._owed, 0
        if not self._to_server and not self._is_caller_done:
            outside |= EPOLLIN
        if self._to_server:
            within |= EPOLLOUT
        if not self._to_caller and not self._is_server_done:
            within |= EPOLLIN
        return {fd: events for fd, events in ((self._outside, outside), (inside, within)) if events}
