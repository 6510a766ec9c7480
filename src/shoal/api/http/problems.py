"""Errors as RFC 9457 problem documents. They never carry a traceback, an address or a path of ours.

`describe_problem` says in a sentence what is wrong with a request: the field, the value that was sent, and
what it may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from shoal.api.queries import CURSOR_PATTERN
from shoal.api.requests import DIGEST_PATTERN, NAME_PATTERN, TEXT_PATTERN
from shoal.errors import Bug, LimitReached, ShoalError, SpecError, StoreUnavailable, Unauthenticated
from shoal.spec.error_text import escape, or_nearest
from shoal.spec.problems import path_of, problem_sentence

MEDIA_TYPE = "application/problem+json"
MAX_PROBLEMS = 100
RETRY_LATER = (LimitReached, StoreUnavailable)


class SlowRequest(LimitReached):
    """The body came too slowly. The same request over a better connection may work."""

    code = "request.timeout"
    status = 408


class TooManyConnections(LimitReached):
    """The caller, or all callers together, hold the most connections allowed."""

    code = "limit.connections"
    status = 503


class WrongHost(ShoalError):
    """The request was addressed to a name that is not ours: DNS rebinding, or a missing setting."""

    code = "request.wrong_host"
    status = 421


class WrongMediaType(SpecError):
    """The body has a media type that this route does not read."""

    code = "request.media_type"
    status = 415


class BadRequest(SpecError):
    """The request itself is malformed, whatever it asks for."""

    code = "request.malformed"
    status = 400


class NoSuchMethod(SpecError):
    """The path exists, but not for this method."""

    code = "request.method"
    status = 405


class RequestHeadersTooLarge(LimitReached):
    """The head of the request is larger than this server reads."""

    code = "request.headers_too_large"
    status = 431


def problem(error: ShoalError, request_id: str) -> dict[str, Any]:
    """The problem document for an error raised on purpose."""
    # A Bug's message may quote our own state. People get the id, and the log gets the rest.
    is_ours = isinstance(error, Bug)
    document: dict[str, Any] = {
        "type": f"urn:shoal:problem:{error.code}",
        "title": _title(error.status),
        "status": error.status,
        "detail": "the server failed inside; it acknowledged nothing" if is_ours else error.message,
        "code": error.code,
        "request_id": request_id,
    }
    hint = f"give an operator the request id {request_id}" if is_ours else error.hint
    if hint:
        document["hint"] = hint
    if isinstance(error, SpecError):
        document["problems"] = list(error.problems[:MAX_PROBLEMS])
    return document


def problem_response(error: ShoalError, request_id: str, *, should_close: bool = False) -> Response:
    """The response for an error. `should_close`: for requests whose body was not read, because reading the
    rest is useless.
    """
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


PATTERNS = {
    NAME_PATTERN: "made of lower-case letters, digits, `.`, `_` and `-`, at most 63, the first a "
    "letter or digit",
    TEXT_PATTERN: "one line of text",
    CURSOR_PATTERN: "a cursor: take `next_cursor` of the page before",
    DIGEST_PATTERN: "a SHA-256 digest, 64 digits of 0-9 and a-f",
}
SECRETS = "`secrets`: names of environment variables, each with a text of at most 64 KiB"
OUTSIDE = ("body", "query", "path")
FORMS = ("str", "list[str]")
"""The types that a flag's value was tried as. A message should not name them."""


def describe_problem(item: Any, field_names: Iterable[str] = ()) -> str:
    """One problem that validation found. `field_names`: the existing fields. Secrets are never quoted."""
    steps = tuple(step for step in item["loc"] if step not in OUTSIDE)
    if steps[:1] == ("secrets",):
        return SECRETS
    if steps[:1] == ("flags",):
        steps = tuple(step for step in steps if step not in FORMS)
    path = path_of(steps)
    if item["type"] == "extra_forbidden":
        return f"unknown field `{path}`" + (
            or_nearest(str(steps[-1]), field_names) if len(steps) == 1 else ""
        )
    if item["type"] == "value_error" and not path:
        return escape(str(item["ctx"]["error"]))
    return problem_sentence(item, path or "the body", PATTERNS)[:500]
