"""Permissions: one table, the default is no, and a token never gives more than its user has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import Denied, NotFound
from shoal.identity import (
    LEAST_ROLE,
    Caller,
    CallerKind,
    Permission,
    authorize,
    check_member_grant,
    check_token_grant,
    user_caller,
    visible_projects,
)
from shoal.identity.permissions import PermissionScope, greater, is_at_least, lesser
from shoal.model.people import Membership, Role, Token, User

ROLES = st.sampled_from(Role)
MAYBE = st.one_of(st.none(), ROLES)


def caller(
    cluster: Role | None = None,
    member: Role | None = None,
    scope: Role = Role.ADMIN,
    project: str | None = None,
) -> Caller:
    user = User(user_id="usr_1", name="ana", cluster_role=cluster)
    token = Token(token_id="tok_1", user_id="usr_1", secret_hash=b"", scope=scope, project=project)
    held = [Membership(user_id="usr_1", user_name="ana", project="vision", role=member)] if member else []
    return user_caller(user, token, held)


def may(who: Caller, permission: Permission, project: str | None = "vision", *, is_own: bool = False) -> bool:
    try:
        authorize(who, permission, project, is_own=is_own)
    except (Denied, NotFound):
        return False
    return True


def test_every_permission_has_a_rule() -> None:
    assert set(LEAST_ROLE) == set(Permission)


@given(
    st.sampled_from(Permission),
    MAYBE,
    MAYBE,
    ROLES,
    st.sampled_from([None, "vision", "speech"]),
    st.booleans(),
)
def test_a_token_never_gives_more_than_its_user_has(
    permission: Permission,
    cluster: Role | None,
    member: Role | None,
    scope: Role,
    only: str | None,
    is_own: bool,
) -> None:
    whole, capped = caller(cluster, member), caller(cluster, member, scope, only)
    if may(capped, permission, is_own=is_own):
        assert may(whole, permission, is_own=is_own)
    for project in ("vision", "speech"):
        held, given_ = whole.role_in(project), capped.role_in(project)
        assert given_ is None or (
            held is not None and is_at_least(held, given_) and is_at_least(scope, given_)
        )


@given(st.sampled_from(Permission), MAYBE, ROLES, ROLES, st.booleans())
def test_more_role_never_takes_a_right_away(
    permission: Permission, cluster: Role | None, one: Role, two: Role, is_own: bool
) -> None:
    less, more = lesser(one, two), greater(one, two)
    if may(caller(cluster, less), permission, is_own=is_own):
        assert may(caller(cluster, more), permission, is_own=is_own)


@pytest.mark.parametrize(
    "permission", [p for p, rule in LEAST_ROLE.items() if rule.scope is PermissionScope.PROJECT]
)
def test_invisible_project_is_not_found_rather_than_denied(permission: Permission) -> None:
    with pytest.raises(NotFound):
        authorize(caller(member=Role.LEAD), permission, "speech")
    with pytest.raises(NotFound):
        authorize(caller(), permission, None)


def test_members_act_on_their_own_jobs_and_leads_on_all_jobs() -> None:
    for permission in (Permission.JOB_STOP, Permission.JOB_RETRY):
        assert may(caller(member=Role.MEMBER), permission, is_own=True)
        assert not may(caller(member=Role.MEMBER), permission)
        assert not may(caller(member=Role.VIEWER), permission, is_own=True)
        assert may(caller(member=Role.LEAD), permission)


def test_a_role_in_a_project_is_none_on_the_cluster() -> None:
    for permission in (Permission.NODE_MANAGE, Permission.USER_MANAGE, Permission.AUDIT_READ):
        assert not may(caller(member=Role.ADMIN), permission)
    assert may(caller(cluster=Role.OPERATOR), Permission.NODE_MANAGE)
    assert not may(caller(cluster=Role.OPERATOR), Permission.USER_MANAGE)


def test_a_token_of_one_project_holds_nothing_on_the_cluster() -> None:
    narrow = caller(cluster=Role.ADMIN, project="vision")
    assert visible_projects(narrow) == ("vision",)
    assert narrow.role_in("vision") is Role.ADMIN
    assert narrow.role_in("speech") is None
    assert not may(narrow, Permission.USER_MANAGE)


def test_visible_projects_depend_on_role_and_token() -> None:
    assert visible_projects(caller(cluster=Role.OPERATOR)) is None
    assert visible_projects(caller(member=Role.VIEWER)) == ("vision",)
    assert visible_projects(caller()) == ()


def test_a_job_reads_itself_and_nothing_else() -> None:
    job = Caller(kind=CallerKind.JOB, id="job_1", name="vision/1", job_id="job_1")
    authorize(job, Permission.JOB_READ, "vision", job_id="job_1")
    with pytest.raises(NotFound):
        authorize(job, Permission.JOB_READ, "vision", job_id="job_2")
    for permission in set(Permission) - {Permission.JOB_READ, Permission.JOB_SELF}:
        with pytest.raises(Denied):
            authorize(job, permission, "vision", is_own=True)
    assert visible_projects(job) == ()


def test_a_supervisor_renews_and_hands_in_logs_and_nothing_else() -> None:
    supervisor = Caller(kind=CallerKind.SUPERVISOR, id="att_1", name="att_1@node-1")
    for permission in Permission:
        if permission in (Permission.LEASE_RENEW, Permission.LOG_SHIP):
            authorize(supervisor, permission)
        else:
            with pytest.raises(Denied):
                authorize(supervisor, permission, "vision", is_own=True)


@given(ROLES, MAYBE, ROLES)
def test_users_cannot_give_or_take_a_role_above_their_own(
    own_role: Role, held: Role | None, wanted: Role
) -> None:
    giver = caller(member=own_role)
    highest = greater(held, wanted)
    assert highest is not None
    if is_at_least(own_role, highest):
        check_member_grant(giver, "vision", wanted, held)
    else:
        with pytest.raises(Denied):
            check_member_grant(giver, "vision", wanted, held)


@given(ROLES, ROLES, st.sampled_from([None, "vision"]), st.sampled_from([None, "vision", "speech"]))
def test_a_token_makes_only_tokens_within_its_own_reach(
    scope: Role, wanted: Role, only: str | None, project: str | None
) -> None:
    maker = caller(member=Role.LEAD, scope=scope, project=only)
    if is_at_least(scope, wanted) and only in (None, project):
        check_token_grant(maker, wanted, project)
    else:
        with pytest.raises(Denied):
            check_token_grant(maker, wanted, project)


def test_bootstrap_token_fetches_task_specs_and_nothing_else() -> None:
    holder = Caller(kind=CallerKind.BOOTSTRAP, id="att_1", name="bootstrap of att_1", attempt_id="att_1")
    for permission in Permission:
        if permission is Permission.TASK_SPEC_FETCH:
            authorize(holder, permission)
        else:
            with pytest.raises(Denied):
                authorize(holder, permission)
