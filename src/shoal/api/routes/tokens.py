"""Tokens: everybody's own; other people's for admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.bodies import read_small_model
from shoal.api.call import Call, answer, call_of, idempotency_key
from shoal.api.queries import NoQuery, TokenQuery
from shoal.api.render import render_token
from shoal.api.requests import NewToken, role
from shoal.api.routing import Routes
from shoal.control.people import find_user
from shoal.errors import Denied, NotFound, SpecError
from shoal.identity import Permission, check_token_grant, is_at_least
from shoal.model.people import Role, User

routes = Routes("tokens")


@routes.add("GET", "/v1/tokens", Permission.TOKEN_READ, answers=views.TokenPageView)
async def list_tokens(request: Request, query: Annotated[TokenQuery, Query()]) -> Response:
    """Your tokens, newest first: never their text."""
    call = call_of(request)
    owner = await _owner(call, query.user)
    call.allow(is_own=owner.user_id == call.caller.id)
    tokens = await call.plane.core.store.read(lambda tx: tx.people.tokens(user_id=owner.user_id))
    items = [render_token(token) for token in sorted(tokens, key=lambda token: token.token_id, reverse=True)]
    view: views.TokenPageView = {"items": items, "next_cursor": None}
    return answer(view)


@routes.add(
    "POST", "/v1/tokens", Permission.TOKEN_CREATE, answers=views.NewTokenView, status=201, body=NewToken
)
async def create_token(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A new token; its text is in this answer and nowhere else."""
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_small_model(request, NewToken)
    owner = await _owner(call, body.user)
    call.allow(is_own=owner.user_id == call.caller.id)
    scope = role(body.scope) or call.caller.scope
    project = body.project or call.caller.only_project
    assert scope is not None
    check_token_grant(call.caller, scope, project)
    if project is not None and owner.user_id == call.caller.id and call.caller.role_in(project) is None:
        raise NotFound("no such thing, or one you may not see")
    if project is not None:
        await call.project(project)
    if body.service is not None and project is None:
        raise SpecError(
            f"a token for service `{body.service}` needs its `project`: names are unique in one alone",
            hint="add `--project PROJECT`",
        )
    token, text = await call.plane.create_token(
        call.actor,
        owner,
        label=body.label,
        scope=scope,
        project=project,
        service=body.service,
        lifetime_s=_lifetime(call, body.lifetime_s),
        key=key,
    )
    view: views.NewTokenView = {**render_token(token), "text": text}
    return answer(view, 201)


@routes.add("DELETE", "/v1/tokens/{token_id}", Permission.TOKEN_REVOKE, answers=views.RevokedTokenView)
async def revoke_token(request: Request, token_id: str, query: Annotated[NoQuery, Query()]) -> Response:
    """End a token now: requests at once, open streams within seconds. May be repeated."""
    call = call_of(request)
    key = idempotency_key(request)
    token = await call.plane.core.store.read(lambda tx: tx.people.get_token(token_id))
    is_own = token is not None and token.user_id == call.caller.id
    if not is_own and not is_at_least(call.caller.cluster_role, Role.ADMIN):
        raise NotFound("no such token, or one that is not yours", hint="shoal token list")
    call.allow(is_own=is_own)
    try:
        revoked, is_confirmed = await call.plane.revoke_token(call.actor, token_id, key=key)
    finally:
        call.services.authenticator.forget()
    view: views.RevokedTokenView = {**render_token(revoked), "is_confirmed": is_confirmed}
    return answer(view)


async def _owner(call: Call, name: str | None) -> User:
    """Whose tokens this is about. Only an admin learns whether another name exists."""
    me = call.person()
    if name is None or name == me.name:
        return me
    if not is_at_least(call.caller.cluster_role, Role.ADMIN):
        raise Denied("tokens of others are for admins", hint="leave out the user")
    return await call.plane.core.store.read(lambda tx: find_user(tx, name))


def _lifetime(call: Call, asked: float | None) -> float | None:
    """A token made with one that expires does not outlive it."""
    expires_at = call.caller.expires_at
    if expires_at is None:
        return asked
    left = max(expires_at - call.plane.core.clock.now(), 0.0)
    return left if asked is None else min(asked, left)
