"""Why a candidate may not start yet whatever is free: its dependencies, its backoff, its array's limit."""

from __future__ import annotations

from shoal.scheduler.snapshot import Candidate
from shoal.scheduler.types import Explanation, Why
from shoal.scheduler.words import duration, listed, number_of

VERB_OF_KIND = {"succeeded": "succeed", "failed": "fail", "ended": "end"}


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


def explain_backoff(candidate: Candidate, now: float) -> Explanation:
    return Explanation(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        why=Why.BACKOFF,
        sentence=f"waits {duration(candidate.not_before - now)} before it is tried again",
        facts={"not_before": candidate.not_before},
    )


def explain_array(candidate: Candidate, num_holding: int, limit: int) -> Explanation:
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
