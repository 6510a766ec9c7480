"""What one check of `shoal doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Works, with something missing."""
    BROKEN = "broken"
    """Something will fail until it is repaired."""


@dataclass(frozen=True)
class Finding:
    """`hint` is what to type; without one there is nothing to do."""

    name: str
    level: Level
    told: str
    hint: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "level": self.level.value, "told": self.told, "hint": self.hint}
