"""Problem documents (RFC 9457) turned back into the error the server raised."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from shoal import errors
from shoal.errors import ShoalError, SpecError

BY_STATUS: dict[int, type[ShoalError]] = {
    400: errors.SpecError,
    401: errors.Unauthenticated,
    403: errors.Denied,
    404: errors.NotFound,
    405: errors.SpecError,
    408: errors.LimitReached,
    409: errors.StateError,
    413: errors.TooLarge,
    415: errors.SpecError,
    421: errors.Denied,
    422: errors.SpecError,
    429: errors.LimitReached,
    431: errors.LimitReached,
    500: errors.Bug,
    502: errors.EngineRefused,
    503: errors.StoreUnavailable,
}
BY_CODE: dict[str, type[ShoalError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ShoalError)
}


def error_from(status: int, body: bytes, url: str) -> ShoalError:
    """The error a server's answer stands for. Something that is not Shoal's becomes `ServerUnreachable`."""
    try:
        told = json.loads(body)
    except ValueError:
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("code"), str):
        return errors.ServerUnreachable(
            f"{url} answered {status}, but not as Shoal does",
            hint="check the address: `shoal login` alone says which one it is",
        )
    message = str(told.get("detail") or told.get("title") or f"the server answered {status}")
    kind = _kind(told["code"], status)
    facts: dict[str, Any] = {"request_id": told.get("request_id")}
    if issubclass(kind, SpecError):
        problems = tuple(str(problem) for problem in told.get("problems") or ())
        return kind(message, problems=problems, hint=told.get("hint"), **facts)
    return kind(message, hint=told.get("hint"), **facts)


@cache
def _kind(code: str, status: int) -> type[ShoalError]:
    """The class with this code; a code unknown here keeps it on the class its status stands for."""
    if code in BY_CODE:
        return BY_CODE[code]
    family = BY_STATUS.get(status, ShoalError)
    return type(family.__name__, (family,), {"code": code})
