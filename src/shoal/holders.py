"""Who holds a connection, and places for connections that their holders share.

A holder is an address, a user of this machine or a caller: whatever a listener counts connections against.
`SharedSlots` keeps a few holders from taking all places: for a newcomer the holder with most connections
loses the one that has been idle longest, so a flood of connections ends its own.
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
"""Of the places: while fewer are taken, users of this machine need not be told apart."""
LOCAL = ("127.", "::1")
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
ANY_STATE = 0xFFFFFFFF
NO_COOKIE = b"\xff" * 8
HEADER = struct.Struct("=IHHII")
ASKED = struct.Struct("=BBBxI")
"""Family, protocol, extensions; then the states that will do."""
PORTS = struct.Struct("!HH")
USER_AT = HEADER.size + 64
"""Of `idiag_uid` in the answer: behind the header, four bytes, the socket's id of 48 and three numbers."""
TIMEOUT_S = 0.1
UNKNOWN = -1

Address = tuple[str, int]
Link = TypeVar("Link")


def peer_of(client: Address | None) -> str:
    """Whom wrong tokens are counted against: the address we see, never one that a header claims."""
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
    """The address that a connection comes from; on loopback the user, where places are scarce."""
    peer = client[0] if client is not None and ":" not in client[0] else peer_of(client)
    if not is_scarce or client is None or server is None or not peer.startswith(LOCAL):
        return peer
    return f"{peer} user {user_of(client, (server[0], server[1] or 0))}"


def user_of(client: Address, server: Address) -> int:
    """The uid that holds the socket at `client` connected to `server`; -1 where the kernel does not say.

    Asks the kernel for that one socket (`sock_diag(7)`, about 10 µs): reading /proc/net/tcp takes
    milliseconds where there are thousands of sockets.
    """
    with contextlib.suppress(OSError, ValueError, struct.error):
        return _ask(client, server)
    return UNKNOWN


def _ask(client: Address, server: Address) -> int:
    own, other = ipaddress.ip_address(client[0]), ipaddress.ip_address(server[0])
    family = socket.AF_INET6 if own.version == 6 else socket.AF_INET
    socket_id = PORTS.pack(client[1], server[1]) + own.packed.ljust(16, b"\0") + other.packed.ljust(16, b"\0")
    asked = ASKED.pack(family, socket.IPPROTO_TCP, 0, ANY_STATE) + socket_id + b"\0" * 4 + NO_COOKIE
    size = HEADER.size + len(asked)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG) as link:
        link.settimeout(TIMEOUT_S)
        link.sendto(HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + asked, (0, 0))
        told = link.recv(4096)
    kind = HEADER.unpack_from(told)[1]
    if kind != SOCK_DIAG_BY_FAMILY:
        raise ValueError("the kernel knows no such socket")
    return int(struct.unpack_from("=I", told, USER_AT)[0])


class SharedSlots(Generic[Link]):
    """Places for `most` connections, of which one holder has at most `most_each`.

    `end` closes the connection that loses its place. `enter` takes that connection out before it calls `end`.
    """

    def __init__(self, most: int, end: Callable[[Link], object], *, most_each: int | None = None) -> None:
        self._most = most
        self._most_each = most if most_each is None else most_each
        self._end = end
        self._holders: dict[Link, str] = {}
        self._count: Counter[str] = Counter()
        self._idle: dict[str, dict[Link, None]] = {}
        self._busy: dict[str, dict[Link, None]] = {}
        """By holder, the connection that has been idle, or busy, longest first."""

    def __len__(self) -> int:
        return len(self._holders)

    def __iter__(self) -> Iterator[Link]:
        return iter(self._holders)

    @property
    def is_scarce(self) -> bool:
        return len(self._holders) >= self._most * SCARCE_SHARE

    def enter(self, link: Link, holder: str) -> bool:
        """Give the connection a place as one of the holder's; it is idle until `begin`.

        The connection may have a place already, as another holder's. Busy connections are ended last, and
        only where their holder has more than the newcomer's would have. False: there is no place, and
        nothing has changed.
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
            self.leave(link)
            self._holders[link] = holder
            self._count[holder] += 1
            self.wait(link)
        return has_room

    def leave(self, link: Link) -> None:
        """Give the place back. May be repeated."""
        holder = self._holders.pop(link, None)
        if holder is not None:
            self._drop(self._idle, holder, link)
            self._drop(self._busy, holder, link)
            self._count[holder] -= 1
            if not self._count[holder]:
                del self._count[holder]

    def begin(self, link: Link) -> None:
        """The connection is busy with a request from now on."""
        holder = self._holders.get(link)
        if holder is not None:
            self._drop(self._idle, holder, link)
            self._busy.setdefault(holder, {})[link] = None

    def wait(self, link: Link) -> None:
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
        self.leave(link)
        self._end(link)
        return True
