"""Share a limited number of connections fairly between their holders.

A holder is what a listener counts connections against: an address, a user of this machine, or a caller. If
all places are taken, `ConnectionQuota` makes room for a new connection by closing one of the holder that has
the most connections: the one that has been idle longest. So a flood of connections ends its own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

SCARCE_SHARE = 0.25
"""While a smaller share of the places is taken, all users of this machine count as one holder."""
LOCAL = ("127.", "::1")
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
ANY_STATE = 0xFFFFFFFF
NO_COOKIE = b"\xff" * 8
HEADER = struct.Struct("=IHHII")
SOCKET_QUERY = struct.Struct("=BBBxI")
"""Family, protocol, extensions, and the accepted states."""
PORTS = struct.Struct("!HH")
USER_AT = HEADER.size + 64
"""Offset of `idiag_uid` in the reply: after the header, four bytes, the socket's id of 48 and three
numbers."""
TIMEOUT_S = 0.1
UNKNOWN = -1

Address = tuple[str, int]
Link = TypeVar("Link")


def peer_of(client: Address | None) -> str:
    """Return the address against which wrong tokens count: the socket's, never one that a header claims."""
    if client is None:
        return "-"
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0][:64]
    if address.version == 6 and not address.is_loopback:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def holder_of(client: Address | None, server: tuple[str, int | None] | None, *, is_scarce: bool) -> str:
    """Return the address of a connection's client. On loopback add the user if places are scarce."""
    peer = client[0] if client is not None and ":" not in client[0] else peer_of(client)
    if not is_scarce or client is None or server is None or not peer.startswith(LOCAL):
        return peer
    return f"{peer} user {user_of(client, (server[0], server[1] or 0))}"


def user_of(client: Address, server: Address) -> int:
    """Return the uid that owns the socket at `client` connected to `server`, or -1 if it is unknown.

    Asks the kernel for that one socket (`sock_diag(7)`, about 10 µs). With thousands of sockets, reading
    /proc/net/tcp would take milliseconds.
    """
    with contextlib.suppress(OSError, ValueError, struct.error):
        return _query_kernel(client, server)
    return UNKNOWN


def _query_kernel(client: Address, server: Address) -> int:
    client_address, other = ipaddress.ip_address(client[0]), ipaddress.ip_address(server[0])
    family = socket.AF_INET6 if client_address.version == 6 else socket.AF_INET
    socket_id = (
        PORTS.pack(client[1], server[1])
        + client_address.packed.ljust(16, b"\0")
        + other.packed.ljust(16, b"\0")
    )
    query = SOCKET_QUERY.pack(family, socket.IPPROTO_TCP, 0, ANY_STATE) + socket_id + b"\0" * 4 + NO_COOKIE
    size = HEADER.size + len(query)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as link:
        link.settimeout(TIMEOUT_S)
        link.sendto(HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + query, (0, 0))
        reply = link.recv(4096)
    kind = HEADER.unpack_from(reply)[1]
    if kind != SOCK_DIAG_BY_FAMILY:
        raise ValueError("the kernel knows no such socket")
    return int(struct.unpack_from("=I", reply, USER_AT)[0])


class ConnectionQuota(Generic[Link]):
    """At most `most` connections, of which one holder has at most `most_each`.

    `end` closes a connection that loses its place. `admit` removes that connection before it calls `end`.
    """

    def __init__(self, most: int, end: Callable[[Link], object], *, most_each: int | None = None) -> None:
        self._most = most
        self._most_each = most if most_each is None else most_each
        self._end = end
        self._holders: dict[Link, str] = {}
        self._count: Counter[str] = Counter()
        self._idle: dict[str, dict[Link, None]] = {}
        self._busy: dict[str, dict[Link, None]] = {}
        """By holder: its idle, or busy, connections, the one that has been so longest first."""

    def __len__(self) -> int:
        return len(self._holders)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._holders)

    @property
    def is_scarce(self) -> bool:
        return len(self._holders) >= self._most * SCARCE_SHARE

    def admit(self, link: Link, holder: str) -> bool:
        """Give the connection a place as one of the holder's. It counts as idle until `mark_busy`.

        The connection may already have a place under another holder. Busy connections are closed last, and
        only if their holder has more connections than the new one's holder would have. Return False, and
        change nothing, if there is no place.
        """
        before = self._holders.get(link)
        others = len(self._holders) - (before is not None)
        if before != holder and self._count[holder] >= self._most_each:
            has_room = self._end_longest(self._idle.get(holder))
        elif others >= self._most:
            has_room = self._make_room(holder)
        else:
            has_room = True
        if has_room:
            self.release(link)
            self._holders[link] = holder
            self._count[holder] += 1
            self.mark_idle(link)
        return has_room

    def release(self, link: Link) -> None:
        """Free the connection's place. May be repeated."""
        holder = self._holders.pop(link, None)
        if holder is not None:
            self._drop(self._idle, holder, link)
            self._drop(self._busy, holder, link)
            self._count[holder] -= 1
            if not self._count[holder]:
                del self._count[holder]

    def mark_busy(self, link: Link) -> None:
        """The connection is busy with a request from now on."""
        holder = self._holders.get(link)
        if holder is not None:
            self._drop(self._idle, holder, link)
            self._busy.setdefault(holder, {})[link] = None

    def mark_idle(self, link: Link) -> None:
        """The connection is idle from now on."""
        holder = self._holders.get(link)
        if holder is not None:
            self._drop(self._busy, holder, link)
            idle = self._idle.setdefault(holder, {})
            idle.pop(link, None)
            idle[link] = None

    @staticmethod
    def _drop(links: dict[str, dict[Link, None]], holder: str, link: Link) -> None:
        held = links.get(holder)
        if held is not None:
            held.pop(link, None)
            if not held:
                del links[holder]

    def _make_room(self, holder: str) -> bool:
        largest = max(self._count, key=self._count.__getitem__)
        if self._count[largest] > self._count[holder] + 1:
            return self._end_longest(self._idle.get(largest) or self._busy.get(largest))
        return self._end_longest(max(self._idle.values(), key=len, default=None))

    def _end_longest(self, links: dict[Link, None] | None) -> bool:
        if not links:
            return False
        link = next(iter(links))
        self.release(link)
        self._end(link)
        return True
