"""Many event streams at once through a proxy: how many events arrived, and how late each one was.

    python -m benchmarks.proxy.streams PORT PATH STREAMS [HEADER...]

A process of its own, so that its CPU is not counted as the proxy's. Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import cast

import uvloop

from benchmarks.measure import percentile
from benchmarks.proxy.payload import EVERY_S, NUM_EVENTS, chat

EVENT = re.compile(rb"data: (\d+\.\d+)")
PATIENCE_S = 10.0


class Stream(asyncio.Protocol):
    """One request. It ends when all of its events have arrived, or when the connection is gone."""

    def __init__(self, path: str, headers: list[str], delays: list[float]) -> None:
        body = chat(is_stream=True)
        head = [f"POST {path} HTTP/1.1", "host: localhost", "accept: text/event-stream"]
        head += ["content-type: application/json", f"content-length: {len(body)}", *headers]
        self._request = "\r\n".join([*head, "", ""]).encode() + body
        self._delays = delays
        self._seen = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.time()
        for sent in EVENT.findall(data):
            self._delays.append(now - float(sent))
            self._seen += 1
        if self._seen >= NUM_EVENTS:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def follow(port: int, path: str, streams: int, headers: list[str]) -> dict[str, float]:
    """Follow all streams, started one after the other within the time between two events."""
    loop, delays = asyncio.get_running_loop(), list[float]()
    ends = []
    began = time.monotonic()
    for _ in range(streams):
        _, stream = await loop.create_connection(lambda: Stream(path, headers, delays), "127.0.0.1", port)
        ends.append(stream.done)
        await asyncio.sleep(EVERY_S / streams)
    await asyncio.wait(ends, timeout=PATIENCE_S)
    return {
        "expected": streams * NUM_EVENTS,
        "came": len(delays),
        "seconds": time.monotonic() - began,
        "p50_s": percentile(delays, 0.5) if delays else 0.0,
        "p99_s": percentile(delays, 0.99) if delays else 0.0,
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(follow(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))))
