"""Replies that the data plane writes itself: refusals, their problem documents, and health.

`Freshness` tracks how long no control plane has confirmed the table. A data plane keeps serving its table
while no control plane answers. It cannot learn of revoked tokens meanwhile, so its health check fails after
`STALE_S`, and a load balancer in front prefers other data planes.
"""

from __future__ import annotations

from http import HTTPStatus
from math import inf

import msgspec

from shoal.clock import Clock


class ProxyRefusal(Exception):
    """A request that goes no further, with the reply to its sender. `must_close`: the framing is in doubt."""

    def __init__(
        self, status: int, code: str, detail: str, *, must_close: bool = False, retry_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.must_close = must_close
        self.retry_s = retry_s
        self.headers = b""
        """Further header lines, each after a line end."""


def malformed(detail: str) -> ProxyRefusal:
    """Refuse a message whose end is unknown. Nothing after it on the connection can be trusted."""
    return ProxyRefusal(400, "request.malformed", detail, must_close=True)


class HealthRequest(Exception):
    """A request for the data plane's own health. It concerns no service and needs no token."""


def health_reply(version: int, *, closes: bool, has_body: bool = True) -> bytes:
    """Return the whole reply of a healthy data plane."""
    body = msgspec.json.encode({"status": "ok", "version": version})
    lines = [
        "HTTP/1.1 200 OK",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "cache-control: no-store",
    ]
    lines += ["connection: close"] if closes else []
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    return head + body if has_body else head


def service_off(project: str, name: str, *, is_public: bool) -> ProxyRefusal:
    """Refuse a request, because nothing will start a replica for it. Public services do not show
    their name.
    """
    ref = f"{project}/{name}"
    detail = f"service `{ref}` is scaled to 0 replicas; `shoal scale {ref} 1` starts it"
    if is_public:
        detail = "the service is scaled to 0 replicas"
    return ProxyRefusal(503, "service.off", detail)


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Error types of language-model APIs. Others are `invalid_request_error` or `server_error`."""


def problem_document(refused: ProxyRefusal, request_id: str = "") -> bytes:
    """Return an RFC 9457 document with a stable `code` and no internals, and the same in OpenAI's form.

    Every path gets both forms, so that a reply does not reveal whether there is a language model behind it.
    """
    kind = KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    document: dict[str, object] = {
        "type": "about:blank",
        "title": HTTPStatus(refused.status).phrase,
        "status": refused.status,
        "code": refused.code,
        "detail": refused.detail,
        "error": {"message": refused.detail, "type": kind, "param": None, "code": refused.code},
    }
    if request_id:
        document["request_id"] = request_id
    return msgspec.json.encode(document)


def refusal_reply(
    refused: ProxyRefusal, *, closes: bool, has_body: bool = True, request_id: str = ""
) -> bytes:
    """Return the whole reply. A reply to HEAD has no body, but the body's length."""
    body = problem_document(refused, request_id)
    lines = [
        f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}",
        "content-type: application/problem+json",
        f"content-length: {len(body)}",
        "cache-control: no-store",
    ]
    if request_id:
        lines.append(f"x-request-id: {request_id}")
    if refused.status == 401:
        lines.append('www-authenticate: Bearer realm="shoal"')
    if refused.retry_s is not None:
        lines.append(f"retry-after: {max(1, round(refused.retry_s))}")
    if closes:
        lines.append("connection: close")
    head = "\r\n".join(lines).encode("latin-1") + refused.headers + b"\r\n\r\n"
    return head + body if has_body else head


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""An interim reply. Every reader of HTTP/1.1 skips any number of them."""

STALE_S = 8.0
"""A revoked token must be refused, or the check must fail, within 10 s. This leaves 2 s to notice."""
HEALTH = b"/-/health"


class Freshness:
    """`limit_s` is infinite if the table comes from a file, which needs no confirmation."""

    def __init__(self, clock: Clock, limit_s: float = inf) -> None:
        self._clock = clock
        self.limit_s = limit_s
        self._confirmed_at: float | None = None

    def confirm(self) -> None:
        """Record that the leader said that the table in use is the newest."""
        self._confirmed_at = self._clock.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last confirmation; infinite before the first."""
        return inf if self._confirmed_at is None else self._clock.monotonic() - self._confirmed_at

    @property
    def is_stale(self) -> bool:
        return self.silent_s > self.limit_s

    @property
    def problem(self) -> ProxyRefusal | None:
        """The health check's refusal while the table is stale, or None while it is fresh."""
        if not self.is_stale:
            return None
        since = "since this process began" if self.silent_s == inf else f"for {self.silent_s:.0f} s"
        detail = f"no control plane has confirmed the table {since}; the limit is {self.limit_s:g} s"
        return ProxyRefusal(503, "plane.stale", detail, retry_s=1.0)
