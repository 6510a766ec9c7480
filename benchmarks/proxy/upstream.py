"""The server behind every proxy: 1 KB for each request, or an event stream. As cheap as Python can be.

    python -m benchmarks.proxy.upstream PORT

`/sse` sends CHUNKS events, one every EVERY_S, each with the time at which it was written.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

import httptools
import uvloop

BODY = b'{"text":"' + b"x" * 1013 + b'"}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(BODY),
    BODY,
)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS, EVERY_S = 64, 0.02


class Server(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        if self._url.endswith(b"/sse"):
            self._transport.write(STREAM)
            self._left = CHUNKS
            self._send()
        else:
            self._transport.write(ANSWER)

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        if self._left == 0:
            self._transport.write(b"0\r\n\r\n")
            return
        self._left -= 1
        event = b"data: %.6f %s\n\n" % (time.time(), b"t" * 40)
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
        asyncio.get_running_loop().call_later(EVERY_S, self._send)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
