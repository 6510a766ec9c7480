"""One request, once its caller is known: what the routes use instead of the raw request.

A route's permission is fixed by its declaration. A handler that answers without having asked for it is
a bug of ours, and the answer is withheld.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.api.authenticate import Authenticator, Known
from shoal.api.denials import SCOPE_KEY, Denials
from shoal.api.limits import StreamSlots
from shoal.api.submissions import Submissions
from shoal.control import Actor, ControlPlane
from shoal.control.rights import Question, Rights
from shoal.errors import Bug, Denied, NotFound, NotVisible, SpecError
from shoal.identity import Caller, CallerKind, Permission, authorize, is_at_least, visible_projects
from shoal.identity.permissions import FOR_JOBS, LEAST_ROLE, Reach
from shoal.model.people import Project, Role, User

_KEY = re.compile(r"[\x21-\x7e]{1,200}")


class Services:
    """What all requests share."""

    def __init__(self, plane: ControlPlane) -> None:
        limits = plane.settings.limits
        self.plane = plane
        self.authenticator = Authenticator(plane)
        self.denials = Denials(plane)
        self.started_at = plane.core.clock.now()
        self.submissions = Submissions()
        self.slots = StreamSlots(limits.max_streams, limits.max_streams_per_actor)


class Call:
    """Made by the guard for every request that it lets in."""

    __slots__ = (
        *("caller", "generation", "is_authorized", "permission", "questions"),
        *("request_id", "services", "token", "user"),
    )

    def __init__(self, services: Services, known: Known, token: str, request_id: str) -> None:
        self.services = services
        self.caller: Caller = known.caller
        self.user: User | None = known.user
        self.generation = known.generation
        self.questions: tuple[Question, ...] = ()
        """That were answered with yes."""
        self.token = token
        self.request_id = request_id
        self.permission: Permission | None = None
        self.is_authorized = False

    @property
    def plane(self) -> ControlPlane:
        return self.services.plane

    @property
    def actor(self) -> Actor:
        """As whom the control plane records what is done."""
        caller = self.caller
        return Actor(
            kind=caller.kind,
            id=caller.id,
            name=caller.name,
            request_id=self.request_id,
            rights=self.rights,
        )

    @property
    def rights(self) -> Rights | None:
        """What the control plane asks again when it does what is asked for here."""
        if self.caller.kind is not CallerKind.USER:
            return None
        return Rights(caller=self.caller, generation=self.generation, questions=self.questions)

    async def look_again(self) -> None:
        """Raise unless this request would still be let in. For effects outside the store; commands look by
        themselves.
        """
        rights, core = self.rights, self.plane.core
        if rights is not None:
            await core.store.read(lambda tx: rights.check(tx, core.clock.now()))

    def enter(self, permission: Permission) -> None:
        """The route is known. Refuse here what can be refused before the request is read."""
        self.permission = permission
        rule = LEAST_ROLE[permission]
        kind = self.caller.kind
        if rule.reach is Reach.PROJECT:
            is_process = kind in (CallerKind.SUPERVISOR, CallerKind.DATA_PLANE, CallerKind.TICKET)
            if is_process or (kind is CallerKind.JOB and permission not in FOR_JOBS):
                authorize(self.caller, permission)
        elif rule.any is None or rule.reach is Reach.CLUSTER or kind is not CallerKind.USER:
            self._ask(Question(permission))

    def allow(self, project: str | None = None, *, is_own: bool = False, job_id: str | None = None) -> None:
        """Ask for the route's own permission. Raises `Denied` or `NotFound`."""
        if self.permission is None:
            raise Bug("a route asked for its permission before it was entered")
        self._ask(Question(self.permission, project, is_own, job_id))

    def _ask(self, question: Question) -> None:
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
        """Projects whose things may be listed; None: all of them."""
        return visible_projects(self.caller)

    async def listed(self, project: str | None) -> tuple[str, ...] | None:
        """The same where one project was asked for; `NotFound` if it is not there or not to be seen."""
        if project is None:
            return self.visible()
        if self.caller.role_in(project) is None:
            raise NotVisible("no such thing, or one you may not see")
        return ((await self.project(project)).name,)

    def person(self) -> User:
        """The user behind the call. Raises `Denied` for tokens that are nobody's."""
        if self.user is None:
            raise Denied("this is for people; a job's or supervisor's token will not do", hint="shoal login")
        return self.user

    def only_project(self) -> str:
        """The project of somebody who may submit to one alone. Raises `SpecError` with the choices."""
        may = sorted(name for name, role in self.caller.roles.items() if is_at_least(role, Role.MEMBER))
        if len(may) == 1:
            return may[0]
        if not may and len(self.caller.roles) == 1:
            authorize(self.caller, Permission.JOB_SUBMIT, next(iter(self.caller.roles)))
        raise SpecError(
            f"which project? You may submit to: {', '.join(may) or 'none yet'}",
            hint=f"add `--project {may[0]}`" if may else "ask a lead: `shoal project add PROJECT YOU`",
        )

    async def project(self, name: str) -> Project:
        """The project, which the caller was allowed into. Raises `NotFound`."""
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


def answer(data: Mapping[str, Any], status: int = 200) -> Response:
    """JSON, encoded once, with no second validation on the way out."""
    return Response(msgspec.json.encode(data), status_code=status, media_type="application/json")
