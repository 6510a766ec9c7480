"""Maintenance and reservations: when a job may start on a node that is, or soon will be, set aside.

Outside its window a node is like any other. But a job that starts there must have ended, by its time limit,
before the window begins; a job without a limit may not start there until the window is over. Inside the
window an outsider may not start on the node. Maintenance makes every job an outsider. To a reservation, all
jobs are outsiders except those of its project and of the projects below that; it never blocks them, before,
in or after it.

`first_opening` finds when a gang whose nodes have windows can start: the first time at which enough of them
are free and none would meet a window before the gang must have ended.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from math import inf

from shoal.model.node import Window
from shoal.scheduler.facts.amounts import Demand
from shoal.scheduler.facts.capacity import Capacity
from shoal.scheduler.order.project_tree import ProjectTree

WindowNumbers = tuple[int, ...]
"""Windows by their index in `WindowSchedule.all`."""
NO_WINDOWS: WindowNumbers = ()
OpenSpan = tuple[float, float]
"""A job may start at its two ends and at any time between."""


class OpenHours:
    """When a job of one project and time limit may start on the nodes that have windows for it."""

    def __init__(self, by_node: dict[str, list[Window]], limit_s: float) -> None:
        self._by_node = by_node
        self._limit_s = limit_s
        self.names = by_node.keys()
        windows = [window for node_windows in by_node.values() for window in node_windows]
        self.opens = sorted({window.until_at for window in windows})
        """When starts become possible again on some node."""
        self.closes = sorted({window.from_at - limit_s for window in windows})
        """After these times starts are not possible any more."""

    def is_open(self, name: str, at: float) -> bool:
        """Whether the job may start on that node at that time."""
        return all(
            at + self._limit_s <= window.from_at or at >= window.until_at
            for window in self._by_node.get(name, ())
        )

    def spans(self, name: str, since: float) -> list[OpenSpan]:
        """Return the spans from `since` on. The last one has no end."""
        spans: list[OpenSpan] = []
        for window in self._by_node[name]:
            if since + self._limit_s <= window.from_at:
                spans.append((since, window.from_at - self._limit_s))
            since = max(since, window.until_at)
        return [*spans, (since, inf)]


class WindowSchedule:
    """The declared windows, the first to begin first."""

    def __init__(self, tree: ProjectTree) -> None:
        self.all: tuple[Window, ...] = ()
        self._tree = tree
        self._nodes: dict[WindowNumbers, frozenset[str]] = {}

    def change(self, windows: Iterable[Window]) -> bool:
        """Replace all windows. Return whether anything changed."""
        ordered = tuple(sorted(windows, key=lambda window: (window.from_at, window.window_id)))
        if ordered == self.all:
            return False
        self.all = ordered
        self._nodes.clear()
        return True

    def blocking(self, project: str, now: float, ends_at: float) -> WindowNumbers:
        """Return the windows that bar a job of the project which would start now and may last until
        `ends_at`.
        """
        if not self.all:
            return NO_WINDOWS
        return tuple(
            number
            for number, window in enumerate(self.all)
            if now < window.until_at and ends_at > window.from_at and not self.serves(window, project)
        )

    def nodes_of(self, numbers: WindowNumbers) -> frozenset[str]:
        names = self._nodes.get(numbers)
        if names is None:
            names = self._nodes[numbers] = frozenset(n for number in numbers for n in self.all[number].nodes)
        return names

    def open_hours(self, project: str, limit_s: float, now: float) -> OpenHours | None:
        """Return None if no window, now or later, is in the project's way."""
        if not self.all:
            return None
        by_node: dict[str, list[Window]] = {}
        for number in self.blocking(project, now, inf):
            window = self.all[number]
            for name in window.nodes:
                by_node.setdefault(name, []).append(window)
        return OpenHours(by_node, limit_s) if by_node else None

    def serves(self, window: Window, project: str) -> bool:
        """Whether the window is reserved for jobs of that project."""
        return window.project is not None and any(
            view.name == window.project for view in self._tree.ancestry(project)
        )

    def next_change(self, now: float) -> float:
        """Return when the next window begins or ends; infinity if none does."""
        if not self.all:
            return inf
        moments = (moment for window in self.all for moment in (window.from_at, window.until_at))
        return min((moment for moment in moments if moment > now), default=inf)


NodeFreeAt = tuple[float, str]
"""From when a node could hold the need at the latest, and its name."""
Opening = tuple[float, list[str]]


def first_opening(
    demand: Demand, waits: Sequence[NodeFreeAt], open_hours: OpenHours, capacity: Capacity, now: float
) -> Opening | None:
    """Return the time and the nodes; None if no time is known. `waits`: the earliest first."""
    timed = [wait for wait in waits if wait[0] < inf]
    if demand.within is None or not demand.is_close_required:
        return _first_shared_span(demand.min_nodes, timed, open_hours, now)
    domains: dict[str, list[NodeFreeAt]] = {}
    for at, name in timed:
        domain = capacity.nodes[name].label(demand.within)
        if domain is not None:
            domains.setdefault(domain, []).append((at, name))
    openings = (
        _first_shared_span(demand.min_nodes, domains[domain], open_hours, now) for domain in sorted(domains)
    )
    return min(
        (opening for opening in openings if opening is not None), key=lambda opening: opening[0], default=None
    )


def _first_shared_span(
    count: int, waits: Iterable[NodeFreeAt], open_hours: OpenHours, now: float
) -> Opening | None:
    of_node: dict[NodeFreeAt, list[OpenSpan]] = {}
    num_plain = 0
    for wait in waits:
        since = max(wait[0], now)
        if wait[1] in open_hours.names:
            of_node[wait] = open_hours.spans(wait[1], since)
        elif num_plain < count:
            # Nodes without windows stay open once they are open, so at most `count` of them matter.
            num_plain += 1
            of_node[wait] = [(since, inf)]
    spans = [span for node_spans in of_node.values() for span in node_spans]
    begins, ends = sorted(begin for begin, _ in spans), sorted(end for _, end in spans)
    for at in begins:
        if bisect_right(begins, at) - bisect_left(ends, at) >= count:
            chosen = [name for (_, name), node_spans in of_node.items() if _is_in(at, node_spans)]
            return at, chosen[:count]
    return None


def _is_in(at: float, spans: Iterable[OpenSpan]) -> bool:
    return any(begin <= at <= end for begin, end in spans)
