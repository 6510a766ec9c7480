"""Who may hold how many connections, so that nobody can hold all of them.

A connection belongs to a stranger until a request on it shows a good token. Strangers have places of their
own. When these are taken, a newcomer gets the place of the connection that has waited longest, of the address
that holds most of them (on loopback: of the user). So a flood of connections ends its own. Signed connections
count against the token's owner, and a quarter of their places is for supervisors and data planes.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from shoal.api.limits import peer_of
from shoal.api.peer_user import user_of

MACHINES_SHARE = 0.25
ACCOUNT_SHARE = 0.25
"""Of the signed connections: at most so many are of one user, or of all jobs of one project."""
STRANGERS_SHARE = 0.25
"""Beside the signed ones."""
SCARCE_SHARE = 0.25
"""Of the strangers' places: below, users of this machine need not be told apart."""
LOCAL = ("127.", "::1")


class Link(Protocol):
    """A connection, as it is counted."""

    def holder(self, *, is_scarce: bool) -> str: ...

    def abort(self) -> None: ...


def holder_of(
    client: tuple[str, int] | None, server: tuple[str, int | None] | None, *, is_scarce: bool
) -> str:
    """The address that a connection comes from; on loopback the user, where places are scarce."""
    peer = client[0] if client is not None and ":" not in client[0] else peer_of(client)
    if not is_scarce or client is None or server is None or not peer.startswith(LOCAL):
        return peer
    return f"{peer} user {user_of(client, (server[0], server[1] or 0))}"


class ConnectionSlots:
    """Places for `max_signed` connections with a token, and a quarter as many beside them for strangers."""

    def __init__(self, max_signed: int) -> None:
        self._max_signed = max_signed
        self._max_strangers = max(int(max_signed * STRANGERS_SHARE), 4)
        self._max_people = max(int(max_signed * (1 - MACHINES_SHARE)), 4)
        self._max_each = max(int(max_signed * ACCOUNT_SHARE), 4)
        self._strangers: dict[Link, str] = {}
        self._waiting: dict[str, dict[Link, None]] = {}
        """Strangers without a request under way by holder, those that have waited longest first."""
        self._signed: dict[Link, tuple[str, bool]] = {}
        self._by_account: Counter[str] = Counter()
        self._num_machines = 0

    def enter(self, link: Link) -> bool:
        """A new connection. False: every stranger's place is taken by a request under way."""
        if len(self._strangers) >= self._max_strangers and not self._make_room():
            return False
        is_scarce = len(self._strangers) >= self._max_strangers * SCARCE_SHARE
        self._strangers[link] = link.holder(is_scarce=is_scarce)
        self.wait(link)
        return True

    def leave(self, link: Link) -> None:
        """It is closed. May be repeated."""
        self.begin(link)
        if self._strangers.pop(link, None) is None:
            self._leave_signed(link)

    def begin(self, link: Link) -> None:
        """It has a request under way."""
        holder = self._strangers.get(link)
        if holder is not None:
            held = self._waiting.get(holder, {})
            held.pop(link, None)
            if not held:
                self._waiting.pop(holder, None)

    def wait(self, link: Link) -> None:
        """It waits for its client, from now on."""
        holder = self._strangers.get(link)
        if holder is not None:
            held = self._waiting.setdefault(holder, {})
            held.pop(link, None)
            held[link] = None

    def sign(self, link: Link, account: str, *, is_machine: bool) -> bool:
        """It is `account`'s from now on. False: there is no place for that; it stays whose it was."""
        before = self._signed.get(link)
        others = len(self._signed) - (before is not None)
        if others >= self._max_signed:
            return False
        if not is_machine:
            people = others - (self._num_machines - (before is not None and before[1]))
            if people >= self._max_people or self._by_account[account] >= self._max_each:
                return False
        self.begin(link)
        self._strangers.pop(link, None)
        self._leave_signed(link)
        self._signed[link] = (account, is_machine)
        self._by_account[account] += 1
        self._num_machines += is_machine
        return True

    def _leave_signed(self, link: Link) -> None:
        signed = self._signed.pop(link, None)
        if signed is not None:
            account, is_machine = signed
            self._by_account[account] -= 1
            if not self._by_account[account]:
                del self._by_account[account]
            self._num_machines -= is_machine

    def _make_room(self) -> bool:
        """Cut off the connection that has waited longest, of whoever has most of them."""
        if not self._waiting:
            return False
        held = max(self._waiting.values(), key=len)
        link = next(iter(held))
        self.leave(link)
        link.abort()
        return True
