"""What may go wrong between the control plane and a fake cluster, decided call by call."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum

import msgspec


class Verb(StrEnum):
    SUBMIT = "submit"
    CANCEL = "cancel"
    LIST_OWNED = "list_owned"
    FORGET = "forget"
    NODES = "nodes"
    READ_LOG = "read_log"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What befalls one call. The default is nothing."""

    is_lost_before: bool = False
    """`EngineUnreachable`, and the call had no effect."""
    is_lost_after: bool = False
    """`EngineUnreachable`, though the call had its whole effect: the answer was lost."""
    delay_s: float = 0.0
    """An order or a stop reaches its node this much later."""
    is_stillborn: bool = False
    """The orders reach their nodes, but no supervisor ever comes of them unless they are sent again."""
    copies: int = 1
    """How often each observation is listed."""
    is_stale: bool = False
    """Shares that were listed before are listed as they were seen then."""


NO_FAULT = Fault()

Faults = Callable[[Verb, str | None], Fault]
"""Asked once per call, with the attempt's id where there is one."""


def no_faults(verb: Verb, attempt_id: str | None) -> Fault:
    return NO_FAULT


def seeded_faults(seed: int, *, chance: float = 0.1, max_delay_s: float = 5.0) -> Faults:
    """Each call fails in one of the ways above with `chance`; its fate depends on `seed` and its number."""
    dice = random.Random(f"faults/{seed}")  # noqa: S311 - replay, not secrecy

    def faults(verb: Verb, attempt_id: str | None) -> Fault:
        # Always the same number of draws, so that one call's fate does not shift the others'.
        roll, which, delay_s = dice.random(), dice.randrange(6), dice.uniform(0, max_delay_s)
        if roll >= chance:
            return NO_FAULT
        return (
            Fault(is_lost_before=True),
            Fault(is_lost_after=True),
            Fault(delay_s=delay_s),
            Fault(copies=2),
            Fault(is_stale=True),
            Fault(is_stillborn=True),
        )[which]

    return faults
