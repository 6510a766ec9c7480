"""Actors: who or what asks for a change, and the rights with which its request was admitted.

Events and the audit record the actor.

While a request is on its way, an operator may revoke its token or deactivate or expel its user, because a
body can take minutes to arrive. So every command checks the rights again in its own transaction
(`run_idempotent`), and an upload checks them again before it keeps a file.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shoal.errors import StateError, Unauthenticated
from shoal.identity import Caller, Permission, authorize, user_caller
from shoal.model.people import Token, User
from shoal.store import Tx


class PermissionCheck(NamedTuple):
    """A permission that the caller had when the request was admitted."""

    permission: Permission
    project: str | None = None
    is_own: bool = False
    job_id: str | None = None


class RequestRights(msgspec.Struct, frozen=True, kw_only=True):
    """A person's rights as of the transaction in which `generation` was read."""

    caller: Caller
    generation: int
    checks: tuple[PermissionCheck, ...] = ()

    def check(self, tx: Tx, now: float) -> None:
        """Raise unless the request would still be admitted.

        `Unauthenticated`: its token is no longer valid. `Denied`, `NotFound`: the reply that the request
        would get now. `StateError`: the caller may still do it, but by other rights than before.
        """
        expires_at = self.caller.expires_at
        if expires_at is not None and expires_at <= now:
            raise _token_ended()
        if tx.people.generation() == self.generation:
            return
        token = tx.tokens.get(self.caller.token_id) if self.caller.token_id is not None else None
        current = load_caller(tx, token)
        if current is None:
            raise _token_ended()
        if current[1] == self.caller:
            return
        for check in self.checks:
            authorize(
                current[1],
                check.permission,
                check.project,
                is_own=check.is_own,
                job_id=check.job_id,
            )
        raise StateError(
            "your roles changed while this request was on its way; nothing was done",
            hint="send it again: it is judged by your roles of now",
        )


def load_caller(tx: Tx, token: Token | None) -> tuple[User, Caller] | None:
    """Return the user of the token and its caller, or None if the token opens nothing of the API: it is
    revoked, it is for one service only, or its user is missing or deactivated. The function that calls this
    checks the token's expiry.
    """
    if token is None or token.service is not None or token.revoked_at is not None:
        return None
    user = tx.people.get_user(token.user_id)
    if user is None or not user.is_active:
        return None
    return user, user_caller(user, token, tx.people.memberships(user_id=user.user_id))


def _token_ended() -> Unauthenticated:
    return Unauthenticated(
        "the token of this request was revoked, or ended, while the request was on its way; nothing was done",
        hint="sign in with another: `shoal login URL`",
    )


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """What asks for a change. `kind` is `user`, `job`, `supervisor` or `shoal`."""

    kind: str
    id: str
    name: str
    request_id: str | None = None
    rights: RequestRights | None = None
    """A person's rights, checked again before anything changes. None: the actor proved its right in another
    way.
    """

    @property
    def token_id(self) -> str | None:
        """The token that the request carried."""
        return self.rights.caller.token_id if self.rights is not None else None

    def __str__(self) -> str:
        return self.kind if self.kind == "shoal" else f"{self.kind}:{self.name}"


SHOAL = Actor(kind="shoal", id="shoal", name="shoal")
"""The actor of the control loops themselves."""
