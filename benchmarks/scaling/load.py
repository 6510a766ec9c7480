"""Callers with one connection each, as many as are wanted at the moment; one request after the other."""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import Self

MOST = 256
PAUSE_S = 0.02
"""Between the answer and the caller's next request."""


class Callers:
    """Counts every request sent and every complete answer. `wanted` may be set at any time."""

    def __init__(self, port: int, path: str, token: str) -> None:
        self._port = port
        head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\n\r\n"
        self._request = head.encode()
        self.wanted = 0
        self.sent = self.answered = 0
        self.failures: list[str] = []
        self.longest_s = 0.0
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self._thread.join()

    @property
    def outstanding(self) -> int:
        return self.sent - self.answered - len(self.failures)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(MOST):
                group.create_task(self._call(index))

    async def _call(self, index: int) -> None:
        link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while not self._is_over:
            if index >= self.wanted:
                await asyncio.sleep(0.05)
                continue
            began = time.monotonic()
            self.sent += 1
            try:
                link = link or await asyncio.open_connection("127.0.0.1", self._port)
                is_kept = await self._ask(*link)
                self.answered += 1
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self.failures.append(repr(error))
                is_kept = False
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if link is not None and not is_kept:
                link[1].close()
                link = None
            await asyncio.sleep(PAUSE_S)
        if link is not None:
            link[1].close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the connection may be used again. `ValueError`: the answer's status was not 200."""
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        body = await reader.readexactly(int(length.partition(b":")[2]))
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise ValueError(f"{head!r} {body!r}")
        return b"connection: close" not in head
