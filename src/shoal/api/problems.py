"""Errors as RFC 9457 problem documents. They never carry a traceback, an address or a path of ours."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from shoal.errors import Bug, LimitReached, ShoalError, SpecError, StoreUnavailable, Unauthenticated

MEDIA_TYPE = "application/problem+json"
MAX_PROBLEMS = 100
RETRY_LATER = (LimitReached, StoreUnavailable)


class SlowRequest(LimitReached):
    """The body came too slowly; the same request on a better line may work."""

    code = "request.timeout"
    status = 408


class TooManyConnections(LimitReached):
    """The caller, or all callers together, hold as many connections as they may."""

    code = "limit.connections"
    status = 503


class WrongHost(ShoalError):
    """The request was addressed to a name that is not ours: DNS rebinding, or a missing setting."""

    code = "request.wrong_host"
    status = 421


class WrongMediaType(SpecError):
    """The body is not of a kind this route reads."""

    code = "request.media_type"
    status = 415


class BadRequest(SpecError):
    """The request itself is malformed, whatever it asks for."""

    code = "request.malformed"
    status = 400


class NoSuchMethod(SpecError):
    """The path exists; what was to be done there does not."""

    code = "request.method"
    status = 405


class RequestHeadersTooLarge(LimitReached):
    """The head of the request is larger than this server reads."""

    code = "request.headers_too_large"
    status = 431


def problem(error: ShoalError, request_id: str) -> dict[str, Any]:
    """The document for an error raised on purpose."""
    # A Bug's message may quote our own state: people get the id, the log gets the rest.
    is_ours = isinstance(error, Bug)
    document: dict[str, Any] = {
        "type": f"urn:shoal:problem:{error.code}",
        "title": _title(error.status),
        "status": error.status,
        "detail": "something broke inside the server; nothing was acknowledged" if is_ours else error.message,
        "code": error.code,
        "request_id": request_id,
    }
    hint = f"tell an operator the request id {request_id}" if is_ours else error.hint
    if hint:
        document["hint"] = hint
    if isinstance(error, SpecError):
        document["problems"] = list(error.problems[:MAX_PROBLEMS])
    return document


def problem_response(error: ShoalError, request_id: str, *, should_close: bool = False) -> Response:
    """`should_close` for requests whose body was not read: the rest of it is not worth reading."""
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="shoal"'
    if isinstance(error, RETRY_LATER) and error.status in (429, 503):
        headers["Retry-After"] = "1"
    if should_close:
        headers["Connection"] = "close"
    body = msgspec.json.encode(problem(error, request_id))
    return Response(body, status_code=error.status, headers=headers, media_type=MEDIA_TYPE)


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
