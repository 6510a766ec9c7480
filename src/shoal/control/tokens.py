"""Tokens: a tree, in which each is within the reach of the one it was made with, and ends with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

import msgspec

from shoal.control.actor import SHOAL, Actor
from shoal.control.core import Core
from shoal.control.once import fingerprint, once
from shoal.control.record import note
from shoal.control.services.tables import spread
from shoal.errors import Denied, LimitReached, NotFound, StateError
from shoal.identity import is_at_least, mint_token
from shoal.model.people import Role, Token, User
from shoal.store import Tx

MAX_ENDED = 100
"""Of one user: more revoked and expired tokens are not kept, the oldest go first."""
KEEP_ENDED_S = 7 * 86400.0
MAX_SHOWN = 10
"""Token ids in an answer or an event's own words."""


class AskedToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token as somebody wants it. `service`: good for requests to that service of `project` alone."""

    label: str
    scope: Role
    project: str | None = None
    service: str | None = None
    lifetime_s: float | None = None


class Revoked(msgspec.Struct, frozen=True, kw_only=True):
    token: Token
    with_it: tuple[str, ...] = ()
    """Ids of tokens that were made with it and ended by this."""
    moved: tuple[str, ...] = ()
    """Ids of those that count as made with its own parent from now on."""


async def create_token(
    core: Core, actor: Actor, user: User, asked: AskedToken, key: str | None
) -> tuple[Token, str | None]:
    """The token and its text, which nobody can ever read again: None when the key was used before.

    It ends no later than the token it was made with. `LimitReached`: the user or the service has as many
    living ones as may be.
    """
    token_id = core.new_id("tok")
    minted = mint_token(token_id, core.random)
    said = {"user": user.name, **msgspec.structs.asdict(asked)}

    def change(tx: Tx) -> tuple[Token, bool]:
        now = core.clock.now()

        def act() -> Token:
            token = Token(
                token_id=token_id,
                user_id=user.user_id,
                secret_hash=minted.secret_hash,
                label=asked.label,
                scope=asked.scope,
                project=asked.project,
                service=asked.service,
                parent=actor.token_id,
                created_at=now,
                expires_at=now + asked.lifetime_s if asked.lifetime_s is not None else None,
            )
            token = _within(tx, token, now)
            _make_room(core, tx, user, token, now)
            tx.tokens.add(token)
            seen_in = token.project if token.service else None  # who may call a service is its project's
            note(tx, "token.created", now, actor, project=seen_in, data={"token": token_id, **said})
            return token

        return once(tx, actor, key, fingerprint("token.created", said), now, Token, act)

    token, was_repeated = await core.store.write(change)
    await spread(core)
    return token, None if was_repeated else minted.text


def _within(tx: Tx, token: Token, now: float) -> Token:
    """The token, cut to the life of its parent. `Denied` where it would reach further in anything else."""
    if token.parent is None:
        return token
    parent = tx.tokens.get(token.parent)
    if parent is None or not parent.is_living(now):
        raise Denied("the token that this one should be made with is good no more", hint="shoal login URL")
    is_elsewhere = parent.project is not None and token.project != parent.project
    if is_elsewhere or not is_at_least(parent.scope, token.scope):
        raise Denied(
            f"a token made with yours reaches no further than yours: scope {parent.scope}, "
            f"project {parent.project or 'any'}",
            hint=f"ask for less: `shoal token create --scope {parent.scope}`",
        )
    ends = [at for at in (token.expires_at, parent.expires_at) if at is not None]
    return msgspec.structs.replace(token, expires_at=min(ends, default=None))


def _make_room(core: Core, tx: Tx, user: User, token: Token, now: float) -> None:
    """Raise `LimitReached` where there are as many living ones as may be; forget the oldest that ended."""
    limits = core.settings.limits
    own = tx.tokens.of_user(user.user_id)
    living = sum(one.is_living(now) for one in own)
    if living >= limits.max_tokens_per_user:
        raise LimitReached(
            f"{user.name} has {living} tokens that are good; at most {limits.max_tokens_per_user} may be",
            hint="end one that nobody needs: `shoal token list`, then `shoal token revoke TOKEN_ID`; with "
            "`--lifetime 30d` they end by themselves",
        )
    if token.service is not None and token.project is not None:
        callers = sum(one.is_living(now) for one in tx.tokens.of_service(token.project, token.service))
        if callers >= limits.max_tokens_per_service:
            raise LimitReached(
                f"service `{token.service}` of {token.project} has {callers} tokens that are good; at most "
                f"{limits.max_tokens_per_service} may be",
                hint="end one that nobody needs: `shoal token list`, then `shoal token revoke TOKEN_ID`",
            )
    ended = [one.token_id for one in own if not one.is_living(now)]
    tx.tokens.remove(ended[: max(0, len(ended) - MAX_ENDED)])


async def revoke_token(
    core: Core, actor: Actor, token_id: str, key: str | None, *, keep_children: bool = False
) -> tuple[Revoked, bool]:
    """Revoke the token and all that was made with it, at any depth; return whether data planes confirmed it.

    `keep_children`: only the token itself. Its children count as made with its parent from then on, so that
    whoever revokes that one reaches them. May be repeated.
    """

    def change(tx: Tx) -> Revoked:
        now = core.clock.now()
        said = fingerprint("token.revoked", token_id, keep_children)
        return once(
            tx, actor, key, said, now, Revoked, lambda: _revoke(tx, actor, token_id, now, keep_children)
        )[0]

    revoked = await core.store.write(change)
    return revoked, await spread(core)


def _revoke(tx: Tx, actor: Actor, token_id: str, now: float, keep_children: bool) -> Revoked:  # noqa: FBT001
    token = tx.tokens.get(token_id)
    if token is None:
        raise NotFound(f"no token `{token_id}`", hint="shoal token list")
    children = tx.tokens.children(token_id) if keep_children else []
    below = [] if keep_children else [one for one in tx.tokens.descendants(token_id) if one.is_living(now)]
    if keep_children and (actor.token_id == token_id or is_made_with(tx, actor.token_id, token_id)):
        raise StateError(
            "the token that you came with is this one or was made with it: neither decides what outlives it",
            hint=f"leave out `--keep-children`, or sign in with a token not made with {token_id}",
        )
    tx.tokens.revoke([token, *below], now)
    tx.tokens.move(children, token.parent)
    after = tx.tokens.get(token_id)
    assert after is not None
    _tell(tx, actor, after, below, children, now)
    return Revoked(
        token=after,
        with_it=tuple(one.token_id for one in below),
        moved=tuple(one.token_id for one in children),
    )


def _tell(tx: Tx, actor: Actor, token: Token, below: list[Token], moved: list[Token], now: float) -> None:
    """One event of all, and one for each service that lost callers: its project sees that one alone."""
    told: dict[str, object] = {"token": token.token_id}
    if below:
        told["made_with_it"] = len(below)
    if moved:
        told["kept"] = len(moved)
    seen_in = token.project if token.service else None
    note(tx, "token.revoked", now, actor, project=seen_in, data=told)
    callers = Counter((one.project, one.service) for one in below if one.service is not None)
    for (project, service), count in callers.items():
        told = {"service": service, "tokens": count, "because": f"they were made with {token.token_id}"}
        note(tx, "token.revoked", now, actor, project=project, data=told)


def is_made_with(tx: Tx, token_id: str | None, ancestor_id: str) -> bool:
    """Whether the token was made with the other one, at any depth; not of the token itself."""
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
    ended = (one.token_id for one in tx.tokens.all() if _ended_at(one, now) <= now - KEEP_ENDED_S)
    old = list(islice(ended, most))
    tx.tokens.remove(old)
    if old:
        note(tx, "token.removed", now, SHOAL, data={"tokens": len(old)})
    return len(old)


def _ended_at(token: Token, now: float) -> float:
    ends = [at for at in (token.revoked_at, token.expires_at) if at is not None and at <= now]
    return min(ends, default=now)


def has_ended_long_ago(tokens: Iterable[Token], now: float) -> bool:
    """Whether `forget_ended` would find anything."""
    return any(_ended_at(token, now) <= now - KEEP_ENDED_S for token in tokens)
