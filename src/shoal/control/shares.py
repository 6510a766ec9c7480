"""What each project holds now, and how much it had lately against its part: for people to look at."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.control.tree import project_view
from shoal.control.usage import hold_all, recall
from shoal.model.people import Project
from shoal.scheduler.devices import Amount, held_by
from shoal.scheduler.fair import Fair
from shoal.scheduler.tree import Tree
from shoal.store import Tx


class Share(msgspec.Struct, frozen=True):
    held: Amount
    """By it and all below it."""
    standing: float | None
    """Its part of what it and its siblings had lately, over the part its weight gives it: 2.0 had twice
    its part. None while none of them had anything."""


def shares(tx: Tx, half_life_s: float, now: float) -> dict[str, Share]:
    """Of every project there is."""
    projects = tx.people.projects()
    tree = Tree(map(project_view, projects))
    fair = Fair(tree, half_life_s)
    fair.tell(recall(tx, half_life_s).usages)
    hold_all(tx, fair)
    for job, attempt in tx.attempts.holding():
        tree.take(job.project, held_by(attempt.allocation))
    siblings: dict[str | None, list[Project]] = {}
    for project in projects:
        siblings.setdefault(project.parent, []).append(project)
    return {
        project.name: Share(tree.held(project.name), _standing(fair, project, siblings[project.parent], now))
        for project in projects
    }


def _standing(fair: Fair, project: Project, siblings: Iterable[Project], now: float) -> float | None:
    used = {one.name: fair.total(one.name, now) for one in siblings}
    weight = sum(one.weight for one in siblings)
    if not sum(used.values()):
        return None
    return used[project.name] / sum(used.values()) * weight / project.weight
