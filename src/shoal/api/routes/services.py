"""Serve, list, show, scale and stop services."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api.call import Call, call_of, idempotency_key, json_response, read_for_project
from shoal.api.http.bodies import decode_strictly, parse_body, read_model, validate
from shoal.api.queries import NoQuery, ServiceQuery
from shoal.api.requests import NoBody, RolloutBody, ScaleBody, ServeBody
from shoal.api.routes.jobs import missing_archive, require_empty_body
from shoal.api.routing import RouteGroup
from shoal.api.views import services as views
from shoal.control.services import commands as service_commands
from shoal.control.services.commands import ServiceRequest
from shoal.control.services.snapshot import ServiceSnapshot, load_snapshot, waiting_reasons
from shoal.errors import NotFound, SpecError
from shoal.identity import Permission, is_at_least
from shoal.model.people import Role
from shoal.model.service import Release, Service
from shoal.spec.parse import parse_service
from shoal.spec.service import ServiceSpec
from shoal.store import Tx

routes = RouteGroup("services")


@routes.add(
    "POST",
    "/v1/services",
    Permission.SERVICE_MANAGE,
    answers=views.ServedView,
    status=201,
    body=ServeBody,
)
async def serve(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A new service, or a new release of the service of that name. Sending the same again changes nothing."""
    call = call_of(request)
    key = idempotency_key(request)
    body, spec = await parse_body(await read_for_project(call, request), _parse_service_body)
    project = _project_for(call, body.project, spec)
    existing = await call.core.records.store.read(lambda tx: tx.services.by_name(project, spec.name))
    call.allow(project, is_own=existing is None or existing.owner == call.caller.id)
    service_request = ServiceRequest(
        spec=spec,
        project=project,
        owner=call.person(),
        archive_digest=body.archive,
        left_behind=body.left_behind.to_wire() if body.left_behind else None,
        secrets=body.secrets,
        may_claim=is_at_least(call.caller.role_in(project), Role.LEAD),
        refusal=missing_archive(call, project, body.archive),
    )
    service = await service_commands.serve(
        call.core.admission, call.core.services, call.actor, service_request, key=key
    )
    snapshot = await _load_service(call, service.service_id)
    return json_response(views.render_served(snapshot, call.core.services.url, existing), 201)


def _parse_service_body(raw: bytes) -> tuple[ServeBody, ServiceSpec]:
    body = validate(ServeBody, decode_strictly(raw))
    return body, parse_service(body.spec)


def _project_for(call: Call, named: str | None, spec: ServiceSpec) -> str:
    if named is not None and spec.project is not None and named != spec.project:
        raise SpecError(
            f"the request names project `{named}`, its spec names `{spec.project}`", hint="drop one of them"
        )
    return named or spec.project or call.only_project()


@routes.add("GET", "/v1/services", Permission.SERVICE_LIST, answers=views.ServicePageView)
async def list_services(request: Request, query: Annotated[ServiceQuery, Query()]) -> Response:
    """Services of the projects you may see."""
    call = call_of(request)
    projects = await call.visible_in(query.project)

    def look(tx: Tx) -> list[ServiceSnapshot]:
        named = (service for service in tx.services.all() if query.name in (None, service.name))
        shown = [service for service in named if projects is None or service.project in projects]
        return [
            snapshot for service in shown if (snapshot := load_snapshot(tx, service.service_id)) is not None
        ]

    snapshots = await call.core.records.store.read(look)
    view: views.ServicePageView = {
        "items": [_shown(call, snapshot) for snapshot in snapshots],
        "next_cursor": None,
    }
    return json_response(view)


@routes.add("GET", "/v1/services/{service_id}", Permission.SERVICE_READ, answers=views.ServiceDetailView)
async def show_service(request: Request, service_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """One service with its replicas, releases and the spec of the newest."""
    call = call_of(request)
    await _allowed(call, service_id)
    snapshot = await _load_service(call, service_id)

    def load_releases(tx: Tx) -> list[Release]:
        return tx.services.releases(service_id)

    core = call.core
    releases = await core.records.store.read(load_releases)
    load_now = core.services.load(snapshot.service, core.records.clock.monotonic())
    return json_response(
        views.render_service_detail(
            snapshot,
            core.services.url,
            releases,
            load_now,
            waiting_reasons(core.records.clock, core.planning.planner, snapshot),
        )
    )


@routes.add(
    "POST",
    "/v1/services/{service_id}/scale",
    Permission.SERVICE_MANAGE,
    answers=views.ServiceView,
    body=ScaleBody,
)
async def scale_service(request: Request, service_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Set the least and the most replicas from now on, whatever the spec says."""

    async def scale(call: Call, key: str | None) -> None:
        body = await read_model(request, ScaleBody)
        await service_commands.scale(
            call.core.records,
            call.core.services,
            call.core.settings,
            call.actor,
            service_id,
            body.min,
            body.max,
            key=key,
        )

    return await _altered(request, service_id, scale)


@routes.add(
    "POST",
    "/v1/services/{service_id}/rollout",
    Permission.SERVICE_MANAGE,
    answers=views.ServiceView,
    body=RolloutBody,
)
async def steer_rollout(request: Request, service_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Go back to the previous release, or finish the rollout without watching any longer."""

    async def steer(call: Call, key: str | None) -> None:
        body = await read_model(request, RolloutBody)
        is_undo = body.action == "undo"
        turn = service_commands.undo_rollout if is_undo else service_commands.promote_rollout
        await turn(call.core.records, call.core.services, call.actor, service_id, key=key)

    return await _altered(request, service_id, steer)


@routes.add(
    "POST",
    "/v1/services/{service_id}/stop",
    Permission.SERVICE_MANAGE,
    answers=views.ServiceView,
    body=NoBody,
)
async def stop_service(request: Request, service_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """The replicas finish their requests and stop. Then the service is removed."""

    async def stop(call: Call, key: str | None) -> None:
        await require_empty_body(request)
        await service_commands.stop(call.core.records, call.core.services, call.actor, service_id, key=key)

    return await _altered(request, service_id, stop)


async def _altered(
    request: Request, service_id: str, change: Callable[[Call, str | None], Awaitable[None]]
) -> Response:
    """The service after `change`, for a caller with the permission. If the service has been removed by then,
    as it was before.
    """
    call = call_of(request)
    key = idempotency_key(request)
    await _allowed(call, service_id)
    snapshot = await _load_service(call, service_id)
    await change(call, key)
    with suppress(NotFound):
        snapshot = await _load_service(call, service_id)
    return json_response(_shown(call, snapshot))


def _shown(call: Call, snapshot: ServiceSnapshot) -> views.ServiceView:
    return views.render_service(snapshot, call.core.services.url)


async def _allowed(call: Call, service_id: str) -> Service:
    service = await call.core.records.store.read(lambda tx: tx.services.get(service_id))
    if service is None:
        raise NotFound("no such thing, or one you may not see")
    call.allow(service.project, is_own=service.owner == call.caller.id)
    return service


async def _load_service(call: Call, service_id: str) -> ServiceSnapshot:
    snapshot = await call.core.records.store.read(lambda tx: load_snapshot(tx, service_id))
    if snapshot is None:
        raise NotFound("no such thing, or one you may not see")
    return snapshot
