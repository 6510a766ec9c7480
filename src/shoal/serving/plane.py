"""The data plane in one process: it listens, holds what its connections share, swaps tables and drains.

Its TLS certificate is read again when the file changes, so a renewal needs no restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import ssl
from pathlib import Path
from time import monotonic

from shoal.clock import Clock, SystemClock
from shoal.connection_quota import ConnectionQuota
from shoal.serving.admission.accounts import HeldBytes
from shoal.serving.admission.routes import ServiceRoutes
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.balance.service import LiveService
from shoal.serving.processes import is_local_error
from shoal.serving.proxy.downstream import Downstream
from shoal.serving.proxy.local_reply import Freshness, ProxyRefusal
from shoal.serving.proxy.upstream import ConnectionSeeker, connect
from shoal.serving.table import ServingTable, usable
from shoal.sidecar_tls import client_context
from shoal.tls_listener import TlsListener
from shoal.wire import TlsIdentity

log = logging.getLogger(__name__)

TLS_CHECK_INTERVAL_S = 10.0


class TlsFiles:
    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._seen = self._stamp()
        self.context.load_cert_chain(certificate, key)

    def refresh(self) -> None:
        """Use the files as they are now for new connections. If they are no good, the previous pair stays."""
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                # A pair that does not match leaves a context with the new certificate and without a key.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
                self.context.load_cert_chain(*self._files)
        except OSError as error:  # `ssl.SSLError` is one
            log.warning("certificate %s not taken, the one before stays: %s", self._files[0], error)

    async def keep_fresh(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(TLS_CHECK_INTERVAL_S)
            self.refresh()

    def _stamp(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)


BACKLOG = 4096
STRANGERS_SHARE, LEAST_STRANGERS = 0.25, 16
"""Limit of connections on which no request has named its caller, as a part of `max_clients`."""
CALLER_SHARE, LEAST_OF_CALLER = 0.25, 4
"""Limit of connections of one caller, or of one address at public services, as a part of `max_clients`."""
MAX_GUESSES = 100
GUESSES_S = 60.0
"""The period in which one address may send `MAX_GUESSES` requests without a known token."""
MAX_GUESSERS = 10_000
MAX_HELD_BYTES = 256 << 20
"""Limit of request bodies that wait, or are kept for a retry."""


class DataPlane:
    """`share` is this process's part where several serve one port; `zone` is the zone it is in."""

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
        """What was left out of the table in use, and why."""
        self.services: dict[tuple[str, str], LiveService] = {}
        self.clock = clock or SystemClock()
        self.freshness = Freshness(self.clock)
        self.routes = ServiceRoutes({}, self.clock.now())
        self.clients: set[Downstream] = set()
        num_strangers = max(int(max_clients * STRANGERS_SHARE), LEAST_STRANGERS)
        self._strangers = ConnectionQuota(num_strangers, Downstream.abort)
        self._callers = ConnectionQuota(
            max(max_clients - num_strangers, LEAST_OF_CALLER),
            Downstream.abort,
            most_each=max(int(max_clients * CALLER_SHARE), LEAST_OF_CALLER),
        )
        self.held = HeldBytes(max_held_bytes)
        self.is_draining = False
        self.client_tls: ssl.SSLContext | None = None
        """The client certificate for replica sidecars. None: this data plane has none."""
        self._tls_identity: TlsIdentity | None = None
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
    def health(self) -> ProxyRefusal | None:
        """Why load balancers in front should prefer another data plane, or None."""
        if self.is_draining:
            return ProxyRefusal(503, "plane.draining", "this data plane is ending")
        return self.freshness.problem

    async def listen(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve what `listener` accepts, until `drain`."""
        if tls is not None:
            self._servers.append(TlsListener(listener, lambda: Downstream(self), tls))
            return
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Downstream(self), sock=listener, backlog=BACKLOG)
        self._servers.append(server)

    def swap(self, table: ServingTable) -> bool:
        """Use this table as a whole. Return False if the one in use is as new.

        No request is dropped, except those of callers that the new table does not know. Entries that cannot
        be served are left out and logged once.
        """
        if table.epoch == self.epoch and table.version <= self.version:
            return False
        table, faults = usable(table)
        faults += self._use_tls_identity(table.tls_identity)
        for fault in faults:
            if fault not in self.left_out:
                log.warning("left out of table %d: %s", table.version, fault)
        self.left_out = faults
        now = monotonic()
        before, self.services = self.services, {}
        for spec in table.services:
            key = (spec.project, spec.name)
            live = before.pop(key, None)
            if live is None:
                live = LiveService(spec, share=self._share, zone=self._zone, now=now)
            else:
                live.update(spec, now)
            self.services[key] = live
        for gone in before.values():
            gone.end()
        self.version, self.epoch = table.version, table.epoch
        self.refresh_admission()
        return True

    def _use_tls_identity(self, tls_identity: TlsIdentity | None) -> list[str]:
        """Use this certificate at sidecars, and return what is wrong with it."""
        if tls_identity == self._tls_identity:
            return []
        try:
            self.client_tls = client_context(tls_identity) if tls_identity is not None else None
        except (OSError, ValueError) as error:
            return [f"TLS identity for replica sidecars not usable, the previous one stays: {error}"]
        self._tls_identity = tls_identity
        return []

    def refresh_admission(self) -> None:
        """Apply the table and the clock to all callers. Requests of callers no longer allowed end."""
        self.routes = ServiceRoutes(self.services, self.clock.now())
        begun = [client.exchange for client in self.clients if client.exchange is not None]
        ended = [exchange for exchange in begun if not self.routes.admits(exchange.entry)]
        # Waiting requests first: a slot that is given back must not go to one of them.
        for exchange in sorted(ended, key=lambda exchange: exchange.slot is not None):
            try:
                exchange.refuse(ProxyRefusal(401, "unauthenticated", "the token is no longer valid"))
            except Exception:  # whatever is wrong with one request, the others end as well
                log.exception("a request with a token that is no longer valid is cut off")
                exchange.client.abort()

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None:
        """Connect, and report the result to the seeker."""
        task = asyncio.get_running_loop().create_task(self._connect(replica, seeker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None:
        try:
            up = await connect(replica, self.client_tls)
        except (OSError, ValueError) as error:  # a timeout is an OSError as well
            seeker.on_refused(replica, is_local=is_local_error(error))
        else:
            seeker.on_connected(up)

    def new_id(self) -> bytes:
        return self._id_prefix + b"%x" % next(self._ids)

    def count_refusal(self, refused: ProxyRefusal) -> None:
        key = (refused.status, refused.code)
        self.refusals[key] = self.refusals.get(key, 0) + 1

    def count_guess(self, peer: str, refused: ProxyRefusal) -> ProxyRefusal:
        """Count a request without a known token, and return its refusal. After too many it is a 429."""
        count = self._guesses.get(peer, 0) + 1
        if peer in self._guesses or len(self._guesses) < MAX_GUESSERS:
            self._guesses[peer] = count
        if count <= MAX_GUESSES:
            return refused
        return ProxyRefusal(
            429, "limit.guesses", "too many requests without a known token", retry_s=GUESSES_S
        )

    def forget_guesses(self, now: float) -> None:
        if now - self._guesses_since > GUESSES_S:
            self._guesses_since = now
            self._guesses.clear()

    def add_stranger(self, client: Downstream) -> None:
        self._strangers.admit(client, client.address(is_scarce=self._strangers.is_scarce))

    def assign_caller(self, client: Downstream, caller: str) -> bool:
        holder = caller or client.address(is_scarce=self._callers.is_scarce)
        if not self._callers.admit(client, holder):
            return False
        self._strangers.release(client)
        return True

    def begin(self, client: Downstream) -> None:
        self._callers.mark_busy(client)

    def wait(self, client: Downstream) -> None:
        self._callers.mark_idle(client)

    def remove_client(self, client: Downstream) -> None:
        self.clients.discard(client)
        self._strangers.release(client)
        self._callers.release(client)
        if self.is_draining and not self.clients:
            self._emptied.set()

    async def drain(self, within_s: float) -> None:
        """Accept nothing new, finish open requests, then close. After `within_s`, abort the rest."""
        self.is_draining = True
        for server in self._servers:
            server.close()
        for client in list(self.clients):
            client.drain()
        if self.clients:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), within_s)
        for service in self.services.values():
            service.end()  # a request that still waits for a replica gets a reply instead of an abort
        for client in list(self.clients):
            client.abort()
