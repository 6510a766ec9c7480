"""What waiting jobs are ordered by in a twin: the production's `Stamps`, or what a test puts in their place.

Learned from jobs that have ended, as the log goes; never from the run time of the job itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from shoal.model.request import Request
from shoal.scheduler import Candidate, Holding, NodeView


class Stamper(Protocol):
    """As `shoal.scheduler.Stamps`, which is one."""

    def see(self, nodes: Iterable[NodeView]) -> None:
        """The whole cluster, whenever it has changed."""

    def arrive(self, candidate: Candidate) -> Candidate:
        """It waits from now on: the candidate with its stamps."""

    def leave(self, attempt_id: str) -> None:
        """It does not wait any more."""

    def ended(self, holding: Holding, request: Request, run_s: float, now: float) -> list[Candidate]:
        """It ran to its end: those who wait and are stamped otherwise because of it."""


class LimitStamper:
    """Expects the limit, learns nothing, and everybody is due at once: what EASY knows."""

    def see(self, nodes: Iterable[NodeView]) -> None:
        pass

    def arrive(self, candidate: Candidate) -> Candidate:
        limit_s = candidate.request.time_limit_s
        return msgspec.structs.replace(candidate, expected_s=limit_s, score=limit_s)

    def leave(self, attempt_id: str) -> None:
        pass

    def ended(self, holding: Holding, request: Request, run_s: float, now: float) -> list[Candidate]:
        return []
