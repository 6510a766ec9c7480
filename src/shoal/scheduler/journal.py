"""A log of changes that several readers follow, each at its own pace. Forgets what is old."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

MAX_KEPT = 4096
"""Whoever is further behind starts anew, which costs no more than reading so much."""


class Journal(Generic[T]):
    def __init__(self) -> None:
        self._entries: list[T] = []
        self._first = 0
        self.end = 0
        """Where a reader stands who has read everything."""

    def append(self, entry: T) -> None:
        if len(self._entries) >= 2 * MAX_KEPT:
            del self._entries[:MAX_KEPT]
            self._first += MAX_KEPT
        self._entries.append(entry)
        self.end += 1

    def since(self, place: int) -> list[T] | None:
        """What was written after `place`; None when some of that is forgotten."""
        return None if place < self._first else self._entries[place - self._first :]
