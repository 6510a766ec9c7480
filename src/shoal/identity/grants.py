"""Giving away: nobody hands out more than they hold, to themselves or to others."""

from __future__ import annotations

from shoal.errors import Denied
from shoal.identity.caller import Caller
from shoal.identity.permissions import greater, is_at_least
from shoal.model.people import Role, Token


def check_member_grant(caller: Caller, project: str, role: Role, held: Role | None) -> None:
    """Raise `Denied` unless the caller may turn the role `held` into `role` in the project.

    A role above the caller's own can be neither given nor taken away. That the caller may manage members
    at all was asked before.
    """
    own = caller.role_in(project)
    highest = greater(role, held)
    if own is None or (highest is not None and not is_at_least(own, highest)):
        raise Denied(
            f"you are {own} in project `{project}` and may not give or take the role {highest}",
            hint="ask somebody with that role",
        )


def check_makes_tokens(caller: Caller) -> None:
    """Raise `Denied` where the caller's own token only reads: it would take the room of its user's others."""
    if caller.scope is Role.VIEWER:
        raise Denied(
            "your token's scope is viewer: it only reads, and makes no tokens",
            hint="sign in with another token, `shoal login URL`, and then make one with `--scope viewer`",
        )


def check_token_grant(caller: Caller, scope: Role, project: str | None) -> None:
    """Raise `Denied` unless a token of this reach is within the reach of the caller's own token."""
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


def reaches(caller: Caller, token: Token) -> bool:
    """Whether the caller's own token is at least as wide as this one, so that it may see and revoke it.

    Whose token it is was asked before.
    """
    is_there = caller.only_project is None or token.project == caller.only_project
    return is_there and caller.scope is not None and is_at_least(caller.scope, token.scope)
