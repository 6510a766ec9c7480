"""Priorities by name: each class is the band of numbers from its own value up to the next one's.

A job may say `priority: production` or any number; what it may do to others follows from the number, so
there is nothing more to record. Who is evicted for whom is decided where preemption is.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    name: str
    value: int
    can_preempt: bool = False
    """Its jobs may take devices from jobs of lesser priority that can be preempted."""
    is_preemptible: bool = True
    """Its jobs may be asked to give way."""


CLASSES = (
    PriorityClass(name="idle", value=-100),
    PriorityClass(name="batch", value=0),
    PriorityClass(name="production", value=50, can_preempt=True),
    PriorityClass(name="interactive", value=80, can_preempt=True, is_preemptible=False),
)
"""What a cluster has unless its operator says otherwise. A job that says nothing is `batch`."""


@lru_cache(maxsize=1 << 10)
def class_of(priority: int, classes: tuple[PriorityClass, ...] = CLASSES) -> PriorityClass:
    """The class whose band it is in; below all of them, the lowest. `classes` may not be empty."""
    reached = [one for one in classes if one.value <= priority]
    return max(reached, key=_value) if reached else min(classes, key=_value)


def value_of(name: str, classes: tuple[PriorityClass, ...] = CLASSES) -> int | None:
    """None: there is no such class."""
    return next((one.value for one in classes if one.name == name), None)


def _value(one: PriorityClass) -> tuple[int, str]:
    return one.value, one.name
