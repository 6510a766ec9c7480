"""Whether ranks that failed are started anew where they are. Pure.

The cheapest way on, tried first and only while it helps: ranks that fail again at once need other nodes, a
pause or a person, which is the control plane's business.
"""

from __future__ import annotations

from shoal.runtime.ending import Ending
from shoal.wire import EndKind, Order

LIVED_S = 5.0
"""Ranks that ran for less before they failed are not started again here: nothing says that it would help."""
RANK_FAILED = frozenset({EndKind.EXITED, EndKind.SIGNALED})


class Restarts:
    """Counts them for one share."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.count = 0

    def may_follow(self, end: Ending, ran_s: float) -> bool:
        """Whether a group that ended so after `ran_s` is followed by another in the same place."""
        return (
            end.kind in RANK_FAILED
            and len(self._order.nodes) == 1
            and self.count < self._order.max_restarts
            and ran_s >= LIVED_S
        )
