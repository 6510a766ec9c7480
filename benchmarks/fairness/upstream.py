"""`python -m benchmarks.fairness.upstream COUNT SECONDS`: servers this slow; prints their ports."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import cast

import uvloop

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Connection(asyncio.Protocol):
    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """A GET arrives in one piece, and the next one only after its answer.

        No two requests take equally long. Otherwise all slots would become free at the same moment, and none
        in between.
        """
        takes_s = self._takes_s * random.uniform(0.5, 1.5)
        asyncio.get_running_loop().call_later(takes_s, self._transport.write, ANSWER)


async def serve(count: int, takes_s: float) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: Connection(takes_s), "127.0.0.1", 0) for _ in range(count)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent process is done, or gone


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))
