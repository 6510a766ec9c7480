"""A connection to a replica: sends one request at a time, reads the reply, and is used again.

It decides nothing about requests; it reports what arrives or goes wrong to the exchange that uses it.

A replica on another machine is reached over TLS through its sidecar, which sends one byte when the server is
reached. Nothing is sent before that byte, so until then no request has begun and it may go to another
replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from time import monotonic
from typing import Protocol, cast

from shoal.local_sockets import pinned_socket, receive_socket
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.proxy.chunks import BadChunk, Chunks
from shoal.serving.proxy.reply import MAX_HEAD_BYTES, UNTIL_CLOSE, BadProxyReply, ProxyReply, parse_reply
from shoal.serving.proxy.request_head import CHUNKED
from shoal.sidecar_tls import ALPN, READY_BYTE, SCHEME

SILENCE_MS = 15_000
"""A machine that acknowledges nothing for this long is cut off, so its requests can go to another replica."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""The same limit where nothing is being sent and a reply is awaited: probes after 5 s, every 5 s, 3 times."""


class _Greeting(asyncio.Protocol):
    """Waits for the sidecar's ready byte and accepts nothing else."""

    def __init__(self) -> None:
        self.is_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        if data == READY_BYTE and not self.is_open.done():
            self.is_open.set_result(None)
        else:
            self._end("it sent data before any request")

    def eof_received(self) -> bool:
        self._end("its server could not be reached")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc or "its server could not be reached"))

    def _end(self, because: str) -> None:
        self.is_lost = True
        if not self.is_open.done():
            self.is_open.set_exception(
                ConnectionRefusedError(f"the sidecar closed the connection: {because}")
            )


async def connect_sidecar(address: str, name: str, client_tls: ssl.SSLContext | None) -> asyncio.Transport:
    """Connect to the server behind the sidecar of the replica with that name. Nothing has been sent on it.

    `OSError`: the sidecar or its server cannot be reached, or another process is there.
    """
    if client_tls is None:
        raise ConnectionRefusedError("this data plane has no TLS identity to show to a replica sidecar")
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(
        _Greeting, host.strip("[]"), int(port), ssl=client_tls, server_hostname=name
    )
    try:
        _set_timeouts(transport)
        if transport.get_extra_info("ssl_object").selected_alpn_protocol() != ALPN:
            raise ConnectionRefusedError("the peer is not a replica sidecar")
        await protocol.is_open
        if protocol.is_lost:
            raise ConnectionResetError("the sidecar closed the connection")
    except BaseException:  # a timeout as well
        transport.abort()
        raise
    return transport


def _set_timeouts(transport: asyncio.Transport) -> None:
    link = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):  # the connection may be gone already, which is noticed elsewhere
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            link.setsockopt(socket.IPPROTO_TCP, option, value)


AWAITING = -3
TUNNEL = -4
"""Values of `Upstream._left`: the head has not arrived; no more HTTP is spoken."""
CONNECT_S = 5.0
MAX_REMEMBERED = 512
_remembered: dict[bytes, ProxyReply] = {}
"""Heads of replies by their exact bytes: a busy replica repeats them until its date changes."""


class ReplyHandler(Protocol):
    """The exchange that uses the connection."""

    @property
    def is_head(self) -> bool: ...

    @property
    def is_upgrade(self) -> bool:
        """Whether 101 is a valid reply to it."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the request has been sent completely."""
        ...

    def on_reply(self, reply: ProxyReply, body: bytes) -> None:
        """The reply's head has come, with a body if all of it came at once."""
        ...

    def on_data(self, data: bytes, num_chunks: int = 1) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, reason: str) -> None: ...

    def on_stalled(self) -> None:
        """The replica does not read what is ready for it."""
        ...

    def on_resumed(self) -> None: ...


class ConnectionSeeker(Protocol):
    """What wants a connection, and learns whether it got one."""

    def on_connected(self, up: Upstream) -> None: ...

    def on_refused(self, replica: LiveReplica, *, is_local: bool = False) -> None:
        """`is_local`: the reason is on this side, not the replica's."""
        ...


class Upstream(asyncio.Protocol):
    __slots__ = (
        "_buffer",
        "_chunks",
        "_is_keep_alive",
        "_is_paused",
        "_left",
        "handler",
        "idle_since",
        "replica",
        "transport",
    )

    def __init__(self, replica: LiveReplica) -> None:
        self.replica = replica
        self.handler: ReplyHandler | None = None
        self.idle_since = 0.0
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._buffer = b""
        self._chunks: Chunks | None = None
        self._left = 0
        """Bytes left of a body with a length; or `UNTIL_CLOSE`, `AWAITING` or `TUNNEL`."""
        self._is_keep_alive = False
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, handler: ReplyHandler, data: bytes) -> None:
        self.handler = handler
        self._left = AWAITING
        self.transport.write(data)

    def close(self) -> None:
        """Close without notice to the exchange that uses it."""
        self.handler = None
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        """Stop reading until `unpause`, because the caller reads slowly."""
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def unpause(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        handler = self.handler
        if handler is None:
            self.transport.abort()  # a replica that sends data without a request is not trusted
            return
        chunks = self._chunks
        try:
            if chunks is not None:
                if chunks.is_one(data):
                    handler.on_data(data)
                else:
                    self._chunked(handler, chunks, data)
            elif self._left == AWAITING:
                self._head(handler, data)
            elif self._left == TUNNEL:
                handler.on_data(data)
            else:
                self._body(handler, data)
        except (BadProxyReply, BadChunk) as error:
            self.close()
            handler.on_lost(str(error))

    def _head(self, handler: ReplyHandler, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        at = 0
        while True:
            end = data.find(b"\r\n\r\n", at) + 4
            if end == 3:
                self._buffer = data[at:]
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise BadProxyReply(f"the head of the response is longer than {MAX_HEAD_BYTES} bytes")
                return
            reply = _remembered.get(data[at:end]) or _parse_head(data[at:end])
            at = end
            if reply.status >= 200 or reply.status == 101:
                break  # other replies are interim
        body = data[at:]
        self._is_keep_alive = reply.is_keep_alive
        length = 0 if handler.is_head else reply.length
        if reply.status == 101:
            if not handler.is_upgrade:
                raise BadProxyReply("the replica switches protocols without a request to do so")
            self._left = TUNNEL
        elif length == len(body):
            handler.on_reply(reply, body)
            self._done(handler)
            return
        elif length == CHUNKED:
            self._chunks = Chunks()
            self._left = 0
        elif length != UNTIL_CLOSE and len(body) > length:
            raise BadProxyReply("the response is longer than it says")
        else:
            self._left = length
        handler.on_reply(reply, b"")
        if body and self.handler is handler:
            self.data_received(body)

    def _body(self, handler: ReplyHandler, data: bytes) -> None:
        if self._left == UNTIL_CLOSE or len(data) < self._left:
            self._left -= len(data) if self._left > 0 else 0
            handler.on_data(data)
        elif len(data) == self._left:
            handler.on_data(data)
            self._done(handler)
        else:
            raise BadProxyReply("the response is longer than it says")

    def _chunked(self, handler: ReplyHandler, chunks: Chunks, data: bytes) -> None:
        before = chunks.count
        ready, rest = chunks.feed(data)
        if ready:
            handler.on_data(ready, chunks.count - before)
        if rest is not None:
            self._chunks = None
            self._is_keep_alive = self._is_keep_alive and not rest
            self._done(handler)

    def _done(self, handler: ReplyHandler) -> None:
        """Finish the reply. Close the connection if the request is not complete, or if it asked for an
        upgrade: what the replica makes of later bytes is then uncertain.
        """
        self.handler = None
        if not self._is_keep_alive or not handler.is_whole or handler.is_upgrade or self.replica.is_draining:
            self.transport.close()
        else:
            if self._is_paused:
                self.unpause()
            self.idle_since = monotonic()
            self.replica.idle.append(self)
        handler.on_end()

    def eof_received(self) -> bool:
        handler = self.handler
        if handler is not None and self._left == UNTIL_CLOSE:
            self.handler = None
            handler.on_end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.on_lost(f"the replica closed the connection{f' ({exc})' if exc else ''}")
        elif self in self.replica.idle:
            self.replica.idle.remove(self)

    def pause_writing(self) -> None:
        if self.handler is not None:
            self.handler.on_stalled()

    def resume_writing(self) -> None:
        if self.handler is not None:
            self.handler.on_resumed()


def _parse_head(raw: bytes) -> ProxyReply:
    reply = parse_reply(raw)
    if len(_remembered) >= MAX_REMEMBERED:
        _remembered.clear()
    if len(raw) <= 2048:
        _remembered[raw] = reply
    return reply


async def connect(replica: LiveReplica, client_tls: ssl.SSLContext | None = None) -> Upstream:
    """Open a new connection, owned by the caller. `OSError`: the replica cannot be reached, or not in time.

    `client_tls` is the identity for replica sidecars.
    """
    loop = asyncio.get_running_loop()
    address = replica.spec.address
    async with asyncio.timeout(CONNECT_S):
        if address.startswith("unix:"):
            # The program owns the folder, so whatever it put there must not lead to another process.
            with pinned_socket(address.removeprefix("unix:")) as name:
                _, upstream = await loop.create_unix_connection(lambda: Upstream(replica), name)
        elif address.startswith("broker:"):
            fresh = await _connect_through(address.removeprefix("broker:"))
            _, upstream = await loop.create_connection(lambda: Upstream(replica), sock=fresh)
        elif address.startswith(SCHEME):
            transport = await connect_sidecar(address, replica.spec.name, client_tls)
            upstream = Upstream(replica)
            transport.set_protocol(upstream)
            upstream.connection_made(transport)
        else:
            host, _, port = address.rpartition(":")
            _, upstream = await loop.create_connection(lambda: Upstream(replica), host.strip("[]"), int(port))
    return upstream


async def _connect_through(path: str) -> socket.socket:
    """Open a connection in the private network that the socket at `path` leads to."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as link:
        link.setblocking(False)  # noqa: FBT003 - the standard library's own
        with pinned_socket(path) as name:
            link.connect(name)
        ready = loop.create_future()
        loop.add_reader(link, ready.set_result, None)
        try:
            await ready
        finally:
            loop.remove_reader(link)
        fresh, address = receive_socket(link)
    try:
        fresh.setblocking(False)  # noqa: FBT003 - the standard library's own
        await loop.sock_connect(fresh, address)
    except BaseException:  # a timeout as well
        fresh.close()
        raise
    return fresh
