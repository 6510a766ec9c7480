"""How many connections each holder may have, so that no client can hold all of them.

A connection belongs to a stranger until a request on it shows a good token. Strangers have slots of their
own. When these are taken, a new connection takes the slot of the connection that has waited longest, of the
address that holds most of them (on loopback: of the user). So a flood of connections only closes its own.
Signed connections count against the token's owner, and a quarter of their slots is for supervisors and data
planes. When people and jobs hold all others, a new connection takes a slot of the account that holds most: a
connection without a request under way if there is one, else the oldest.
"""

from __future__ import annotations

from typing import Protocol

MACHINES_SHARE = 0.25
ACCOUNT_SHARE = 0.25
"""Part of the signed connections that one user, or all jobs of one owner, may hold."""
STRANGERS_SHARE = 0.25
"""Strangers' slots, as a part of the signed ones and beside them."""
SCARCE_SHARE = 0.25
"""Part of the strangers' slots. While fewer are taken, users of this machine are not told apart."""
MACHINE = ""


class Link(Protocol):
    """A connection, as the slots count it."""

    def holder(self, *, is_scarce: bool) -> str: ...

    def abort(self) -> None: ...


class ConnectionSlots:
    """Slots for `max_signed` connections with a token, and a quarter as many beside them for strangers."""

    def __init__(self, max_signed: int) -> None:
        self._max_signed = max_signed
        self._max_strangers = max(int(max_signed * STRANGERS_SHARE), 4)
        self._max_people = max(int(max_signed * (1 - MACHINES_SHARE)), 4)
        self._max_each = max(int(max_signed * ACCOUNT_SHARE), 4)
        self._strangers: dict[Link, str] = {}
        self._waiting: dict[str, dict[Link, None]] = {}
        """Strangers without a request under way, by holder, those that have waited longest first."""
        self._signed: dict[Link, str] = {}
        """The account of each signed connection; empty for machines."""
        self._people: dict[str, dict[Link, bool]] = {}
        """By account: whether each connection has a request under way, the least recently used first."""
        self._num_machines = 0

    def enter(self, link: Link) -> bool:
        """Add a new connection. False: every stranger's slot has a request under way."""
        if len(self._strangers) >= self._max_strangers and not self._make_room():
            return False
        is_scarce = len(self._strangers) >= self._max_strangers * SCARCE_SHARE
        self._strangers[link] = link.holder(is_scarce=is_scarce)
        self.wait(link)
        return True

    def leave(self, link: Link) -> None:
        """Remove a closed connection. May be repeated."""
        self.begin(link)
        if self._strangers.pop(link, None) is None:
            self._leave_signed(link)

    def begin(self, link: Link) -> None:
        """Note that the connection has a request under way."""
        self._set_busy(link, is_busy=True)
        holder = self._strangers.get(link)
        if holder is not None:
            held = self._waiting.get(holder, {})
            held.pop(link, None)
            if not held:
                self._waiting.pop(holder, None)

    def wait(self, link: Link) -> None:
        """Note that the connection waits for its client from now on."""
        self._set_busy(link, is_busy=False)
        holder = self._strangers.get(link)
        if holder is not None:
            held = self._waiting.setdefault(holder, {})
            held.pop(link, None)
            held[link] = None

    def sign(self, link: Link, account: str, *, is_machine: bool) -> bool:
        """Assign the connection to `account`. False: there is no slot for that, and its owner
        stays the same.
        """
        before = self._signed.get(link)
        others = len(self._signed) - (before is not None)
        if is_machine:
            if others >= self._max_signed:
                return False
        else:
            people = others - (self._num_machines - (before == MACHINE))
            if len(self._people.get(account, ())) >= self._max_each:
                return False
            is_full = people >= self._max_people or others >= self._max_signed
            if is_full and not self._make_room_for(account):
                return False
        self.begin(link)
        self._strangers.pop(link, None)
        self._leave_signed(link)
        self._signed[link] = MACHINE if is_machine else account
        if is_machine:
            self._num_machines += 1
        else:
            self._people.setdefault(account, {})[link] = True
        return True

    def _set_busy(self, link: Link, *, is_busy: bool) -> None:
        held = self._people.get(self._signed.get(link, MACHINE))
        if held is not None:
            held.pop(link)
            held[link] = is_busy

    def _leave_signed(self, link: Link) -> None:
        account = self._signed.pop(link, None)
        if account == MACHINE:
            self._num_machines -= 1
        elif account is not None:
            held = self._people[account]
            del held[link]
            if not held:
                del self._people[account]

    def _make_room_for(self, account: str) -> bool:
        """Close a connection of the account that holds most. False: all are busy, and no
        account holds more.
        """
        held = max(self._people.values(), key=lambda held: (len(held), not all(held.values())), default={})
        idle = next((link for link, is_busy in held.items() if not is_busy), None)
        if idle is None and len(held) <= len(self._people.get(account, ())) + 1:
            return False
        link = idle if idle is not None else next(iter(held))
        self.leave(link)
        link.abort()
        return True

    def _make_room(self) -> bool:
        """Close the connection that has waited longest, of the holder that has most of them."""
        if not self._waiting:
            return False
        held = max(self._waiting.values(), key=len)
        link = next(iter(held))
        self.leave(link)
        link.abort()
        return True
