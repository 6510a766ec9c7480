"""Serve, list, look at, scale and stop services."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api import service_views as views
from shoal.api.admission import read_named
from shoal.api.bodies import decode_strictly, parsed, read_model, validate
from shoal.api.call import Call, answer, call_of, idempotency_key
from shoal.api.queries import NoQuery, ServiceQuery
from shoal.api.requests import NoBody, RolloutBody, ScaleBody, ServeBody
from shoal.api.routes.jobs import missing_archive, read_nothing
from shoal.api.routing import Routes
from shoal.control.services.commands import AskedService
from shoal.control.services.look import Look, load, waits
from shoal.errors import NotFound, SpecError
from shoal.identity import Permission, is_at_least
from shoal.model.people import Role
from shoal.model.service import Release, Service
from shoal.spec.parse import parse_service
from shoal.spec.service import ServiceSpec
from shoal.store import Tx

routes = Routes("services")


@routes.add(
    "POST",
    "/v1/services",
    Permission.SERVICE_MANAGE,
    answers=views.ServedView,
    status=201,
    body=ServeBody,
)
async def serve(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A new service, or a new release of the one of that name; of the same again nothing comes."""
    call = call_of(request)
    key = idempotency_key(request)
    body, spec = await parsed(await read_named(call, request), _asked)
    project = _project_for(call, body.project, spec)
    known = await call.plane.core.store.read(lambda tx: tx.services.by_name(project, spec.name))
    call.allow(project, is_own=known is None or known.owner == call.caller.id)
    asked = AskedService(
        spec=spec,
        project=project,
        owner=call.person(),
        archive_digest=body.archive,
        left_behind=body.left_behind.told() if body.left_behind else None,
        secrets=body.secrets,
        may_claim=is_at_least(call.caller.role_in(project), Role.LEAD),
        refusal=missing_archive(call, project, body.archive),
    )
    service = await call.plane.serve(call.actor, asked, key=key)
    look = await _look(call, service.service_id)
    return answer(views.render_served(look, call.plane.core.services.url, known), 201)


def _asked(raw: bytes) -> tuple[ServeBody, ServiceSpec]:
    body = validate(ServeBody, decode_strictly(raw))
    return body, parse_service(body.spec)


def _project_for(call: Call, named: str | None, spec: ServiceSpec) -> str:
    if named is not None and spec.project is not None and named != spec.project:
        raise SpecError(
            f"the request says project `{named}`, its spec `{spec.project}`", hint="drop one of them"
        )
    return named or spec.project or call.only_project()


@routes.add("GET", "/v1/services", Permission.SERVICE_LIST, answers=views.ServicePageView)
async def list_services(request: Request, query: Annotated[ServiceQuery, Query()]) -> Response:
    """Services of the projects you may see."""
    call = call_of(request)
    projects = await call.listed(query.project)

    def look(tx: Tx) -> list[Look]:
        named = (one for one in tx.services.all() if query.name in (None, one.name))
        shown = [one for one in named if projects is None or one.project in projects]
        return [found for one in shown if (found := load(tx, one.service_id)) is not None]

    found = await call.plane.core.store.read(look)
    view: views.ServicePageView = {
        "items": [_shown(call, one) for one in found],
        "next_cursor": None,
    }
    return answer(view)


@routes.add("GET", "/v1/services/{service_id}", Permission.SERVICE_READ, answers=views.ServiceDetailView)
async def show_service(request: Request, service_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """One service with its replicas, releases and the spec of the newest."""
    call = call_of(request)
    await _allowed(call, service_id)
    look = await _look(call, service_id)

    def load_releases(tx: Tx) -> list[Release]:
        return tx.services.releases(service_id)

    core = call.plane.core
    releases = await core.store.read(load_releases)
    load_now = core.services.load(look.service, core.clock.monotonic())
    return answer(views.render_detail(look, core.services.url, releases, load_now, waits(core, look)))


@routes.add(
    "POST",
    "/v1/services/{service_id}/scale",
    Permission.SERVICE_MANAGE,
    answers=views.ServiceView,
    body=ScaleBody,
)
async def scale_service(request: Request, service_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Between so many and so many replicas from now on, whatever its spec says."""

    async def scale(call: Call, key: str | None) -> None:
        body = await read_model(request, ScaleBody)
        await call.plane.scale_service(call.actor, service_id, body.min, body.max, key=key)

    return await _altered(request, service_id, scale)


@routes.add(
    "POST",
    "/v1/services/{service_id}/rollout",
    Permission.SERVICE_MANAGE,
    answers=views.ServiceView,
    body=RolloutBody,
)
async def steer_rollout(request: Request, service_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Back to the release before, or on without watching any longer."""

    async def steer(call: Call, key: str | None) -> None:
        body = await read_model(request, RolloutBody)
        turn = call.plane.undo_rollout if body.action == "undo" else call.plane.promote_rollout
        await turn(call.actor, service_id, key=key)

    return await _altered(request, service_id, steer)


@routes.add(
    "POST",
    "/v1/services/{service_id}/stop",
    Permission.SERVICE_MANAGE,
    answers=views.ServiceView,
    body=NoBody,
)
async def stop_service(request: Request, service_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Its replicas finish what they have and stop; then it is gone."""

    async def stop(call: Call, key: str | None) -> None:
        await read_nothing(request)
        await call.plane.stop_service(call.actor, service_id, key=key)

    return await _altered(request, service_id, stop)


async def _altered(
    request: Request, service_id: str, change: Callable[[Call, str | None], Awaitable[None]]
) -> Response:
    """The service after `change`, for whoever may; as it was before, if it is gone by then."""
    call = call_of(request)
    key = idempotency_key(request)
    await _allowed(call, service_id)
    look = await _look(call, service_id)
    await change(call, key)
    with suppress(NotFound):
        look = await _look(call, service_id)
    return answer(_shown(call, look))


def _shown(call: Call, look: Look) -> views.ServiceView:
    return views.render_service(look, call.plane.core.services.url)


async def _allowed(call: Call, service_id: str) -> Service:
    service = await call.plane.core.store.read(lambda tx: tx.services.get(service_id))
    if service is None:
        raise NotFound("no such thing, or one you may not see")
    call.allow(service.project, is_own=service.owner == call.caller.id)
    return service


async def _look(call: Call, service_id: str) -> Look:
    found = await call.plane.core.store.read(lambda tx: load(tx, service_id))
    if found is None:
        raise NotFound("no such thing, or one you may not see")
    return found
