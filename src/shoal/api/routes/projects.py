"""Projects, their limits, and the roles of their members."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api.call import Call, call_of, idempotency_key, json_response
from shoal.api.http.bodies import read_model
from shoal.api.queries import NoQuery
from shoal.api.requests import MemberBody, NewProject, ProjectLimits, role
from shoal.api.routing import RouteGroup
from shoal.api.views import schema
from shoal.api.views.render import render_member, render_project
from shoal.control.commands import people
from shoal.control.loops.project_usage import ProjectShare, project_shares
from shoal.errors import SpecError
from shoal.identity import Permission, check_member_grant
from shoal.model.people import Membership, Project, Role
from shoal.store import Tx

routes = RouteGroup("projects")


@routes.add("GET", "/v1/projects", Permission.PROJECT_READ, answers=schema.ProjectPageView)
async def list_projects(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """The projects you may see, with their limits."""
    call = call_of(request)
    visible = call.visible()

    def load(tx: Tx) -> list[Project]:
        return [project for project in tx.people.projects() if visible is None or project.name in visible]

    projects = await call.core.records.store.read(load)
    view: schema.ProjectPageView = {"items": await _views(call, projects), "next_cursor": None}
    return json_response(view)


@routes.add(
    "POST", "/v1/projects", Permission.PROJECT_MANAGE, answers=schema.ProjectView, status=201, body=NewProject
)
async def create_project(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A new project, without members."""
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, NewProject)
    project = await people.create_project(
        call.core.records, call.core.settings, call.actor, body.name, body.changed_fields(), key=key
    )
    return json_response((await _views(call, [project]))[0], 201)


@routes.add(
    "PATCH", "/v1/projects/{name}", Permission.PROJECT_MANAGE, answers=schema.ProjectView, body=ProjectLimits
)
async def update_project(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Change the limits that are sent."""
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, ProjectLimits)
    if not body.changed_fields():
        raise SpecError("nothing to change was sent", hint='send for example {"max_open_jobs": 100}')
    try:
        project = await people.update_project(
            call.core.records, call.actor, name, body.changed_fields(), key=key
        )
    finally:
        call.services.authenticator.forget()
    return json_response((await _views(call, [project]))[0])


@routes.add("GET", "/v1/projects/{name}/members", Permission.MEMBER_READ, answers=schema.MemberPageView)
async def list_members(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """The members of the project and their roles."""
    call = call_of(request)
    call.allow(name)
    await call.project(name)
    members = await call.core.records.store.read(lambda tx: tx.people.memberships(project=name))
    items = [render_member(member) for member in sorted(members, key=lambda member: member.user_name)]
    view: schema.MemberPageView = {"items": items, "next_cursor": None}
    return json_response(view)


@routes.add(
    "PUT",
    "/v1/projects/{name}/members/{user}",
    Permission.MEMBER_MANAGE,
    answers=schema.MemberView,
    body=MemberBody,
)
async def set_member(request: Request, name: str, user: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Give a user a role in the project, at most your own."""
    call = call_of(request)
    key = idempotency_key(request)
    call.allow(name)
    await call.project(name)
    body = await read_model(request, MemberBody)
    wanted = role(body.role)
    assert wanted is not None
    check_member_grant(call.caller, name, wanted, await _held(call, name, user))
    try:
        membership = await people.set_member(call.core.serving, call.actor, name, user, wanted, key=key)
    finally:
        call.services.authenticator.forget()
    return json_response(render_member(membership))


@routes.add(
    "DELETE",
    "/v1/projects/{name}/members/{user}",
    Permission.MEMBER_MANAGE,
    answers=schema.RemovedView,
)
async def remove_member(
    request: Request, name: str, user: str, query: Annotated[NoQuery, Query()]
) -> Response:
    """Remove a user from the project. May be repeated."""
    call = call_of(request)
    key = idempotency_key(request)
    call.allow(name)
    await call.project(name)
    held = await _held(call, name, user)
    if held is not None:
        check_member_grant(call.caller, name, held, held)
    try:
        await people.remove_member(call.core.serving, call.actor, name, user, key=key)
    finally:
        call.services.authenticator.forget()
    view: schema.RemovedView = {"user": user, "project": name}
    return json_response(view)


async def _views(call: Call, projects: list[Project]) -> list[schema.ProjectView]:
    """The views of projects, with what each of them holds now."""
    core = call.core
    now, half_life_s = core.records.clock.now(), core.planning.planner.policy.half_life_s

    def load(tx: Tx) -> tuple[dict[str, int], dict[str, ProjectShare]]:
        counts = {project.name: tx.jobs.count_open(project.name) for project in projects}
        return counts, project_shares(tx, half_life_s, now)

    counts, share = await core.records.store.read(load)
    return [
        render_project(project, call.caller.role_in(project.name), counts[project.name], share[project.name])
        for project in projects
    ]


async def _held(call: Call, project: str, user_name: str) -> Role | None:
    """The user's present role in the project."""

    def load(tx: Tx) -> Membership | None:
        user = tx.people.user_by_name(user_name)
        return tx.people.membership(user.user_id, project) if user else None

    membership = await call.core.records.store.read(load)
    return membership.role if membership else None
