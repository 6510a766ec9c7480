"""Why a project's ceiling keeps a job waiting, in words. Names only its project and those above it."""

from __future__ import annotations

from typing import Any

from shoal.scheduler.amounts import MILLI
from shoal.scheduler.snapshot import Candidate
from shoal.scheduler.tree import Device, Refusal
from shoal.scheduler.types import Explanation, Why
from shoal.scheduler.words import thousandths


def explain_refusal(candidate: Candidate, refusal: Refusal) -> Explanation:
    return Explanation(
        attempt_id=candidate.attempt_id,
        job_id=candidate.job_id,
        why=Why.LIMIT if refusal.is_by_limit else Why.QUOTA,
        sentence=sentence(refusal),
        hint=hint(refusal),
        facts=facts(refusal),
    )


def sentence(refusal: Refusal) -> str:
    """`needs 8 GPUs; project `vision` holds 60 of its limit of 64`."""
    who = f"project `{refusal.by}`"
    if refusal.by != refusal.project:
        who += f", which `{refusal.project}` is part of,"
    if refusal.asked > refusal.allowed:
        return f"needs {_told(refusal, refusal.asked)}; {who} may have at most {_ceiling(refusal)}"
    in_use = thousandths(refusal.in_use) if refusal.in_use else "none"
    kept = f", and keeps {thousandths(refusal.kept)} for a job that is due" if refusal.kept else ""
    return f"needs {_told(refusal, refusal.asked)}; {who} holds {in_use} of {_ceiling(refusal)}{kept}"


def hint(refusal: Refusal) -> str:
    if refusal.asked > refusal.allowed:
        return (
            f"ask for less, or ask an admin to raise it; see it with `shoal project show {refusal.project}`"
        )
    return f"wait for jobs of the project to end; see it with `shoal project show {refusal.project}`"


def facts(refusal: Refusal) -> dict[str, Any]:
    """In whole devices, as people write them."""
    numbers = {
        "asked": refusal.asked,
        "in_use": refusal.in_use,
        "limit": refusal.limit,
        "quota": refusal.quota,
        "borrow": refusal.borrow,
    }
    whole = {name: None if n is None else _whole(refusal.device, n) for name, n in numbers.items()}
    kept = {"kept": _whole(refusal.device, refusal.kept)} if refusal.kept else {}
    return {"project": refusal.by, "device": refusal.device.value, **whole, **kept}


def _whole(device: Device, amount: int) -> float:
    """GPUs without decimals where they are whole."""
    return amount // MILLI if device is Device.GPUS and amount % MILLI == 0 else amount / MILLI


def _ceiling(refusal: Refusal) -> str:
    allowed = thousandths(refusal.allowed)
    if refusal.is_by_limit:
        return f"{allowed}, its limit" if refusal.asked > refusal.allowed else f"its limit of {allowed}"
    if refusal.borrow == 0:
        return f"the {allowed} of its quota, and may borrow none"
    quota, borrow = thousandths(refusal.quota or 0), thousandths(refusal.borrow or 0)
    return f"{allowed}: its quota of {quota}, and {borrow} that it may borrow"


def _told(refusal: Refusal, amount: int) -> str:
    return f"{thousandths(amount)} {refusal.device.value[:-1].upper()}{'' if amount == MILLI else 's'}"
