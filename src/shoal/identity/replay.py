"""Users, projects, memberships, tokens and the policy, made again from the event log alone.

Whoever changes a table in the database behind Shoal's back leaves no event, so the table and the log differ.
Memory grows with what there is in the tables, and not with the length of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from shoal.model.people import Project, Role, Token, User

CHANGES = "changes"
"""The field of an event with the rows that it changed, oldest change first."""
POLICY_SET = "policy.set"
KINDS = ("user.", "project.", "member.", "token.", "cluster.created")
"""Only events of these kinds say what tables hold: what others carry was written by their senders."""
Record = TypeVar("Record", User, Project, Token)


class Difference(NamedTuple):
    """One field of one row that is not what the log says."""

    table: str
    row: str
    field: str
    """Empty where the whole row is there in one of them alone."""
    in_table: str
    in_log: str
    seq: int
    """The last event about the row; 0 where there is none."""

    def __str__(self) -> str:
        of = f"{self.table} `{self.row}`"
        last = f"event {self.seq}" if self.seq else "no event"
        if not self.field:
            return f"{of} is {self.in_table} in the table and {self.in_log} in the log ({last})"
        return f"{of}: {self.field} is `{self.in_table}` in the table, `{self.in_log}` in the log ({last})"


class Held(NamedTuple):
    """What the log says of one row."""

    value: Any
    seq: int


class Replay:
    """Feed it every event in order, then compare."""

    def __init__(self) -> None:
        self.users: dict[str, Held] = {}
        self.projects: dict[str, Held] = {}
        self.members: dict[tuple[str, str], Held] = {}
        self.tokens: dict[str, Held] = {}
        self.policy: Held | None = None
        self._ended: dict[tuple[str, str], int] = {}
        """Rows that the log has taken away, by the event that did."""

    def see(self, seq: int, kind: str, data: str) -> None:
        """One event; `data` as JSON. `msgspec.MsgspecError`: it is not what Shoal writes."""
        if kind == POLICY_SET:
            self.policy = Held(msgspec.json.decode(data), seq)
        elif kind.startswith(KINDS):
            for change in msgspec.json.decode(data).get(CHANGES, ()):
                for name, row in change.items():
                    self._apply(seq, name, row)

    def _apply(self, seq: int, name: str, row: dict[str, Any]) -> None:
        match name:
            case "user":
                self.users[row["user_id"]] = Held(msgspec.convert(row, User), seq)
            case "project":
                self.projects[row["name"]] = Held(msgspec.convert(row, Project), seq)
            case "token":
                self.tokens[row["token_id"]] = Held(msgspec.convert(row, Token), seq)
            case "member" if row["role"] is None:
                self.members.pop((row["user_id"], row["project"]), None)
                self._ended["memberships", f"{row['user_id']} in {row['project']}"] = seq
            case "member":
                self.members[row["user_id"], row["project"]] = Held(Role(row["role"]), seq)
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
                self.tokens[token_id] = Held(msgspec.structs.replace(held.value, **fields), seq)

    def compare_users(self, rows: Iterable[tuple[str, str, User | None]]) -> Iterator[Difference]:
        """Rows as `(user_id, name, body)`; the body is None where it cannot be read."""
        missing = dict(self.users)
        for user_id, name, user in rows:
            held = missing.pop(user_id, None)
            yield from _compare("users", user_id, user, held, {"name": name})
        yield from _gone("users", missing)

    def compare_projects(self, rows: Iterable[tuple[str, int, Project | None]]) -> Iterator[Difference]:
        """Rows as `(name, uid, body)`."""
        missing = dict(self.projects)
        for name, uid, project in rows:
            yield from _compare("projects", name, project, missing.pop(name, None), {"uid": uid})
        yield from _gone("projects", missing)

    def compare_members(self, rows: Iterable[tuple[str, str, str]]) -> Iterator[Difference]:
        """Rows as `(user_id, project, role)`."""
        missing = dict(self.members)
        for user_id, project, role in rows:
            held = missing.pop((user_id, project), None)
            name = f"{user_id} in {project}"
            if held is None:
                seq = self._ended.get(("memberships", name), 0)
                yield Difference("memberships", name, "", f"there, as {role},", "not there", seq)
            elif held.value != role:
                yield Difference("memberships", name, "role", role, held.value, held.seq)
        yield from _gone("memberships", {f"{user} in {of}": held for (user, of), held in missing.items()})

    def compare_tokens(
        self, rows: Iterable[tuple[str, dict[str, str | None], Token | None]]
    ) -> Iterator[Difference]:
        """Rows as `(token_id, columns, body)`, the body as events have it (`logged_token`)."""
        missing = dict(self.tokens)
        for token_id, columns, token in rows:
            yield from _compare("tokens", token_id, token, missing.pop(token_id, None), columns)
        yield from _gone("tokens", missing)

    def compare_policy(self, policy: Any) -> Iterator[Difference]:
        """What the database says is the policy; None where it says nothing."""
        told, seq = self.policy or Held(None, 0)
        if told == policy:
            return
        if not isinstance(told, dict) or not isinstance(policy, dict):
            yield Difference("meta", "policy", "", _known(policy), _known(told), seq)
            return
        for name in sorted(told.keys() | policy.keys()):
            if told.get(name) != policy.get(name):
                yield Difference("meta", "policy", name, _text(policy.get(name)), _text(told.get(name)), seq)


def _compare(
    table: str, row: str, found: Record | None, held: Held | None, columns: dict[str, Any]
) -> Iterator[Difference]:
    """`columns` of the table repeat fields of the body, and searches go by them."""
    if held is None:
        yield Difference(table, row, "", "there", "not there", 0)
        return
    if found is None:
        yield Difference(table, row, "", "not readable", "there", held.seq)
        return
    in_log = msgspec.structs.asdict(held.value)
    for name, value in msgspec.structs.asdict(found).items():
        if value != in_log[name]:
            yield Difference(table, row, name, _text(value), _text(in_log[name]), held.seq)
    for name, value in columns.items():
        if value != in_log.get(name, value):
            yield Difference(table, row, f"column {name}", _text(value), _text(in_log[name]), held.seq)


def _gone(table: str, missing: dict[str, Held]) -> Iterator[Difference]:
    for name, held in missing.items():
        yield Difference(table, name, "", "not there", "there", held.seq)


def _known(value: object) -> str:
    return "there" if value is not None else "not there"


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(msgspec.to_builtins(value))
