"""A clock that moves only when told to."""

from __future__ import annotations


class VirtualClock:
    """A `Clock` for simulation: the date may be made to jump, the monotonic reading only advances."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._monotonic = 0.0
        self._ahead = now

    def now(self) -> float:
        return self._ahead + self._monotonic

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if seconds < 0:
            raise ValueError(f"time cannot pass backwards: {seconds}")
        self._monotonic += seconds

    def advance_to(self, monotonic: float) -> None:
        """Let time pass until this monotonic reading; one already passed is no move."""
        self._monotonic = max(self._monotonic, monotonic)

    def jump(self, seconds: float) -> None:
        """Set the date forward or back without letting time pass."""
        self._ahead += seconds
