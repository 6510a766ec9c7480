"""Permission before parsing, for bodies that name the project they are for.

Of such a body nothing but its project is looked at, in about a millisecond per MiB, until its sender is known
to be allowed there. A sender who is allowed nowhere is refused before the body is read.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from shoal.api.bodies import read_raw_json
from shoal.api.call import Call
from shoal.api.problems import BadRequest
from shoal.errors import Denied, SpecError
from shoal.identity import is_at_least
from shoal.identity.permissions import LEAST_ROLE

MAX_NAME = 100


class _Outer(msgspec.Struct):
    project: msgspec.Raw = msgspec.Raw(b"null")
    spec: msgspec.Raw = msgspec.Raw(b"null")
    flags: msgspec.Raw = msgspec.Raw(b"null")


class _Inner(msgspec.Struct):
    project: msgspec.Raw = msgspec.Raw(b"null")


async def read_named(call: Call, request: Request) -> bytes:
    """The body of a request by a caller who may do this in the project that it names, not decoded yet.

    The route asks again, with what it reads from the body.
    """
    allow_somewhere(call)
    raw = await read_raw_json(request, is_permitted=True)
    call.allow(named_project(raw) or call.only_project(), is_own=True)
    return raw


def allow_somewhere(call: Call) -> None:
    """Raise `Denied` unless the caller may do what the route does in one project at least."""
    assert call.permission is not None
    caller, least = call.caller, LEAST_ROLE[call.permission].own
    if least is None or is_at_least(caller.cluster_role, least):
        return
    if any(is_at_least(role, least) for role in caller.roles.values()):
        return
    if len(caller.roles) == 1:
        call.allow(next(iter(caller.roles)), is_own=True)  # says which role is missing
    raise Denied(
        f"`{call.permission}` needs the role {least} in a project, and you have it in none",
        hint="ask a lead of a project: `shoal project add PROJECT YOU`",
    )


def named_project(raw: bytes) -> str | None:
    """The project that the body names: beside its spec, else in it. `BadRequest`: it is not JSON."""
    try:
        outer = msgspec.json.decode(raw, type=_Outer)
    except (msgspec.ValidationError, UnicodeError):
        return None  # JSON, but no object: the parser says so, to those who may submit
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise SpecError("the body is nested too deeply") from error
    return _text(outer.project) or _inside(outer.spec) or _inside(outer.flags)


def _inside(raw: msgspec.Raw) -> str | None:
    try:
        return _text(msgspec.json.decode(raw, type=_Inner).project)
    except (ValueError, RecursionError):
        return None


def _text(raw: msgspec.Raw) -> str | None:
    """The name, if it is a text that can be one."""
    if not 2 < len(bytes(raw)) <= MAX_NAME:
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except ValueError:  # nor is it UTF-8, perhaps
        return None
