"""Why a candidate may not start, whatever is free: dependencies, backoff, array limits, and project ceilings.

An explanation of a ceiling names only the candidate's project and those above it.
"""

from __future__ import annotations

from typing import Any

from shoal.scheduler.explain.text import duration, listed, number_of, thousandths
from shoal.scheduler.facts.amounts import MILLI
from shoal.scheduler.facts.plan import Explanation, WaitReason
from shoal.scheduler.facts.snapshot import Candidate
from shoal.scheduler.order.project_tree import DeviceKind, QuotaRefusal

VERB_OF_KIND = {"succeeded": "succeed", "failed": "fail", "ended": "end"}


def explain_unmet(candidate: Candidate) -> Explanation:
    """Name the jobs it waits for. The candidate has unmet dependencies."""
    by_kind: dict[str, list[str]] = {}
    for unmet in candidate.unmet:
        by_kind.setdefault(unmet.on, []).append(f"`{unmet.label}`")
    waits = [f"{listed(labels, most=3)} to {VERB_OF_KIND[kind]}" for kind, labels in by_kind.items()]
    return Explanation(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        why=WaitReason.DEPENDENCY,
        sentence=f"waits for {', and for '.join(waits)}",
        facts={"after": [{"job": unmet.label, "on": str(unmet.on)} for unmet in candidate.unmet]},
    )


def explain_backoff(candidate: Candidate, now: float) -> Explanation:
    return Explanation(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        why=WaitReason.BACKOFF,
        sentence=f"waits {duration(candidate.not_before - now)} before it is tried again",
        facts={"not_before": candidate.not_before},
    )


def explain_array(candidate: Candidate, num_holding: int, limit: int) -> Explanation:
    return Explanation(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        why=WaitReason.ARRAY_LIMIT,
        sentence=(
            f"waits for its array: {number_of(num_holding, 'element')} of it "
            f"{'holds' if num_holding == 1 else 'hold'} resources, and it allows {limit} at once"
        ),
        facts={"num_holding": num_holding, "at_once": limit},
    )


def explain_refusal(candidate: Candidate, refusal: QuotaRefusal) -> Explanation:
    return Explanation(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        why=WaitReason.LIMIT if refusal.is_by_limit else WaitReason.QUOTA,
        sentence=refusal_sentence(refusal),
        hint=refusal_hint(refusal),
        facts=refusal_facts(refusal),
    )


def refusal_sentence(refusal: QuotaRefusal) -> str:
    """`needs 8 GPUs; project `vision` holds 60 of its limit of 64`."""
    holder = f"project `{refusal.by}`"
    if refusal.by != refusal.project:
        holder += f", which `{refusal.project}` is part of,"
    if refusal.requested > refusal.allowed:
        return (
            f"needs {_amount_text(refusal, refusal.requested)}; {holder} may have at most {_ceiling(refusal)}"
        )
    in_use = thousandths(refusal.in_use) if refusal.in_use else "none"
    reserved = (
        f", and keeps {thousandths(refusal.reserved)} for a job that is due" if refusal.reserved else ""
    )
    return (
        f"needs {_amount_text(refusal, refusal.requested)}; "
        f"{holder} holds {in_use} of {_ceiling(refusal)}{reserved}"
    )


def refusal_hint(refusal: QuotaRefusal) -> str:
    if refusal.requested > refusal.allowed:
        return (
            f"ask for less, or ask an admin to raise it; see it with `shoal project show {refusal.project}`"
        )
    return f"wait for jobs of the project to end; see it with `shoal project show {refusal.project}`"


def refusal_facts(refusal: QuotaRefusal) -> dict[str, Any]:
    """Return the numbers in whole devices, as people write them."""
    numbers = {
        "asked": refusal.requested,
        "in_use": refusal.in_use,
        "limit": refusal.limit,
        "quota": refusal.quota,
        "borrow": refusal.borrow,
    }
    whole = {name: None if n is None else _whole(refusal.device, n) for name, n in numbers.items()}
    reserved = {"kept": _whole(refusal.device, refusal.reserved)} if refusal.reserved else {}
    return {"project": refusal.by, "device": refusal.device.value, **whole, **reserved}


def _whole(device: DeviceKind, amount: int) -> float:
    """Return GPUs without decimals if they are whole."""
    return amount // MILLI if device is DeviceKind.GPUS and amount % MILLI == 0 else amount / MILLI


def _ceiling(refusal: QuotaRefusal) -> str:
    allowed = thousandths(refusal.allowed)
    if refusal.is_by_limit:
        return f"{allowed}, its limit" if refusal.requested > refusal.allowed else f"its limit of {allowed}"
    if refusal.borrow == 0:
        return f"the {allowed} of its quota, and may borrow none"
    quota, borrow = thousandths(refusal.quota or 0), thousandths(refusal.borrow or 0)
    return f"{allowed}: its quota of {quota}, and {borrow} that it may borrow"


def _amount_text(refusal: QuotaRefusal, amount: int) -> str:
    return f"{thousandths(amount)} {refusal.device.value[:-1].upper()}{'' if amount == MILLI else 's'}"
