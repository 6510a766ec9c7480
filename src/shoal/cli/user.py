"""`shoal user`: list users and what they may do on the whole cluster."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.output import print_json, print_table
from shoal.cli.text import one_line
from shoal.errors import SpecError

app = App(name="user", help="Manage users and their roles.")
Name = Annotated[str, Parameter(help="The user's name.")]
ClusterRole = Annotated[
    Literal["operator", "admin", "none"] | None,
    Parameter(name="--role", help="The role on the whole cluster; `none` removes it."),
]


@app.default
@app.command(name="list")
def list_users(*, json: JsonFlag = False) -> int:
    """List users."""
    with connect() as shoal:
        users = shoal.users.all()
    if json:
        print_json(users)
        return 0
    rows = (
        (user["name"], user.get("cluster_role") or "-", "yes" if user.get("is_active", True) else "no")
        for user in users
    )
    print_table(("USER", "CLUSTER ROLE", "ACTIVE"), rows, elastic="USER")
    return 0


@app.command
def create(name: Name, *, cluster_role: ClusterRole = None, json: JsonFlag = False) -> int:
    """Create a user. They need a token next: `shoal token create --user NAME`."""
    with connect() as shoal:
        user = shoal.users.create(name, cluster_role=None if cluster_role == "none" else cluster_role)
    if json:
        print_json(user)
    else:
        shown = one_line(user["name"])
        print(f"user {shown} created; next: `shoal token create --user {shown}`")
    return 0


@app.command
def update(
    name: Name,
    *,
    cluster_role: ClusterRole = None,
    active: Annotated[bool | None, Parameter(help="Whether their tokens are valid.")] = None,
    json: JsonFlag = False,
) -> int:
    """Change a user's cluster role, or close and reopen their account."""
    changes: dict[str, Any] = {}
    if cluster_role is not None:
        changes["cluster_role"] = None if cluster_role == "none" else cluster_role
    if active is not None:
        changes["is_active"] = active
    if not changes:
        raise SpecError("nothing to change", hint=f"`shoal user update {one_line(name)} --no-active`")
    with connect() as shoal:
        after = shoal.users.update(name, **changes)
    if json:
        print_json(after)
    else:
        print(f"user {one_line(after['name'])} changed")
    return 0
