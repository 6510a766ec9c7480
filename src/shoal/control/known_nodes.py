"""The nodes as of the last look, as the scheduler sees them, and which requests they could hold."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.control.snapshot import node_view
from shoal.model.node import Node
from shoal.model.request import Request
from shoal.scheduler import Explanation, NodeView, Planner, Why, impossible, missed

MAX_KNOWN = 1024
"""Requests remembered as possible."""


class KnownNodes:
    """None yet, until the first look. The planner is not told of those that are gone."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._gone: list[Node] = []
        self._possible: set[Request] = set()

    def tell(self, planner: Planner, nodes: list[Node]) -> bool:
        """Tell the planner what is new about them. Whether anything is."""
        there = [node for node in nodes if not node.is_gone]
        self._gone = [node for node in nodes if node.is_gone]
        if there == self._nodes:
            return False
        before = {node.name: node for node in self._nodes}
        for node in there:
            if before.pop(node.name, None) != node:
                planner.set_node(node_view(node))
        for name in before:
            planner.drop_node(name)
        self._nodes = there
        self._possible.clear()
        return True

    @property
    def pools(self) -> frozenset[str]:
        return frozenset(node.facts.pool for node in self._nodes)

    def is_alive(self, name: str) -> bool:
        """Whether it answers, as its engine last said."""
        return any(node.name == name and node.facts.is_alive for node in self._nodes)

    def views(self) -> tuple[NodeView, ...]:
        """By name."""
        return _views(self._nodes)

    def never_fits(self, request: Request) -> Explanation | None:
        """Why no set of these nodes could ever hold it; None when one could, or no node is known."""
        if request in self._possible:
            return None
        never = impossible(request, self.views())
        if never is None and len(self._possible) < MAX_KNOWN:
            self._possible.add(request)
        return never and self.with_gone(never, request)

    def with_gone(self, told: Explanation, request: Request) -> Explanation:
        """The same with the nodes that are gone, if it could be held with them."""
        if told.why not in (Why.NEVER_FITS, Why.NO_NODES) or not self._gone:
            return told
        sentence = missed(request, self.views(), _views(self._gone))
        return msgspec.structs.replace(told, sentence=f"{told.sentence}; {sentence}") if sentence else told


def _views(nodes: Iterable[Node]) -> tuple[NodeView, ...]:
    return tuple(node_view(node) for node in sorted(nodes, key=lambda node: node.name))
