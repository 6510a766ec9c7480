"""One request, once its caller is known: what the routes use instead of the raw request.

A route's declaration fixes its permission. If a handler answers without having asked for that permission, it
is a bug of ours, and the answer is withheld.

Some bodies name the project they are for. Until the sender is known to be allowed there, only the project is
read from such a body, in about a millisecond per MiB. A sender without permission in any project is refused
before the body is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.api.authenticate import AuthenticatedCaller, Authenticator
from shoal.api.http.bodies import SubmissionCache, read_raw_json
from shoal.api.http.limits import SCOPE_KEY, Denials, StreamSlots
from shoal.api.http.problems import BadRequest
from shoal.control import Actor, Core
from shoal.control.actor import PermissionCheck, RequestRights
from shoal.errors import Bug, Denied, NotFound, NotVisible, SpecError
from shoal.identity import Caller, CallerKind, Permission, authorize, is_at_least, visible_projects
from shoal.identity.permissions import FOR_JOBS, LEAST_ROLE, PermissionScope
from shoal.model.people import Project, Role, User

_KEY = re.compile(r"[\x21-\x7e]{1,200}")


class ApiServices:
    """What all requests share."""

    def __init__(self, core: Core) -> None:
        limits = core.settings.limits
        self.core = core
        self.authenticator = Authenticator(core.records, core.sealing, core.settings)
        self.denials = Denials(core.records, core.refusals)
        self.started_at = core.records.clock.now()
        self.submissions = SubmissionCache()
        self.slots = StreamSlots(limits.max_streams, limits.max_streams_per_actor)


class Call:
    """A request of a known caller. The guard makes one for every request that it admits."""

    __slots__ = (
        *("caller", "generation", "is_authorized", "permission", "questions"),
        *("request_id", "services", "token", "user"),
    )

    def __init__(
        self, services: ApiServices, authenticated: AuthenticatedCaller, token: str, request_id: str
    ) -> None:
        self.services = services
        self.caller: Caller = authenticated.caller
        self.user: User | None = authenticated.user
        self.generation = authenticated.generation
        self.questions: tuple[PermissionCheck, ...] = ()
        """Permission checks that passed."""
        self.token = token
        self.request_id = request_id
        self.permission: Permission | None = None
        self.is_authorized = False

    @property
    def core(self) -> Core:
        """The capabilities of the control plane. A route hands a command those that it takes."""
        return self.services.core

    @property
    def actor(self) -> Actor:
        """The actor that the control plane records for this request."""
        caller = self.caller
        return Actor(
            kind=caller.kind,
            id=caller.id,
            name=caller.name,
            request_id=self.request_id,
            rights=self.rights,
        )

    @property
    def rights(self) -> RequestRights | None:
        """The rights that the control plane checks again when it makes the requested change."""
        if self.caller.kind is not CallerKind.USER:
            return None
        return RequestRights(caller=self.caller, generation=self.generation, checks=self.questions)

    async def check_again(self) -> None:
        """Raise unless this request would still be admitted. For effects outside the store; commands check by
        themselves.
        """
        rights, records = self.rights, self.core.records
        if rights is not None:
            await records.store.read(lambda tx: rights.check(tx, records.clock.now()))

    def enter(self, permission: Permission) -> None:
        """Note the route. Refuse here what can be refused before the request is read."""
        self.permission = permission
        rule = LEAST_ROLE[permission]
        kind = self.caller.kind
        if rule.scope is PermissionScope.PROJECT:
            is_process = kind in (CallerKind.SUPERVISOR, CallerKind.DATA_PLANE, CallerKind.BOOTSTRAP)
            if is_process or (kind is CallerKind.JOB and permission not in FOR_JOBS):
                authorize(self.caller, permission)
        elif rule.any_role is None or rule.scope is PermissionScope.CLUSTER or kind is not CallerKind.USER:
            self._ask(PermissionCheck(permission))

    def allow(self, project: str | None = None, *, is_own: bool = False, job_id: str | None = None) -> None:
        """Check the route's own permission. Raises `Denied` or `NotFound`."""
        if self.permission is None:
            raise Bug("a route asked for its permission before it was entered")
        self._ask(PermissionCheck(self.permission, project, is_own, job_id))

    def _ask(self, question: PermissionCheck) -> None:
        authorize(
            self.caller,
            question.permission,
            question.project,
            is_own=question.is_own,
            job_id=question.job_id,
        )
        self.questions = (*self.questions, question)
        self.is_authorized = True

    def visible(self) -> tuple[str, ...] | None:
        """Projects whose objects may be listed. None: all projects."""
        return visible_projects(self.caller)

    async def visible_in(self, project: str | None) -> tuple[str, ...] | None:
        """The same, limited to one project. `NotFound` if it does not exist or the caller may not see it."""
        if project is None:
            return self.visible()
        if self.caller.role_in(project) is None:
            raise NotVisible("no such thing, or one you may not see")
        return ((await self.project(project)).name,)

    def person(self) -> User:
        """The user behind the call. Raises `Denied` for tokens without a user."""
        if self.user is None:
            raise Denied(
                "this needs a user's token, not the token of a job or a supervisor",
                hint="shoal login",
            )
        return self.user

    def only_project(self) -> str:
        """The project of a caller that may submit to only one. Raises `SpecError` with the choices."""
        may = sorted(name for name, role in self.caller.roles.items() if is_at_least(role, Role.MEMBER))
        if len(may) == 1:
            return may[0]
        if not may and len(self.caller.roles) == 1:
            authorize(self.caller, Permission.JOB_SUBMIT, next(iter(self.caller.roles)))
        raise SpecError(
            f"which project? You may submit to: {', '.join(may) or 'none'}",
            hint=f"add `--project {may[0]}`" if may else "ask a lead: `shoal project add PROJECT YOU`",
        )

    async def project(self, name: str) -> Project:
        """The project, which the caller was allowed to use. Raises `NotFound`."""
        project = await self.services.authenticator.project(name)
        if project is None:
            raise NotFound("no such thing, or one you may not see")
        return project


def call_of(request: Request) -> Call:
    """The call the guard made for this request."""
    call = request.scope.get(SCOPE_KEY)
    if not isinstance(call, Call):
        raise Bug("a request reached a route without passing the guard")
    return call


def idempotency_key(request: Request) -> str | None:
    """The client's key for this change, if it sent one."""
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise SpecError("Idempotency-Key is 1 to 200 visible ASCII characters", hint="send a UUID")
    return key


def json_response(data: Mapping[str, Any], status: int = 200) -> Response:
    """JSON, encoded once, with no second validation on the way out."""
    return Response(msgspec.json.encode(data), status_code=status, media_type="application/json")


MAX_NAME = 100


class _Outer(msgspec.Struct):
    project: msgspec.Raw = msgspec.Raw(b"null")
    spec: msgspec.Raw = msgspec.Raw(b"null")
    flags: msgspec.Raw = msgspec.Raw(b"null")


class _Inner(msgspec.Struct):
    project: msgspec.Raw = msgspec.Raw(b"null")


async def read_for_project(call: Call, request: Request) -> bytes:
    """The undecoded body of a request. The caller must have the permission in the project that the body
    names.

    The route checks the permission again with what it reads from the body.
    """
    allow_somewhere(call)
    raw = await read_raw_json(request, is_permitted=True)
    call.allow(named_project(raw) or call.only_project(), is_own=True)
    return raw


def allow_somewhere(call: Call) -> None:
    """Raise `Denied` unless the caller has the route's permission in at least one project."""
    assert call.permission is not None
    caller, least = call.caller, LEAST_ROLE[call.permission].own_role
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
    """The project that the body names, beside its spec or else in it. `BadRequest`: the body is not JSON."""
    try:
        outer = msgspec.json.decode(raw, type=_Outer)
    except (msgspec.ValidationError, UnicodeError):
        return None  # JSON, but no object: the parser reports that, to callers that may submit
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
    """The name, if it is valid as text."""
    if not 2 < len(bytes(raw)) <= MAX_NAME:
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except ValueError:  # perhaps not UTF-8 either
        return None
