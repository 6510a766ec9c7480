"""Who is looked at first: the higher priority, then who came first; ids break ties so that plans repeat."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.scheduler.snapshot import Candidate


def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=_place)


def _place(candidate: Candidate) -> tuple[int, int, str]:
    return -candidate.priority, candidate.order, candidate.attempt_id
