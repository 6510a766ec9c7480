"""Tokens: everybody's own; other people's for admins."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api import views
from shoal.api.bodies import read_small_model
from shoal.api.call import Call, answer, call_of, idempotency_key
from shoal.api.queries import NoQuery, RevokeQuery, TokenQuery
from shoal.api.render import render_token
from shoal.api.requests import NewToken, role
from shoal.api.routing import Routes
from shoal.control.people import find_user
from shoal.control.tokens import is_made_with
from shoal.errors import Denied, NotFound, NotVisible, SpecError
from shoal.identity import Permission, check_makes_tokens, check_token_grant, is_at_least, reaches
from shoal.model.people import Role, Token, User
from shoal.store import Tx

MAX_MADE_FOR_OTHERS = 1000
NOT_YOURS = "no such token, or one that is not yours"
routes = Routes("tokens")


@routes.add("GET", "/v1/tokens", Permission.TOKEN_READ, answers=views.TokenPageView)
async def list_tokens(request: Request, query: Annotated[TokenQuery, Query()]) -> Response:
    """Your tokens, newest first, with those that were made with them: never their text.

    What the token of the request does not reach is left out.
    """
    call = call_of(request)
    owner = await _owner(call, query.user)
    call.allow(is_own=owner.user_id == call.caller.id)
    found = await call.plane.core.store.read(lambda tx: _listed(tx, call, owner))
    items = [render_token(token, user) for token, user in found]
    view: views.TokenPageView = {"items": items, "next_cursor": None}
    return answer(view)


@routes.add(
    "POST", "/v1/tokens", Permission.TOKEN_CREATE, answers=views.NewTokenView, status=201, body=NewToken
)
async def create_token(request: Request, query: Annotated[NoQuery, Query()]) -> Response:
    """A new token; its text is in this answer and nowhere else."""
    call = call_of(request)
    key = idempotency_key(request)
    check_makes_tokens(call.caller)  # before the body is read: no body changes this answer
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
        lifetime_s=body.lifetime_s,
        key=key,
    )
    view: views.NewTokenView = {**render_token(token, owner.name), "text": text}
    return answer(view, 201)


@routes.add("DELETE", "/v1/tokens/{token_id}", Permission.TOKEN_REVOKE, answers=views.RevokedTokenView)
async def revoke_token(request: Request, token_id: str, query: Annotated[RevokeQuery, Query()]) -> Response:
    """End a token, and all that was made with it, now: requests at once, open streams within seconds."""
    call = call_of(request)
    key = idempotency_key(request)
    user = await call.plane.core.store.read(lambda tx: _revocable(tx, call, token_id))
    call.allow(is_own=True)
    try:
        revoked, is_confirmed = await call.plane.revoke_token(
            call.actor, token_id, keep_children=query.keep_children, key=key
        )
    finally:
        call.services.authenticator.forget()
    view: views.RevokedTokenView = {
        **render_token(revoked.token, user.name),
        "is_confirmed": is_confirmed,
        "revoked_with_it": list(revoked.with_it),
        "kept": list(revoked.moved),
    }
    return answer(view)


def _revocable(tx: Tx, call: Call, token_id: str) -> User:
    """Whose token it is. `NotFound`, `Denied`: the caller may not revoke it.

    A token ends itself and what was made with it, whatever its scope. Beyond that it has to reach the token,
    which is its user's own or, for admins, anybody's.
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
    if not reaches(caller, token):
        raise Denied(
            f"your token's scope is {caller.scope}; it cannot revoke one with scope {token.scope}",
            hint="sign in with a token of that scope: `shoal login URL`",
        )
    return user


def _listed(tx: Tx, call: Call, owner: User) -> list[tuple[Token, str]]:
    """Newest first, each with the name of its user: the owner's that the caller's token reaches, and those of
    others that were made with these, where the caller may see tokens of others.
    """
    caller = call.caller
    own = [token for token in tx.tokens.of_user(owner.user_id) if reaches(caller, token)]
    shown = {token.token_id: token for token in own}
    if is_at_least(caller.cluster_role, Role.ADMIN):
        made = tx.tokens.made_with_those_of(owner.user_id, MAX_MADE_FOR_OTHERS)
        shown |= {token.token_id: token for token in made if reaches(caller, token)}
    names = {user_id: tx.people.get_user(user_id) for user_id in {one.user_id for one in shown.values()}}
    listed = sorted(shown.values(), key=lambda token: token.token_id, reverse=True)
    return [(token, user.name) for token in listed if (user := names[token.user_id]) is not None]


async def _owner(call: Call, name: str | None) -> User:
    """Whose tokens this is about. Only an admin learns whether another name exists."""
    me = call.person()
    if name is None or name == me.name:
        return me
    if not is_at_least(call.caller.cluster_role, Role.ADMIN):
        raise Denied("tokens of others are for admins", hint="leave out the user")
    return await call.plane.core.store.read(lambda tx: find_user(tx, name))
