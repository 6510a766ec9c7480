"""What a request was let in with, asked again in the transaction that does what it wants.

Between the head of a request and its commit its token may be revoked, or its user deactivated or expelled,
because a body can take minutes to arrive. So every command looks again in its own transaction (`once`), and
an upload looks again before it keeps a file.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from shoal.errors import StateError, Unauthenticated
from shoal.identity import Caller, Permission, authorize, user_caller
from shoal.model.people import Token, User
from shoal.store import Tx


class Question(NamedTuple):
    """One that was answered with yes before."""

    permission: Permission
    project: str | None = None
    is_own: bool = False
    job_id: str | None = None


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """A person's, as of the transaction that `generation` was read in."""

    caller: Caller
    generation: int
    questions: tuple[Question, ...] = ()

    def check(self, tx: Tx, now: float) -> None:
        """Raise unless the request would still be let in.

        `Unauthenticated`: its token is good no more. `Denied`, `NotFound`: as it would be answered now.
        `StateError`: the caller may still do it, but not by the same rights.
        """
        expires_at = self.caller.expires_at
        if expires_at is not None and expires_at <= now:
            raise _ended()
        if tx.people.generation() == self.generation:
            return
        token = tx.tokens.get(self.caller.token_id) if self.caller.token_id is not None else None
        found = load_caller(tx, token)
        if found is None:
            raise _ended()
        if found[1] == self.caller:
            return
        for question in self.questions:
            authorize(
                found[1],
                question.permission,
                question.project,
                is_own=question.is_own,
                job_id=question.job_id,
            )
        raise StateError(
            "your roles changed while this request was on its way; nothing was done",
            hint="send it again: it is judged by your roles of now",
        )


def load_caller(tx: Tx, token: Token | None) -> tuple[User, Caller] | None:
    """Who comes with the token; None where it opens nothing of the API: revoked, of one service, of a user
    who is gone or closed. Its expiry is the asker's to look at.
    """
    if token is None or token.service is not None or token.revoked_at is not None:
        return None
    user = tx.people.get_user(token.user_id)
    if user is None or not user.is_active:
        return None
    return user, user_caller(user, token, tx.people.memberships(user_id=user.user_id))


def _ended() -> Unauthenticated:
    return Unauthenticated(
        "the token of this request was revoked, or ended, while the request was on its way; nothing was done",
        hint="sign in with another: `shoal login URL`",
    )
