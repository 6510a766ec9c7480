"""What an operator may choose about scheduling. Every field is a promise that an explanation can repeat."""

from __future__ import annotations

import msgspec

from shoal.scheduler.classes import CLASSES, PriorityClass
from shoal.scheduler.fair import HALF_LIFE_S


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Order is always priority, then first come; this says what one that cannot start does to later ones."""

    skip_blocked: bool = True
    """Later jobs may start past one that waits for resources. False: a queue stops at its first such job."""
    patience_s: float = 600.0
    """The first job of a queue that waited longer than this keeps the nodes it needs from later ones."""
    half_life_s: float = HALF_LIFE_S
    """How long until what a project had counts half. Longer: fairness over weeks; shorter: over hours."""
    classes: tuple[PriorityClass, ...] = CLASSES
    """Priorities that have a name, and what jobs of each may do to others."""
