"""One connection through a porch: the handshake, the way to the server, then bytes both ways until both end.

Never waits. Of each direction at most one piece is held: who does not read is not read for. An end is passed
on as an end, a break as a break.
"""

from __future__ import annotations

import socket
import ssl
from select import EPOLLIN, EPOLLOUT

from shoal.porch import GREETS, OPEN, is_data_plane
from shoal.runtime.porch.reach import Reach

PIECE = 1 << 16
_WANTS = {ssl.SSLWantReadError: EPOLLIN, ssl.SSLWantWriteError: EPOLLOUT}
_LATER = tuple(_WANTS)


class Broken(Exception):
    """It is over, and not by an orderly end: both sides are to see a break."""


class Passage:
    """`wanted` says what to wait for, by descriptor, after every `work`; empty: it is over."""

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
        self._reach: Reach | socket.socket | None = None
        self._to_server = self._to_caller = b""
        self._owed = 0
        """What TLS waits for before it takes what is held for the caller."""
        self._is_caller_done = self._is_server_told = False
        self._is_server_done = self._is_end_told = False
        self.is_stranger = True
        """It has not been shown yet that a data plane is there."""
        self.deadline: float | None = deadline
        """By when whoever is waited for must have done it; None: nobody is hurried."""
        self.wanted = {self._outside: EPOLLIN | EPOLLOUT}

    def work(self, fd: int, events: int) -> None:
        """Do what can be done now. `Broken`: nothing more, ever; `close` it."""
        try:
            if self.is_stranger:
                self._shake()
            elif isinstance(self._reach, Reach):
                self._go_on()
            if isinstance(self._reach, socket.socket):
                self._pass(self._reach, is_outside=fd == self._outside, events=events)
        except _LATER as later:
            self.wanted = {self._outside: _WANTS[type(later)]}
        except OSError as error:  # also what TLS says of a stranger, and an end without the last word
            raise Broken(str(error)) from error

    def close(self) -> None:
        self._link.close()
        if self._reach is not None:
            self._reach.close()

    def _shake(self) -> None:
        self._link.do_handshake()
        if not is_data_plane(self._link):
            raise Broken("not a data plane")
        self.is_stranger = False
        self._reach = Reach(self._server)
        self._await_server()

    def _go_on(self) -> None:
        assert isinstance(self._reach, Reach)
        self._reach.go_on()
        self._await_server()

    def _await_server(self) -> None:
        reach = self._reach
        assert isinstance(reach, Reach)
        if not reach.is_connected:
            self.wanted = {reach.fd: EPOLLIN if reach.is_at_door else EPOLLOUT}
            return
        self._reach = reach.take()
        self.deadline = None
        self._to_caller = OPEN if self._link.selected_alpn_protocol() == GREETS else b""

    @property
    def is_ending(self) -> bool:
        """The server has said its last, and the caller was told."""
        return self._is_end_told

    def _pass(self, server: socket.socket, *, is_outside: bool, events: int) -> None:
        """Read where there is something and room for it, write what is held, tell of ends."""
        if events & ~EPOLLOUT:  # an error is read, too
            if is_outside:
                self._hear_caller()
            else:
                self._hear_server(server)
        self._write_to_server(server)
        self._write_to_caller()
        if self._is_caller_done and self._is_end_told and not self._to_server:
            self.wanted = {}
        else:
            self.wanted = self._next(server.fileno())

    def _hear_caller(self) -> None:
        if self._to_server or self._is_caller_done:
            return
        try:
            self._to_server = self._link.recv(PIECE)
        except _LATER:
            return
        except ssl.SSLZeroReturnError:  # an end as any other, where we have told ours before
            pass
        self._is_caller_done = not self._to_server

    def _hear_server(self, server: socket.socket) -> None:
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
                # The same bytes again after a refusal, as TLS wants them: whole or not at all.
                self._link.send(self._to_caller)
                self._to_caller = b""
            if self._is_server_done and not self._is_end_told:
                self._tell_end()
        except _LATER as later:
            self._owed = _WANTS[type(later)]

    def _tell_end(self) -> None:
        try:
            self._link.unwrap()
        except ssl.SSLWantReadError:
            pass  # it is told; their own end may come later
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
