"""What a program knows of its own saves, left beside them for whoever asks: where they are, what they cost.

Written by rank 0 when a save has landed. Nothing depends on it: a program that finds none goes on.
"""

from __future__ import annotations

import contextlib
import os
from enum import StrEnum

import msgspec

STATUS = ".status.json"
MAX_KEPT = 64
MEMORY = "memory"


class Reason(StrEnum):
    """Why saves are as far apart as they are."""

    EVERY = "every"
    """The program says after how many steps."""
    INTERVAL = "interval"
    """The job says after how long."""
    FIRST = "first"
    """Nobody says, and what a save costs is not known yet."""
    COST = "cost"
    """Nobody says: by what saves cost and how often the job fails."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """How far it is from one save to the next, and what that rests on."""

    reason: Reason
    steps: int
    step_s: float
    cost_s: float | None = None
    """How long the save before held training up."""
    written_s: float = 0.0
    """How long it then went on in the background."""
    interval_s: float | None = None
    mtbf_s: float | None = None
    """Expected seconds between failures."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    decision: Decision | None = None
    kept: dict[str, tuple[str, ...]] = {}
    """By the name of a checkpoint, in the order they were made, where it was put."""


def read_status(data: bytes) -> Status | None:
    """None: it is not one, or of another version."""
    try:
        return msgspec.json.decode(data, type=Status)
    except (ValueError, RecursionError):
        return None


def note(folder: str, name: str, places: tuple[str, ...], decision: Decision | None) -> None:
    """Add one to what stands there. A folder that cannot be written has said so already."""
    path = os.path.join(folder, STATUS)
    with contextlib.suppress(OSError):
        before = Status()
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            before = read_status(file.read()) or before
        # Memory holds the newest alone.
        others = {one: _without_memory(where) for one, where in before.kept.items() if one != name}
        kept = {**others, name: places}
        newest = dict(list(kept.items())[-MAX_KEPT:])
        with open(f"{path}.new", "wb") as file:
            file.write(msgspec.json.encode(Status(decision=decision, kept=newest)))
        os.rename(f"{path}.new", path)


def _without_memory(places: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(place for place in places if place != MEMORY)
