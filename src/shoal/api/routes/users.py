"""People: who there is, and what they are on the whole cluster. For admins."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.bodies import read_model
from shoal.api.call import answer, call_of, idempotency_key
from shoal.api.queries import NoQuery
from shoal.api.render import render_user
from shoal.api.requests import NewUser, UserChange, role
from shoal.api.routing import Routes
from shoal.errors import SpecError
from shoal.identity import Permission

routes = Routes("users")


@routes.add("GET", "/v1/users", Permission.USER_MANAGE, answers=views.UserPageView)
async def list_users(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """Everybody, by name."""
    call = call_of(request)
    users = await call.plane.core.store.read(lambda tx: tx.people.users())
    items = [render_user(user) for user in sorted(users, key=lambda user: user.name)]
    view: views.UserPageView = {"items": items, "next_cursor": None}
    return answer(view)


@routes.add("POST", "/v1/users", Permission.USER_MANAGE, answers=views.UserView, status=201, body=NewUser)
async def create_user(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A new user, without any token yet."""
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, NewUser)
    user = await call.plane.create_user(call.actor, body.name, role(body.cluster_role), key=key)
    return answer(render_user(user), 201)


@routes.add("PATCH", "/v1/users/{name}", Permission.USER_MANAGE, answers=views.UserView, body=UserChange)
async def update_user(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Change what is sent. Deactivating a user takes effect at once, for open streams within seconds."""
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, UserChange)
    changes: dict[str, Any] = {}
    if body.is_active is not None:
        changes["is_active"] = body.is_active
    if "cluster_role" in body.model_fields_set:
        changes["cluster_role"] = role(body.cluster_role)
    if not changes:
        raise SpecError("nothing to change was sent", hint='send for example {"is_active": false}')
    try:
        user = await call.plane.update_user(call.actor, name, changes, key=key)
    finally:
        call.services.authenticator.forget()
    return answer(render_user(user))
