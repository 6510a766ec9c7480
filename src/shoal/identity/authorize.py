"""The one question: may this caller do this, there? Default: no.

A project the caller may not see answers exactly like one that does not exist.
"""

from __future__ import annotations

from shoal.errors import Denied, NotVisible
from shoal.identity.caller import Caller, CallerKind
from shoal.identity.permissions import FOR_JOBS, LEAST_ROLE, Permission, Reach, Rule, is_at_least
from shoal.model.people import Role

DOING = {
    Permission.JOB_SUBMIT: "submitting",
    Permission.JOB_STOP: "stopping",
    Permission.JOB_RETRY: "retrying",
    Permission.JOB_DRILL: "drilling",
    Permission.ARCHIVE_WRITE: "submitting",
    Permission.MEMBER_MANAGE: "changing members",
    Permission.SERVICE_MANAGE: "serving",
}
"""What a person is doing who lacks the role for it."""


def authorize(
    caller: Caller,
    permission: Permission,
    project: str | None = None,
    *,
    is_own: bool = False,
    job_id: str | None = None,
) -> None:
    """Return if allowed; raise `Denied` if not, `NotVisible` if the caller may not know it exists.

    `project` is the project of the thing, `is_own` whether it is the caller's own, `job_id` the job it
    belongs to: a job's token is good for that job alone.
    """
    rule = LEAST_ROLE[permission]
    if caller.kind is CallerKind.JOB:
        _job(caller, permission, job_id)
    elif caller.kind is CallerKind.SUPERVISOR:
        if rule.reach is not Reach.SUPERVISOR:
            raise Denied("a supervisor's token can only renew its own lease")
    elif caller.kind is CallerKind.TICKET:
        if rule.reach is not Reach.TICKET:
            raise Denied("a ticket can only fetch the orders of its attempt")
    elif caller.kind is CallerKind.DATA_PLANE:
        if rule.reach is not Reach.DATA_PLANE:
            raise Denied("a data plane's token can only read the table and report what it counts")
    elif rule.reach is Reach.PROJECT:
        _in_project(caller, permission, rule, project, is_own=is_own)
    elif rule.reach is Reach.CLUSTER:
        _on_cluster(caller, permission, rule.any)
    elif rule.reach is not Reach.ANYBODY:
        raise Denied(f"`{permission}` is for {rule.reach} tokens, not for people")
    elif rule.any is not None and not is_own:
        _on_cluster(caller, permission, rule.any)


def visible_projects(caller: Caller) -> tuple[str, ...] | None:
    """The projects whose things the caller may read; None: every one there is."""
    if caller.kind is not CallerKind.USER:
        return ()
    if caller.cluster_role is not None:
        return None
    return tuple(sorted(caller.roles))


def _job(caller: Caller, permission: Permission, job_id: str | None) -> None:
    if permission not in FOR_JOBS:
        raise Denied(
            f"a job's token may not `{permission}`: it reads its own job and nothing else",
            hint="use a person's token: `shoal login`",
        )
    if job_id is not None and job_id != caller.job_id:
        raise NotVisible("no such job, or one you may not see")


def _in_project(
    caller: Caller, permission: Permission, rule: Rule, project: str | None, *, is_own: bool
) -> None:
    role = caller.role_in(project) if project is not None else None
    if role is None:
        raise NotVisible("no such thing, or one you may not see")
    least = rule.own if is_own else rule.any
    if least is None or not is_at_least(role, least):
        whose = "" if is_own or rule.own is rule.any else " somebody else's"
        doing = DOING.get(permission, f"`{permission}`")
        capped = f" with a token of scope {caller.scope}" if caller.scope is role else ""
        raise Denied(
            f"you are {role} in {project}{capped}; {doing}{whose} needs {least}",
            hint=f"ask a lead of the project: `shoal project members {project}`",
        )


def _on_cluster(caller: Caller, permission: Permission, least: Role | None) -> None:
    if least is None or not is_at_least(caller.cluster_role, least):
        has = f"you are {caller.cluster_role}" if caller.cluster_role else "you have no role on the cluster"
        raise Denied(
            f"`{permission}` needs the role {least} on the cluster; {has}",
            hint="ask an admin, or see what you may do with `shoal login`",
        )
