"""Two policies on requests: which web pages may call a service, and which requests may be repeated. Pure.

Before a cross-origin request, a browser sends a preflight without a token, so the data plane answers that
itself. Replies to the requests that follow carry the page's origin, unless the program writes CORS headers
of its own.

A request may go to two replicas when the first is lost (a retry) or late (a hedge). A request that may have
had an effect is never repeated, unless the caller or the service's spec says that it does no harm.
"""

from __future__ import annotations

import re

from shoal.serving.proxy.request_head import CHUNKED, RequestHead
from shoal.serving.table import Balance, ServiceConfig

ANY_ORIGIN = "*"
MAX_AGE_S = 600
"""Browsers send another preflight after this. Chromium limits it to 7,200 s."""
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
        """Return the whole reply."""
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


def origin_of(head: RequestHead, service: ServiceConfig) -> bytes:
    """Return the page's origin if the service admits it; empty if not, or if no page sent the request."""
    if not service.origins:
        return b""
    origin = head.value(b"origin")
    is_admitted = ANY_ORIGIN in service.origins or origin.decode("latin-1") in service.origins
    return origin if is_admitted and b"\r" not in origin else b""


def check_preflight(head: RequestHead, service: ServiceConfig) -> None:
    """Raise `Preflight` if the head is a preflight that the service admits."""
    if head.method != b"OPTIONS" or not head.value(b"access-control-request-method"):
        return
    origin = origin_of(head, service)
    if origin and head.length == 0:
        names = head.value(b"access-control-request-headers")
        raise Preflight(origin, names if _NAMES.fullmatch(names) else b"")


def header_lines(origin: bytes) -> bytes:
    """Return the reply's header lines for this origin, each after a line end; empty without an origin."""
    if not origin:
        return b""
    return b"\r\naccess-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\nvary: origin" % (
        origin,
        EXPOSED,
    )


HOLD_BYTES = 64 << 10
HOLD_PROMPT_BYTES = 1 << 20
"""Bytes of a body to await before a replica is chosen. So slow senders take no slot, and what was held can
be sent again."""
SAFE = frozenset({b"GET", b"HEAD", b"OPTIONS"})
WITHOUT_EFFECT = (b"/completions", b"/embeddings")
"""Path endings of language-model requests, as OpenAI names them, that store nothing."""


def has_prompt(head: RequestHead, service: ServiceConfig) -> bool:
    return service.balance is Balance.TOKENS and head.method == b"POST"


def may_repeat(head: RequestHead, service: ServiceConfig) -> bool:
    """Return whether the request may go to another replica while no reply has begun."""
    if head.method in SAFE or service.is_repeatable or head.value(b"idempotency-key"):
        return True
    return has_prompt(head, service) and head.target.partition(b"?")[0].endswith(WITHOUT_EFFECT)


def hold_bytes(head: RequestHead, service: ServiceConfig) -> int:
    """Return how much of the body to hold before a replica is chosen; 0 if it may be a conversation."""
    if has_prompt(head, service) or service.is_repeatable:
        return HOLD_PROMPT_BYTES
    return 0 if head.length == CHUNKED else HOLD_BYTES


def hedge_bytes(head: RequestHead, service: ServiceConfig) -> int:
    """Return the longest body with which the request may be hedged; -1: never.

    Only requests that the caller or the method marks as harmless are hedged, and only if a copy costs little.
    """
    if not service.hedge_s or head.is_websocket:
        return -1
    if head.value(b"idempotency-key"):
        return HOLD_BYTES
    return 0 if head.method in SAFE else -1
