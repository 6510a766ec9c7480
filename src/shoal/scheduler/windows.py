"""Maintenance and reservations: who may start on a node that is, or soon will be, for others.

Outside its window a node is like any other, but whoever starts there must be gone, by its time limit,
before the window begins: a job without a limit may not start there until the window is over. In the window
an outsider starts nowhere on it. Everybody is an outsider to maintenance; to a reservation, all but the
jobs of its project and of those below that. It never stands in their way, before, in or after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from shoal.model.window import Window
from shoal.scheduler.tree import Tree

Numbers = tuple[int, ...]
"""Windows by their place in `Windows.all`."""
NONE: Numbers = ()
Span = tuple[float, float]
"""A job may start at its two ends and at any time between."""


class Hours:
    """When a job of one project and time limit may start on the nodes that have windows for it."""

    def __init__(self, by_node: dict[str, list[Window]], limit_s: float) -> None:
        self._by_node = by_node
        self._limit_s = limit_s
        self.names = by_node.keys()
        windows = [window for found in by_node.values() for window in found]
        self.opens = sorted({window.until_at for window in windows})
        """When starts become possible again somewhere."""
        self.closes = sorted({window.from_at - limit_s for window in windows})
        """After which moments they are not any more."""

    def is_open(self, name: str, at: float) -> bool:
        """Whether it may start there then."""
        return all(
            at + self._limit_s <= window.from_at or at >= window.until_at
            for window in self._by_node.get(name, ())
        )

    def spans(self, name: str, since: float) -> list[Span]:
        """From `since` on. The last one has no end."""
        spans: list[Span] = []
        for window in self._by_node[name]:
            if since + self._limit_s <= window.from_at:
                spans.append((since, window.from_at - self._limit_s))
            since = max(since, window.until_at)
        return [*spans, (since, inf)]


class Windows:
    """Those that are declared, the first to begin first."""

    def __init__(self, tree: Tree) -> None:
        self.all: tuple[Window, ...] = ()
        self._tree = tree
        self._nodes: dict[Numbers, frozenset[str]] = {}

    def change(self, windows: Iterable[Window]) -> bool:
        """Replace them all. Whether that is anything new."""
        told = tuple(sorted(windows, key=lambda window: (window.from_at, window.window_id)))
        if told == self.all:
            return False
        self.all = told
        self._nodes.clear()
        return True

    def shut(self, project: str, now: float, ends_at: float) -> Numbers:
        """Those that bar a job of the project which would start now and may last until `ends_at`."""
        if not self.all:
            return NONE
        return tuple(
            number
            for number, window in enumerate(self.all)
            if now < window.until_at and ends_at > window.from_at and not self.serves(window, project)
        )

    def nodes_of(self, numbers: Numbers) -> frozenset[str]:
        found = self._nodes.get(numbers)
        if found is None:
            found = self._nodes[numbers] = frozenset(n for number in numbers for n in self.all[number].nodes)
        return found

    def hours(self, project: str, limit_s: float, now: float) -> Hours | None:
        """None when no window, now or later, is in the way of the project."""
        if not self.all:
            return None
        by_node: dict[str, list[Window]] = {}
        for number in self.shut(project, now, inf):
            window = self.all[number]
            for name in window.nodes:
                by_node.setdefault(name, []).append(window)
        return Hours(by_node, limit_s) if by_node else None

    def serves(self, window: Window, project: str) -> bool:
        """Whether it is kept for jobs of that project."""
        return window.project is not None and any(
            view.name == window.project for view in self._tree.line(project)
        )

    def next_change(self, now: float) -> float:
        """When the next one begins or ends; infinity when none does."""
        if not self.all:
            return inf
        moments = (moment for window in self.all for moment in (window.from_at, window.until_at))
        return min((moment for moment in moments if moment > now), default=inf)
