"""Cross-origin requests: which web pages may call a service, and what a browser is told about that.

A browser asks first, without a token (a preflight), so the data plane answers that itself. Answers to the
requests that follow carry the page's origin, unless the program has written CORS headers of its own.
"""

from __future__ import annotations

import re

from shoal.serving.head import RequestHead
from shoal.serving.table import Service

ANY_ORIGIN = "*"
MAX_AGE_S = 600
"""Browsers ask again after this; Chromium takes no more than 7,200 s."""
METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
EXPOSED = b"x-request-id, retry-after"
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")


class Preflight(Exception):
    """A browser asks whether a page of `origin` may send a request with these headers."""

    def __init__(self, origin: bytes, headers: bytes) -> None:
        super().__init__(origin)
        self.origin = origin
        self.headers = headers

    def response(self, *, closes: bool) -> bytes:
        """The whole answer."""
        lines = [
            b"HTTP/1.1 204 No Content",
            b"access-control-allow-origin: " + self.origin,
            b"access-control-allow-methods: " + METHODS,
            b"access-control-max-age: %d" % MAX_AGE_S,
            b"vary: origin",
        ]
        lines += [b"access-control-allow-headers: " + self.headers] if self.headers else []
        lines += [b"connection: close"] if closes else []
        return b"\r\n".join(lines) + b"\r\n\r\n"


def origin_of(head: RequestHead, service: Service) -> bytes:
    """The page's origin if the service admits it; empty if not, and for requests that no page sent."""
    if not service.origins:
        return b""
    origin = head.value(b"origin")
    is_admitted = ANY_ORIGIN in service.origins or origin.decode("latin-1") in service.origins
    return origin if is_admitted and b"\r" not in origin else b""


def check_preflight(head: RequestHead, service: Service) -> None:
    """Raise `Preflight` if the head is one that the service admits."""
    if head.method != b"OPTIONS" or not head.value(b"access-control-request-method"):
        return
    origin = origin_of(head, service)
    if origin and head.length == 0:
        names = head.value(b"access-control-request-headers")
        raise Preflight(origin, names if _NAMES.fullmatch(names) else b"")


def header_lines(origin: bytes) -> bytes:
    """Header lines for the answer to a request of this origin, each after a line end; empty without one."""
    if not origin:
        return b""
    return b"\r\naccess-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\nvary: origin" % (
        origin,
        EXPOSED,
    )
