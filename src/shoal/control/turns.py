"""Which loops fail, since when and why. Only in memory: whoever starts anew tries all of them at once."""

from __future__ import annotations

import msgspec

from shoal.clock import Clock
from shoal.errors import ShoalError

MAX_WHY = 300


class Failing(msgspec.Struct, frozen=True, kw_only=True):
    """A loop whose last turn failed."""

    loop: str
    since: float
    """When the first of its failures in a row was."""
    times: int
    why: str
    """What the last one said."""


class Turns:
    """How each loop's last turn went."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failing: dict[str, Failing] = {}

    @property
    def failing(self) -> tuple[Failing, ...]:
        """By name."""
        return tuple(failing for _, failing in sorted(self._failing.items()))

    def went_well(self, loop: str) -> None:
        self._failing.pop(loop, None)

    def failed(self, loop: str, error: Exception) -> None:
        before = self._failing.get(loop)
        why = error.message if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        self._failing[loop] = Failing(
            loop=loop,
            since=before.since if before else self._clock.now(),
            times=before.times + 1 if before else 1,
            why=why[:MAX_WHY],
        )
