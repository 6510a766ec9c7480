"""What an operator may choose about scheduling. Every field is a promise that an explanation can repeat."""

from __future__ import annotations

import msgspec

from shoal.scheduler.classes import CLASSES, PriorityClass
from shoal.scheduler.fair import HALF_LIFE_S


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The order is: priority, fair share, who is due first; whoever can start without delaying them may."""

    patience_s: float = 600.0
    """Where time limits are missing, so that no start can be promised, the first job of a queue keeps the
    nodes it needs from later ones once it has waited this long,"""
    patience_factor: float = 24.0
    """or this many times its expected run time, if that is longer,"""
    patience_most_s: float = 2 * 86_400.0
    """but never more than this. Nodes that are kept drain for as long as the longest run on them: the less
    often that is done, the shorter everybody waits but the one it is done for."""
    power_caps: dict[str, float] = {}
    """Watts that a rack may draw, by the value of its nodes' label `rack`."""
    half_life_s: float = HALF_LIFE_S
    """How long until what a project had counts half. Longer: fairness over weeks; shorter: over hours."""
    classes: tuple[PriorityClass, ...] = CLASSES
    """Priorities that have a name, and what jobs of each may do to others."""
    max_evictions: int = 5
    """A job that gave way to others this often runs on until it ends, whoever waits. 0: nobody gives way."""
    settle_s: float = 5.0
    """Nobody gives way who began later than this: what is short ends by itself, and who has just begun for
    another would be stopped for the next. 0: they may be asked at once."""
    grow_gain: float = 2.0
    """A job that could use more nodes is stopped to go on with idle ones where that wins this many times what
    is done again. More: later, and surer to pay. 0: as soon as it has saved."""

    def patience_of(self, expected_s: float | None) -> float:
        wished_s = max(self.patience_s, self.patience_factor * (expected_s or 0.0))
        return min(wished_s, max(self.patience_s, self.patience_most_s))
