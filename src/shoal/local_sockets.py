"""Connect safely to servers on this machine, by the file of a Unix socket or by a loopback port.

A Unix socket may lie in a folder in which another user can write. That user must not be able to put a link
there and redirect our connection to another socket. On loopback, any user may take the port of a server that
is down. So a client checks which user owns the other end before it sends anything.

This module imports nothing else of Shoal. It knows only Linux. Elsewhere it reports nothing and refuses
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_SOCKET_PATH = 107
"""Bytes of the longest path at which a program can listen on Linux."""
PORT_TEXT = re.compile(rb"[1-9][0-9]{0,4}")
MAX_PORT = 65535


@contextlib.contextmanager
def pinned_socket(path: str) -> Iterator[str]:
    """Yield a short path to exactly the socket at `path`. `OSError`: there is none.

    The path is valid inside the `with` block. Links are not followed. Linux only.
    """
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), path)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def receive_socket(link: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
    """Receive a socket from a socket broker. Return it and the address to which to connect it.

    The socket belongs to the broker's network namespace. `OSError`: the broker sent no usable socket. The
    program in that namespace may have put another broker in its place.
    """
    message, descriptors, _, _ = socket.recv_fds(link, 16, 1)
    if not descriptors:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the socket broker sent no socket")
    try:
        fresh = socket.socket(fileno=descriptors[0])
    except OSError:
        os.close(descriptors[0])
        raise
    is_of_its_kind = (fresh.family, fresh.type) == (socket.AF_INET, socket.SOCK_STREAM)
    if not is_of_its_kind or PORT_TEXT.fullmatch(message) is None or int(message) > MAX_PORT:
        fresh.close()
        raise ConnectionRefusedError(
            errno.ECONNREFUSED, "the socket broker sent something else than a socket"
        )
    return fresh, ("127.0.0.1", int(message))


ESTABLISHED, HANDSHAKE, LISTENING = "01", "03", "0A"
UNACCEPTED = "0"
FIRST_PROJECT_UID = 1_900_000_000
"""The first uid of projects, whose jobs run under these uids. It is above every range that distributions use
for people, services, their subordinate ids and containers. `control/project_uids.py` lists those ranges.
"""


class SocketOwner(NamedTuple):
    """The owner and inode of a socket, from `/proc/net/tcp`."""

    uid: int
    inode: str

    def __str__(self) -> str:
        """Describe the owner, with the process if it is visible."""
        pid = next((pid for pid in _processes() if self.inode in sockets_of(pid)), None)
        return f"user {self.uid}" + (f" (process {pid})" if pid else "")


class UnexpectedListener(ConnectionRefusedError):
    """An unexpected user accepts connections at this address. Nothing was sent. `hint` can be typed."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def socket_owners(link: socket.socket) -> tuple[SocketOwner, ...] | None:
    """Return the owners of the sockets that may read what is written to `link`.

    That is the other end, or, until the connection is accepted, every socket that listens there. None: the
    system does not list them. `ConnectionResetError`: the other end is already gone.
    """
    here, there = link.getsockname(), link.getpeername()
    # Read the listening sockets first. A connection that is still not accepted after that waits on one of
    # them, because it would have ended with a listener that closed earlier.
    listening = tuple(_listening(there))
    has_rows = False
    for table, place, peer in zip(
        _tables(there), _table_addresses(there), _table_addresses(here), strict=True
    ):
        for row in _rows(table):
            has_rows = True
            if (row[1], row[2]) == (place, peer):
                end = SocketOwner(int(row[7]), row[9])
                candidates = listening if end.inode == UNACCEPTED else (end,)
                if row[3] in (ESTABLISHED, HANDSHAKE) and candidates:
                    return candidates
    if not has_rows:
        return None
    raise ConnectionResetError(f"the process that listens on port {there[1]} closed the connection")


def sockets_of(pid: int, *, with_open: Path | None = None) -> frozenset[str]:
    """Return the inodes of the process's sockets.

    The result is empty if the process is gone, may not be inspected, or does not have `with_open` open. That
    file tells the process from a later one with the same pid.
    """
    sockets: set[str] = set()
    has_file = with_open is None
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
                elif with_open is not None and target.endswith(f"/{with_open.name}"):
                    has_file = has_file or link.samefile(with_open)
    return frozenset(sockets) if has_file else frozenset()


def is_loopback(link: socket.socket) -> bool:
    """Whether the other end is a loopback address."""
    host = str(link.getpeername()[0])
    return host.startswith("127.") or host == "::1"


def _listening(address: tuple[str, int]) -> Iterator[SocketOwner]:
    has_begun = False
    for table, place in zip(_tables(address), _table_addresses(address), strict=True):
        if has_begun:
            return  # a socket listens for IPv4 only: the same port of IPv6 may be another user's
        host, _, port = place.rpartition(":")
        taken = (place, f"{'0' * len(host)}:{port}")
        for row in _rows(table):
            if row[3] != LISTENING and has_begun:
                break  # Linux lists listening sockets first, and a busy server has thousands of others
            if row[3] == LISTENING and row[1] in taken:
                has_begun = True
                yield SocketOwner(int(row[7]), row[9])


def _rows(table: str) -> Iterator[list[str]]:
    with contextlib.suppress(OSError), open(table, encoding="ascii") as file:  # noqa: PTH123 - starts fast
        next(file, None)
        for line in file:
            yield line.split()


def _tables(address: tuple[str, int]) -> tuple[str, ...]:
    """Return the tables that may list the address. An IPv4 address may also stand in the IPv6 table."""
    return ("/proc/net/tcp6",) if ":" in address[0] else ("/proc/net/tcp", "/proc/net/tcp6")


def _table_addresses(address: tuple[str, int]) -> tuple[str, ...]:
    """Return the address as each table writes it: words of four bytes in native byte order, then the port."""
    host, port = address[:2]
    if ":" in host:
        return (f"{_hex_words(socket.inet_pton(socket.AF_INET6, host.partition('%')[0]))}:{port:04X}",)
    old = socket.inet_pton(socket.AF_INET, host)
    return tuple(f"{_hex_words(packed)}:{port:04X}" for packed in (old, bytes(10) + b"\xff\xff" + old))


def _hex_words(packed: bytes) -> str:
    chunks = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in chunks)


def _processes() -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
