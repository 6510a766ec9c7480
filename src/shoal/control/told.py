"""Why everybody waits, as of the newest plan; and what that says about those who came since.

A plan says of most refusals: nobody who asks this can start now. While nothing is given back, that
holds for a newcomer who asks the same, and no plan has to be made to tell them.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import msgspec

from shoal.model.request import Request
from shoal.scheduler import Candidate, Explanation, Plan, Why

LASTING = frozenset(
    {Why.NO_NODES, Why.NEVER_FITS, Why.NODES_CLOSED, Why.NODES_EXCLUDED, Why.RESOURCES, Why.TOPOLOGY}
)
"""Refusals of the cluster, not of the order among those who wait."""
FRESH_S = 10.0
"""How long a plan speaks for newcomers at most: patience ends and times move on while nothing happens."""

Asked = tuple[Request, tuple[str, ...]]


class Told:
    def __init__(self) -> None:
        self.explanations: dict[str, Explanation] = {}
        """By attempt."""
        self.planned_on = 0.0
        """The date of the plan."""
        self.good_until = -inf
        """Until then, on the monotonic clock, the plan speaks for newcomers."""
        self._refused: dict[Asked, Explanation] = {}

    def hear(self, made: Plan, candidates: Iterable[Candidate], now: float) -> None:
        """A new plan of these candidates, made `now`. It does not speak for newcomers yet."""
        self.good_until = -inf
        self.explanations = {said.attempt_id: said for said in made.explanations}
        self.planned_on = now
        self._refused = {}
        for candidate in candidates:
            said = self.explanations.get(candidate.attempt_id)
            if said is not None and said.why in LASTING:
                self._refused[candidate.request, candidate.excluded_nodes] = said

    def explain(self, newcomers: Iterable[Candidate], now: float) -> bool:
        """Whether none of them can start, all explained. `now` on the monotonic clock."""
        if now > self.good_until:
            return False
        told = {}
        for candidate in newcomers:
            said = self._refused.get((candidate.request, candidate.excluded_nodes))
            if said is None or candidate.array_at_once is not None:
                return False
            told[candidate.attempt_id] = msgspec.structs.replace(
                said, attempt_id=candidate.attempt_id, job_id=candidate.job_id
            )
        self.explanations |= told
        return True
