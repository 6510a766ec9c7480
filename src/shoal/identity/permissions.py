"""What there is to be allowed, and the least role that is. One literal, total table.

Roles are ordered, and each may do what the lesser ones may. A role held on the whole cluster
(`operator`, `admin`) counts in every project.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shoal.model.people import Role


class Permission(StrEnum):
    """One thing a route does. Every route declares exactly one."""

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
    ORDER_FETCH = "order.fetch"
    SERVICE_LIST = "service.list"
    SERVICE_READ = "service.read"
    SERVICE_MANAGE = "service.manage"
    TABLE_READ = "table.read"
    TABLE_REPORT = "table.report"


class Reach(StrEnum):
    """What a permission is about, and so where the role must be held."""

    ANYBODY = "anybody"
    """Every signed-in user; the answer is filtered to what they may see."""
    PROJECT = "project"
    """A role in the project that holds the thing."""
    CLUSTER = "cluster"
    """A role held on the whole cluster."""
    JOB = "job"
    """A job's own token, and nobody else."""
    SUPERVISOR = "supervisor"
    """A supervisor's own token, and nobody else."""
    TICKET = "ticket"
    """A supervisor on its way to its order, and nobody else."""
    DATA_PLANE = "data plane"
    """What requests to services go through, and nobody else."""


class Rule(msgspec.Struct, frozen=True):
    """`own` is the least role to do it to one's own things, `any` to everybody's."""

    reach: Reach
    own: Role | None = None
    any: Role | None = None


def _everybody(role: Role | None = None) -> Rule:
    return Rule(Reach.ANYBODY, any=role)


def _project(role: Role, others: Role | None = None) -> Rule:
    return Rule(Reach.PROJECT, own=role, any=others or role)


def _cluster(role: Role) -> Rule:
    return Rule(Reach.CLUSTER, own=role, any=role)


LEAST_ROLE: dict[Permission, Rule] = {
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
    Permission.JOB_SELF: Rule(Reach.JOB),
    Permission.LEASE_RENEW: Rule(Reach.SUPERVISOR),
    Permission.LOG_SHIP: Rule(Reach.SUPERVISOR),
    Permission.ORDER_FETCH: Rule(Reach.TICKET),
    Permission.SERVICE_LIST: _everybody(),
    Permission.SERVICE_READ: _project(Role.VIEWER),
    Permission.SERVICE_MANAGE: _project(Role.MEMBER, others=Role.LEAD),
    Permission.TABLE_READ: Rule(Reach.DATA_PLANE),
    Permission.TABLE_REPORT: Rule(Reach.DATA_PLANE),
}
"""`_everybody(role)`: everybody for what is their own, `role` on the cluster for what is not."""

FOR_JOBS = frozenset({Permission.JOB_READ, Permission.JOB_SELF})
"""What a job's own token may do, and that for its own job alone."""

_RANK = {role: rank for rank, role in enumerate(Role)}


def is_at_least(role: Role | None, least: Role) -> bool:
    """Whether `role` may do what `least` may. None may nothing."""
    return role is not None and _RANK[role] >= _RANK[least]


def lesser(one: Role | None, other: Role | None) -> Role | None:
    """The role that may less. None is the least."""
    if one is None or other is None:
        return None
    return one if _RANK[one] <= _RANK[other] else other


def greater(one: Role | None, other: Role | None) -> Role | None:
    """The role that may more."""
    if one is None or other is None:
        return one or other
    return one if _RANK[one] >= _RANK[other] else other
