"""Usage messages between the processes of one port, 10 times a second: how much of each limit each has used.

So a caller whose connections all reached one process has its whole limit there, and each replica its whole
cap. Messages hold totals and levels, never differences, so the next message makes up for a lost one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from time import monotonic

import msgspec

from shoal.serving.plane import DataPlane

EVERY_S = 0.1
FULL_EVERY = 10
"""One in this many messages is complete, for processes that have just started."""
SILENT_S = 3.0
"""A process silent for this long is gone and uses nothing."""
MAX_ENTRIES_SENT = 500
"""Entries in one datagram, which keeps it below 100 KB."""

MAX_ENTRIES_STORED = 20_000
"""Entries stored for one process. Beyond that, they are cleared and counted from the next messages."""

CALLER, REPLICA = "caller", "replica"
Key = tuple[str, str, str, str]
"""`CALLER` or `REPLICA`, then project, service, and the name of the caller or replica."""
Used = tuple[int, int]
"""Of a caller: requests drawn from its rate so far, and requests admitted now. Of a replica: 0, and
requests in it."""


class UsageMessage(msgspec.Struct, array_like=True):
    process_id: str
    used: list[tuple[Key, Used]]


_read = msgspec.msgpack.Decoder(UsageMessage).decode


class PeerUsage:
    """What another process has reported of itself."""

    def __init__(self) -> None:
        self.heard_at = 0.0
        self.used: dict[Key, Used] = {}


class PeerProcesses:
    """Exchanges usage with the other processes; `link` carries datagrams from and to all of them."""

    def __init__(self, plane: DataPlane, link: socket.socket) -> None:
        self._plane = plane
        self._link = link
        self._others: dict[str, PeerUsage] = {}
        self._last_sent: dict[Key, Used] = {}
        link.setblocking(False)  # noqa: FBT003 - the standard library's own

    async def keep_exchanging(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link, lambda: self.receive_usage(monotonic()))
        try:
            while True:
                for turn in range(FULL_EVERY):
                    await asyncio.sleep(EVERY_S)
                    self.send_usage(is_full=turn == 0)
                self.forget_silent(monotonic())
        finally:
            loop.remove_reader(self._link)

    def send_usage(self, *, is_full: bool) -> None:
        """Send what has changed. If `is_full`, send everything, and at least one message."""
        before = self._last_sent
        self._last_sent = self._used(before)
        news = [entry for entry in self._last_sent.items() if is_full or before.get(entry[0]) != entry[1]]
        for at in range(0, len(news) or int(is_full), MAX_ENTRIES_SENT):
            message = UsageMessage(self._plane.process_id, news[at : at + MAX_ENTRIES_SENT])
            with contextlib.suppress(OSError):  # full, or no process listens: a later message repeats it
                self._link.send(msgspec.msgpack.encode(message))

    def _used(self, before: dict[Key, Used]) -> dict[Key, Used]:
        """Return the usage now. Keys of `before` stay, because usage that fell to 0 is news."""
        usage: dict[Key, Used] = {}
        for name, live in self._plane.services.items():
            for replica_id, replica in live.replicas.items():
                usage[REPLICA, *name, replica_id] = (0, replica.outstanding)
            for account in live.accounts.values() if live.rps or live.concurrency else ():
                key = (CALLER, *name, account.name)
                if account.drawn or account.admitted or key in before:
                    usage[key] = (account.drawn, account.admitted)
        return usage

    def receive_usage(self, now: float) -> None:
        """Apply one message, if there is one."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._apply_message(_read(self._link.recv(1 << 20)), now)

    def _apply_message(self, message: UsageMessage, now: float) -> None:
        other = self._others.setdefault(message.process_id, PeerUsage())
        other.heard_at = now
        if len(other.used) > MAX_ENTRIES_STORED:
            other.used.clear()
        for key, used in message.used:
            before = other.used.get(key, used)
            other.used[key] = used
            self._apply(key, used[0] - before[0], now)

    def forget_silent(self, now: float) -> None:
        for process_id, other in list(self._others.items()):
            if now - other.heard_at > SILENT_S:
                del self._others[process_id]
                for key in other.used:
                    self._apply(key, 0, now)

    def _apply(self, key: Key, drawn: int, now: float) -> None:
        kind, project, service, name = key
        live = self._plane.services.get((project, service))
        if live is None:
            return
        elsewhere = sum(other.used[key][1] for other in self._others.values() if key in other.used)
        account, replica = live.accounts.get(name), live.replicas.get(name)
        if kind == CALLER and account is not None:
            account.elsewhere = elsewhere
            if live.rps and drawn > 0:
                account.charge(drawn, live.rps, live.burst, now)
        elif kind == REPLICA and replica is not None:
            replica.set_elsewhere(elsewhere)
            if live.waiting.count:
                live.pump()
