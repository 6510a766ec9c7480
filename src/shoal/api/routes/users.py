"""Users and their roles on the whole cluster, for admins.

Tokens: every user's own; other users' for admins.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request, Response

from shoal.api.call import Call, call_of, idempotency_key, json_response
from shoal.api.http.bodies import read_model, read_small_model
from shoal.api.queries import NoQuery, RevokeQuery, TokenQuery
from shoal.api.requests import NewToken, NewUser, UserChange, role
from shoal.api.routing import RouteGroup
from shoal.api.views import schema
from shoal.api.views.render import render_token, render_user
from shoal.control.commands import people
from shoal.control.commands import tokens as token_commands
from shoal.control.commands.people import find_user
from shoal.control.commands.tokens import is_made_with
from shoal.errors import Denied, NotFound, NotVisible, SpecError
from shoal.identity import Permission, check_may_make_tokens, check_token_grant, covers_token, is_at_least
from shoal.model.people import Role, Token, User
from shoal.store import Tx

user_routes = RouteGroup("users")


@user_routes.add("GET", "/v1/users", Permission.USER_MANAGE, answers=schema.UserPageView)
async def list_users(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """All users, by name."""
    call = call_of(request)
    users = await call.core.records.store.read(lambda tx: tx.people.users())
    items = [render_user(user) for user in sorted(users, key=lambda user: user.name)]
    view: schema.UserPageView = {"items": items, "next_cursor": None}
    return json_response(view)


@user_routes.add(
    "POST", "/v1/users", Permission.USER_MANAGE, answers=schema.UserView, status=201, body=NewUser
)
async def create_user(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A new user, without a token."""
    call = call_of(request)
    key = idempotency_key(request)
    body = await read_model(request, NewUser)
    user = await people.create_user(
        call.core.records, call.actor, body.name, role(body.cluster_role), key=key
    )
    return json_response(render_user(user), 201)


@user_routes.add(
    "PATCH", "/v1/users/{name}", Permission.USER_MANAGE, answers=schema.UserView, body=UserChange
)
async def update_user(request: Request, name: str, query: Annotated[NoQuery, Query()]) -> Response:
    """Change what is sent. Deactivating a user takes effect at once; open streams end within seconds."""
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
        user = await people.update_user(call.core.serving, call.actor, name, changes, key=key)
    finally:
        call.services.authenticator.forget()
    return json_response(render_user(user))


MAX_MADE_FOR_OTHERS = 1000
NOT_YOURS = "no such token, or one that is not yours"
token_routes = RouteGroup("tokens")


@token_routes.add("GET", "/v1/tokens", Permission.TOKEN_READ, answers=schema.TokenPageView)
async def list_tokens(request: Request, query: Annotated[TokenQuery, Query()]) -> Response:
    """Your tokens, newest first, with those that were made with them, but never their text.

    Tokens outside the reach of the request's token are left out.
    """
    call = call_of(request)
    owner = await _owner(call, query.user)
    call.allow(is_own=owner.user_id == call.caller.id)
    tokens = await call.core.records.store.read(lambda tx: _listed(tx, call, owner))
    items = [render_token(token, user) for token, user in tokens]
    view: schema.TokenPageView = {"items": items, "next_cursor": None}
    return json_response(view)


@token_routes.add(
    "POST", "/v1/tokens", Permission.TOKEN_CREATE, answers=schema.NewTokenView, status=201, body=NewToken
)
async def create_token(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A new token; its text is in this answer and nowhere else."""
    call = call_of(request)
    key = idempotency_key(request)
    check_may_make_tokens(call.caller)  # before the body is read: no body changes this answer
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
            f"a token for service `{body.service}` needs its `project`: names are unique only in a project",
            hint="add `--project PROJECT`",
        )
    wanted = token_commands.TokenRequest(
        label=body.label,
        scope=scope,
        project=project,
        service=body.service,
        lifetime_s=body.lifetime_s,
    )
    token, text = await token_commands.create_token(call.core.serving, call.actor, owner, wanted, key)
    view: schema.NewTokenView = {**render_token(token, owner.name), "text": text}
    return json_response(view, 201)


@token_routes.add("DELETE", "/v1/tokens/{token_id}", Permission.TOKEN_REVOKE, answers=schema.RevokedTokenView)
async def revoke_token(request: Request, token_id: str, query: Annotated[RevokeQuery, Query()]) -> Response:
    """Revoke a token, and all tokens made with it: requests fail at once, open streams end within seconds."""
    call = call_of(request)
    key = idempotency_key(request)
    user = await call.core.records.store.read(lambda tx: _revocable(tx, call, token_id))
    call.allow(is_own=True)
    try:
        revoked, is_confirmed = await token_commands.revoke_token(
            call.core.serving, call.actor, token_id, keep_children=query.keep_children, key=key
        )
    finally:
        call.services.authenticator.forget()
    view: schema.RevokedTokenView = {
        **render_token(revoked.token, user.name),
        "is_confirmed": is_confirmed,
        "revoked_with_it": list(revoked.ended_with_it),
        "kept": list(revoked.moved),
    }
    return json_response(view)


def _revocable(tx: Tx, call: Call, token_id: str) -> User:
    """The owner of the token. `NotFound`, `Denied`: the caller may not revoke it.

    A token may end itself and the tokens made with it, whatever its scope. Beyond that, the token to revoke
    must be within its reach: its user's own or, for admins, any user's.
    """
    token, caller = tx.tokens.get(token_id), call.caller
    user = tx.people.get_user(token.user_id) if token is not None else None
    if token is None or user is None:
        raise NotFound(NOT_YOURS, hint="shoal token list")
    if token_id == caller.token_id or is_made_with(tx, token_id, caller.token_id or ""):
        return user
    is_admin = is_at_least(caller.cluster_role, Role.ADMIN)
    is_elsewhere = caller.only_project is not None and token.project != caller.only_project
    if (token.user_id != caller.id and not is_admin) or is_elsewhere:
        raise NotVisible(NOT_YOURS, hint="shoal token list")
    if not covers_token(caller, token):
        raise Denied(
            f"your token's scope is {caller.scope}; it cannot revoke one with scope {token.scope}",
            hint="sign in with a token of that scope: `shoal login URL`",
        )
    return user


def _listed(tx: Tx, call: Call, owner: User) -> list[tuple[Token, str]]:
    """Tokens newest first, each with the name of its user: the owner's tokens within reach of the caller's
    token, and tokens of other users that were made with these, if the caller may see them.
    """
    caller = call.caller
    own_tokens = [token for token in tx.tokens.of_user(owner.user_id) if covers_token(caller, token)]
    shown = {token.token_id: token for token in own_tokens}
    if is_at_least(caller.cluster_role, Role.ADMIN):
        made = tx.tokens.created_by_tokens_of(owner.user_id, MAX_MADE_FOR_OTHERS)
        shown |= {token.token_id: token for token in made if covers_token(caller, token)}
    names = {user_id: tx.people.get_user(user_id) for user_id in {token.user_id for token in shown.values()}}
    listed = sorted(shown.values(), key=lambda token: token.token_id, reverse=True)
    return [(token, user.name) for token in listed if (user := names[token.user_id]) is not None]


async def _owner(call: Call, name: str | None) -> User:
    """The owner of the requested tokens. Only an admin learns whether another name exists."""
    me = call.person()
    if name is None or name == me.name:
        return me
    if not is_at_least(call.caller.cluster_role, Role.ADMIN):
        raise Denied("only admins see tokens of other users", hint="leave out the user")
    return await call.core.records.store.read(lambda tx: find_user(tx, name))
