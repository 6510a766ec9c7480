"""Windows: nodes that are not for everybody from one moment to another."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class WindowKind(StrEnum):
    MAINTENANCE = "maintenance"
    """The nodes take nobody."""
    RESERVATION = "reservation"
    """They take one project's jobs, and those of the projects below it."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """From `from_at` until just before `until_at`. Windows that share a node never overlap."""

    window_id: str
    kind: WindowKind
    nodes: tuple[str, ...]
    from_at: float
    until_at: float
    project: str | None = None
    """For whom a reservation is; None for maintenance."""
    because: str = ""
    by: str = ""
    created_at: float = 0.0

    def overlaps(self, other: Window) -> tuple[str, ...]:
        """The nodes on which the two meet."""
        if self.from_at >= other.until_at or other.from_at >= self.until_at:
            return ()
        return tuple(sorted(set(self.nodes) & set(other.nodes)))
