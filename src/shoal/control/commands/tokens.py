"""Tokens form a tree: each stays within the reach of the token it was made with, and ends with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

import msgspec

from shoal.control.actor import SHOAL, Actor
from shoal.control.capabilities import Serving
from shoal.control.record import fingerprint, record_event, run_idempotent
from shoal.control.services.serving_table import publish_and_wait
from shoal.errors import Denied, LimitReached, NotFound, StateError
from shoal.identity import is_at_least, mint_token
from shoal.model.people import Role, Token, User
from shoal.settings import Settings
from shoal.store import Tx

MAX_ENDED = 100
"""Revoked and expired tokens of one user that are kept. Of more, the oldest are removed."""
KEEP_ENDED_S = 7 * 86400.0
MAX_SHOWN = 10
"""Token ids that a reply or an event names."""


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A token as the caller wants it. `service`: valid only for requests to that service of `project`."""

    label: str
    scope: Role
    project: str | None = None
    service: str | None = None
    lifetime_s: float | None = None


class TokenRevocation(msgspec.Struct, frozen=True, kw_only=True):
    token: Token
    ended_with_it: tuple[str, ...] = ()
    """Ids of tokens that were made with it and that this revocation ended."""
    moved: tuple[str, ...] = ()
    """Ids of tokens that count as made with its parent from now on."""


async def create_token(
    serving: Serving, actor: Actor, user: User, request: TokenRequest, key: str | None
) -> tuple[Token, str | None]:
    """Return the token and its text, which is never shown again. The text is None if the key was used
    before.

    The token ends no later than the token it was made with. `LimitReached`: the user or the service has as
    many living tokens as allowed.
    """
    token_id = serving.records.new_id("tok")
    minted = mint_token(token_id, serving.sealing.random)
    facts = {"user": user.name, **msgspec.structs.asdict(request)}

    def change(tx: Tx) -> tuple[Token, bool]:
        now = serving.records.clock.now()

        def act() -> Token:
            token = Token(
                token_id=token_id,
                user_id=user.user_id,
                secret_hash=minted.secret_hash,
                label=request.label,
                scope=request.scope,
                project=request.project,
                service=request.service,
                parent=actor.token_id,
                created_at=now,
                expires_at=now + request.lifetime_s if request.lifetime_s is not None else None,
            )
            token = _bounded_by_parent(tx, token, now)
            _make_room(serving.settings, tx, user, token, now)
            tx.tokens.add(token)
            # The callers of a service are its project's concern.
            seen_in = token.project if token.service else None
            record_event(tx, "token.created", now, actor, project=seen_in, data={"token": token_id, **facts})
            return token

        return run_idempotent(tx, actor, key, fingerprint("token.created", facts), now, Token, act)

    token, was_repeated = await serving.records.store.write(change)
    await publish_and_wait(serving)
    return token, None if was_repeated else minted.text


def _bounded_by_parent(tx: Tx, token: Token, now: float) -> Token:
    """Return the token, cut to the life of its parent. `Denied`: it would reach further than its parent in
    anything else.
    """
    if token.parent is None:
        return token
    parent = tx.tokens.get(token.parent)
    if parent is None or not parent.is_living(now):
        raise Denied("the token that this one should be made with is no longer valid", hint="shoal login URL")
    is_elsewhere = parent.project is not None and token.project != parent.project
    if is_elsewhere or not is_at_least(parent.scope, token.scope):
        raise Denied(
            f"a token made with yours reaches no further than yours: scope {parent.scope}, "
            f"project {parent.project or 'any'}",
            hint=f"ask for less: `shoal token create --scope {parent.scope}`",
        )
    ends = [at for at in (token.expires_at, parent.expires_at) if at is not None]
    return msgspec.structs.replace(token, expires_at=min(ends, default=None))


def _make_room(settings: Settings, tx: Tx, user: User, token: Token, now: float) -> None:
    """Raise `LimitReached` if there are as many living tokens as allowed. Remove the oldest ended ones."""
    limits = settings.limits
    tokens = tx.tokens.of_user(user.user_id)
    living = sum(held.is_living(now) for held in tokens)
    if living >= limits.max_tokens_per_user:
        raise LimitReached(
            f"{user.name} has {living} valid tokens; at most {limits.max_tokens_per_user} may be",
            hint="revoke one that is not needed: `shoal token list`, then `shoal token revoke TOKEN_ID`; "
            "with `--lifetime 30d` they end by themselves",
        )
    if token.service is not None and token.project is not None:
        callers = sum(held.is_living(now) for held in tx.tokens.of_service(token.project, token.service))
        if callers >= limits.max_tokens_per_service:
            raise LimitReached(
                f"service `{token.service}` of {token.project} has {callers} valid tokens; at most "
                f"{limits.max_tokens_per_service} may be",
                hint="revoke one that is not needed: `shoal token list`, then `shoal token revoke TOKEN_ID`",
            )
    ended = [held.token_id for held in tokens if not held.is_living(now)]
    tx.tokens.remove(ended[: max(0, len(ended) - MAX_ENDED)])


async def revoke_token(
    serving: Serving, actor: Actor, token_id: str, key: str | None, *, keep_children: bool = False
) -> tuple[TokenRevocation, bool]:
    """Revoke the token and all tokens made with it, at any depth. Return also whether data planes confirmed
    it.

    `keep_children`: only the token itself. Its children count as made with its parent from then on, so that a
    revocation of the parent reaches them. May be repeated.
    """

    def change(tx: Tx) -> TokenRevocation:
        now = serving.records.clock.now()
        digest = fingerprint("token.revoked", token_id, keep_children)
        return run_idempotent(
            tx,
            actor,
            key,
            digest,
            now,
            TokenRevocation,
            lambda: _revoke(tx, actor, token_id, now, keep_children),
        )[0]

    revoked = await serving.records.store.write(change)
    return revoked, await publish_and_wait(serving)


def _revoke(tx: Tx, actor: Actor, token_id: str, now: float, keep_children: bool) -> TokenRevocation:  # noqa: FBT001
    token = tx.tokens.get(token_id)
    if token is None:
        raise NotFound(f"no token `{token_id}`", hint="shoal token list")
    children = tx.tokens.children(token_id) if keep_children else []
    below = (
        [] if keep_children else [child for child in tx.tokens.descendants(token_id) if child.is_living(now)]
    )
    if keep_children and (actor.token_id == token_id or is_made_with(tx, actor.token_id, token_id)):
        raise StateError(
            "the token that you came with is this one or was made with it: neither decides what outlives it",
            hint=f"leave out `--keep-children`, or sign in with a token not made with {token_id}",
        )
    tx.tokens.revoke([token, *below], now)
    tx.tokens.reparent(children, token.parent)
    after = tx.tokens.get(token_id)
    assert after is not None
    _record_revocation(tx, actor, after, below, children, now)
    return TokenRevocation(
        token=after,
        ended_with_it=tuple(child.token_id for child in below),
        moved=tuple(child.token_id for child in children),
    )


def _record_revocation(
    tx: Tx, actor: Actor, token: Token, below: list[Token], moved: list[Token], now: float
) -> None:
    """Record one event for all, and one for each service that lost callers, because its project sees only
    that one.
    """
    facts: dict[str, object] = {"token": token.token_id}
    if below:
        facts["made_with_it"] = len(below)
    if moved:
        facts["kept"] = len(moved)
    seen_in = token.project if token.service else None
    record_event(tx, "token.revoked", now, actor, project=seen_in, data=facts)
    callers = Counter((child.project, child.service) for child in below if child.service is not None)
    for (project, service), count in callers.items():
        facts = {"service": service, "tokens": count, "because": f"they were made with {token.token_id}"}
        record_event(tx, "token.revoked", now, actor, project=project, data=facts)


def is_made_with(tx: Tx, token_id: str | None, ancestor_id: str) -> bool:
    """Whether the token was made with the other one, at any depth. False for the token itself."""
    seen: set[str] = set()
    token = tx.tokens.get(token_id) if token_id is not None else None
    while token is not None and token.parent is not None and token.parent not in seen:
        if token.parent == ancestor_id:
            return True
        seen.add(token.parent)
        token = tx.tokens.get(token.parent)
    return False


def forget_ended(tx: Tx, now: float, most: int) -> int:
    """Remove at most `most` tokens that ended long ago, and return how many."""
    ended = (token.token_id for token in tx.tokens.all() if _ended_at(token, now) <= now - KEEP_ENDED_S)
    old = list(islice(ended, most))
    tx.tokens.remove(old)
    if old:
        record_event(tx, "token.removed", now, SHOAL, data={"tokens": len(old)})
    return len(old)


def _ended_at(token: Token, now: float) -> float:
    ends = [at for at in (token.revoked_at, token.expires_at) if at is not None and at <= now]
    return min(ends, default=now)


def has_ended_long_ago(tokens: Iterable[Token], now: float) -> bool:
    """Whether `forget_ended` would find anything."""
    return any(_ended_at(token, now) <= now - KEEP_ENDED_S for token in tokens)
