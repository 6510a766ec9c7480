"""uvicorn's HTTP protocol with a deadline and a limit for the head of a request.

uvicorn times idle keep-alive connections alone: a client that sends its headers one byte a minute, or
without end, would hold a connection and memory for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_S = 10.0
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
BODY_IS_HERE = "shoal.body_is_here"
"""Set in the scope of a request once all of it has arrived; most have before the application looks."""


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose next request has not come in whole within `MAX_HEAD_S`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._deadline is None:
                self._start_deadline()
        super().data_received(data)
        # Counted after parsing, so that a body in the same packet as its head is not held against it.
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._close()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._close()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_deadline()
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.scope[BODY_IS_HERE] = True  # type: ignore[literal-required]
        self._is_in_head = True
        self._head_bytes = 0

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(MAX_HEAD_S, self._close)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()
