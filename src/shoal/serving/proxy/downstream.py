"""A caller's connection: cuts the bytes that arrive into requests, one after the other, and writes replies.

Memory is bounded whatever the caller does: an unfinished head, one request under way, one piece read ahead.
These bytes count as held, like bodies.
"""

from __future__ import annotations

import asyncio
import ssl
from time import monotonic
from typing import cast

from shoal.connection_quota import holder_of
from shoal.serving.admission.request_policy import Preflight
from shoal.serving.admission.routes import RoutedRequest
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.exchange.client import FOREVER
from shoal.serving.exchange.exchange import Exchange
from shoal.serving.proxy.body_reader import BODY_S, BodyReader
from shoal.serving.proxy.caller_flow import STALL_S, CallerFlow
from shoal.serving.proxy.chunks import BadChunk
from shoal.serving.proxy.connection_plane import ConnectionPlane
from shoal.serving.proxy.half_closed import HalfClosed
from shoal.serving.proxy.local_reply import (
    CONTINUE,
    HealthRequest,
    ProxyRefusal,
    health_reply,
    malformed,
    refusal_reply,
)
from shoal.serving.proxy.read_buffer import ReadBuffer
from shoal.serving.proxy.request_head import too_large
from shoal.serving.proxy.upstream import ConnectionSeeker

HEAD_S = 10.0
"""Limit from a request's first byte to the end of its head."""
IDLE_S = 75.0
LAST_IDLE_S = 2.0
"""The idle limit while the process drains."""
LINGER_S = 5.0
LINGER_BYTES = 64 << 10
"""Bytes of a request, answered before it was complete, that are read and discarded so that the reply
arrives."""
WRITE_BUFFER = 64 << 10


class Downstream(asyncio.Protocol):
    __slots__ = (
        "_body",
        "_buffer",
        "_caller",
        "_flow",
        "_half_closed",
        "_num_discarded",
        "_plane",
        "_transport",
        "body_due",
        "due",
        "exchange",
        "forwarded",
        "held",
        "is_last",
        "peer",
        "write",
    )

    def __init__(self, plane: ConnectionPlane) -> None:
        self._plane = plane
        self.held = plane.held
        self._buffer = ReadBuffer(plane.held)
        """An unfinished head, or bytes read ahead of the reply to the request before."""
        self._body = BodyReader(0)
        """Of the exchange, while its request is not whole."""
        self._caller: str | None = None
        """The caller for which the plane counts this connection; None: a stranger."""
        self._num_discarded = 0
        """Bytes that came after the last reply."""
        self._half_closed: HalfClosed | None = None
        """Set once the caller has closed its sending side."""
        self.exchange: Exchange | None = None
        self.is_last = False
        self.due = self.body_due = FOREVER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._flow = CallerFlow(self._transport)
        self.write = self._transport.write
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else "local"
        proto = b"https" if self._is_tls else b"http"
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

    @property
    def _is_tls(self) -> bool:
        return isinstance(self._transport.get_extra_info("ssl_object"), ssl.SSLObject)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self._read_head(data)
        elif not exchange.is_whole:
            self._read_body(exchange, data)
        elif exchange.is_tunnel:
            exchange.on_tunnel_data(data)
        else:
            self._read_ahead(data)

    # Reading.

    def _read_head(self, data: bytes) -> None:
        if self.is_last:
            self._discard(len(data))
            return
        routes = self._plane.routes
        num_searched = 0
        if self._buffer.data:
            num_searched = self._buffer.num_searched
            data = self._buffer.take() + data
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
        if refused is None and not self._buffer.has_room(len(data)):
            refused = ProxyRefusal(
                503, "plane.full", "this data plane holds too many bytes", must_close=True, retry_s=2.0
            )
        if refused is not None:
            self._answer(refused)
            return
        if not num_searched:
            self.due = min(self.due, monotonic() + HEAD_S)
        self._buffer.set(data, num_searched=len(data))

    def _keep_rest(self, rest: bytes, refused: ProxyRefusal | None) -> None:
        """Keep what came after a request that is answered here, unless there is no room for it."""
        if self._buffer.has_room(len(rest)):
            self._buffer.set(rest)
        elif refused is not None:
            refused.must_close = True
        else:
            self.is_last = True

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
            exchange.on_request(rest)
            return
        if length == 0:
            exchange.on_request(b"")
            self._read_ahead(rest)
            return
        self.due = FOREVER
        self.body_due = now + BODY_S
        self._body = BodyReader(length)
        if entry.is_expecting and not rest:
            self.write(CONTINUE)
        exchange.on_body_follows()
        if rest:
            self._read_body(exchange, rest)

    def _assign_caller(self, caller: str) -> ProxyRefusal | None:
        """Have the plane count this connection for the caller, or return why it may not."""
        if caller == self._caller:
            return None
        if not self._plane.assign_caller(self, caller):
            return ProxyRefusal(503, "plane.full", "too many connections are busy", retry_s=2.0)
        self._caller = caller
        return None

    def _read_body(self, exchange: Exchange, data: bytes) -> None:
        try:
            ready, rest = self._body.feed(data)
        except BadChunk as error:
            self.is_last = True
            exchange.refuse(malformed(str(error)))
            return
        if ready:
            exchange.on_body(ready)
        if rest is not None:
            self.body_due = FOREVER
            exchange.on_body_end()
            if rest:
                self._read_ahead(rest)

    def _read_ahead(self, data: bytes) -> None:
        """Keep the next request, which arrived before this one is answered, and stop reading.

        If the process holds as much as it may, the reply under way is the connection's last, and the caller
        has to send the rest again on another.
        """
        exchange, is_full = self.exchange, not self._buffer.has_room(len(data))
        if not is_full:
            self._buffer.set(self._buffer.data + data)
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
        elif (
            self._flow.is_held
            or self._buffer.data
            or self.is_last
            or self.is_stalled
            or self._plane.is_draining
        ):
            self._next()
        else:
            self.body_due = FOREVER
            self.due = monotonic() + IDLE_S

    def _linger(self) -> None:
        """Read and discard what the caller still sends: closing now would destroy the reply on its way."""
        self.is_last = True
        self.body_due = FOREVER
        self.due = monotonic() + LINGER_S
        self._buffer.set(b"")
        self._num_discarded = 0
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self.resume()

    def switch(self) -> None:
        """End HTTP: what the caller has sent since it asked for the upgrade, and will send, is the
        replica's.
        """
        data = self._buffer.take()
        self.resume()
        if data and self.exchange is not None:
            self.exchange.on_tunnel_data(data)

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > LINGER_BYTES:
            self.abort()

    def _next(self) -> None:
        """Continue with what was read ahead, in an event-loop turn of its own. Until then no more is read.
        While the caller does not read its replies, no request begins.
        """
        self.body_due = FOREVER
        if self.is_last:
            self._buffer.set(b"")
            self.due = monotonic() + LINGER_S
            self._transport.close()
            return
        if self.is_stalled:
            self.hold()
            return
        self.due = monotonic() + (LAST_IDLE_S if self._plane.is_draining else IDLE_S)
        if self._buffer.data:
            self.hold()
            asyncio.get_running_loop().call_soon(self._resume_buffer)
        elif self._flow.is_held:
            self.resume()

    def _resume_buffer(self) -> None:
        """Parse what was read ahead."""
        is_next = self.exchange is None and not self.is_stalled
        if is_next and self._buffer.data and not self._transport.is_closing():
            data = self._buffer.take()
            self.resume()
            self._read_head(data)

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

    @property
    def is_stalled(self) -> bool:
        """Whether the caller does not read what is ready for it."""
        return self._flow.is_stalled

    def hold(self) -> None:
        """Stop reading until `resume`."""
        self._flow.hold()

    def resume(self) -> None:
        self._flow.resume()

    def pause_writing(self) -> None:
        """The caller reads more slowly than the replica sends."""
        self._flow.stall()
        self.due = monotonic() + STALL_S
        if self.exchange is None:
            self.hold()
        else:
            self.exchange.on_caller_stalled()

    def resume_writing(self) -> None:
        self._flow.unstall()
        if self.exchange is not None:
            self.exchange.on_caller_resumed()
        elif not self.is_last:
            self._next()

    # The end.

    def sweep(self, now: float) -> None:
        """Enforce deadlines. Called when `due` or `body_due` has passed."""
        exchange = self.exchange
        if now >= self.body_due and exchange is not None:
            if not self._body.has_grown() and not self._flow.is_held:
                self.body_due = FOREVER
                exchange.refuse(
                    ProxyRefusal(408, "request.slow", "the body comes too slowly", must_close=True)
                )
                return
            self.body_due = now + BODY_S
        if now < self.due:
            return
        if self.is_stalled or (self.is_last and exchange is None):
            self._check_progress(now)
        elif exchange is not None:
            exchange.expire(now)
        elif self._buffer.data:
            self._answer(ProxyRefusal(408, "request.slow", "the head comes too slowly", must_close=True))
        else:
            self._transport.close()

    def _check_progress(self, now: float) -> None:
        """Abort a caller that reads too slowly. One that reads gets all, also the last reply of a
        connection.
        """
        if self._flow.has_read():
            self.due = now + STALL_S
        else:
            self.abort()

    def eof_received(self) -> bool:
        """The caller sends no more: it waits for its reply, or it is gone (`half_closed.py`). A caller of an
        event stream that has begun counts as gone. TLS has no half-closed connections.
        """
        exchange = self.exchange
        is_waiting = exchange is not None and exchange.is_whole and not exchange.is_upgrade
        if exchange is None or not is_waiting or exchange.is_events or self._is_tls:
            return False
        self.is_last = True
        if self._half_closed is None:
            self._half_closed = HalfClosed(self._transport, lambda: self.exchange)
            self.write = self._half_closed.write
            self._half_closed.begin()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._plane.remove_client(self)
        self._buffer.set(b"")
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_gone()
