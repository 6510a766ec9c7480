"""Whole nodes against what a project may have: they count by all that they have, not by what was asked.

Each node of a gang must be one of which the project may have as many as the gang needs. So whatever nodes are
chosen of those that are left, together they pass no ceiling.
"""

from __future__ import annotations

from shoal.scheduler.amounts import Amounts, Demand
from shoal.scheduler.devices import taken_whole
from shoal.scheduler.possible import Suitable, can_hold
from shoal.scheduler.tree import Refusal, Tree


class WholeNodes:
    """What a project is refused of the nodes that could serve an exclusive demand."""

    def __init__(self, tree: Tree, project: str, demand: Demand, suitable: Suitable) -> None:
        self._demand = demand
        self._nodes = suitable.without(demand.excluded).nodes
        asked = {node.whole: taken_whole(node.whole, demand.min_nodes) for node in self._nodes}
        told = {whole: tree.refusal(project, amount) for whole, amount in asked.items()}
        self._refused: dict[Amounts, Refusal] = {whole: no for whole, no in told.items() if no is not None}

    def allowed(self) -> Demand:
        """The demand, with the nodes that are too large for the project excluded."""
        too_large = frozenset(node.name for node in self._nodes if node.whole in self._refused)
        return self._demand._replace(excluded=self._demand.excluded | too_large)

    def refusal(self) -> Refusal | None:
        """Of the least that would do, where only nodes that are too large could serve."""
        if not self._refused or not can_hold(self._demand, self._nodes):
            return None
        if can_hold(self._demand, [node for node in self._nodes if node.whole not in self._refused]):
            return None
        return min(self._refused.values(), key=lambda no: (no.asked, no.by, no.device))
