"""Whether a candidate may start yet: its dependencies, its backoff, its array's limit. Not where it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal.scheduler.snapshot import Candidate, Holding
from shoal.scheduler.types import Explanation, Why
from shoal.scheduler.words import duration, listed, number_of

VERB_OF_KIND = {"succeeded": "succeed", "failed": "fail", "ended": "end"}


class Arrays:
    """How many elements of each array hold resources, the starts of this cycle included."""

    def __init__(self, holdings: Iterable[Holding]) -> None:
        self._num_holding = Counter(h.array_id for h in holdings if h.array_id is not None)

    def count(self, candidate: Candidate) -> int:
        return self._num_holding[candidate.array_id] if candidate.array_id is not None else 0

    def start(self, candidate: Candidate) -> None:
        if candidate.array_id is not None:
            self._num_holding[candidate.array_id] += 1


def too_early(candidate: Candidate, arrays: Arrays, now: float) -> Explanation | None:
    """Why it may not start yet whatever is free, or None when it may."""
    if candidate.unmet:
        return explain_unmet(candidate)
    if candidate.not_before > now:
        return _backoff(candidate, now)
    limit = candidate.array_at_once
    if limit is not None and candidate.array_id is not None and arrays.count(candidate) >= limit:
        return _array_limit(candidate, arrays.count(candidate), limit)
    return None


def explain_unmet(candidate: Candidate) -> Explanation:
    """Which jobs it waits for. It has unmet dependencies."""
    by_kind: dict[str, list[str]] = {}
    for unmet in candidate.unmet:
        by_kind.setdefault(unmet.on, []).append(f"`{unmet.label}`")
    waits = [f"{listed(labels, most=3)} to {VERB_OF_KIND[kind]}" for kind, labels in by_kind.items()]
    return Explanation(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        why=Why.DEPENDENCY,
        sentence=f"waits for {', and for '.join(waits)}",
        facts={"after": [{"job": unmet.label, "on": str(unmet.on)} for unmet in candidate.unmet]},
    )


def _backoff(candidate: Candidate, now: float) -> Explanation:
    return Explanation(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        why=Why.BACKOFF,
        sentence=f"waits {duration(candidate.not_before - now)} before it is tried again",
        facts={"not_before": candidate.not_before},
    )


def _array_limit(candidate: Candidate, num_holding: int, limit: int) -> Explanation:
    return Explanation(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        why=Why.ARRAY_LIMIT,
        sentence=(
            f"waits for its array: {number_of(num_holding, 'element')} of it "
            f"{'holds' if num_holding == 1 else 'hold'} resources, and it allows {limit} at once"
        ),
        facts={"num_holding": num_holding, "at_once": limit},
    )
