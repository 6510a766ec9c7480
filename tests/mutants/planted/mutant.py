"""What a planted bug is."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake that somebody could really make."""

    name: str
    file: str
    """Below `src/shoal`."""
    old: str
    new: str
    promise: str
    """What it breaks."""
    suites: tuple[str, ...]
    """Who should notice, the most likely first."""
