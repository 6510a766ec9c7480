"""All permissions, and the least role that each of them needs, in one complete table.

Roles are ordered, and each role may do what the lesser roles may. A role on the whole cluster (`operator`,
`admin`) counts in every project.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shoal.model.people import Role


class Permission(StrEnum):
    """The action of a route. Every route declares exactly one."""

    ME_READ = "me.read"
    STATUS_READ = "status.read"
    SCHEMA_READ = "schema.read"
    JOB_READ = "job.read"
    JOB_LIST = "job.list"
    JOB_SUBMIT = "job.submit"
    JOB_STOP = "job.stop"
    JOB_RETRY = "job.retry"
    JOB_DRILL = "job.drill"
    ARCHIVE_READ = "archive.read"
    ARCHIVE_WRITE = "archive.write"
    NODE_READ = "node.read"
    NODE_MANAGE = "node.manage"
    NODE_DRILL = "node.drill"
    EVENT_READ = "event.read"
    AUDIT_READ = "audit.read"
    USER_MANAGE = "user.manage"
    PROJECT_READ = "project.read"
    PROJECT_MANAGE = "project.manage"
    MEMBER_READ = "member.read"
    MEMBER_MANAGE = "member.manage"
    TOKEN_READ = "token.read"  # noqa: S105 - a permission, no password
    TOKEN_CREATE = "token.create"  # noqa: S105 - a permission, no password
    TOKEN_REVOKE = "token.revoke"  # noqa: S105 - a permission, no password
    JOB_SELF = "job.self"
    LEASE_RENEW = "lease.renew"
    LOG_SHIP = "log.ship"
    TASK_SPEC_FETCH = "order.fetch"
    SERVICE_LIST = "service.list"
    SERVICE_READ = "service.read"
    SERVICE_MANAGE = "service.manage"
    TABLE_READ = "table.read"
    TABLE_REPORT = "table.report"


class PermissionScope(StrEnum):
    """The object of a permission, which determines where the caller must hold the role."""

    ANYBODY = "anybody"
    """Every signed-in user. The reply is filtered to what the user may see."""
    PROJECT = "project"
    """A role in the object's project."""
    CLUSTER = "cluster"
    """A role held on the whole cluster."""
    JOB = "job"
    """Only a job's own token."""
    SUPERVISOR = "supervisor"
    """Only a supervisor's own token."""
    BOOTSTRAP = "bootstrap"
    """Only the bootstrap token of a node agent that fetches its task spec."""
    DATA_PLANE = "data plane"
    """Only a data plane's token."""


class PermissionRule(msgspec.Struct, frozen=True):
    """`own_role` is the least role for the caller's own objects, `any_role` for those of all users."""

    scope: PermissionScope
    own_role: Role | None = None
    any_role: Role | None = None


def _everybody(role: Role | None = None) -> PermissionRule:
    return PermissionRule(PermissionScope.ANYBODY, any_role=role)


def _project(role: Role, others: Role | None = None) -> PermissionRule:
    return PermissionRule(PermissionScope.PROJECT, own_role=role, any_role=others or role)


def _cluster(role: Role) -> PermissionRule:
    return PermissionRule(PermissionScope.CLUSTER, own_role=role, any_role=role)


LEAST_ROLE: dict[Permission, PermissionRule] = {
    Permission.ME_READ: _everybody(),
    Permission.STATUS_READ: _everybody(),
    Permission.SCHEMA_READ: _everybody(),
    Permission.JOB_LIST: _everybody(),
    Permission.JOB_READ: _project(Role.VIEWER),
    Permission.JOB_SUBMIT: _project(Role.MEMBER),
    Permission.JOB_STOP: _project(Role.MEMBER, others=Role.LEAD),
    Permission.JOB_RETRY: _project(Role.MEMBER, others=Role.LEAD),
    Permission.JOB_DRILL: _project(Role.MEMBER, others=Role.LEAD),
    Permission.ARCHIVE_READ: _everybody(),
    Permission.ARCHIVE_WRITE: _project(Role.MEMBER),
    Permission.NODE_READ: _everybody(),
    Permission.NODE_MANAGE: _cluster(Role.OPERATOR),
    Permission.NODE_DRILL: _cluster(Role.OPERATOR),
    Permission.EVENT_READ: _everybody(),
    Permission.AUDIT_READ: _cluster(Role.OPERATOR),
    Permission.USER_MANAGE: _cluster(Role.ADMIN),
    Permission.PROJECT_READ: _everybody(),
    Permission.PROJECT_MANAGE: _cluster(Role.ADMIN),
    Permission.MEMBER_READ: _project(Role.VIEWER),
    Permission.MEMBER_MANAGE: _project(Role.LEAD),
    Permission.TOKEN_READ: _everybody(Role.ADMIN),
    Permission.TOKEN_CREATE: _everybody(Role.ADMIN),
    Permission.TOKEN_REVOKE: _everybody(Role.ADMIN),
    Permission.JOB_SELF: PermissionRule(PermissionScope.JOB),
    Permission.LEASE_RENEW: PermissionRule(PermissionScope.SUPERVISOR),
    Permission.LOG_SHIP: PermissionRule(PermissionScope.SUPERVISOR),
    Permission.TASK_SPEC_FETCH: PermissionRule(PermissionScope.BOOTSTRAP),
    Permission.SERVICE_LIST: _everybody(),
    Permission.SERVICE_READ: _project(Role.VIEWER),
    Permission.SERVICE_MANAGE: _project(Role.MEMBER, others=Role.LEAD),
    Permission.TABLE_READ: PermissionRule(PermissionScope.DATA_PLANE),
    Permission.TABLE_REPORT: PermissionRule(PermissionScope.DATA_PLANE),
}
"""`_everybody(role)`: every user for their own objects, and `role` on the cluster for those of others."""

FOR_JOBS = frozenset({Permission.JOB_READ, Permission.JOB_SELF})
"""The permissions of a job's own token, for its own job only."""

_RANK = {role: rank for rank, role in enumerate(Role)}


def is_at_least(role: Role | None, least: Role) -> bool:
    """Whether `role` includes `least`. None includes no role."""
    return role is not None and _RANK[role] >= _RANK[least]


def lesser(left: Role | None, right: Role | None) -> Role | None:
    """Return the lesser of two roles. None is the least."""
    if left is None or right is None:
        return None
    return left if _RANK[left] <= _RANK[right] else right


def greater(left: Role | None, right: Role | None) -> Role | None:
    """Return the greater of two roles."""
    if left is None or right is None:
        return left or right
    return left if _RANK[left] >= _RANK[right] else right
