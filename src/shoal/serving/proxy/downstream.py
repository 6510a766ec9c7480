"""A caller's connection: cuts the bytes that arrive into requests, one after the other, and writes replies.

Memory is bounded whatever the caller does: an unfinished head, one request under way, one piece read ahead.
These bytes count as held, like bodies.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from time import monotonic
from typing import Protocol, cast

from shoal.connection_quota import holder_of
from shoal.serving.admission.accounts import HeldBytes
from shoal.serving.admission.request_policy import Preflight
from shoal.serving.admission.routes import RoutedRequest, ServiceRoutes
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.proxy.chunks import BadChunk, Chunks
from shoal.serving.proxy.exchange import FOREVER, Exchange
from shoal.serving.proxy.local_reply import (
    HealthRequest,
    ProxyRefusal,
    health_reply,
    malformed,
    refusal_reply,
)
from shoal.serving.proxy.request_head import CHUNKED, too_large
from shoal.serving.proxy.upstream import ConnectionSeeker

HEAD_S = 10.0
"""Limit from a request's first byte to the end of its head."""
IDLE_S = 75.0
LAST_IDLE_S = 2.0
"""The idle limit while the process drains."""
BODY_S = 20.0
"""Interval of body checks: a body must have grown by `BODY_RATE` bytes for each second."""
BODY_RATE = 64
STALL_S = 60.0
"""Interval of checks that a caller reads its reply: `BODY_RATE` bytes for each second."""
LINGER_S = 5.0
LINGER_BYTES = 64 << 10
"""Bytes of a request, answered before it was complete, that are read and discarded so that the reply
arrives."""
TCP_CLOSE = 7
"""The kernel's state of a connection that was reset."""
FIRST_LOOK_S, LAST_LOOK_S = 0.05, 1.0
"""First and longest interval of the checks whether a caller that sends no more is still there."""
QUIET_S = 5.0
"""How long a reply to a caller that sends no more may pause where nothing else can be written to it."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WRITE_BUFFER = 64 << 10


class ConnectionPlane(Protocol):
    """What a connection needs of its process."""

    routes: ServiceRoutes
    is_draining: bool
    version: int
    clients: set[Downstream]
    held: HeldBytes

    @property
    def health(self) -> ProxyRefusal | None:
        """Why load balancers in front should prefer another data plane, or None."""
        ...

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None: ...

    def new_id(self) -> bytes: ...

    def count_refusal(self, refused: ProxyRefusal) -> None:
        """Count a refusal for the metrics."""
        ...

    def count_guess(self, peer: str, refused: ProxyRefusal) -> ProxyRefusal: ...

    def add_stranger(self, client: Downstream) -> None:
        """Count a new connection as a stranger's until a request names its caller."""
        ...

    def assign_caller(self, client: Downstream, caller: str) -> bool:
        """Count the connection for the caller, or for its address if `caller` is empty (at a public service).
        Return False if this caller, or all callers together, have too many connections; the connection then
        stays counted as before.
        """
        ...

    def begin(self, client: Downstream) -> None:
        """Mark a caller's connection as busy, until `wait`."""
        ...

    def wait(self, client: Downstream) -> None: ...

    def remove_client(self, client: Downstream) -> None:
        """Forget a closed connection."""
        ...


class Downstream(asyncio.Protocol):
    __slots__ = (
        "_buffer",
        "_caller",
        "_chunks",
        "_grown",
        "_is_half",
        "_is_held",
        "_is_safe",
        "_left",
        "_moved",
        "_plane",
        "_searched",
        "_transport",
        "_unread",
        "body_due",
        "due",
        "exchange",
        "forwarded",
        "held",
        "is_last",
        "is_stalled",
        "peer",
        "write",
    )

    def __init__(self, plane: ConnectionPlane) -> None:
        self._plane = plane
        self.held = plane.held
        self._buffer = b""
        """An unfinished head, or bytes read ahead of the reply to the request before."""
        self._searched = 0
        """How many of these bytes are known to hold no end of a head."""
        self._chunks: Chunks | None = None
        self._left = 0
        """Bytes left of a body that has a length."""
        self._grown = 0
        self._is_half = False
        """The caller has closed its sending side."""
        self._moved = 0.0
        """When something was last written after that."""
        self._caller: str | None = None
        """The caller for which the plane counts this connection; None: a stranger."""
        self._is_held = False
        self._is_safe = False
        """TLS, which has no half-closed connections."""
        self.is_stalled = False
        self._unread = 0
        """Unsent bytes of replies at the last check whether the caller reads them; 0: not checked yet."""
        self.exchange: Exchange | None = None
        self.is_last = False
        self.due = self.body_due = FOREVER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.write = self._transport.write
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else "local"
        self._is_safe = isinstance(transport.get_extra_info("ssl_object"), ssl.SSLObject)
        proto = b"https" if self._is_safe else b"http"
        self.forwarded = b"x-forwarded-for: %b\r\nx-forwarded-proto: %b\r\nx-request-id: " % (
            self.peer.encode(),
            proto,
        )
        self.due = monotonic() + HEAD_S
        self._plane.clients.add(self)  # all clients are swept, and awaited when the process ends
        self._plane.add_stranger(self)

    def address(self, *, is_scarce: bool) -> str:
        """Return the holder that the connection counts for while no token names a caller."""
        client, server = (self._transport.get_extra_info(name) for name in ("peername", "sockname"))
        return holder_of(client, server, is_scarce=is_scarce)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self._head(data)
        elif not exchange.is_whole:
            self._body(exchange, data)
        elif exchange.is_tunnel:
            exchange.send_through_tunnel(data)
        else:
            self._ahead(data)

    # Reading.

    def _head(self, data: bytes) -> None:
        if self.is_last:
            self._discard(len(data))
            return
        routes = self._plane.routes
        num_searched = 0
        if self._buffer:
            data, num_searched = self._buffer + data, self._searched
            self._set_buffer(b"")
        if data.endswith(b"\r\n\r\n"):
            recalled = routes.recall(data)
            if recalled is not None:
                self._begin(recalled, b"")
                return
        data = data.lstrip(b"\r\n") if data.startswith(b"\r\n") else data
        end = data.find(b"\r\n\r\n", max(0, num_searched - 3)) + 4
        if end == 3:
            self._unfinished(data, num_searched)
            return
        head = data[:end]
        try:
            request = routes.recall(head) or routes.resolve(head)
        except HealthRequest:
            self._keep_rest(data[end:], None)
            self._answer_health(is_head=head.startswith(b"HEAD "))
            return
        except Preflight as preflight:
            self._keep_rest(data[end:], None)
            self.write(preflight.response(closes=self.is_last))
            self._next()
            return
        except ProxyRefusal as refusal:
            refused = self._plane.count_guess(self.peer, refusal) if refusal.status == 401 else refusal
            # If a request's body is not read, its end is unknown, and so is the start of the next request.
            refused.must_close = refused.must_close or self._has_body(head)
            self._keep_rest(data[end:], refused)
            self._answer(refused, is_head=head.startswith(b"HEAD "))
            return
        self._begin(request, data[end:])

    def _unfinished(self, data: bytes, num_searched: int) -> None:
        refused = too_large(data, num_searched)
        if refused is None and not self._has_room(len(data)):
            refused = ProxyRefusal(
                503, "plane.full", "this data plane holds too many bytes", must_close=True, retry_s=2.0
            )
        if refused is not None:
            self._answer(refused)
            return
        if not num_searched:
            self.due = min(self.due, monotonic() + HEAD_S)
        self._set_buffer(data)
        self._searched = len(data)

    def _has_room(self, num_bytes: int) -> bool:
        return self.held.bytes + num_bytes <= self.held.max_bytes

    def _keep_rest(self, rest: bytes, refused: ProxyRefusal | None) -> None:
        """Keep what came after a request that is answered here, unless there is no room for it."""
        if self._has_room(len(rest)):
            self._set_buffer(rest)
        elif refused is not None:
            refused.must_close = True
        else:
            self.is_last = True

    def _set_buffer(self, data: bytes) -> None:
        """Set the buffer and count it as held."""
        self.held.bytes += len(data) - len(self._buffer)
        self._buffer = data
        self._searched = 0

    @staticmethod
    def _has_body(head: bytes) -> bool:
        lowered = head.lower()
        return b"\r\ncontent-length" in lowered or b"\r\ntransfer-encoding" in lowered

    def _begin(self, request: RoutedRequest, rest: bytes) -> None:
        now = monotonic()
        entry, query, request_id, own_headers, length = request
        service, plane = entry.service, self._plane
        account = entry.account or service.account(self.peer)
        refused = self._assign_caller(entry.caller) or service.admit(account, now)
        if refused is not None:
            refused.headers = entry.cors
            refused.must_close = not 0 <= length <= len(rest)
            self._keep_rest(rest[length:], refused)
            self._answer(refused, is_head=entry.is_head)
            return
        self.is_last = not entry.is_keep_alive or plane.is_draining
        plane.begin(self)
        if not request_id:
            request = (entry, query, plane.new_id(), own_headers, length)
        exchange = Exchange(self, request, account, now)
        self.exchange = exchange
        if length == len(rest):
            exchange.on_whole(rest)
            return
        if length == 0:
            exchange.on_whole(b"")
            self._ahead(rest)
            return
        self._grown = 0
        self.due = FOREVER
        self.body_due = now + BODY_S
        self._left = length
        self._chunks = Chunks() if length == CHUNKED else None
        if entry.is_expecting and not rest:
            self.write(CONTINUE)
        if entry.hold_bytes == 0:
            exchange.seek()
        if rest:
            self._body(exchange, rest)

    def _assign_caller(self, caller: str) -> ProxyRefusal | None:
        """Have the plane count this connection for the caller, or return why it may not."""
        if caller == self._caller:
            return None
        if not self._plane.assign_caller(self, caller):
            return ProxyRefusal(503, "plane.full", "too many connections are busy", retry_s=2.0)
        self._caller = caller
        return None

    def _body(self, exchange: Exchange, data: bytes) -> None:
        if self._chunks is not None:
            try:
                ready, rest = self._chunks.feed(data)
            except BadChunk as error:
                self.is_last = True
                exchange.refuse(malformed(str(error)))
                return
        else:
            left = self._left
            ready, rest = (data, None) if len(data) < left else (data[:left], data[left:])
            self._left = left - len(ready)
        if ready:
            self._grown += len(ready)  # extensions and trailers that drip in do not count
            exchange.on_body(ready)
        if rest is not None:
            self.body_due = FOREVER
            exchange.on_body_end()
            exchange.is_whole = True
            if rest:
                self._ahead(rest)

    def _ahead(self, data: bytes) -> None:
        """Keep the next request, which arrived before this one is answered, and stop reading.

        If the process holds as much as it may, the reply under way is the connection's last, and the caller
        has to send the rest again on another.
        """
        exchange, is_full = self.exchange, not self._has_room(len(data))
        if not is_full:
            self._set_buffer(self._buffer + data)
        elif exchange is not None and exchange.is_upgrade:
            self.abort()  # these bytes would be missing in the tunnel
            return
        if exchange is not None:
            self.is_last = self.is_last or is_full
            self.hold()
        elif not self.is_last:
            self.is_last = is_full
            self._next()

    # Writing.

    def _answer(self, refused: ProxyRefusal, *, is_head: bool = False, request_id: str = "") -> None:
        self._plane.count_refusal(refused)
        self.is_last = closes = refused.must_close or self.is_last or self._plane.is_draining
        self.write(refusal_reply(refused, closes=closes, has_body=not is_head, request_id=request_id))
        if refused.must_close:
            self._linger()
        else:
            self._next()

    def _answer_health(self, *, is_head: bool) -> None:
        problem = self._plane.health
        if problem is not None:
            self._answer(problem, is_head=is_head)
            return
        self.write(health_reply(self._plane.version, closes=self.is_last, has_body=not is_head))
        self._next()

    def refuse(self, refused: ProxyRefusal, exchange: Exchange) -> None:
        refused.must_close = refused.must_close or not exchange.is_whole
        self.exchange = None
        self._plane.wait(self)
        self._answer(refused, is_head=exchange.is_head, request_id=exchange.request_id.decode())

    def finish(self) -> None:
        exchange, self.exchange = self.exchange, None
        self._plane.wait(self)
        if exchange is not None and not exchange.is_whole:
            self._linger()
        elif self._is_held or self._buffer or self.is_last or self.is_stalled or self._plane.is_draining:
            self._next()
        else:
            self.body_due = FOREVER
            self.due = monotonic() + IDLE_S

    def _linger(self) -> None:
        """Read and discard what the caller still sends: closing now would destroy the reply on its way."""
        self.is_last = True
        self.body_due = FOREVER
        self.due = monotonic() + LINGER_S
        self._set_buffer(b"")
        self._grown = 0
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self.resume()

    def switch(self) -> None:
        """End HTTP: what the caller has sent since it asked for the upgrade, and will send, is the
        replica's.
        """
        data = self._buffer
        self._set_buffer(b"")
        self.resume()
        if data and self.exchange is not None:
            self.exchange.send_through_tunnel(data)

    def _discard(self, num_bytes: int) -> None:
        self._grown += num_bytes
        if self._grown > LINGER_BYTES:
            self.abort()

    def _next(self) -> None:
        """Go on with what was read ahead, in an event-loop turn of its own. Until then no more is read. While
        the caller does not read its replies, no request begins.
        """
        self.body_due = FOREVER
        if self.is_last:
            self._set_buffer(b"")
            self.due = monotonic() + LINGER_S
            self._transport.close()
            return
        if self.is_stalled:
            self.hold()
            return
        self.due = monotonic() + (LAST_IDLE_S if self._plane.is_draining else IDLE_S)
        if self._buffer:
            self.hold()
            asyncio.get_running_loop().call_soon(self._resume_buffer)
        elif self._is_held:
            self.resume()

    def _resume_buffer(self) -> None:
        """Parse what was read ahead."""
        is_next = self.exchange is None and not self.is_stalled
        if is_next and self._buffer and not self._transport.is_closing():
            data = self._buffer
            self._set_buffer(b"")
            self.resume()
            self._head(data)

    def abort(self) -> None:
        self._transport.abort()

    def drain(self) -> None:
        """Announce in the reply to come, or in the one to the next request, that it is the last.

        A connection that closed without this might cross a request on its way.
        """
        if self.exchange is None:
            self.due = min(self.due, monotonic() + LAST_IDLE_S)
        elif not self.exchange.is_answered:
            self.is_last = True

    def open(self, replica: LiveReplica, seeker: ConnectionSeeker) -> None:
        self._plane.open(replica, seeker)

    # Back-pressure.

    def hold(self) -> None:
        """Stop reading until `resume`."""
        if not self._is_held:
            self._is_held = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_held and not self._transport.is_closing():
            self._is_held = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The caller reads more slowly than the replica sends."""
        self.is_stalled = True
        self._unread = self._transport.get_write_buffer_size()
        self.due = monotonic() + STALL_S
        if self.exchange is None:
            self.hold()
        elif self.exchange.up is not None:
            self.exchange.up.pause()

    def resume_writing(self) -> None:
        self.is_stalled = False
        self._unread = 0
        exchange = self.exchange
        if exchange is None:
            if not self.is_last:
                self._next()
        elif exchange.up is not None:
            self.due = monotonic() + exchange.entry.service.timeout_s
            exchange.up.unpause()

    # The end.

    def sweep(self, now: float) -> None:
        """Enforce deadlines. Called when `due` or `body_due` has passed."""
        exchange = self.exchange
        if now >= self.body_due and exchange is not None:
            # Chunks may be a conversation: it is enough that they come.
            wanted = BODY_RATE * BODY_S if self._chunks is None else 1
            if self._grown < wanted and not self._is_held:
                self.body_due = FOREVER
                exchange.refuse(
                    ProxyRefusal(408, "request.slow", "the body comes too slowly", must_close=True)
                )
                return
            self._grown = 0
            self.body_due = now + BODY_S
        if now < self.due:
            return
        if self.is_stalled or (self.is_last and exchange is None):
            self._check_progress(now)
        elif exchange is not None:
            exchange.expire(now)
        elif self._buffer:
            self._answer(ProxyRefusal(408, "request.slow", "the head comes too slowly", must_close=True))
        else:
            self._transport.close()

    def _check_progress(self, now: float) -> None:
        """Abort a caller that reads too slowly. One that reads gets all, also the last reply of a
        connection.
        """
        unread_before, self._unread = self._unread, self._transport.get_write_buffer_size()
        if self._unread and (not unread_before or unread_before - self._unread >= BODY_RATE * STALL_S):
            self.due = now + STALL_S
        else:
            self.abort()

    def eof_received(self) -> bool:
        """The caller sends no more: either it waits for its reply, or it is gone. Both look the same from
        here, but a caller that is gone refuses what is written to it. So write something that every HTTP/1.1
        reader skips. If the reply has begun, or for HTTP/1.0, there is no such thing: then a caller of an
        event stream counts as gone, and any other is believed for `QUIET_S` after each piece of its reply.
        """
        exchange = self.exchange
        is_waiting = exchange is not None and exchange.is_whole and not exchange.is_upgrade
        if exchange is None or not is_waiting or self._is_safe or exchange.is_events:
            return False
        self.is_last = True
        if not self._is_half:
            self._is_half = True
            self._moved = monotonic()
            self.write = self._write_noted
            if not exchange.has_begun and not exchange.entry.is_http10:
                self.write(CONTINUE)
            self._check_half_closed(FIRST_LOOK_S)
        return True

    def _check_half_closed(self, delay_s: float) -> None:
        exchange = self.exchange
        if exchange is None or self._transport.is_closing():
            return
        cannot_ask = exchange.has_begun or exchange.entry.is_http10
        is_quiet = not self._transport.get_write_buffer_size() and monotonic() - self._moved > QUIET_S
        link = self._transport.get_extra_info("socket")
        if link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE or (
            cannot_ask and is_quiet
        ):
            self.abort()
        else:
            asyncio.get_running_loop().call_later(
                delay_s, self._check_half_closed, min(LAST_LOOK_S, delay_s * 2)
            )

    def _write_noted(self, data: bytes | bytearray | memoryview) -> None:
        self._moved = monotonic()
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._plane.remove_client(self)
        self._set_buffer(b"")
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_gone()
