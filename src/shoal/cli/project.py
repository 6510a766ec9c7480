"""`shoal project`: projects, their quotas and their members."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.show import print_json, print_table
from shoal.cli.text import one_line, size

app = App(name="project", help="Projects, their quotas and members.")
Name = Annotated[str, Parameter(help="The project's name.")]
Role = Literal["viewer", "member", "lead"]
UserName = Annotated[str, Parameter(help="The user's name.")]
MaxOpenJobs = Annotated[int | None, Parameter(help="Quota on jobs accepted and not ended.")]
MaxPriority = Annotated[int | None, Parameter(help="The highest priority a member may ask for.")]
MaxUpload = Annotated[int | None, Parameter(name="--max-upload-bytes", help="The largest working directory.")]


@app.default
@app.command(name="list")
def list_projects(*, json: JsonFlag = False) -> int:
    """List the projects you may see."""
    with connect() as shoal:
        found = shoal.projects.all()
    if json:
        print_json(found)
        return 0
    rows = (
        (p["name"], p.get("role") or "-", f"{p.get('open_jobs', 0)}/{p['max_open_jobs']}", p["max_priority"],
         size(p["max_upload_bytes"]))
        for p in found
    )  # fmt: skip
    print_table(("PROJECT", "YOU", "OPEN JOBS", "MAX PRIORITY", "MAX UPLOAD"), rows, elastic="PROJECT")
    return 0


@app.command
def create(
    name: Name,
    *,
    max_open_jobs: MaxOpenJobs = None,
    max_priority: MaxPriority = None,
    max_upload: MaxUpload = None,
    json: JsonFlag = False,
) -> int:
    """Make a project."""
    with connect() as shoal:
        made = shoal.projects.create(
            name, max_open_jobs=max_open_jobs, max_priority=max_priority, max_upload_bytes=max_upload
        )
    return _print(made, f"project {one_line(made['name'])} made", json=json)


@app.command
def update(
    name: Name,
    *,
    max_open_jobs: MaxOpenJobs = None,
    max_priority: MaxPriority = None,
    max_upload: MaxUpload = None,
    json: JsonFlag = False,
) -> int:
    """Change a project's quotas; what is not named stays."""
    with connect() as shoal:
        after = shoal.projects.update(
            name, max_open_jobs=max_open_jobs, max_priority=max_priority, max_upload_bytes=max_upload
        )
    return _print(after, f"project {one_line(after['name'])} changed", json=json)


@app.command
def members(name: Name, *, json: JsonFlag = False) -> int:
    """List who is in a project, and as what."""
    with connect() as shoal:
        found = shoal.projects.members(name)
    if json:
        print_json(found)
    else:
        print_table(("USER", "ROLE"), ((m["user"], m["role"]) for m in found), elastic="USER")
    return 0


@app.command
def add(
    name: Name,
    user: UserName,
    *,
    role: Annotated[Role, Parameter(help="`member` if not given.")] = "member",
    json: JsonFlag = False,
) -> int:
    """Add a user to a project, or change their role in it."""
    with connect() as shoal:
        made = shoal.projects.set_member(name, user, role)
    return _print(
        made, f"{one_line(made['user'])} is {one_line(made['role'])} of {one_line(name)}", json=json
    )


@app.command
def remove(name: Name, user: UserName, *, json: JsonFlag = False) -> int:
    """Take a user out of a project."""
    with connect() as shoal:
        shoal.projects.remove_member(name, user)
    return _print(
        {"user": user, "project": name}, f"{one_line(user)} removed from {one_line(name)}", json=json
    )


def _print(data: dict[str, Any], sentence: str, *, json: bool) -> int:
    if json:
        print_json(data)
    else:
        print(sentence)
    return 0
