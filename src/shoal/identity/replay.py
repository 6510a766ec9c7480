"""Rebuild users, projects, memberships, tokens and the policy from the event log, and compare the tables.

A change to a table in the database that bypasses Shoal leaves no event, so the table and the log differ.
Memory grows with the size of the tables, not with the length of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from shoal.model.people import Project, Role, Token, User

CHANGES = "changes"
"""The field of an event that lists the changed rows, oldest change first."""
POLICY_SET = "policy.set"
KINDS = ("user.", "project.", "member.", "token.", "cluster.created")
"""Only events of these kinds describe table rows. The content of other events comes from their senders."""
Record = TypeVar("Record", User, Project, Token)


class Difference(NamedTuple):
    """One field of one row that differs from the log."""

    table: str
    row: str
    field: str
    """Empty if the whole row is only in the table or only in the log."""
    in_table: str
    in_log: str
    seq: int
    """The last event about the row. 0: there is none."""

    def __str__(self) -> str:
        of = f"{self.table} `{self.row}`"
        last = f"event {self.seq}" if self.seq else "no event"
        if not self.field:
            return f"{of} is {self.in_table} in the table and {self.in_log} in the log ({last})"
        return f"{of}: {self.field} is `{self.in_table}` in the table, `{self.in_log}` in the log ({last})"


class LoggedRow(NamedTuple):
    """One row according to the log."""

    value: Any
    seq: int


class IdentityReplay:
    """Apply every event in order, then compare."""

    def __init__(self) -> None:
        self.users: dict[str, LoggedRow] = {}
        self.projects: dict[str, LoggedRow] = {}
        self.members: dict[tuple[str, str], LoggedRow] = {}
        self.tokens: dict[str, LoggedRow] = {}
        self.policy: LoggedRow | None = None
        self._ended: dict[tuple[str, str], int] = {}
        """Rows that an event has removed, with the number of that event."""

    def apply_event(self, seq: int, kind: str, data: str) -> None:
        """Apply one event. `data` is JSON. `msgspec.MsgspecError`: Shoal did not write it."""
        if kind == POLICY_SET:
            self.policy = LoggedRow(msgspec.json.decode(data), seq)
        elif kind.startswith(KINDS):
            for change in msgspec.json.decode(data).get(CHANGES, ()):
                for name, row in change.items():
                    self._apply(seq, name, row)

    def _apply(self, seq: int, name: str, row: dict[str, Any]) -> None:
        match name:
            case "user":
                self.users[row["user_id"]] = LoggedRow(msgspec.convert(row, User), seq)
            case "project":
                self.projects[row["name"]] = LoggedRow(msgspec.convert(row, Project), seq)
            case "token":
                self.tokens[row["token_id"]] = LoggedRow(msgspec.convert(row, Token), seq)
            case "member" if row["role"] is None:
                self.members.pop((row["user_id"], row["project"]), None)
                self._ended["memberships", f"{row['user_id']} in {row['project']}"] = seq
            case "member":
                self.members[row["user_id"], row["project"]] = LoggedRow(Role(row["role"]), seq)
            case "revoked":
                self._change_tokens(seq, row["tokens"], revoked_at=row["at"])
            case "moved":
                self._change_tokens(seq, row["tokens"], parent=row["parent"])
            case "removed":
                for token_id in row["tokens"]:
                    self.tokens.pop(token_id, None)

    def _change_tokens(self, seq: int, token_ids: Iterable[str], **fields: Any) -> None:
        for token_id in token_ids:
            held = self.tokens.get(token_id)
            if held is not None:
                self.tokens[token_id] = LoggedRow(msgspec.structs.replace(held.value, **fields), seq)

    def compare_users(self, rows: Iterable[tuple[str, str, User | None]]) -> Iterator[Difference]:
        """Compare rows `(user_id, name, body)`. The body is None if it is unreadable."""
        missing = dict(self.users)
        for user_id, name, user in rows:
            held = missing.pop(user_id, None)
            yield from _compare("users", user_id, user, held, {"name": name})
        yield from _missing_rows("users", missing)

    def compare_projects(self, rows: Iterable[tuple[str, int, Project | None]]) -> Iterator[Difference]:
        """Compare rows `(name, uid, body)`."""
        missing = dict(self.projects)
        for name, uid, project in rows:
            yield from _compare("projects", name, project, missing.pop(name, None), {"uid": uid})
        yield from _missing_rows("projects", missing)

    def compare_members(self, rows: Iterable[tuple[str, str, str]]) -> Iterator[Difference]:
        """Compare rows `(user_id, project, role)`."""
        missing = dict(self.members)
        for user_id, project, role in rows:
            held = missing.pop((user_id, project), None)
            name = f"{user_id} in {project}"
            if held is None:
                seq = self._ended.get(("memberships", name), 0)
                yield Difference("memberships", name, "", f"there, as {role},", "not there", seq)
            elif held.value != role:
                yield Difference("memberships", name, "role", role, held.value, held.seq)
        yield from _missing_rows(
            "memberships", {f"{user} in {of}": held for (user, of), held in missing.items()}
        )

    def compare_tokens(
        self, rows: Iterable[tuple[str, dict[str, str | None], Token | None]]
    ) -> Iterator[Difference]:
        """Compare rows `(token_id, columns, body)`, with the body as in events (`logged_token`)."""
        missing = dict(self.tokens)
        for token_id, columns, token in rows:
            yield from _compare("tokens", token_id, token, missing.pop(token_id, None), columns)
        yield from _missing_rows("tokens", missing)

    def compare_policy(self, policy: Any) -> Iterator[Difference]:
        """Compare the policy in the database. None: the database has none."""
        logged, seq = self.policy or LoggedRow(None, 0)
        if logged == policy:
            return
        if not isinstance(logged, dict) or not isinstance(policy, dict):
            yield Difference("meta", "policy", "", _presence(policy), _presence(logged), seq)
            return
        for name in sorted(logged.keys() | policy.keys()):
            if logged.get(name) != policy.get(name):
                yield Difference(
                    "meta", "policy", name, _text(policy.get(name)), _text(logged.get(name)), seq
                )


def _compare(
    table: str, row: str, body: Record | None, held: LoggedRow | None, columns: dict[str, Any]
) -> Iterator[Difference]:
    """Compare the columns of the table that repeat fields of the body, because queries use the columns."""
    if held is None:
        yield Difference(table, row, "", "there", "not there", 0)
        return
    if body is None:
        yield Difference(table, row, "", "not readable", "there", held.seq)
        return
    in_log = msgspec.structs.asdict(held.value)
    for name, value in msgspec.structs.asdict(body).items():
        if value != in_log[name]:
            yield Difference(table, row, name, _text(value), _text(in_log[name]), held.seq)
    for name, value in columns.items():
        if value != in_log.get(name, value):
            yield Difference(table, row, f"column {name}", _text(value), _text(in_log[name]), held.seq)


def _missing_rows(table: str, missing: dict[str, LoggedRow]) -> Iterator[Difference]:
    for name, held in missing.items():
        yield Difference(table, name, "", "not there", "there", held.seq)


def _presence(value: object) -> str:
    return "there" if value is not None else "not there"


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(msgspec.to_builtins(value))
