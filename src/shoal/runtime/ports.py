"""Ports: for a new group of ranks to meet at, and for a server that is a replica of a service."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Iterator

from shoal import bounded_file

FIRST, COUNT = 30_000, 2_700
"""Below those that the kernel hands out by itself, and apart from those that an engine gives to attempts."""
LISTENS = "0A"
"""As Linux's tables of sockets spell that state."""
MAX_TABLE = 4 << 20
"""Bytes of such a table: 28,000 sockets. A server whose own socket comes later has no port that is known."""
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def free_port(address: str, after: int) -> int:
    """A port that nobody listens at, looked for behind `after`. Nothing keeps it free."""
    for step in range(COUNT):
        port = FIRST + (after + 1 + step) % COUNT
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
    raise OSError(f"all {COUNT} ports from {FIRST} on are taken")


def hold_port(address: str, port: int | None, among: range = range(FIRST, FIRST + COUNT)) -> socket.socket:
    """A socket that keeps a port for the server we are about to start; this very port if one is given.

    It is bound and never listens: Linux lets a server bind beside it that sets SO_REUSEADDR, as servers do
    to survive their own restart, and refuses everybody who does not, such as the next who looks for a port.
    A port is taken also where somebody listens at another address of this machine: what keeps strangers off
    a replica's port goes by its number. `OSError`: it is taken.
    """
    taken = {number for _, number in _listening("self")}
    for candidate in (port,) if port is not None else among:
        if candidate in taken:
            continue
        held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Looking for one, first without the option: to be refused where somebody else holds it. What was
            # asked for may have been in use a moment ago, and then it takes the option to have it again.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port is not None))
            held.bind((address, candidate))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise OSError(
        f"port {port} is taken"
        if port is not None
        else f"all {len(among)} ports from {among.start} are taken"
    )


def listened_to(pids: Iterable[int]) -> list[int]:
    """TCP ports that one of these processes listens at, in its own network. Who may not be looked at, or is
    gone, listens at none.
    """
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            own = set(_sockets(pid))
            if own:
                found |= {port for inode, port in _listening(pid) if inode in own}
    return sorted(found)


def _sockets(pid: int) -> Iterator[str]:
    """Their inodes."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if match := _SOCKET.fullmatch(os.readlink(entry.path)):
                yield match[1]


def _listening(pid: int | str) -> Iterator[tuple[str, int]]:
    """Inodes and ports of the sockets that listen in the network of this process."""
    for table in ("tcp", "tcp6"):
        try:
            text = bounded_file.read_start(f"/proc/{pid}/net/{table}", MAX_TABLE).decode("ascii")
        except FileNotFoundError:
            continue  # a machine without IPv6 has no `tcp6`
        rows = text.split("\n")
        for row in rows[1:-1]:  # without the heads, and without what is behind the last newline
            words = row.split()
            if words[3] == LISTENS:
                yield words[9], int(words[1].rpartition(":")[2], 16)
