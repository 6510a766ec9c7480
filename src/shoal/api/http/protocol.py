"""uvicorn's HTTP protocol with a bound for everything a client may send, hold back or leave unread.

uvicorn times idle keep-alive connections alone. Here every stage of a connection ends by itself:

| stage | ends |
|---|---|
| HEAD | with the head, after `head_s` or `head_bytes` |
| BODY | with the body; the guard times it while the application reads, `DRAIN` follows an early answer |
| ANSWER | with the answer; what the client sends meanwhile waits, and beyond `ahead_bytes` is not read |
| DRAIN | after `drain_s` or `drain_bytes`: the answer is out while its request still comes |

In every stage a client that does not read its answers is cut off after `unread_s` without progress.

The parser sees one request at a time, and of a chunked body no extension and no trailer: it joins the pieces
of a long value again and again, which takes time quadratic in their number.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.api.http.connections import ConnectionSlots
from shoal.connection_quota import holder_of
from shoal.serving.proxy.chunks import LAST_CHUNK, BadChunk, BareChunks

HEAD, BODY, ANSWER, DRAIN = range(4)
BODY_IS_HERE = "shoal.body_is_here"
"""Set in the scope of a request once all of it has arrived. Most requests have arrived before the application
looks.
"""
CONNECTION = "shoal.connection"
"""Where a request's scope names its connection."""
ABSOLUTE = re.compile(rb"https?://([^/?#]*)(?:[/?][^#]*)?", re.IGNORECASE)
METHOD_BEGINS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
"""The first byte of a method. Bytes that begin otherwise, as a TLS greeting does, are no HTTP and have no end
of a head.
"""
FREE_CHUNKS = 4096
MIN_CHUNK_BYTES = 24
"""On average, framing included, for a body in more than `FREE_CHUNKS`: each chunk costs about 2 µs."""

MIN_READ_PER_S = 64
"""Bytes per second of its answers that a client must read, once they do not all fit into the kernel's
buffers.
"""

log = logging.getLogger(__name__)


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one connection. Tests shorten the times."""

    head_s: float = 10.0
    head_bytes: int = 64 << 10
    headers: int = 100
    target_bytes: int = 10 << 10
    """Longest path and query together. Both are decoded before the token is looked at."""
    drain_s: float = 5.0
    drain_bytes: int = 64 << 10
    ahead_bytes: int = 64 << 10
    unread_s: float = 20.0


class BadFraming(ValueError):
    """Raised in a callback of the parser. The request gets 400 and its connection is closed."""


class _Closing:
    """The transport as uvicorn sees it. We handle `close`, so that an answer on its way arrives."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Any) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `limits` and `slots` are shared by all connections of a listener."""

    def __init__(self, *args: Any, limits: ConnectionLimits, slots: ConnectionSlots, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._slots = slots
        self._stage = HEAD
        self._buffer = bytearray()
        """Bytes of a head that is not complete."""
        self._ahead = bytearray()
        """Bytes that came behind a request that is not answered."""
        self._head_bytes = 0
        self._left = 0
        """Bytes left of a body with a known length."""
        self._chunks: BareChunks | None = None
        self._chunk_bytes = 0
        self._drained = 0
        self._unread = 0
        self._keeps_alive = False
        self._is_ending = False
        self._deadline: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None
        self._account: str | None = None
        """The account of the last token on this connection. None: it is a stranger's."""

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._link = transport
        self.transport = cast("asyncio.Transport", _Closing(transport, self._end))
        self._set_deadline(self._limits.head_s)
        if not self._slots.enter(self):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._slots.leave(self)
        self._stop_deadline()
        if self._reading_due is not None:
            self._reading_due.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def eof_received(self) -> None:
        """The transport closes itself once the written bytes have gone out, and that is timed."""
        self._watch_reading()

    def shutdown(self) -> None:
        self._is_ending = True
        self._keeps_alive = False
        super().shutdown()

    def abort(self) -> None:
        """Close at once. Bytes that are written and not sent are lost."""
        self._link.abort()

    def holder(self, *, is_scarce: bool) -> str:
        """The holder that a stranger's connection counts against."""
        return holder_of(self.client, self.server, is_scarce=is_scarce)

    def sign(self, account: str, *, is_machine: bool) -> bool:
        """Note that the request under way showed a good token. False: its owner holds too many
        connections.
        """
        if account == self._account:
            return True
        if not self._slots.sign(self, account, is_machine=is_machine):
            return False
        self._account = account
        return True

    # Reading.

    def data_received(self, data: bytes) -> None:
        if self._stage == ANSWER or self._ahead:
            self._keep_ahead(data)
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        while data and not self._link.is_closing():
            if self._stage == HEAD:
                data = self._read_head(data)
            elif self._stage == BODY:
                data = self._read_body(data)
            elif self._stage == ANSWER:
                self._keep_ahead(data)
                return
            else:
                self._discard(len(data))
                return

    def _read_head(self, data: bytes) -> bytes:
        """Hand the parser a whole head, and return the bytes after it."""
        self._unset_keepalive_if_required()
        if not self._buffer:
            self._head_bytes += len(data)
            data = data.lstrip(b"\r\n") if data[0] in b"\r\n" else data
            if data and data[0] not in METHOD_BEGINS:
                self._refuse("no method begins like this")
                return b""
            end = data.find(b"\r\n\r\n") + 4
            if 3 < end <= self._limits.head_bytes:
                self._begin(data[:end])
                return data[end:]
            if end == 3 and self._head_bytes <= self._limits.head_bytes:
                self._buffer += data
                if self._deadline is None:
                    self._set_deadline(self._limits.head_s)
                return b""
            self._close()
            return b""
        searched = len(self._buffer)
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n", max(0, searched - 3)) + 4
        if end > self._limits.head_bytes or (end == 3 and len(self._buffer) > self._limits.head_bytes):
            self._close()
            return b""
        if end == 3:
            return b""
        head, rest = bytes(self._buffer[:end]), bytes(self._buffer[end:])
        self._buffer.clear()
        self._begin(head)
        return rest

    def _begin(self, head: bytes) -> None:
        self._stop_deadline()
        self._head_bytes = 0
        super().data_received(head)
        if self._stage == HEAD and not self._link.is_closing():  # the parser waits for more of this head
            self._refuse("the head of the request is malformed")

    def _read_body(self, data: bytes) -> bytes:
        """Hand the parser what belongs to the body, and return the bytes after it."""
        if self._chunks is None:
            piece, rest = (data, b"") if len(data) <= self._left else (data[: self._left], data[self._left :])
            self._left -= len(piece)
            super().data_received(piece)
            return rest
        try:
            ready, after = self._chunks.feed(data)
            self._chunk_bytes += len(ready)
            count = self._chunks.count
            if count > FREE_CHUNKS and self._chunk_bytes < count * MIN_CHUNK_BYTES:
                raise BadChunk("chunks are too small")
        except BadChunk as error:
            self._refuse(str(error))
            return b""
        if ready:
            super().data_received(ready)
        if after is None:
            return b""
        super().data_received(LAST_CHUNK)
        return after

    def _keep_ahead(self, data: bytes) -> None:
        """Keep bytes that come before the answer: the next request, or junk. No more is read."""
        self._ahead += data
        if len(self._ahead) > self._limits.ahead_bytes:
            self._link.pause_reading()

    def _discard(self, num_bytes: int) -> None:
        self._drained += num_bytes
        if self._drained > self._limits.drain_bytes:
            self.abort()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage != HEAD:
            raise BadFraming("headers behind the head")
        if name.lower() == b"cookie":
            return  # no route reads one, and to parse 60 KB of them takes 11 ms
        super().on_header(name, value)
        if len(self.headers) > self._limits.headers:
            raise BadFraming("too many headers")

    def on_headers_complete(self) -> None:
        if len(self.url) > self._limits.target_bytes:
            raise BadFraming("the target is too long")
        if not self.url.startswith(b"/"):
            self._check_absolute()
        self._frame()
        self._stage = BODY
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._slots.begin(self)
        super().on_headers_complete()
        # If an answer comes before the end of its request, it carries `Connection: close`.
        self._keeps_alive = self.cycle.keep_alive and not self.parser.should_upgrade() and not self._is_ending
        self.cycle.keep_alive = False

    def _frame(self) -> None:
        """How the body is framed. The parser has refused two lengths, and a length beside a coding."""
        self._left, self._chunks, self._chunk_bytes = 0, None, 0
        codings = 0
        for name, value in self.headers:
            if name == b"content-length":
                self._left = int(value)
            elif name == b"transfer-encoding":
                codings += 1
                if codings > 1 or value.strip().lower() != b"chunked":
                    raise BadFraming("the only transfer coding is `chunked`, once")
                self._chunks = BareChunks()

    def _check_absolute(self) -> None:
        """An absolute address as the target must name the host that `Host` names."""
        absolute = ABSOLUTE.fullmatch(self.url)
        hosts = [value for name, value in self.headers if name == b"host"]
        if absolute is None or [absolute[1].lower()] != [host.lower() for host in hosts]:
            raise BadFraming("the target and Host name different hosts")

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.scope[BODY_IS_HERE] = True  # type: ignore[literal-required]
        if self._stage == BODY:
            self._stage = ANSWER
            if not self.cycle.response_started:
                self.cycle.keep_alive = self._keeps_alive

    def _unsupported_upgrade_warning(self) -> None:
        """Answer as if the request had not asked for an upgrade, and then close."""

    # Answering.

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self._link.is_closing() or self._stage == DRAIN:
            return
        self._stage = HEAD
        self._slots.wait(self)
        if self._ahead:
            self.loop.call_soon(self._read_ahead)
            return
        self.flow.resume_reading()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _read_ahead(self) -> None:
        """Parse what came while the previous request was answered."""
        if self._stage != HEAD or self._link.is_closing():
            return
        data, self._ahead = bytes(self._ahead), bytearray()
        self.flow.resume_reading()
        self._link.resume_reading()
        self._read(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()
        if self._account is None:
            self._slots.wait(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_due is not None and not self._link.is_closing():
            self._reading_due.cancel()
            self._reading_due = None

    def _watch_reading(self) -> None:
        """Check every `unread_s` whether the client reads what is written to it. Write no more meanwhile."""
        size = self._link.get_write_buffer_size()
        if size and self._reading_due is None:
            self._unread = size
            self._reading_due = self.loop.call_later(self._limits.unread_s, self._look_at_reading)

    def _look_at_reading(self) -> None:
        self._reading_due = None
        before, left = self._unread, self._link.get_write_buffer_size()
        if left and left > before - self._limits.unread_s * MIN_READ_PER_S:
            self.abort()
        elif left:
            self._watch_reading()

    # The end.

    def _refuse(self, because: str) -> None:
        """Answer 400 unless the request has an answer: it cannot be read any further."""
        log.debug("refused a request: %s", because)
        if self._stage == BODY and self.cycle.response_started:
            self.abort()
            return
        self._stage = DRAIN
        self.send_400_response("Invalid HTTP request received.")

    def _end(self) -> None:
        """Close. If the request is still arriving, let the answer arrive first."""
        if self._link.is_closing():
            return
        if self._stage == BODY and not self._is_ending:
            self._drain()
            return
        self._link.close()
        self._watch_reading()

    def _drain(self) -> None:
        """Closing now would destroy the answer on its way. Arriving bytes are thrown away, up to a bound."""
        self._stage = DRAIN
        self._drained = 0
        self._set_deadline(self._limits.drain_s, self.abort)
        if self._account is None:
            self._slots.wait(self)
        if self._link.can_write_eof():
            self._link.write_eof()
        self.flow.resume_reading()

    def _set_deadline(self, seconds: float, end: Any = None) -> None:
        self._deadline = self.loop.call_later(seconds, end or self._close)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if not self._link.is_closing():
            self._link.close()
            self._watch_reading()
