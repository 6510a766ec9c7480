"""The server behind every proxy: 1 KB for each request, or an event stream. As cheap as Python can be.

    python -m benchmarks.proxy.upstream PORT

A body that asks for a stream gets NUM_EVENTS events, one every EVERY_S.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
import uvloop

from benchmarks.proxy.payload import ANSWER, EVERY_S, NUM_EVENTS, WANTS_EVENTS, event

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(ANSWER),
    ANSWER,
)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Server(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._parser = httptools.HttpRequestParser(self)
        self._is_stream = False
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._is_stream = self._is_stream or WANTS_EVENTS in data

    def on_message_complete(self) -> None:
        if self._is_stream:
            self._is_stream = False
            self._transport.write(STREAM)
            self._left = NUM_EVENTS
            self._send()
        else:
            self._transport.write(WHOLE)

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        if self._left == 0:
            self._transport.write(b"0\r\n\r\n")
            return
        self._left -= 1
        data = event()
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))
        asyncio.get_running_loop().call_later(EVERY_S, self._send)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
