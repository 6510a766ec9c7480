"""Whether the planner knows the tree of projects as it is recorded."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.control.tree import project_view
from shoal.model.people import Project
from shoal.scheduler import Planner
from shoal.scheduler.fair import Usage


class KnownProjects:
    """None yet, until the first look."""

    def __init__(self) -> None:
        self._was_told = False

    def tell(self, planner: Planner, projects: Sequence[Project], usages: Sequence[Usage]) -> None:
        """`usages`: what they had, as of the first look; later the planner knows itself."""
        planner.set_projects(map(project_view, projects), () if self._was_told else usages)
        self._was_told = True
