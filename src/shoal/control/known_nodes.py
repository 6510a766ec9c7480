"""The nodes as of the last look, as the scheduler sees them, and which requests they could hold."""

from __future__ import annotations

from shoal.control.snapshot import node_view
from shoal.model.node import Node
from shoal.model.request import Request
from shoal.scheduler import Explanation, NodeView, Planner, impossible

MAX_KNOWN = 1024
"""Requests remembered as possible."""


class KnownNodes:
    """None yet, until the first look."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._possible: set[Request] = set()

    def tell(self, planner: Planner, nodes: list[Node]) -> bool:
        """Tell the planner what is new about them. Whether anything is."""
        if nodes == self._nodes:
            return False
        before = {node.name: node for node in self._nodes}
        for node in nodes:
            if before.pop(node.name, None) != node:
                planner.set_node(node_view(node))
        for name in before:
            planner.drop_node(name)
        self._nodes = nodes
        self._possible.clear()
        return True

    @property
    def pools(self) -> frozenset[str]:
        return frozenset(node.facts.pool for node in self._nodes)

    def views(self) -> tuple[NodeView, ...]:
        """By name."""
        return tuple(node_view(node) for node in sorted(self._nodes, key=lambda node: node.name))

    def never_fits(self, request: Request) -> Explanation | None:
        """Why no set of these nodes could ever hold it; None when one could, or no node is known."""
        if request in self._possible:
            return None
        never = impossible(request, self.views())
        if never is None and len(self._possible) < MAX_KNOWN:
            self._possible.add(request)
        return never
