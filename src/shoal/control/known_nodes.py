"""The nodes as the newest plan saw them, and which requests they could hold."""

from __future__ import annotations

from shoal.model.request import Request
from shoal.scheduler import Explanation, NodeView, impossible

MAX_KNOWN = 1024
"""Requests remembered as possible."""


class KnownNodes:
    """Nobody yet, until the first plan is made."""

    def __init__(self) -> None:
        self.views: tuple[NodeView, ...] = ()
        self._possible: set[Request] = set()

    def see(self, views: tuple[NodeView, ...]) -> None:
        if views != self.views:
            self.views = views
            self._possible.clear()

    def never_fits(self, request: Request) -> Explanation | None:
        """Why no set of these nodes could ever hold it; None when one could, or no node is known."""
        if request in self._possible:
            return None
        never = impossible(request, self.views)
        if never is None and len(self._possible) < MAX_KNOWN:
            self._possible.add(request)
        return never
