"""Who serves a connection within this machine: once a server is down, anybody may take the port it had.

A leaf. Knows Linux alone; where nothing is known, nothing is claimed and nothing refused.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ESTABLISHED, HANDSHAKE, LISTENING = "01", "03", "0A"
UNACCEPTED = "0"
FIRST_PROJECT_UID = 1_900_000_000
"""Users from here on are projects', whose jobs run as them: above every range that distributions hand out
to people, services, their subordinate ids and containers. `control/uids.py` says which ranges those are.
"""


class Serving(NamedTuple):
    """A socket as `/proc/net/tcp` tells of it."""

    uid: int
    inode: str

    def __str__(self) -> str:
        """Its owner in words; the process where it can be seen."""
        pid = next((pid for pid in _processes() if self.inode in sockets_of(pid)), None)
        return f"user {self.uid}" + (f" (process {pid})" if pid else "")


class Stranger(ConnectionRefusedError):
    """Somebody else than the one meant takes connections there. Nothing was sent. `hint` can be typed."""

    def __init__(self, told: str, hint: str) -> None:
        super().__init__(told)
        self.hint = hint


def serving(link: socket.socket) -> tuple[Serving, ...] | None:
    """Who reads what is written to `link`: its other end, or until that was accepted all who listen there.

    None where the system does not tell. `ConnectionResetError`: the other end is gone already.
    """
    here, there = link.getsockname(), link.getpeername()
    # Those who listen are read first. A connection that is not accepted afterwards still waits on one of
    # them: it would have ended with a listener that went away before.
    listening = tuple(_listening(there))
    has_rows = False
    for table, place, peer in zip(_tables(there), _places(there), _places(here), strict=True):
        for row in _rows(table):
            has_rows = True
            if (row[1], row[2]) == (place, peer):
                end = Serving(int(row[7]), row[9])
                found = listening if end.inode == UNACCEPTED else (end,)
                if row[3] in (ESTABLISHED, HANDSHAKE) and found:
                    return found
    if not has_rows:
        return None
    raise ConnectionResetError(f"whoever listens on port {there[1]} closed the connection")


def sockets_of(pid: int, *, with_open: Path | None = None) -> frozenset[str]:
    """Inodes of the process's sockets; none if it is gone, may not be looked into or lacks that open file.

    The file tells the process that was meant from a later one with its number.
    """
    found: set[str] = set()
    has_file = with_open is None
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(link.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
                elif with_open is not None and target.endswith(f"/{with_open.name}"):
                    has_file = has_file or link.samefile(with_open)
    return frozenset(found) if has_file else frozenset()


def is_loopback(link: socket.socket) -> bool:
    """Whether the other end is this machine's alone to reach."""
    host = str(link.getpeername()[0])
    return host.startswith("127.") or host == "::1"


def _listening(address: tuple[str, int]) -> Iterator[Serving]:
    has_begun = False
    for table, place in zip(_tables(address), _places(address), strict=True):
        if has_begun:
            return  # somebody listens for old addresses alone: the new ones' port may be another's
        host, _, port = place.rpartition(":")
        taken = (place, f"{'0' * len(host)}:{port}")
        for row in _rows(table):
            if row[3] != LISTENING and has_begun:
                break  # Linux lists those that listen first, and a busy server has thousands of others
            if row[3] == LISTENING and row[1] in taken:
                has_begun = True
                yield Serving(int(row[7]), row[9])


def _rows(table: str) -> Iterator[list[str]]:
    with contextlib.suppress(OSError), open(table, encoding="ascii") as file:  # noqa: PTH123 - starts fast
        next(file, None)
        for line in file:
            yield line.split()


def _tables(address: tuple[str, int]) -> tuple[str, ...]:
    """One socket may serve both kinds of addresses: an old address may stand among the new ones."""
    return ("/proc/net/tcp6",) if ":" in address[0] else ("/proc/net/tcp", "/proc/net/tcp6")


def _places(address: tuple[str, int]) -> tuple[str, ...]:
    """The address as each of its tables has it: words of four bytes in the machine's own order, the port."""
    host, port = address[:2]
    if ":" in host:
        return (f"{_spelled(socket.inet_pton(socket.AF_INET6, host.partition('%')[0]))}:{port:04X}",)
    old = socket.inet_pton(socket.AF_INET, host)
    return tuple(f"{_spelled(packed)}:{port:04X}" for packed in (old, bytes(10) + b"\xff\xff" + old))


def _spelled(packed: bytes) -> str:
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def _processes() -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
