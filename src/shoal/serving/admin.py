"""A door for operators, on an address of its own: `/-/health` for anybody, `/-/metrics` with the token."""

from __future__ import annotations

import asyncio
import hmac
from typing import cast

from shoal.serving.freshness import HEALTH
from shoal.serving.head import parse_head, too_large
from shoal.serving.plane import DataPlane
from shoal.serving.problem import Refused, healthy, response
from shoal.serving.report import metrics

WITHIN_S = 10.0
"""From the connection to the last byte that is read of its answer."""
MAX_OPEN = 64


class Admin(asyncio.Protocol):
    """One request for each connection. `connections`: all of them; the oldest goes for one too many."""

    def __init__(
        self, plane: DataPlane, token: str, connections: dict[Admin, None], within_s: float = WITHIN_S
    ) -> None:
        self._plane = plane
        self._token = token
        self._open = connections
        self._within_s = within_s
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._is_over = False
        self._end = asyncio.get_running_loop().call_later(self._within_s, self._transport.abort)
        self._open[self] = None
        if len(self._open) > MAX_OPEN:
            next(iter(self._open)).abort()

    def abort(self) -> None:
        self._open.pop(self, None)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)
        self._end.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n") + 4
        try:
            if end > 3:
                self._transport.write(self._answer(self._buffer[:end]))
            elif (refused := too_large(self._buffer)) is not None:
                raise refused
            else:
                return
        except Refused as refused:
            self._transport.write(response(refused, closes=True))
        self._is_over = True
        self._transport.close()

    def _answer(self, raw: bytes) -> bytes:
        head = parse_head(raw)
        if head.target == HEALTH:
            problem = self._plane.health
            if problem is not None:
                raise problem
            return healthy(self._plane.version, closes=True)
        if head.target != b"/-/metrics":
            raise Refused(404, "not_found", "there are /-/health and /-/metrics")
        given = head.value(b"authorization")
        if self._token and not hmac.compare_digest(given, b"Bearer " + self._token.encode()):
            raise Refused(401, "unauthenticated", "a token is needed: `Authorization: Bearer TOKEN`")
        return _page("200 OK", metrics(self._plane).encode(), "text/plain; version=0.0.4")


def _page(status: str, body: bytes, kind: str) -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        f"content-type: {kind}",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
