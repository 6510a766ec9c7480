"""Users, projects and memberships. `identity` decides what they may do.

Every change is also put into `PeopleChanges`. The next event of the transaction carries all of these changes,
so `shoal audit --verify` can rebuild the tables from the log alone (`identity.replay`) and compare them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from sqlalchemy import bindparam, delete, insert, select, update

from shoal.errors import NotFound, StateError
from shoal.local_sockets import FIRST_PROJECT_UID
from shoal.model.people import Membership, Project, Role, Token, User
from shoal.store.schema import memberships, projects, users
from shoal.store.session import Session, decode_project, decode_user, encode
from shoal.store.tables.bookkeeping import MetaTable


class PeopleChanges:
    def __init__(self) -> None:
        self._pending: list[dict[str, Any]] = []

    def put_user(self, user: User) -> None:
        self._pending.append({"user": msgspec.to_builtins(user)})

    def put_project(self, project: Project) -> None:
        self._pending.append({"project": msgspec.to_builtins(project)})

    def put_membership(self, user_id: str, project: str, role: Role | None) -> None:
        """Note the change. A role of None removes the membership."""
        self._pending.append({"member": {"user_id": user_id, "project": project, "role": role}})

    def put_token(self, token: Token) -> None:
        self._pending.append({"token": msgspec.to_builtins(logged_token(token))})

    def revoke_tokens(self, token_ids: Iterable[str], at: float) -> None:
        self._pending.append({"revoked": {"tokens": list(token_ids), "at": at}})

    def move_tokens(self, token_ids: Iterable[str], parent: str | None) -> None:
        self._pending.append({"moved": {"tokens": list(token_ids), "parent": parent}})

    def remove_tokens(self, token_ids: Iterable[str]) -> None:
        self._pending.append({"removed": {"tokens": list(token_ids)}})

    def take(self) -> list[dict[str, Any]]:
        """All changes since the last call, oldest first."""
        changes, self._pending = self._pending, []
        return changes


def logged_token(token: Token) -> Token:
    """The token as events carry it: with a hash of the secret's hash, because many people read events."""
    return msgspec.structs.replace(token, secret_hash=hashlib.sha256(token.secret_hash).digest())


NEXT_UID = "next_uid"
ADD_USER = insert(users)
USER = select(users.c.body).where(users.c.user_id == bindparam("id"))
USER_BY_NAME = select(users.c.body).where(users.c.name == bindparam("named"))
USERS = select(users.c.body).order_by(users.c.name)
SET_USER = (
    update(users)
    .where(users.c.user_id == bindparam("id"))
    .values(name=bindparam("to_name"), body=bindparam("to_body"))
)
ADD_PROJECT = insert(projects)
PROJECT = select(projects.c.body).where(projects.c.name == bindparam("named"))
PROJECTS = select(projects.c.body).order_by(projects.c.name)
SET_PROJECT = (
    update(projects)
    .where(projects.c.name == bindparam("named"), projects.c.uid == bindparam("its_uid"))
    .values(body=bindparam("to_body"))
)
SET_UID = (
    update(projects)
    .where(projects.c.name == bindparam("named"))
    .values(uid=bindparam("to_uid"), body=bindparam("to_body"))
)
ADD_MEMBERSHIP = insert(memberships)
MEMBERSHIPS = (
    select(memberships.c.user_id, users.c.name, memberships.c.project, memberships.c.role)
    .join_from(memberships, users, users.c.user_id == memberships.c.user_id)
    .order_by(memberships.c.project, users.c.name)
)
DROP_MEMBERSHIP = delete(memberships).where(
    memberships.c.user_id == bindparam("id"), memberships.c.project == bindparam("of")
)
RAW_USERS = select(users.c.user_id, users.c.name, users.c.body).order_by(users.c.user_id)
RAW_PROJECTS = select(projects.c.name, projects.c.uid, projects.c.body).order_by(projects.c.name)
RAW_MEMBERSHIPS = select(memberships.c.user_id, memberships.c.project, memberships.c.role).order_by(
    memberships.c.user_id, memberships.c.project
)
GENERATION = "people.generation"


class PeopleTable:
    def __init__(self, session: Session, changes: PeopleChanges) -> None:
        self._session = session
        self._run = session.run
        self._meta = MetaTable(session)
        self._changes = changes

    def generation(self) -> int:
        """A number that changes whenever any person may have lost a right."""
        return int(self._meta.get(GENERATION) or 0)

    def begin_generation(self) -> None:
        """Make all holders of rights from an earlier transaction read their rights again."""
        self._meta.take(GENERATION, 0)

    def add_user(self, user: User) -> None:
        """`StateError` if the name is taken."""
        if self.user_by_name(user.name) is not None:
            raise StateError(f"there is already a user `{user.name}`", hint="see them with `shoal user`")
        self._run(ADD_USER, {"user_id": user.user_id, "name": user.name, "body": encode(user)})
        self._changes.put_user(user)

    def get_user(self, user_id: str) -> User | None:
        body = self._session.value(USER, {"id": user_id})
        return None if body is None else decode_user(body)

    def user_by_name(self, name: str) -> User | None:
        body = self._session.value(USER_BY_NAME, {"named": name})
        return None if body is None else decode_user(body)

    def users(self) -> list[User]:
        """By name."""
        return [decode_user(body) for (body,) in self._run(USERS)]

    def update_user(self, user: User) -> None:
        changes = {"id": user.user_id, "to_name": user.name, "to_body": encode(user)}
        if self._run(SET_USER, changes).rowcount == 0:
            raise NotFound(f"there is no user `{user.name}`")
        self.begin_generation()
        self._changes.put_user(user)

    def add_project(self, project: Project) -> None:
        """`StateError` if the name is taken; its uid must come from `next_uid`."""
        if self.get_project(project.name) is not None:
            raise StateError(
                f"there is already a project `{project.name}`", hint="see them with `shoal project`"
            )
        self._run(ADD_PROJECT, {"name": project.name, "uid": project.uid, "body": encode(project)})
        self._changes.put_project(project)

    def get_project(self, name: str) -> Project | None:
        body = self._session.value(PROJECT, {"named": name})
        return None if body is None else decode_project(body)

    def projects(self) -> list[Project]:
        """By name."""
        return [decode_project(body) for (body,) in self._run(PROJECTS)]

    def update_project(self, project: Project) -> None:
        """Change a project. It keeps its uid: `NotFound` if no project of this name has that uid."""
        changes = {"named": project.name, "its_uid": project.uid, "to_body": encode(project)}
        if self._run(SET_PROJECT, changes).rowcount == 0:
            raise NotFound(f"there is no project `{project.name}` with uid {project.uid}")
        self._changes.put_project(project)

    def change_uid(self, project: Project, uid: int) -> None:
        """Give a project of a restored copy another uid that no project has had."""
        changed = msgspec.structs.replace(project, uid=uid)
        self._run(SET_UID, {"named": project.name, "to_uid": uid, "to_body": encode(changed)})
        self._changes.put_project(changed)

    def begin_uids(self, first: int) -> None:
        """Give new projects uids from this one on, which no project has had."""
        self._meta.set(NEXT_UID, str(first))

    def upcoming_uid(self) -> int:
        """The uid that `next_uid` would return."""
        return int(self._meta.get(NEXT_UID) or FIRST_PROJECT_UID)

    def next_uid(self) -> int:
        """A Unix uid that no project has had."""
        return self._meta.take(NEXT_UID, FIRST_PROJECT_UID)

    def set_membership(self, membership: Membership) -> None:
        """Add, or change the role."""
        self._run(DROP_MEMBERSHIP, {"id": membership.user_id, "of": membership.project})
        row = {"user_id": membership.user_id, "project": membership.project, "role": membership.role}
        self._run(ADD_MEMBERSHIP, row)
        self.begin_generation()
        self._changes.put_membership(membership.user_id, membership.project, membership.role)

    def remove_membership(self, user_id: str, project: str) -> None:
        """May be repeated."""
        if self._run(DROP_MEMBERSHIP, {"id": user_id, "of": project}).rowcount:
            self.begin_generation()
            self._changes.put_membership(user_id, project, None)

    def membership(self, user_id: str, project: str) -> Membership | None:
        return next(iter(self.memberships(user_id, project)), None)

    def memberships(self, user_id: str | None = None, project: str | None = None) -> list[Membership]:
        """By project, then name."""
        query = MEMBERSHIPS
        if user_id is not None:
            query = query.where(memberships.c.user_id == user_id)
        if project is not None:
            query = query.where(memberships.c.project == project)
        return [
            Membership(user_id=of, user_name=name, project=to, role=Role(role))
            for of, name, to, role in self._session.query(query)
        ]

    def raw_users(self) -> Iterator[tuple[str, str, str]]:
        """`(user_id, name, body)` of each row as the table holds it, by id."""
        yield from self._run(RAW_USERS)

    def raw_projects(self) -> Iterator[tuple[str, int, str]]:
        """`(name, uid, body)` of each row."""
        yield from self._run(RAW_PROJECTS)

    def raw_memberships(self) -> Iterator[tuple[str, str, str]]:
        """`(user_id, project, role)` of each row, also of users that do not exist."""
        yield from self._run(RAW_MEMBERSHIPS)
