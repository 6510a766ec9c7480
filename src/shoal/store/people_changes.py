"""What a transaction has changed about people and tokens and not put into an event yet.

Whoever changes a table puts the change here, and the next event of the transaction takes all of it along. So
`shoal audit --verify` can make the tables again from the log alone (`identity.replay`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from shoal.model.people import Project, Role, Token, User


class PeopleChanges:
    def __init__(self) -> None:
        self._found: list[dict[str, Any]] = []

    def put_user(self, user: User) -> None:
        self._found.append({"user": msgspec.to_builtins(user)})

    def put_project(self, project: Project) -> None:
        self._found.append({"project": msgspec.to_builtins(project)})

    def put_membership(self, user_id: str, project: str, role: Role | None) -> None:
        """None: the membership is gone."""
        self._found.append({"member": {"user_id": user_id, "project": project, "role": role}})

    def put_token(self, token: Token) -> None:
        self._found.append({"token": msgspec.to_builtins(logged_token(token))})

    def revoke_tokens(self, token_ids: Iterable[str], at: float) -> None:
        self._found.append({"revoked": {"tokens": list(token_ids), "at": at}})

    def move_tokens(self, token_ids: Iterable[str], parent: str | None) -> None:
        self._found.append({"moved": {"tokens": list(token_ids), "parent": parent}})

    def remove_tokens(self, token_ids: Iterable[str]) -> None:
        self._found.append({"removed": {"tokens": list(token_ids)}})

    def take(self) -> list[dict[str, Any]]:
        """All changes since the last call, oldest first."""
        found, self._found = self._found, []
        return found


def logged_token(token: Token) -> Token:
    """The token as events have it: with a hash of the secret's hash, since events are read by many."""
    return msgspec.structs.replace(token, secret_hash=hashlib.sha256(token.secret_hash).digest())
