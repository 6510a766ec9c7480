"""Who is asking, with every limit of their token already applied."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shoal.identity.permissions import greater, lesser
from shoal.model.people import Membership, Role, Token, User


class CallerKind(StrEnum):
    USER = "user"
    JOB = "job"
    SUPERVISOR = "supervisor"
    DATA_PLANE = "data_plane"
    TICKET = "ticket"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Roles are the effective ones: what the person holds, capped by the token they came with."""

    kind: CallerKind
    id: str
    """The user's id, or the attempt's."""
    name: str
    """As events record it: `ana`, `vision/17`, `att_...@node-1`."""
    cluster_role: Role | None = None
    """Held on the whole cluster; None also for a token that is good in one project alone."""
    roles: dict[str, Role] = {}
    """By project, memberships and the cluster role together where they are known."""
    token_id: str | None = None
    scope: Role | None = None
    only_project: str | None = None
    """The one project this token is good in."""
    expires_at: float | None = None
    job_id: str | None = None
    attempt_id: str | None = None
    node: str | None = None
    project: str | None = None
    """Of a job."""
    owner: str | None = None
    """The user whose job it is."""
    body_digest: str | None = None
    """Of the one request body a supervisor signed."""

    def role_in(self, project: str) -> Role | None:
        """The effective role in a project, which need not exist."""
        if self.only_project is not None and project != self.only_project:
            return None
        return greater(self.roles.get(project), self.cluster_role)


def user_caller(user: User, token: Token, memberships: Iterable[Membership]) -> Caller:
    """The caller behind a user's token. Whether the token is good was decided before."""
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
