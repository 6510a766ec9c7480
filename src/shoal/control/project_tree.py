"""The tree of projects as it is recorded: which changes it accepts, and how the scheduler sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

import msgspec

from shoal.errors import SpecError
from shoal.model.job import ResourceRequest
from shoal.model.people import DeviceAmounts, Project
from shoal.scheduler.explain.limits import refusal_facts, refusal_hint, refusal_sentence
from shoal.scheduler.facts.amounts import ProjectInfo, demand_of, minimum_devices
from shoal.scheduler.order.project_tree import ProjectTree
from shoal.spec.error_text import or_nearest
from shoal.spec.quantity import UNITS, write_devices
from shoal.store import Tx

MAX_DEPTH = 8
ChildProjects = Mapping[str | None, list[Project]]
TREE_HINT = "see the tree with `shoal project`"


def project_view(project: Project) -> ProjectInfo:
    return ProjectInfo(
        name=project.name,
        parent=project.parent,
        quota=project.quota,
        limit=project.limit,
        borrow=project.borrow,
        weight=project.weight,
    )


def check_tree(projects: Iterable[Project], changed: Project) -> None:
    """Raise `SpecError` if a change would leave a tree that cannot keep what it promises."""
    by_name = {project.name: project for project in projects} | {changed.name: changed}
    ancestors = _new_ancestry(by_name, changed)
    _check_depth(by_name)
    _check_bounds(changed)
    children: dict[str | None, list[Project]] = {}
    for project in by_name.values():
        children.setdefault(project.parent, []).append(project)
    for project in ancestors:
        _check_promises(children, project)


def ancestry(tx: Tx, project: Project) -> list[Project]:
    """Return the project and the projects above it."""
    ancestors = [project]
    while (parent := ancestors[-1].parent) is not None and (
        above := tx.people.get_project(parent)
    ) is not None:
        ancestors.append(above)
    return ancestors


def check_project_limits(tx: Tx, project: Project, request: ResourceRequest, subject: str) -> None:
    """Raise `SpecError` if the project could not have the request even if it held nothing else."""
    ancestors = ancestry(tx, project)
    if all(above.limit is None and above.borrow is None for above in ancestors):
        return
    refusal = ProjectTree(map(project_view, ancestors)).refusal(
        project.name, minimum_devices(demand_of(request))
    )
    if refusal is not None:
        raise SpecError(
            f"{subject} {refusal_sentence(refusal)}", hint=refusal_hint(refusal), **refusal_facts(refusal)
        )


def _new_ancestry(by_name: Mapping[str, Project], changed: Project) -> list[Project]:
    ancestors = [changed]
    while (parent := ancestors[-1].parent) is not None:
        if parent not in by_name:
            near = or_nearest(parent, by_name)
            raise SpecError(f"there is no project `{parent}` to be part of{near}", hint=TREE_HINT)
        if parent == changed.name:
            circle = " is part of ".join(f"`{project.name}`" for project in [*ancestors, changed])
            raise SpecError(f"a project cannot be part of itself: {circle}", hint=TREE_HINT)
        ancestors.append(by_name[parent])
    return ancestors


def _check_depth(by_name: Mapping[str, Project]) -> None:
    for project in by_name.values():
        depth, above = 1, project.parent
        while above is not None and depth <= MAX_DEPTH:
            depth, above = depth + 1, by_name[above].parent
        if depth > MAX_DEPTH:
            raise SpecError(
                f"project `{project.name}` would be more than {MAX_DEPTH} levels below the top",
                hint=TREE_HINT,
            )


def _check_bounds(project: Project) -> None:
    quota, limit, borrow = (_amounts(bound) for bound in (project.quota, project.limit, project.borrow))
    for unit in UNITS:
        if quota.get(unit, 0) > limit.get(unit, inf):
            raise SpecError(
                f"project `{project.name}`: a quota of {_amount_text(unit, quota[unit])} "
                "is above its limit of "
                f"{_amount_text(unit, limit[unit])}",
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


def _check_promises(children: ChildProjects, project: Project) -> None:
    """Raise `SpecError` unless the project can give what is guaranteed to the projects below it, together."""
    for unit in UNITS:
        quota, limit, borrow = (
            _amounts(bound).get(unit) for bound in (project.quota, project.limit, project.borrow)
        )
        borrowed = inf if quota is None or borrow is None else quota + borrow
        ceiling = borrowed if limit is None else min(limit, borrowed)
        promised = _promised(children, project.name, unit)
        if promised > ceiling:
            raise SpecError(
                f"the projects in `{project.name}` would have quotas "
                f"of {_amount_text(unit, promised)} together; "
                f"`{project.name}` may have at most {_amount_text(unit, ceiling)}",
                hint=f"lower a quota, or raise `{project.name}`: `shoal project update {project.name} "
                f"--limit {write_devices({unit: promised})}`",
            )


def _promised(children: ChildProjects, name: str, unit: str) -> float:
    """Return the sum over its children: each child's quota, or what that child has promised in turn if that
    is more.
    """
    return sum(
        max(_amounts(child.quota).get(unit, 0), _promised(children, child.name, unit))
        for child in children.get(name, ())
    )


def _amounts(devices: DeviceAmounts | None) -> dict[str, float]:
    named = msgspec.structs.asdict(devices) if devices else {}
    return {unit: amount for unit, amount in named.items() if amount is not None}


def _amount_text(unit: str, amount: float) -> str:
    return f"{amount:g} {unit.upper()[:-1]}{'' if amount == 1 else 's'}"
