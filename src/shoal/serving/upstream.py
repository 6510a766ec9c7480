"""A connection to a replica: sends one request at a time, reads its response, is used again.

Decides nothing about requests: what arrives or goes wrong is told to the exchange that has the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from time import monotonic
from typing import Protocol, cast

from shoal.porch import SCHEME
from shoal.serving.answer import MAX_HEAD_BYTES, UNTIL_CLOSE, Answer, BadAnswer, parse_answer
from shoal.serving.chunks import BadChunk, Chunks
from shoal.serving.head import CHUNKED
from shoal.serving.porch import reached
from shoal.serving.replica import LiveReplica
from shoal.socket_file import handed_over, pinned

AWAITING = -3
TUNNEL = -4
"""As lengths of what is left: the head is not there yet; no more HTTP is spoken."""
CONNECT_S = 5.0
MAX_REMEMBERED = 512
_remembered: dict[bytes, Answer] = {}
"""Heads of responses by their exact bytes: a busy replica repeats them until its date changes."""


class Asker(Protocol):
    """The exchange that has the connection."""

    is_head: bool
    is_upgrade: bool
    """101 is an answer to it."""
    is_whole: bool
    """Nothing of the request is left to send."""

    def on_answer(self, answer: Answer, body: bytes, *, is_whole: bool) -> None: ...

    def on_data(self, data: bytes, num_chunks: int = 1) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, reason: str) -> None: ...

    def hold(self) -> None: ...

    def resume(self) -> None: ...


class Seeker(Protocol):
    """Who wants a connection, and is told how that went."""

    def connected(self, up: Upstream) -> None: ...

    def on_refused(self, replica: LiveReplica, *, is_ours: bool = False) -> None:
        """`is_ours`: it is no fault of the replica's."""
        ...


class Upstream(asyncio.Protocol):
    __slots__ = (
        "_buffer",
        "_chunks",
        "_is_paused",
        "_keeps",
        "_left",
        "asker",
        "idle_since",
        "replica",
        "transport",
    )

    def __init__(self, replica: LiveReplica) -> None:
        self.replica = replica
        self.asker: Asker | None = None
        self.idle_since = 0.0
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._buffer = b""
        self._chunks: Chunks | None = None
        self._left = 0
        """Of a body with a length; `UNTIL_CLOSE`, `AWAITING` or `TUNNEL`."""
        self._keeps = False
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, asker: Asker, data: bytes) -> None:
        self.asker = asker
        self._left = AWAITING
        self.transport.write(data)

    def close(self) -> None:
        """For good. An exchange that has it is not told."""
        self.asker = None
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        """Read nothing until `unpause`: the caller has enough."""
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def unpause(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        asker = self.asker
        if asker is None:
            self.transport.abort()  # nobody asked: a replica that speaks unasked is not believed
            return
        chunks = self._chunks
        try:
            if chunks is not None:
                if chunks.is_one(data):
                    asker.on_data(data)
                else:
                    self._chunked(asker, chunks, data)
            elif self._left == AWAITING:
                self._head(asker, data)
            elif self._left == TUNNEL:
                asker.on_data(data)
            else:
                self._body(asker, data)
        except (BadAnswer, BadChunk) as error:
            self.close()
            asker.on_lost(str(error))

    def _head(self, asker: Asker, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        at = 0
        while True:
            end = data.find(b"\r\n\r\n", at) + 4
            if end == 3:
                self._buffer = data[at:]
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise BadAnswer(f"the head of the response is longer than {MAX_HEAD_BYTES} bytes")
                return
            answer = _remembered.get(data[at:end]) or _read(data[at:end])
            at = end
            if answer.status >= 200 or answer.status == 101:
                break  # others are interim
        body = data[at:]
        self._keeps = answer.is_keep_alive
        length = 0 if asker.is_head else answer.length
        if answer.status == 101:
            if not asker.is_upgrade:
                raise BadAnswer("the replica changes the protocol unasked")
            self._left = TUNNEL
        elif length == len(body):
            asker.on_answer(answer, body, is_whole=True)
            self._done(asker)
            return
        elif length == CHUNKED:
            self._chunks = Chunks()
            self._left = 0
        elif length != UNTIL_CLOSE and len(body) > length:
            raise BadAnswer("the response is longer than it says")
        else:
            self._left = length
        asker.on_answer(answer, b"", is_whole=False)
        if body and self.asker is asker:
            self.data_received(body)

    def _body(self, asker: Asker, data: bytes) -> None:
        if self._left == UNTIL_CLOSE or len(data) < self._left:
            self._left -= len(data) if self._left > 0 else 0
            asker.on_data(data)
        elif len(data) == self._left:
            asker.on_data(data)
            self._done(asker)
        else:
            raise BadAnswer("the response is longer than it says")

    def _chunked(self, asker: Asker, chunks: Chunks, data: bytes) -> None:
        before = chunks.count
        ready, rest = chunks.feed(data)
        if ready:
            asker.on_data(ready, chunks.count - before)
        if rest is not None:
            self._chunks = None
            self._keeps = self._keeps and not rest
            self._done(asker)

    def _done(self, asker: Asker) -> None:
        """The response is over. A connection on which the request is not is of no further use, nor is one on
        which an upgrade was asked for: who knows what the replica makes of what comes next.
        """
        self.asker = None
        if not self._keeps or not asker.is_whole or asker.is_upgrade or self.replica.is_draining:
            self.transport.close()
        else:
            if self._is_paused:
                self.unpause()
            self.idle_since = monotonic()
            self.replica.idle.append(self)
        asker.on_end()

    def eof_received(self) -> bool:
        asker = self.asker
        if asker is not None and self._left == UNTIL_CLOSE:
            self.asker = None
            asker.on_end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        asker, self.asker = self.asker, None
        if asker is not None:
            asker.on_lost(f"the replica closed the connection{f' ({exc})' if exc else ''}")
        elif self in self.replica.idle:
            self.replica.idle.remove(self)

    def pause_writing(self) -> None:
        if self.asker is not None:
            self.asker.hold()

    def resume_writing(self) -> None:
        if self.asker is not None:
            self.asker.resume()


def _read(raw: bytes) -> Answer:
    answer = parse_answer(raw)
    if len(_remembered) >= MAX_REMEMBERED:
        _remembered.clear()
    if len(raw) <= 2048:
        _remembered[raw] = answer
    return answer


async def connect(replica: LiveReplica, visitor: ssl.SSLContext | None = None) -> Upstream:
    """A new connection, owned by the caller. `OSError` (also when it takes too long): there is none.

    `visitor`: how porches know us.
    """
    loop = asyncio.get_running_loop()
    address = replica.spec.address
    async with asyncio.timeout(CONNECT_S):
        if address.startswith("unix:"):
            # The program owns the folder: what it may have put there is no reason to call somebody else.
            with pinned(address[5:]) as name:
                _, made = await loop.create_unix_connection(lambda: Upstream(replica), name)
        elif address.startswith("door:"):
            fresh = await _through(address[5:])
            _, made = await loop.create_connection(lambda: Upstream(replica), sock=fresh)
        elif address.startswith(SCHEME):
            transport = await reached(address, replica.spec.name, visitor)
            made = Upstream(replica)
            transport.set_protocol(made)
            made.connection_made(transport)
        else:
            host, _, port = address.rpartition(":")
            _, made = await loop.create_connection(lambda: Upstream(replica), host.strip("[]"), int(port))
    return made


async def _through(path: str) -> socket.socket:
    """A connection in the network behind the door."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as link:
        link.setblocking(False)  # noqa: FBT003 - the standard library's own
        with pinned(path) as name:
            link.connect(name)
        ready = loop.create_future()
        loop.add_reader(link, ready.set_result, None)
        try:
            await ready
        finally:
            loop.remove_reader(link)
        fresh, address = handed_over(link)
    try:
        fresh.setblocking(False)  # noqa: FBT003 - the standard library's own
        await loop.sock_connect(fresh, address)
    except BaseException:  # also when it takes too long
        fresh.close()
        raise
    return fresh
