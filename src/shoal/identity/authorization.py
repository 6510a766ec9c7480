"""Decide whether a caller may do something. The default is no.

A `Caller` has the roles of a person or token, with every limit of the token already applied. A project that
the caller may not see is answered exactly like one that does not exist. No caller can grant more than they
have, to themselves or to others.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shoal.errors import Denied, NotVisible
from shoal.identity.permissions import (
    FOR_JOBS,
    LEAST_ROLE,
    Permission,
    PermissionRule,
    PermissionScope,
    greater,
    is_at_least,
    lesser,
)
from shoal.model.people import Membership, Role, Token, User


class CallerKind(StrEnum):
    USER = "user"
    JOB = "job"
    SUPERVISOR = "supervisor"
    DATA_PLANE = "data_plane"
    BOOTSTRAP = "bootstrap"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The source of a request. Its roles are effective: those of the person, capped by the token."""

    kind: CallerKind
    id: str
    """The user's id, or the attempt's."""
    name: str
    """The actor's name as in events: `ana`, `vision/17`, `att_...@node-1`."""
    cluster_role: Role | None = None
    """The role on the whole cluster. Also None for a token that is limited to one project."""
    roles: dict[str, Role] = {}
    """Roles by project, from memberships and the cluster role together if both are known."""
    token_id: str | None = None
    scope: Role | None = None
    only_project: str | None = None
    """The only project in which the token is valid. None: all of them."""
    expires_at: float | None = None
    job_id: str | None = None
    attempt_id: str | None = None
    node: str | None = None
    project: str | None = None
    """The project of a job's token."""
    owner: str | None = None
    """The user who owns the job of a job's token."""
    body_digest: str | None = None
    """The digest of the one request body that a supervisor signed."""

    def role_in(self, project: str) -> Role | None:
        """Return the effective role in a project. The project need not exist."""
        if self.only_project is not None and project != self.only_project:
            return None
        return greater(self.roles.get(project), self.cluster_role)


def user_caller(user: User, token: Token, memberships: Iterable[Membership]) -> Caller:
    """Return the caller of a user's token, which was already found to be valid."""
    roles: dict[str, Role] = {}
    for membership in memberships:
        if token.project in (None, membership.project):
            held = greater(membership.role, user.cluster_role)
            capped = lesser(held, token.scope)
            assert capped is not None
            roles[membership.project] = capped
    cluster_role = lesser(user.cluster_role, token.scope)
    if token.project is not None and cluster_role is not None:
        roles[token.project] = cluster_role
        cluster_role = None
    return Caller(
        kind=CallerKind.USER,
        id=user.user_id,
        name=user.name,
        cluster_role=cluster_role,
        roles=roles,
        token_id=token.token_id,
        scope=token.scope,
        only_project=token.project,
        expires_at=token.expires_at,
    )


DOING = {
    Permission.JOB_SUBMIT: "submitting",
    Permission.JOB_STOP: "stopping",
    Permission.JOB_RETRY: "retrying",
    Permission.JOB_DRILL: "drilling",
    Permission.ARCHIVE_WRITE: "submitting",
    Permission.MEMBER_MANAGE: "changing members",
    Permission.SERVICE_MANAGE: "serving",
}
"""Phrases for the error message, by permission."""


def authorize(
    caller: Caller,
    permission: Permission,
    project: str | None = None,
    *,
    is_own: bool = False,
    job_id: str | None = None,
) -> None:
    """Raise `Denied` if it is not allowed, or `NotVisible` if the caller may not know that the object exists.

    `project` is the object's project, `is_own` whether it is the caller's own, and `job_id` its job, because
    a job's token is valid only for that job.
    """
    rule = LEAST_ROLE[permission]
    if caller.kind is CallerKind.JOB:
        _check_job_token(caller, permission, job_id)
    elif caller.kind is CallerKind.SUPERVISOR:
        if rule.scope is not PermissionScope.SUPERVISOR:
            raise Denied("a supervisor's token can only renew its own lease")
    elif caller.kind is CallerKind.BOOTSTRAP:
        if rule.scope is not PermissionScope.BOOTSTRAP:
            raise Denied("a bootstrap token can only fetch the task specs of its attempt")
    elif caller.kind is CallerKind.DATA_PLANE:
        if rule.scope is not PermissionScope.DATA_PLANE:
            raise Denied("a data plane's token can only read the table and report what it counts")
    elif rule.scope is PermissionScope.PROJECT:
        _check_in_project(caller, permission, rule, project, is_own=is_own)
    elif rule.scope is PermissionScope.CLUSTER:
        _check_on_cluster(caller, permission, rule.any_role)
    elif rule.scope is not PermissionScope.ANYBODY:
        raise Denied(f"`{permission}` is for {rule.scope} tokens, not for people")
    elif rule.any_role is not None and not is_own:
        _check_on_cluster(caller, permission, rule.any_role)


def visible_projects(caller: Caller) -> tuple[str, ...] | None:
    """Return the projects that the caller may read. None: all projects."""
    if caller.kind is not CallerKind.USER:
        return ()
    if caller.cluster_role is not None:
        return None
    return tuple(sorted(caller.roles))


def _check_job_token(caller: Caller, permission: Permission, job_id: str | None) -> None:
    if permission not in FOR_JOBS:
        raise Denied(
            f"a job's token may not `{permission}`: it reads its own job and nothing else",
            hint="use a person's token: `shoal login`",
        )
    if job_id is not None and job_id != caller.job_id:
        raise NotVisible("no such job, or one you may not see")


def _check_in_project(
    caller: Caller, permission: Permission, rule: PermissionRule, project: str | None, *, is_own: bool
) -> None:
    role = caller.role_in(project) if project is not None else None
    if role is None:
        raise NotVisible("no such thing, or one you may not see")
    least = rule.own_role if is_own else rule.any_role
    if least is None or not is_at_least(role, least):
        whose = "" if is_own or rule.own_role is rule.any_role else " somebody else's"
        doing = DOING.get(permission, f"`{permission}`")
        capped = f" with a token of scope {caller.scope}" if caller.scope is role else ""
        raise Denied(
            f"you are {role} in {project}{capped}; {doing}{whose} needs {least}",
            hint=f"ask a lead of the project: `shoal project members {project}`",
        )


def _check_on_cluster(caller: Caller, permission: Permission, least: Role | None) -> None:
    if least is None or not is_at_least(caller.cluster_role, least):
        has = f"you are {caller.cluster_role}" if caller.cluster_role else "you have no role on the cluster"
        raise Denied(
            f"`{permission}` needs the role {least} on the cluster; {has}",
            hint="ask an admin, or see what you may do with `shoal login`",
        )


def check_member_grant(caller: Caller, project: str, role: Role, held: Role | None) -> None:
    """Raise `Denied` unless the caller may turn the role `held` into `role` in the project.

    A role above the caller's own can be neither given nor taken away. The caller's right to manage members
    was already checked.
    """
    own_role = caller.role_in(project)
    highest = greater(role, held)
    if own_role is None or (highest is not None and not is_at_least(own_role, highest)):
        raise Denied(
            f"you are {own_role} in project `{project}` and may not give or take the role {highest}",
            hint="ask a person with that role",
        )


def check_may_make_tokens(caller: Caller) -> None:
    """Raise `Denied` if the caller's own token only reads: new ones would use up its user's limit."""
    if caller.scope is Role.VIEWER:
        raise Denied(
            "your token's scope is viewer: it only reads, and makes no tokens",
            hint="sign in with another token, `shoal login URL`, and then make one with `--scope viewer`",
        )


def check_token_grant(caller: Caller, scope: Role, project: str | None) -> None:
    """Raise `Denied` unless the caller's own token covers this scope and project."""
    if caller.scope is None or not is_at_least(caller.scope, scope):
        raise Denied(
            f"your token's scope is {caller.scope}; it cannot make one with scope {scope}",
            hint=f"ask for less: `shoal token create --scope {caller.scope}`",
        )
    if caller.only_project is not None and project != caller.only_project:
        raise Denied(
            f"your token is good in project `{caller.only_project}` alone; so must be one made with it",
            hint=f"add `--project {caller.only_project}`",
        )


def covers_token(caller: Caller, token: Token) -> bool:
    """Whether the caller's own token covers this one, so that the caller may see and revoke it.

    The owner of the token was already checked.
    """
    is_there = caller.only_project is None or token.project == caller.only_project
    return is_there and caller.scope is not None and is_at_least(caller.scope, token.scope)
