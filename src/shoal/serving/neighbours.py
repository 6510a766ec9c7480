"""What the processes of one port tell each other, ten times a second: how much of each limit they have used.

So a caller whose connections all came to one process has its whole limit there, and replicas their whole cap.
What is told are totals and levels, never differences: a word that is lost is made good by the next.
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
"""Of so many words, one tells everything: for those who have just come."""
SILENT_S = 3.0
"""One not heard from for so long is gone, and has nothing."""
MOST_TOLD = 500
"""Entries in one datagram: below 100 KB."""

MOST_KNOWN = 20_000
"""Entries remembered of one process; beyond that its counting begins anew."""

CALLER, REPLICA = "caller", "replica"
Key = tuple[str, str, str, str]
"""Which of the two; project, service, and its name."""
Used = tuple[int, int]
"""Of a caller: requests drawn from its rate so far, and here now. Of a replica: 0, and what is in it."""


class Word(msgspec.Struct, array_like=True):
    process_id: str
    used: list[tuple[Key, Used]]


_read = msgspec.msgpack.Decoder(Word).decode


class Other:
    """One of the others, by its own words."""

    def __init__(self) -> None:
        self.heard_at = 0.0
        self.used: dict[Key, Used] = {}


class Neighbours:
    """`link` carries datagrams to all the others, and theirs."""

    def __init__(self, plane: DataPlane, link: socket.socket) -> None:
        self._plane = plane
        self._link = link
        self._others: dict[str, Other] = {}
        self._said: dict[Key, Used] = {}
        link.setblocking(False)  # noqa: FBT003 - the standard library's own

    async def keep_talking(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link, lambda: self.listen(monotonic()))
        try:
            while True:
                for turn in range(FULL_EVERY):
                    await asyncio.sleep(EVERY_S)
                    self.tell(is_full=turn == 0)
                self.forget_silent(monotonic())
        finally:
            loop.remove_reader(self._link)

    def tell(self, *, is_full: bool) -> None:
        """What has changed; everything, if only that it is there, when `is_full`."""
        before = self._said
        self._said = self._used(before)
        news = [one for one in self._said.items() if is_full or before.get(one[0]) != one[1]]
        for at in range(0, len(news) or int(is_full), MOST_TOLD):
            word = Word(self._plane.process_id, news[at : at + MOST_TOLD])
            with contextlib.suppress(OSError):  # full, or nobody is there: a later word says it again
                self._link.send(msgspec.msgpack.encode(word))

    def _used(self, before: dict[Key, Used]) -> dict[Key, Used]:
        """Also by those of whom there was something to say: that they have nothing any more is news."""
        found: dict[Key, Used] = {}
        for name, live in self._plane.services.items():
            for replica_id, replica in live.replicas.items():
                found[REPLICA, *name, replica_id] = (0, replica.outstanding)
            for account in live.accounts.values() if live.rps or live.concurrency else ():
                key = (CALLER, *name, account.name)
                if account.drawn or account.admitted or key in before:
                    found[key] = (account.drawn, account.admitted)
        return found

    def listen(self, now: float) -> None:
        """To one word, if there is one."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._hear(_read(self._link.recv(1 << 20)), now)

    def _hear(self, word: Word, now: float) -> None:
        other = self._others.setdefault(word.process_id, Other())
        other.heard_at = now
        if len(other.used) > MOST_KNOWN:
            other.used.clear()
        for key, used in word.used:
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
            replica.shared(elsewhere)
            if live.waiting.count:
                live.pump()
