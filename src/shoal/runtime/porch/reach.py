"""Connect to the server of a replica without waiting: by its port, its socket's file, or through a door."""

from __future__ import annotations

import errno
import os
import socket

from shoal.socket_file import handed_over, pinned


class Reach:
    """One connection in the making. `OSError` from anything here: there will be none; nothing is left open.

    `fd` can be waited for: to be written to, or where `is_at_door`, to be read from.
    """

    def __init__(self, address: str) -> None:
        self.is_at_door = address.startswith("door:")
        self.is_connected = False
        if address.startswith(("unix:", "door:")):
            self._link = _unconnected(socket.AF_UNIX)
            self._connect_by_file(address[5:])
            self.is_connected = not self.is_at_door
        else:
            host, _, port = address.rpartition(":")
            self._link = _unconnected(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._connect((host.strip("[]"), int(port)))

    @property
    def fd(self) -> int:
        return self._link.fileno()

    def go_on(self) -> None:
        """What was waited for has come. `is_connected` says whether that was all."""
        if not self.is_at_door:
            number = self._link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self.close()
                raise OSError(number, os.strerror(number))
            self.is_connected = True
            return
        try:
            fresh, address = handed_over(self._link)
        finally:
            self.close()
        self.is_at_door = False
        self._link = fresh
        self._link.setblocking(False)  # noqa: FBT003 - the standard library's own
        self._connect(address)

    def take(self) -> socket.socket:
        """The connection, for the caller to close."""
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
        # The program owns the folder: what it may have put there is no reason to call somebody else.
        try:
            with pinned(path) as name:
                self._link.connect(name)  # at once, or refused: EAGAIN is a full backlog
        except OSError:
            self.close()
            raise


def _unconnected(family: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)  # noqa: FBT003 - the standard library's own
    return made
