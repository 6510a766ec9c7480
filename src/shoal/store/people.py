"""Users, projects, memberships and tokens. Who may do what is decided elsewhere."""

from __future__ import annotations

import msgspec
from sqlalchemy import bindparam, delete, insert, select, update

from shoal.errors import NotFound, StateError
from shoal.loopback import FIRST_PROJECT_UID
from shoal.model.people import Membership, Project, Role, Token, User
from shoal.store.codec import decode_project, decode_token, decode_user, encode
from shoal.store.meta import Meta
from shoal.store.prepared import Session
from shoal.store.schema import memberships, projects, tokens, users

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
ADD_MEMBERSHIP = insert(memberships)
MEMBERSHIPS = (
    select(memberships.c.user_id, users.c.name, memberships.c.project, memberships.c.role)
    .join_from(memberships, users, users.c.user_id == memberships.c.user_id)
    .order_by(memberships.c.project, users.c.name)
)
DROP_MEMBERSHIP = delete(memberships).where(
    memberships.c.user_id == bindparam("id"), memberships.c.project == bindparam("of")
)
ADD_TOKEN = insert(tokens)
TOKEN = select(tokens.c.body).where(tokens.c.token_id == bindparam("id"))
TOKENS = select(tokens.c.body).order_by(tokens.c.token_id)
SET_TOKEN = update(tokens).where(tokens.c.token_id == bindparam("id")).values(body=bindparam("to_body"))


class People:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run
        self._meta = Meta(session)

    def add_user(self, user: User) -> None:
        """`StateError` if the name is taken."""
        if self.user_by_name(user.name) is not None:
            raise StateError(f"there is already a user `{user.name}`", hint="see them with `shoal user`")
        self._run(ADD_USER, {"user_id": user.user_id, "name": user.name, "body": encode(user)})

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

    def add_project(self, project: Project) -> None:
        """`StateError` if the name is taken; its uid must come from `next_uid`."""
        if self.get_project(project.name) is not None:
            raise StateError(
                f"there is already a project `{project.name}`", hint="see them with `shoal project`"
            )
        self._run(ADD_PROJECT, {"name": project.name, "uid": project.uid, "body": encode(project)})

    def get_project(self, name: str) -> Project | None:
        body = self._session.value(PROJECT, {"named": name})
        return None if body is None else decode_project(body)

    def projects(self) -> list[Project]:
        """By name."""
        return [decode_project(body) for (body,) in self._run(PROJECTS)]

    def update_project(self, project: Project) -> None:
        """A project keeps its uid for ever: `NotFound` if there is none of this name with it."""
        changes = {"named": project.name, "its_uid": project.uid, "to_body": encode(project)}
        if self._run(SET_PROJECT, changes).rowcount == 0:
            raise NotFound(f"there is no project `{project.name}` with uid {project.uid}")

    def begin_uids(self, first: int) -> None:
        """Give projects users from this uid on. Once, before there is a project."""
        self._meta.set(NEXT_UID, str(first))

    def next_uid(self) -> int:
        """A Unix uid that no project had before."""
        return self._meta.take(NEXT_UID, FIRST_PROJECT_UID)

    def set_membership(self, membership: Membership) -> None:
        """Add, or change the role."""
        self.remove_membership(membership.user_id, membership.project)
        row = {"user_id": membership.user_id, "project": membership.project, "role": membership.role}
        self._run(ADD_MEMBERSHIP, row)

    def remove_membership(self, user_id: str, project: str) -> None:
        """May be repeated."""
        self._run(DROP_MEMBERSHIP, {"id": user_id, "of": project})

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
            for of, name, to, role in self._session.ask(query)
        ]

    def add_token(self, token: Token) -> None:
        self._run(ADD_TOKEN, {"token_id": token.token_id, "user_id": token.user_id, "body": encode(token)})

    def get_token(self, token_id: str) -> Token | None:
        body = self._session.value(TOKEN, {"id": token_id})
        return None if body is None else decode_token(body)

    def tokens(self, user_id: str | None = None) -> list[Token]:
        """Oldest first; revoked and expired ones too."""
        query = TOKENS if user_id is None else TOKENS.where(tokens.c.user_id == user_id)
        return [decode_token(body) for (body,) in self._session.ask(query)]

    def revoke_token(self, token_id: str, at: float) -> Token:
        """May be repeated: the first time counts."""
        token = self.get_token(token_id)
        if token is None:
            raise NotFound(f"there is no token `{token_id}`")
        if token.revoked_at is None:
            token = msgspec.structs.replace(token, revoked_at=at)
            self._run(SET_TOKEN, {"id": token_id, "to_body": encode(token)})
        return token
