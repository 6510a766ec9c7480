"""Tokens and their tree: each token knows the token that it was made with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from sqlalchemy import bindparam, delete, insert, select, update

from shoal.model.people import Token
from shoal.store.schema import tokens
from shoal.store.session import Session, decode_token, encode
from shoal.store.tables.people import PeopleChanges, PeopleTable

ADD = insert(tokens)
GET = select(tokens.c.body).where(tokens.c.token_id == bindparam("id"))
ALL = select(tokens.c.body).order_by(tokens.c.token_id)
OF_USER = ALL.where(tokens.c.user_id == bindparam("of"))
OF_SERVICE = ALL.where(tokens.c.service == bindparam("named"))
CHILDREN = ALL.where(tokens.c.parent == bindparam("of"))
_begun = select(tokens.c.token_id, tokens.c.body).where(tokens.c.parent == bindparam("of"))
_tree = _begun.cte("tree", recursive=True)
# A union and not `union all`: a table that was tampered with may hold a cycle.
_tree = _tree.union(
    select(tokens.c.token_id, tokens.c.body).join_from(tokens, _tree, tokens.c.parent == _tree.c.token_id)
)
_maker = tokens.alias("maker")
FOR_OTHERS = (
    select(tokens.c.body)
    .join_from(tokens, _maker, tokens.c.parent == _maker.c.token_id)
    .where(_maker.c.user_id == bindparam("of"), tokens.c.user_id != bindparam("of"))
    .order_by(tokens.c.token_id.desc())
    .limit(bindparam("limit"))
)
DESCENDANTS = select(_tree.c.body).order_by(_tree.c.token_id)
CHANGE = (
    update(tokens)
    .where(tokens.c.token_id == bindparam("id"))
    .values(parent=bindparam("to_parent"), body=bindparam("to_body"))
)
REMOVE = delete(tokens).where(tokens.c.token_id == bindparam("id"))
RAW = select(tokens.c.token_id, tokens.c.user_id, tokens.c.parent, tokens.c.service, tokens.c.body).order_by(
    tokens.c.token_id
)


class TokenTable:
    def __init__(self, session: Session, people: PeopleTable, changes: PeopleChanges) -> None:
        self._session = session
        self._run = session.run
        self._people = people
        self._changes = changes

    def add(self, token: Token) -> None:
        row = {"token_id": token.token_id, "user_id": token.user_id, "body": encode(token)}
        self._run(ADD, row | {"parent": token.parent, "service": service_key(token)})
        self._changes.put_token(token)

    def get(self, token_id: str) -> Token | None:
        body = self._session.value(GET, {"id": token_id})
        return None if body is None else decode_token(body)

    def all(self) -> list[Token]:
        """Oldest first. Includes revoked and expired tokens until they are removed."""
        return [decode_token(body) for (body,) in self._run(ALL)]

    def of_user(self, user_id: str) -> list[Token]:
        """Oldest first, like `all`."""
        return [decode_token(body) for (body,) in self._run(OF_USER, {"of": user_id})]

    def of_service(self, project: str, service: str) -> list[Token]:
        """Tokens that open only this service."""
        return [decode_token(body) for (body,) in self._run(OF_SERVICE, {"named": f"{project}/{service}"})]

    def children(self, token_id: str) -> list[Token]:
        """Tokens made with this one."""
        return [decode_token(body) for (body,) in self._run(CHILDREN, {"of": token_id})]

    def descendants(self, token_id: str) -> list[Token]:
        """Tokens made with this one, with those, and so on."""
        return [decode_token(body) for (body,) in self._run(DESCENDANTS, {"of": token_id})]

    def created_by_tokens_of(self, user_id: str, limit: int) -> list[Token]:
        """Tokens of other users that were made with tokens of this user, the newest first."""
        return [decode_token(body) for (body,) in self._run(FOR_OTHERS, {"of": user_id, "limit": limit})]

    def revoke(self, revoked: Sequence[Token], at: float) -> None:
        """Revoke the tokens. Tokens that are revoked already keep their time."""
        living = [token for token in revoked if token.revoked_at is None]
        if not living:
            return
        self._change([msgspec.structs.replace(token, revoked_at=at) for token in living])
        self._changes.revoke_tokens((token.token_id for token in living), at)

    def reparent(self, moved: Sequence[Token], parent: str | None) -> None:
        """Record `parent`, or None, as the token that these tokens were made with."""
        if not moved:
            return
        self._change([msgspec.structs.replace(token, parent=parent) for token in moved])
        self._changes.move_tokens((token.token_id for token in moved), parent)

    def remove(self, token_ids: Sequence[str]) -> None:
        """Forget the tokens. Only for tokens that are no longer valid."""
        if not token_ids:
            return
        self._session.run_many(REMOVE, [{"id": token_id} for token_id in token_ids])
        self._changes.remove_tokens(token_ids)

    def raw(self) -> Iterator[tuple[str, str, str | None, str | None, str]]:
        """`(token_id, user_id, parent, service, body)` of each row as the table holds it."""
        yield from self._run(RAW)

    def _change(self, changed: Sequence[Token]) -> None:
        rows = [{"id": t.token_id, "to_parent": t.parent, "to_body": encode(t)} for t in changed]
        self._session.run_many(CHANGE, rows)
        self._people.begin_generation()


def service_key(token: Token) -> str | None:
    """The one service that the token opens, as its column stores it."""
    return f"{token.project}/{token.service}" if token.service is not None else None
