"""Users, projects and memberships: every change in one transaction, with its event.

Data planes learn of a change of who may call services before the caller gets a reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio.to_thread
import msgspec

from shoal.control.actor import Actor
from shoal.control.bootstrap import register_name
from shoal.control.capabilities import Records, Serving
from shoal.control.project_tree import check_tree
from shoal.control.project_uids import usable_uid
from shoal.control.record import fingerprint, record_event, run_idempotent
from shoal.control.services.serving_table import publish_and_wait
from shoal.errors import NotFound, StateError
from shoal.model.people import Membership, Project, Role, User
from shoal.settings import Settings
from shoal.spec.error_text import or_nearest
from shoal.store import Store, Tx

T = TypeVar("T", bound=msgspec.Struct)


async def change_people(
    records: Records,
    actor: Actor,
    key: str | None,
    kind: str,
    facts: dict[str, Any],
    answer_type: type[T],
    make: Callable[[Tx, float], T],
    project: str | None = None,
) -> T:
    """Make one idempotent change with its event. `facts`: what the event records."""

    def change(tx: Tx) -> tuple[T, bool]:
        now = records.clock.now()

        def act() -> T:
            result = make(tx, now)
            record_event(tx, kind, now, actor, project=project, data=facts)
            return result

        return run_idempotent(tx, actor, key, fingerprint(kind, facts), now, answer_type, act)

    result, _ = await records.store.write(change)
    return result


async def create_user(
    records: Records, actor: Actor, name: str, cluster_role: Role | None, key: str | None
) -> User:
    def make(tx: Tx, now: float) -> User:
        if tx.people.user_by_name(name) is not None:
            raise StateError(f"user `{name}` exists already", hint="an admin lists them with `shoal user`")
        user = User(user_id=records.new_id("usr"), name=name, cluster_role=cluster_role, created_at=now)
        tx.people.add_user(user)
        return user

    facts = {"user": name, "cluster_role": cluster_role}
    return await change_people(records, actor, key, "user.created", facts, User, make)


async def update_user(
    serving: Serving, actor: Actor, name: str, changes: dict[str, Any], key: str | None
) -> User:
    """Change a user. `changes` names fields of User: `is_active`, `cluster_role`."""

    def make(tx: Tx, now: float) -> User:
        user = find_user(tx, name)
        updated = msgspec.structs.replace(user, **changes)
        tx.people.update_user(updated)
        _keep_an_admin(tx)
        return updated

    facts = {"user": name, **changes}
    user = await change_people(serving.records, actor, key, "user.updated", facts, User, make)
    await publish_and_wait(serving)
    return user


def _keep_an_admin(tx: Tx) -> None:
    if not any(u.is_active and u.cluster_role is Role.ADMIN for u in tx.people.users()):
        raise StateError(
            "this is the last active admin; no other admin could undo it", hint="shoal user list"
        )


async def create_project(
    records: Records, settings: Settings, actor: Actor, name: str, limits: dict[str, Any], key: str | None
) -> Project:
    """Create a project. `limits` names fields of Project; all but `uid` and `created_at` can be set."""

    def make(tx: Tx, now: float) -> Project:
        tx.people.begin_uids(uid)
        if tx.people.get_project(name) is not None:
            raise StateError(f"project `{name}` exists already", hint="shoal project list")
        project = Project(name=name, uid=0, created_at=now, **limits)
        check_tree(tx.people.projects(), project)
        project = msgspec.structs.replace(project, uid=tx.people.next_uid())
        tx.people.add_project(project)
        return project

    facts = {"project": name, **msgspec.to_builtins(limits)}
    async with records.uid_lock:
        uid = await _choose_uid(records.store, settings)
        return await change_people(records, actor, key, "project.created", facts, Project, make, name)


async def _choose_uid(store: Store, settings: Settings) -> int:
    """Return the uid for the next project, which nothing else on this machine has now."""

    def read(tx: Tx) -> tuple[int, list[int]]:
        return tx.people.upcoming_uid(), [project.uid for project in tx.people.projects()]

    uid, used = await store.read(read)
    home = settings.state_dir
    return await anyio.to_thread.run_sync(lambda: usable_uid(uid, home, register_name(home), used))


async def update_project(
    records: Records, actor: Actor, name: str, limits: dict[str, Any], key: str | None
) -> Project:
    def make(tx: Tx, now: float) -> Project:
        updated = msgspec.structs.replace(_project(tx, name), **limits)
        check_tree(tx.people.projects(), updated)
        tx.people.update_project(updated)
        return updated

    facts = {"project": name, **msgspec.to_builtins(limits)}
    return await change_people(records, actor, key, "project.updated", facts, Project, make, name)


async def set_member(
    serving: Serving, actor: Actor, project: str, user_name: str, role: Role, key: str | None
) -> Membership:
    def make(tx: Tx, now: float) -> Membership:
        _project(tx, project)
        user = _user(tx, user_name)
        membership = Membership(user_id=user.user_id, user_name=user.name, project=project, role=role)
        tx.people.set_membership(membership)
        return membership

    facts = {"project": project, "user": user_name, "role": role}
    membership = await change_people(
        serving.records, actor, key, "member.set", facts, Membership, make, project
    )
    await publish_and_wait(serving)
    return membership


async def remove_member(
    serving: Serving, actor: Actor, project: str, user_name: str, key: str | None
) -> None:
    def make(tx: Tx, now: float) -> User:
        user = _user(tx, user_name)
        tx.people.remove_membership(user.user_id, project)
        return user

    facts = {"project": project, "user": user_name}
    await change_people(serving.records, actor, key, "member.removed", facts, User, make, project)
    await publish_and_wait(serving)


def find_user(tx: Tx, name: str) -> User:
    """Return the user. For callers who may see every user, because the error names the nearest user."""
    user = tx.people.user_by_name(name)
    if user is None:
        near = or_nearest(name, (user.name for user in tx.people.users()))
        raise NotFound(f"no user `{name}`{near}", hint="list them with `shoal user`")
    return user


def _user(tx: Tx, name: str) -> User:
    user = tx.people.user_by_name(name)
    if user is None:
        raise NotFound(f"no user `{name}`", hint="an admin lists them with `shoal user`")
    return user


def _project(tx: Tx, name: str) -> Project:
    project = tx.people.get_project(name)
    if project is None:
        raise NotFound(f"no project `{name}`", hint="shoal project list")
    return project
