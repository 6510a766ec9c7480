"""Answers of the data plane's own: the refusal that asks for one, its problem document, the response."""

from __future__ import annotations

from http import HTTPStatus

import msgspec


class Refused(Exception):
    """A request that goes no further, and what its sender is told. `must_close`: framing is in doubt."""

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


def malformed(detail: str) -> Refused:
    """Nobody can say where this message ends, so nothing after it on the connection is believed."""
    return Refused(400, "request.malformed", detail, must_close=True)


class HealthAsked(Exception):
    """A request for the data plane's own health: it is for no service and needs no token."""


def healthy(version: int, *, closes: bool, has_body: bool = True) -> bytes:
    """The whole answer of a data plane that is well."""
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


def switched_off(project: str, name: str, *, is_public: bool) -> Refused:
    """Nothing will start a replica for it, so nobody waits. Strangers are told no names."""
    ref = f"{project}/{name}"
    told = f"service `{ref}` is scaled to 0 replicas; `shoal scale {ref} 1` starts it"
    if is_public:
        told = "the service is scaled to 0 replicas"
    return Refused(503, "service.off", told)


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""What clients of language models call a refusal; others are `invalid_request_error` or `server_error`."""


def document(refused: Refused, request_id: str = "") -> bytes:
    """RFC 9457, with a stable `code` and nothing about our inside; and the same as OpenAI's clients read it.

    Both for every path: by its shape an answer must not say whether there is a language model behind it.
    """
    kind = KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    told: dict[str, object] = {
        "type": "about:blank",
        "title": HTTPStatus(refused.status).phrase,
        "status": refused.status,
        "code": refused.code,
        "detail": refused.detail,
        "error": {"message": refused.detail, "type": kind, "param": None, "code": refused.code},
    }
    if request_id:
        told["request_id"] = request_id
    return msgspec.json.encode(told)


def response(refused: Refused, *, closes: bool, has_body: bool = True, request_id: str = "") -> bytes:
    """The whole answer. Without a body for HEAD, though its length is told."""
    body = document(refused, request_id)
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
