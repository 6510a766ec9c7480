"""`shoal project`: the tree of projects, their quotas and their members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.output import print_json, print_table
from shoal.cli.text import number, one_line, size
from shoal.errors import NotFound, SpecError
from shoal.spec.error_text import or_nearest
from shoal.spec.quantity import UNITS, read_devices, write_devices

ProjectData = dict[str, Any]
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1e6  # as the API takes them

app = App(name="project", help="Manage projects, their quotas and members.")
Name = Annotated[str, Parameter(help="The project's name.")]
Role = Literal["viewer", "member", "lead"]
UserName = Annotated[str, Parameter(help="The user's name.")]
MaxOpenJobs = Annotated[int | None, Parameter(help="Quota on jobs that have not ended.")]
MaxJobsPerDay = Annotated[int | None, Parameter(help="Jobs submitted in a day; array elements count.")]
MaxPriority = Annotated[int | None, Parameter(help="The highest priority a member may request.")]
MaxUpload = Annotated[
    int | None, Parameter(name="--max-upload-bytes", help="The largest working directory, in bytes.")
]


Parent = Annotated[str | None, Parameter(help="The parent project; `none`: no parent.")]
Quota = Annotated[str | None, Parameter(help="Guaranteed: `64` GPUs, or `gpus=64,cpus=512`; `none`.")]
Limit = Annotated[str | None, Parameter(help="The project never holds more than this; `none`: no limit.")]
Borrow = Annotated[
    str | None, Parameter(help="Idle devices it may take above its quota: `0` for none, `none` for no limit.")
]
Weight = Annotated[float | None, Parameter(help="Its weight among its siblings in sharing devices.")]


@app.default
@app.command(name="list")
def list_projects(*, json: JsonFlag = False) -> int:
    """Show the tree of projects you may see: what each holds, its quota, and its recent usage."""
    with connect() as shoal:
        projects = shoal.projects.all()
    if json:
        print_json(projects)
        return 0
    heads = ("PROJECT", "YOU", "OPEN", "HOLDS", "QUOTA", "BORROW", "LIMIT", "WEIGHT", "STANDING")
    print_table(heads, (row(depth, project) for depth, project in in_tree(projects)), elastic="PROJECT")
    return 0


@app.command
def show(name: Name, *, json: JsonFlag = False) -> int:
    """Show all about one project."""
    with connect() as shoal:
        projects = shoal.projects.all()
    project = next((candidate for candidate in projects if candidate["name"] == name), None)
    if project is None:
        near = or_nearest(name, (str(candidate["name"]) for candidate in projects))
        raise NotFound(f"no project `{one_line(name)}` that you may see{near}", hint="shoal project")
    if json:
        print_json(project)
    else:
        print("\n".join(describe(project)))
    return 0


@app.command
def create(
    name: Name,
    *,
    parent: Parent = None,
    quota: Quota = None,
    borrow: Borrow = None,
    limit: Limit = None,
    weight: Weight = None,
    max_open_jobs: MaxOpenJobs = None,
    max_jobs_per_day: MaxJobsPerDay = None,
    max_priority: MaxPriority = None,
    max_upload: MaxUpload = None,
    json: JsonFlag = False,
) -> int:
    """Create a project."""
    with connect() as shoal:
        project = shoal.projects.create(
            name,
            parent=parent,
            quota=_devices("quota", quota),
            borrow=_devices("borrow", borrow),
            limit=_devices("limit", limit),
            weight=_weight(weight),
            max_open_jobs=max_open_jobs,
            max_jobs_per_day=max_jobs_per_day,
            max_priority=max_priority,
            max_upload_bytes=max_upload,
        )
    return _print(project, f"project {one_line(project['name'])} made", json=json)


@app.command
def update(
    name: Name,
    *,
    parent: Parent = None,
    quota: Quota = None,
    borrow: Borrow = None,
    limit: Limit = None,
    weight: Weight = None,
    max_open_jobs: MaxOpenJobs = None,
    max_jobs_per_day: MaxJobsPerDay = None,
    max_priority: MaxPriority = None,
    max_upload: MaxUpload = None,
    json: JsonFlag = False,
) -> int:
    """Change a project's parent, quotas and limits; flags that are not given stay unchanged."""
    changes = (
        parent,
        quota,
        borrow,
        limit,
        weight,
        max_open_jobs,
        max_jobs_per_day,
        max_priority,
        max_upload,
    )
    if all(value is None for value in changes):
        raise SpecError("nothing to change", hint=f"`shoal project update {one_line(name)} --quota 8`")
    with connect() as shoal:
        after = shoal.projects.update(
            name,
            parent=parent,
            quota=_devices("quota", quota),
            borrow=_devices("borrow", borrow),
            limit=_devices("limit", limit),
            weight=_weight(weight),
            max_open_jobs=max_open_jobs,
            max_jobs_per_day=max_jobs_per_day,
            max_priority=max_priority,
            max_upload_bytes=max_upload,
        )
    return _print(after, f"project {one_line(after['name'])} changed", json=json)


@app.command
def members(name: Name, *, json: JsonFlag = False) -> int:
    """List the members of a project and their roles."""
    with connect() as shoal:
        memberships = shoal.projects.members(name)
    if json:
        print_json(memberships)
    else:
        print_table(("USER", "ROLE"), ((m["user"], m["role"]) for m in memberships), elastic="USER")
    return 0


@app.command
def add(
    name: Name,
    user: UserName,
    *,
    role: Annotated[Role, Parameter(help="By default `member`.")] = "member",
    json: JsonFlag = False,
) -> int:
    """Add a user to a project, or change their role in it."""
    with connect() as shoal:
        membership = shoal.projects.set_member(name, user, role)
    return _print(
        membership,
        f"{one_line(membership['user'])} is {one_line(membership['role'])} of {one_line(name)}",
        json=json,
    )


@app.command
def remove(name: Name, user: UserName, *, json: JsonFlag = False) -> int:
    """Remove a user from a project."""
    with connect() as shoal:
        shoal.projects.remove_member(name, user)
    return _print(
        {"user": user, "project": name}, f"{one_line(user)} removed from {one_line(name)}", json=json
    )


def _devices(flag: str, text: str | None) -> ProjectData | str | None:
    """Read devices. `--borrow 0` means no device at all, whatever the quota names."""
    if text is None or text == "none":
        return text
    if flag == "borrow" and text == "0":
        return {"gpus": 0, "cpus": 0}
    try:
        return read_devices(text)
    except ValueError as wrong:
        raise SpecError(f"`--{flag}`: {wrong}", hint="see `shoal project update --help`") from None


def _weight(value: float | None) -> float | None:
    if value is not None and not LEAST_WEIGHT <= value <= MOST_WEIGHT:
        raise SpecError(f"`--weight` is from 0.001 to 1000000, not `{number(value)}`", hint="`--weight 2`")
    return value


def in_tree(projects: Sequence[ProjectData]) -> Iterator[tuple[int, ProjectData]]:
    """Yield each project with its depth, below its parent, by name. A project whose parent you may not see
    stands at the top.
    """
    names = {project["name"] for project in projects}
    below: dict[str | None, list[ProjectData]] = {}
    for project in sorted(projects, key=lambda project: str(project["name"])):
        parent = project.get("parent")
        below.setdefault(parent if parent in names else None, []).append(project)
    waiting = [(0, project) for project in reversed(below.get(None, []))]
    while waiting:
        depth, project = waiting.pop()
        yield depth, project
        waiting += [(depth + 1, child) for child in reversed(below.get(project["name"], []))]


def row(depth: int, project: ProjectData) -> tuple[str, ...]:
    return (
        f"└{'─' * (depth - 1)} {project['name']}" if depth else project["name"],
        project.get("role") or "-",
        f"{project.get('open_jobs', 0)}",
        holds(project),
        *(write_devices(project.get(name)) for name in ("quota", "borrow", "limit")),
        number(project.get("weight", 1.0)),
        standing(project),
    )


def holds(project: ProjectData) -> str:
    """Return the held devices that the quota or limit names; without either, GPUs if any, else CPUs."""
    held = project.get("held") or {}
    bounds = [project.get(name) or {} for name in ("quota", "limit")]
    named = [unit for unit in UNITS if any(bound.get(unit) is not None for bound in bounds)]
    return write_devices(
        {unit: held.get(unit, 0) for unit in named or ["gpus" if held.get("gpus") else "cpus"]}
    )


def standing(project: ProjectData) -> str:
    value = project.get("standing")
    return "-" if value is None else f"{value:.2f}"


def describe(project: ProjectData) -> list[str]:
    facts = {
        "project": one_line(project["name"]),
        "part of": one_line(project.get("parent") or "-"),
        "you": one_line(project.get("role") or "-"),
        "holds": holds(project),
        **{name: write_devices(project.get(name)) for name in ("quota", "borrow", "limit")},
        "weight": number(project.get("weight", 1.0)),
        "standing": f"{standing(project)} of its fair share lately (less than 1 comes first)",
        "open jobs": f"{project.get('open_jobs', 0)} of at most {project['max_open_jobs']}",
        "a day": f"at most {project['max_jobs_per_day']} jobs submitted",
        "priority": f"at most {project['max_priority']}",
        "upload": f"at most {size(project['max_upload_bytes'])}",
    }
    return [f"{name:<12} {value}" for name, value in facts.items()]


def _print(data: dict[str, Any], sentence: str, *, json: bool) -> int:
    if json:
        print_json(data)
    else:
        print(sentence)
    return 0
