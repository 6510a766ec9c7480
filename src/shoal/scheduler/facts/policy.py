"""What an operator may choose about scheduling, and priorities by name.

Each priority class is the band of numbers from its own value up to the next class's value. A job may say
`priority: production` or any number. What it may do to other jobs follows from the number, so nothing more is
recorded. `preemption.rights` decides which job is evicted for which.

Every field of `Policy` is a promise that an explanation can repeat.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from shoal.scheduler.order.fair_share import HALF_LIFE_S


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    name: str
    value: int
    can_preempt: bool = False
    """Its jobs may take devices from preemptible jobs of lower priority."""
    is_preemptible: bool = True
    """Its jobs may be asked to stop for others."""


DEFAULT_CLASSES = (
    PriorityClass(name="idle", value=-100),
    PriorityClass(name="batch", value=0),
    PriorityClass(name="production", value=50, can_preempt=True),
    PriorityClass(name="interactive", value=80, can_preempt=True, is_preemptible=False),
)
"""The classes of a cluster whose operator sets none. A job without a priority is `batch`."""


@lru_cache(maxsize=1 << 10)
def priority_class(priority: int, classes: tuple[PriorityClass, ...] = DEFAULT_CLASSES) -> PriorityClass:
    """Return the class whose band holds the priority; below all bands, the lowest class. `classes` may not be
    empty.
    """
    reached_classes = [cls for cls in classes if cls.value <= priority]
    return max(reached_classes, key=_value) if reached_classes else min(classes, key=_value)


def class_value(name: str, classes: tuple[PriorityClass, ...] = DEFAULT_CLASSES) -> int | None:
    """Return None if there is no such class."""
    return next((cls.value for cls in classes if cls.name == name), None)


def _value(band: PriorityClass) -> tuple[int, str]:
    return band.value, band.name


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The order is: priority, fair share, due time. A job that can start without delaying these may start
    first.
    """

    patience_s: float = 600.0
    """Seconds. If time limits are missing, so that no start can be promised, the first job of a queue keeps
    the nodes it needs from later jobs once it has waited this long,"""
    patience_factor: float = 24.0
    """or this many times its expected run time, if that is longer,"""
    patience_most_s: float = 2 * 86_400.0
    """but never longer than this. Reserved nodes drain for as long as the longest run on them. The less often
    that happens, the shorter all other jobs wait."""
    power_caps: dict[str, float] = {}
    """Watts that a rack may draw, by the value of its nodes' label `rack`."""
    half_life_s: float = HALF_LIFE_S
    """Seconds until past usage of a project counts half. Longer: fairness over weeks. Shorter: over hours."""
    classes: tuple[PriorityClass, ...] = DEFAULT_CLASSES
    """Priorities that have a name, and what jobs of each may do to others."""
    max_evictions: int = 5
    """A job that was evicted this often runs until it ends. 0: no job is evicted."""
    settle_s: float = 5.0
    """An attempt that started less than this many seconds ago is not evicted: short jobs end by themselves,
    and a job that started in freed capacity is not stopped for the next one. 0: it may be evicted at once."""
    grow_gain: float = 2.0
    """A job that could use more nodes is restarted on idle ones if that gains this many times the work that
    is repeated. Higher: later, and more certain to pay off. 0: as soon as it has saved."""

    def patience_of(self, expected_s: float | None) -> float:
        wished_s = max(self.patience_s, self.patience_factor * (expected_s or 0.0))
        return min(wished_s, max(self.patience_s, self.patience_most_s))
