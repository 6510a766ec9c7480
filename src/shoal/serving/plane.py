"""The data plane in one process: listens, holds what is shared by its connections, swaps tables, drains."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import ssl
from time import monotonic

from shoal.accept import TlsListener
from shoal.clock import Clock, SystemClock
from shoal.holders import SharedSlots
from shoal.porch import visitor
from shoal.serving.accounts import Held
from shoal.serving.descriptors import is_ours
from shoal.serving.downstream import Downstream
from shoal.serving.freshness import Freshness
from shoal.serving.problem import Refused
from shoal.serving.replica import LiveReplica
from shoal.serving.route import Routes
from shoal.serving.service import LiveService
from shoal.serving.table import Table, usable
from shoal.serving.upstream import Seeker, connect
from shoal.wire import Papers

log = logging.getLogger(__name__)

BACKLOG = 4096
STRANGERS_SHARE, LEAST_STRANGERS = 0.25, 16
"""Of `max_clients`: connections on which no request has named its caller yet."""
CALLER_SHARE, LEAST_OF_CALLER = 0.25, 4
"""Of `max_clients`: connections of one caller, or of one address at public services."""
MAX_GUESSES = 100
GUESSES_S = 60.0
"""Requests without a known token that one address may send in so long."""
MAX_GUESSERS = 10_000
MAX_HELD_BYTES = 256 << 20
"""Of bodies that wait, or are kept to be sent again."""


class DataPlane:
    """`share` is this process's part where several serve one port; `zone` is where it stands."""

    def __init__(
        self,
        *,
        share: float = 1.0,
        zone: str = "",
        max_clients: int = 10_000,
        max_held_bytes: int = MAX_HELD_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self.process_id = os.urandom(8).hex()
        self.version = 0
        self.epoch = ""
        self.left_out: list[str] = []
        """Of the table in use, and why."""
        self.services: dict[tuple[str, str], LiveService] = {}
        self.clock = clock or SystemClock()
        self.freshness = Freshness(self.clock)
        self.routes = Routes({}, self.clock.now())
        self.clients: set[Downstream] = set()
        num_strangers = max(int(max_clients * STRANGERS_SHARE), LEAST_STRANGERS)
        self._strangers = SharedSlots(num_strangers, Downstream.abort)
        self._callers = SharedSlots(
            max(max_clients - num_strangers, LEAST_OF_CALLER),
            Downstream.abort,
            most_each=max(int(max_clients * CALLER_SHARE), LEAST_OF_CALLER),
        )
        self.held = Held(max_held_bytes)
        self.is_draining = False
        self.visitor: ssl.SSLContext | None = None
        """How porches know this data plane; None: it has no papers for them."""
        self._papers: Papers | None = None
        self.refusals: dict[tuple[int, str], int] = {}
        self._guesses: dict[str, int] = {}
        self._guesses_since = monotonic()
        self._share = share
        self._zone = zone
        self._ids = itertools.count()
        self._id_prefix = f"{self.process_id}-".encode()
        self._emptied = asyncio.Event()
        self._servers: list[asyncio.Server | TlsListener] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def health(self) -> Refused | None:
        """Why balancers in front should prefer another data plane; None: they need not."""
        if self.is_draining:
            return Refused(503, "plane.draining", "this data plane is ending")
        return self.freshness.problem

    async def listen(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve what `listener` accepts, until `drain`."""
        if tls is not None:
            self._servers.append(TlsListener(listener, lambda: Downstream(self), tls))
            return
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Downstream(self), sock=listener, backlog=BACKLOG)
        self._servers.append(server)

    def swap(self, table: Table) -> bool:
        """From now on this table, whole. False: the one in use is as new.

        No request is dropped, but those of callers that it does not know any more. What it names and cannot
        be is left out, and told of once.
        """
        if table.epoch == self.epoch and table.version <= self.version:
            return False
        table, found = usable(table)
        found += self._show(table.papers)
        for fault in found:
            if fault not in self.left_out:
                log.warning("left out of table %d: %s", table.version, fault)
        self.left_out = found
        now = monotonic()
        before, self.services = self.services, {}
        for spec in table.services:
            key = (spec.project, spec.name)
            live = before.pop(key, None)
            if live is None:
                live = LiveService(spec, share=self._share, zone=self._zone, now=now)
            else:
                live.told(spec, now)
            self.services[key] = live
        for gone in before.values():
            gone.end()
        self.version, self.epoch = table.version, table.epoch
        self.admit_anew()
        return True

    def _show(self, papers: Papers | None) -> list[str]:
        """From now on these at porches; what is wrong with them."""
        if papers == self._papers:
            return []
        try:
            self.visitor = visitor(papers) if papers is not None else None
        except (OSError, ValueError) as error:
            return [f"papers for porches, those before stay: {error}"]
        self._papers = papers
        return []

    def admit_anew(self) -> None:
        """Who may call, by the table and the clock; what others have under way, or wait for, is ended."""
        self.routes = Routes(self.services, self.clock.now())
        begun = [client.exchange for client in self.clients if client.exchange is not None]
        ended = [exchange for exchange in begun if not self.routes.admits(exchange.entry)]
        # First those that wait: a slot that is given back must not go to one of them.
        for exchange in sorted(ended, key=lambda one: one.replica is not None):
            try:
                exchange.refuse(Refused(401, "unauthenticated", "the token is not good any more"))
            except Exception:  # whatever is wrong with one, the others end, too
                log.exception("a request of a token that is not good any more is cut off")
                exchange.client.abort()

    def open(self, replica: LiveReplica, seeker: Seeker) -> None:
        """Connect; the seeker is told how that went."""
        task = asyncio.get_running_loop().create_task(self._connect(replica, seeker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, replica: LiveReplica, seeker: Seeker) -> None:
        try:
            up = await connect(replica, self.visitor)
        except (OSError, ValueError) as error:  # a time-out is an OSError, too
            seeker.on_refused(replica, is_ours=is_ours(error))
        else:
            seeker.connected(up)

    def new_id(self) -> bytes:
        return self._id_prefix + b"%x" % next(self._ids)

    def refused(self, refused: Refused) -> None:
        key = (refused.status, refused.code)
        self.refusals[key] = self.refusals.get(key, 0) + 1

    def guessed(self, peer: str, refused: Refused) -> Refused:
        """Somebody showed no token that is known: whoever does so too often is not even told that."""
        seen = self._guesses.get(peer, 0) + 1
        if peer in self._guesses or len(self._guesses) < MAX_GUESSERS:
            self._guesses[peer] = seen
        if seen <= MAX_GUESSES:
            return refused
        return Refused(429, "limit.guesses", "too many requests without a known token", retry_s=GUESSES_S)

    def forget_guesses(self, now: float) -> None:
        if now - self._guesses_since > GUESSES_S:
            self._guesses_since = now
            self._guesses.clear()

    def met(self, client: Downstream) -> None:
        self._strangers.enter(client, client.address(is_scarce=self._strangers.is_scarce))

    def named(self, client: Downstream, caller: str) -> bool:
        holder = caller or client.address(is_scarce=self._callers.is_scarce)
        if not self._callers.enter(client, holder):
            return False
        self._strangers.leave(client)
        return True

    def begin(self, client: Downstream) -> None:
        self._callers.begin(client)

    def wait(self, client: Downstream) -> None:
        self._callers.wait(client)

    def left(self, client: Downstream) -> None:
        self.clients.discard(client)
        self._strangers.leave(client)
        self._callers.leave(client)
        if self.is_draining and not self.clients:
            self._emptied.set()

    async def drain(self, within_s: float) -> None:
        """Take nothing new, finish what is here, then close. After `within_s`, what is left is cut off."""
        self.is_draining = True
        for server in self._servers:
            server.close()
        for client in list(self.clients):
            client.drain()
        if self.clients:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), within_s)
        for service in self.services.values():
            service.end()  # who still waits for a replica is told so, not cut off
        for client in list(self.clients):
            client.abort()
