"""A caller's connection: finds requests in what arrives, one after the other, and writes what comes back.

Bounded whatever the caller does: an unfinished head, one request under way, one piece read ahead. What is
kept of them counts as held, like bodies.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from time import monotonic
from typing import Protocol, cast

from shoal.holders import holder_of
from shoal.serving.accounts import Held
from shoal.serving.chunks import BadChunk, Chunks
from shoal.serving.cors import Preflight
from shoal.serving.exchange import FOREVER, Exchange
from shoal.serving.head import CHUNKED, too_large
from shoal.serving.problem import HealthAsked, Refused, healthy, malformed, response
from shoal.serving.replica import LiveReplica
from shoal.serving.route import Known, Routes
from shoal.serving.upstream import Seeker

HEAD_S = 10.0
"""From a request's first byte to the end of its head."""
IDLE_S = 75.0
LAST_IDLE_S = 2.0
"""While the process drains."""
BODY_S = 20.0
"""How often a body is looked at: it must have grown by `BODY_RATE` bytes for each second."""
BODY_RATE = 64
STALL_S = 60.0
"""How often it is looked whether a caller reads what is there for it: `BODY_RATE` bytes for each second."""
LINGER_S = 5.0
LINGER_BYTES = 64 << 10
"""Of a request that was answered before it was over: read and thrown away, so that the answer arrives."""
TCP_CLOSE = 7
"""The kernel's word for a connection that was reset."""
FIRST_LOOK_S, LAST_LOOK_S = 0.05, 1.0
"""Whether a caller that sends no more is still there: how soon, and how often in the end."""
QUIET_S = 5.0
"""So long an answer to a caller that sends no more may pause, where nothing else can be written to it."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WRITE_BUFFER = 64 << 10


class Plane(Protocol):
    """What a connection needs of the process it is in."""

    routes: Routes
    is_draining: bool
    version: int
    clients: set[Downstream]
    held: Held

    @property
    def health(self) -> Refused | None:
        """Why balancers in front should prefer another data plane; None: they need not."""
        ...

    def open(self, replica: LiveReplica, seeker: Seeker) -> None: ...

    def new_id(self) -> bytes: ...

    def refused(self, refused: Refused) -> None:
        """Counts it."""
        ...

    def guessed(self, peer: str, refused: Refused) -> Refused: ...

    def met(self, client: Downstream) -> None:
        """A stranger's connection: no request of it has named its caller yet."""
        ...

    def named(self, client: Downstream, caller: str) -> bool:
        """Its connection is the caller's from now on; empty: its address's, at a public service. False: the
        caller has too many connections, or all callers together; the connection stays whose it was.
        """
        ...

    def begin(self, client: Downstream) -> None:
        """A request of a named caller is under way, until `wait`."""
        ...

    def wait(self, client: Downstream) -> None: ...

    def left(self, client: Downstream) -> None:
        """The connection is closed."""
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

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self.held = plane.held
        self._buffer = b""
        """Of a head that is not whole, or read ahead of the answer to the request before."""
        self._searched = 0
        """So much of that has no end of a head in it."""
        self._chunks: Chunks | None = None
        self._left = 0
        """Of a body that has a length."""
        self._grown = 0
        self._is_half = False
        """The caller has said that it sends no more."""
        self._moved = 0.0
        """When something was last written, after that."""
        self._caller: str | None = None
        """Whom the plane counts this connection for; None: a stranger."""
        self._is_held = False
        self._is_safe = False
        """TLS: it knows no half of a connection."""
        self.is_stalled = False
        self._unread = 0
        """Bytes of answers here when it was last looked whether the caller reads them; 0: not yet."""
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
        self._plane.clients.add(self)  # all are swept, and awaited when the process ends
        self._plane.met(self)

    def address(self, *, is_scarce: bool) -> str:
        """Whom the connection is counted against where no token says more."""
        client, server = (self._transport.get_extra_info(name) for name in ("peername", "sockname"))
        return holder_of(client, server, is_scarce=is_scarce)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self._head(data)
        elif not exchange.is_whole:
            self._body(exchange, data)
        elif exchange.is_tunnel:
            exchange.tell(data)
        else:
            self._ahead(data)

    # Reading.

    def _head(self, data: bytes) -> None:
        if self.is_last:
            self._thrown_away(len(data))
            return
        routes = self._plane.routes
        known = 0
        if self._buffer:
            data, known = self._buffer + data, self._searched
            self._kept(b"")
        if data.endswith(b"\r\n\r\n"):
            seen = routes.recall(data)
            if seen is not None:
                self._begin(seen, b"")
                return
        data = data.lstrip(b"\r\n") if data.startswith(b"\r\n") else data
        end = data.find(b"\r\n\r\n", max(0, known - 3)) + 4
        if end == 3:
            self._unfinished(data, known)
            return
        head = data[:end]
        try:
            request = routes.recall(head) or routes.resolve(head)
        except HealthAsked:
            self._keep_rest(data[end:], None)
            self._answer_health(is_head=head.startswith(b"HEAD "))
            return
        except Preflight as asked:
            self._keep_rest(data[end:], None)
            self.write(asked.response(closes=self.is_last))
            self._next()
            return
        except Refused as told:
            refused = self._plane.guessed(self.peer, told) if told.status == 401 else told
            # Of a request whose body is not read, nobody can say where the next one begins.
            refused.must_close = refused.must_close or self._has_body(head)
            self._keep_rest(data[end:], refused)
            self._answer(refused, is_head=head.startswith(b"HEAD "))
            return
        self._begin(request, data[end:])

    def _unfinished(self, data: bytes, known: int) -> None:
        refused = too_large(data, known)
        if refused is None and not self._has_room(len(data)):
            refused = Refused(503, "plane.full", "too much is held here", must_close=True, retry_s=2.0)
        if refused is not None:
            self._answer(refused)
            return
        if not known:
            self.due = min(self.due, monotonic() + HEAD_S)
        self._kept(data)
        self._searched = len(data)

    def _has_room(self, num_bytes: int) -> bool:
        return self.held.bytes + num_bytes <= self.held.max_bytes

    def _keep_rest(self, rest: bytes, refused: Refused | None) -> None:
        """What came after a request that is answered here, unless there is no room for it."""
        if self._has_room(len(rest)):
            self._kept(rest)
        elif refused is not None:
            refused.must_close = True
        else:
            self.is_last = True

    def _kept(self, data: bytes) -> None:
        """This is in the buffer now, and counted."""
        self.held.bytes += len(data) - len(self._buffer)
        self._buffer = data
        self._searched = 0

    @staticmethod
    def _has_body(head: bytes) -> bool:
        lowered = head.lower()
        return b"\r\ncontent-length" in lowered or b"\r\ntransfer-encoding" in lowered

    def _begin(self, known: Known, rest: bytes) -> None:
        now = monotonic()
        entry, query, request_id, own, length = known
        service, plane = entry.service, self._plane
        account = entry.account or service.account(self.peer)
        refused = self._full(entry.caller) or service.admit(account, now)
        if refused is not None:
            refused.headers = entry.cors
            refused.must_close = not 0 <= length <= len(rest)
            self._keep_rest(rest[length:], refused)
            self._answer(refused, is_head=entry.is_head)
            return
        self.is_last = not entry.is_keep_alive or plane.is_draining
        plane.begin(self)
        if not request_id:
            known = (entry, query, plane.new_id(), own, length)
        exchange = Exchange(self, known, account, now)
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

    def _full(self, caller: str) -> Refused | None:
        """Have the plane count this connection for the caller, or say why the caller may have no more."""
        if caller == self._caller:
            return None
        if not self._plane.named(self, caller):
            return Refused(503, "plane.full", "too many connections are busy", retry_s=2.0)
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
            self._grown += len(ready)  # not what is no body: extensions and trailers that drip
            exchange.on_body(ready)
        if rest is not None:
            self.body_due = FOREVER
            exchange.on_body_end()
            exchange.is_whole = True
            if rest:
                self._ahead(rest)

    def _ahead(self, data: bytes) -> None:
        """The next request, before this one is answered: it waits, and no more is read.

        Where the process holds as much as it may, this connection's answer is its last: who sent more sends
        that again.
        """
        exchange, is_full = self.exchange, not self._has_room(len(data))
        if not is_full:
            self._kept(self._buffer + data)
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

    def _answer(self, refused: Refused, *, is_head: bool = False, request_id: str = "") -> None:
        self._plane.refused(refused)
        self.is_last = closes = refused.must_close or self.is_last or self._plane.is_draining
        self.write(response(refused, closes=closes, has_body=not is_head, request_id=request_id))
        if refused.must_close:
            self._linger()
        else:
            self._next()

    def _answer_health(self, *, is_head: bool) -> None:
        problem = self._plane.health
        if problem is not None:
            self._answer(problem, is_head=is_head)
            return
        self.write(healthy(self._plane.version, closes=self.is_last, has_body=not is_head))
        self._next()

    def refuse(self, refused: Refused, exchange: Exchange) -> None:
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
        """Closing now would destroy the answer on its way: the caller still sends. What comes is ignored."""
        self.is_last = True
        self.body_due = FOREVER
        self.due = monotonic() + LINGER_S
        self._kept(b"")
        self._grown = 0
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self.resume()

    def switch(self) -> None:
        """HTTP is over: what the caller sent since it asked for that, and will send, is the replica's."""
        data = self._buffer
        self._kept(b"")
        self.resume()
        if data and self.exchange is not None:
            self.exchange.tell(data)

    def _thrown_away(self, num_bytes: int) -> None:
        self._grown += num_bytes
        if self._grown > LINGER_BYTES:
            self.abort()

    def _next(self) -> None:
        """What was read ahead, in a turn of its own. Until then no more is read; while the caller does not
        read its answers none is begun.
        """
        self.body_due = FOREVER
        if self.is_last:
            self._kept(b"")
            self.due = monotonic() + LINGER_S
            self._transport.close()
            return
        if self.is_stalled:
            self.hold()
            return
        self.due = monotonic() + (LAST_IDLE_S if self._plane.is_draining else IDLE_S)
        if self._buffer:
            self.hold()
            asyncio.get_running_loop().call_soon(self._resumed)
        elif self._is_held:
            self.resume()

    def _resumed(self) -> None:
        """What was read ahead."""
        is_next = self.exchange is None and not self.is_stalled
        if is_next and self._buffer and not self._transport.is_closing():
            data = self._buffer
            self._kept(b"")
            self.resume()
            self._head(data)

    def abort(self) -> None:
        self._transport.abort()

    def drain(self) -> None:
        """The answer to come, or the one to the next request, says that it is the last one.

        A connection closed without that word might cross a request on its way.
        """
        if self.exchange is None:
            self.due = min(self.due, monotonic() + LAST_IDLE_S)
        elif not self.exchange.is_answered:
            self.is_last = True

    def open(self, replica: LiveReplica, seeker: Seeker) -> None:
        self._plane.open(replica, seeker)

    # Back-pressure.

    def hold(self) -> None:
        """Read nothing until `resume`."""
        if not self._is_held:
            self._is_held = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_held and not self._transport.is_closing():
            self._is_held = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The caller reads slower than the replica sends."""
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
        """Called when `due` or `body_due` has passed."""
        exchange = self.exchange
        if now >= self.body_due and exchange is not None:
            # Chunks may be a conversation: they only have to come.
            wanted = BODY_RATE * BODY_S if self._chunks is None else 1
            if self._grown < wanted and not self._is_held:
                self.body_due = FOREVER
                exchange.refuse(Refused(408, "request.slow", "the body comes too slowly", must_close=True))
                return
            self._grown = 0
            self.body_due = now + BODY_S
        if now < self.due:
            return
        if self.is_stalled or (self.is_last and exchange is None):
            self._see_reading(now)
        elif exchange is not None:
            exchange.expire(now)
        elif self._buffer:
            self._answer(Refused(408, "request.slow", "the head comes too slowly", must_close=True))
        else:
            self._transport.close()

    def _see_reading(self, now: float) -> None:
        """Whoever reads gets all of it, also the last answer of a connection."""
        before, self._unread = self._unread, self._transport.get_write_buffer_size()
        if self._unread and (not before or before - self._unread >= BODY_RATE * STALL_S):
            self.due = now + STALL_S
        else:
            self.abort()

    def eof_received(self) -> bool:
        """The caller sends no more: it waits for its answer, or has gone. Both look the same from here, but
        who has gone refuses what is written to it. So something is that every reader of HTTP/1.1 passes over.
        Where the answer has begun, or for HTTP/1.0, there is no such thing: who listens to events has gone,
        others are believed for `QUIET_S` after each piece of their answer.
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
            self._look(FIRST_LOOK_S)
        return True

    def _look(self, again_s: float) -> None:
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
            asyncio.get_running_loop().call_later(again_s, self._look, min(LAST_LOOK_S, again_s * 2))

    def _write_noted(self, data: bytes | bytearray | memoryview) -> None:
        self._moved = monotonic()
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._plane.left(self)
        self._kept(b"")
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_gone()
