"""The tree of projects as it is recorded: which changes it takes, and how the scheduler is shown it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

import msgspec

from shoal.errors import SpecError
from shoal.model.people import Devices, Project
from shoal.model.request import Request
from shoal.scheduler.amounts import demand_of
from shoal.scheduler.devices import ProjectView, asked_by
from shoal.scheduler.sharing import facts, hint, sentence
from shoal.scheduler.tree import Tree
from shoal.spec.devices import UNITS, write_devices
from shoal.spec.wording import or_nearest
from shoal.store import Tx

MAX_DEPTH = 8
Below = Mapping[str | None, list[Project]]
LOOK = "see the tree with `shoal project`"


def project_view(project: Project) -> ProjectView:
    return ProjectView(
        name=project.name,
        parent=project.parent,
        quota=project.quota,
        limit=project.limit,
        borrow=project.borrow,
        weight=project.weight,
    )


def check_tree(projects: Iterable[Project], changed: Project) -> None:
    """Raise `SpecError` where a change would leave a tree that cannot keep what it promises."""
    by_name = {project.name: project for project in projects} | {changed.name: changed}
    line = _line(by_name, changed)
    _check_depth(by_name)
    _check_bounds(changed)
    below: dict[str | None, list[Project]] = {}
    for project in by_name.values():
        below.setdefault(project.parent, []).append(project)
    for project in line:
        _check_promises(below, project)


def line_of(tx: Tx, project: Project) -> list[Project]:
    """The project and those above it."""
    line = [project]
    while (parent := line[-1].parent) is not None and (above := tx.people.get_project(parent)) is not None:
        line.append(above)
    return line


def check_share(tx: Tx, project: Project, request: Request, who: str) -> None:
    """Raise `SpecError` where the project could not have what is asked for, though it held nothing else."""
    line = line_of(tx, project)
    if all(above.limit is None and above.borrow is None for above in line):
        return
    refusal = Tree(map(project_view, line)).refusal(project.name, asked_by(demand_of(request)))
    if refusal is not None:
        raise SpecError(f"{who} {sentence(refusal)}", hint=hint(refusal), **facts(refusal))


def _line(by_name: Mapping[str, Project], changed: Project) -> list[Project]:
    line = [changed]
    while (parent := line[-1].parent) is not None:
        if parent not in by_name:
            near = or_nearest(parent, by_name)
            raise SpecError(f"there is no project `{parent}` to be part of{near}", hint=LOOK)
        if parent == changed.name:
            circle = " is part of ".join(f"`{one.name}`" for one in [*line, changed])
            raise SpecError(f"a project cannot be part of itself: {circle}", hint=LOOK)
        line.append(by_name[parent])
    return line


def _check_depth(by_name: Mapping[str, Project]) -> None:
    for project in by_name.values():
        depth, above = 1, project.parent
        while above is not None and depth <= MAX_DEPTH:
            depth, above = depth + 1, by_name[above].parent
        if depth > MAX_DEPTH:
            raise SpecError(
                f"project `{project.name}` would be more than {MAX_DEPTH} levels below the top", hint=LOOK
            )


def _check_bounds(project: Project) -> None:
    quota, limit, borrow = (_amounts(bound) for bound in (project.quota, project.limit, project.borrow))
    for unit in UNITS:
        if quota.get(unit, 0) > limit.get(unit, inf):
            raise SpecError(
                f"project `{project.name}`: a quota of {_told(unit, quota[unit])} is above its limit of "
                f"{_told(unit, limit[unit])}",
                hint=f"raise the limit: `--limit {write_devices({unit: quota[unit]})}`, or lower the quota",
            )
        if borrow.get(unit, 0) > 0 and unit not in quota:
            raise SpecError(
                f"project `{project.name}` has no quota of {unit.upper()[:-1]}s to borrow above",
                hint="give it one with `--quota`, or bound all that it may have: "
                f"`--limit {write_devices({unit: borrow[unit]})}`",
            )
    if project.borrow is not None and project.quota is None:
        raise SpecError(
            f"project `{project.name}` has no quota to borrow above",
            hint="set one: `--quota 8`, or take the bound away: `--borrow none`",
        )


def _check_promises(below: Below, project: Project) -> None:
    """What is guaranteed to those below it, together, must be possible."""
    for unit in UNITS:
        quota, limit, borrow = (
            _amounts(bound).get(unit) for bound in (project.quota, project.limit, project.borrow)
        )
        borrowed = inf if quota is None or borrow is None else quota + borrow
        ceiling = borrowed if limit is None else min(limit, borrowed)
        promised = _promised(below, project.name, unit)
        if promised > ceiling:
            raise SpecError(
                f"the projects in `{project.name}` would have quotas of {_told(unit, promised)} together; "
                f"`{project.name}` may have at most {_told(unit, ceiling)}",
                hint=f"lower a quota, or raise `{project.name}`: `shoal project update {project.name} "
                f"--limit {write_devices({unit: promised})}`",
            )


def _promised(below: Below, name: str, unit: str) -> float:
    """Of each project in it: its quota, or what it has promised in turn, if that is more."""
    return sum(
        max(_amounts(child.quota).get(unit, 0), _promised(below, child.name, unit))
        for child in below.get(name, ())
    )


def _amounts(devices: Devices | None) -> dict[str, float]:
    named = msgspec.structs.asdict(devices) if devices else {}
    return {unit: amount for unit, amount in named.items() if amount is not None}


def _told(unit: str, amount: float) -> str:
    return f"{amount:g} {unit.upper()[:-1]}{'' if amount == 1 else 's'}"
