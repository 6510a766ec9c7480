"""When a queued attempt may be tried again, proof against a wall clock that jumps.

The delay is recorded as a duration. Each control plane turns it into a deadline on its own monotonic
clock the first time it sees the attempt, and never waits longer than the duration itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.clock import Clock
from shoal.model.attempt import Attempt


class Backoff:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready_at: dict[str, float] = {}

    def remaining_s(self, attempt: Attempt) -> float:
        """Seconds until it may be placed; 0 when it may now."""
        if attempt.backoff_s <= 0:
            return 0.0
        now = self._clock.monotonic()
        ready_at = self._ready_at.get(attempt.attempt_id)
        if ready_at is None:
            left = attempt.queued_at + attempt.backoff_s - self._clock.now()
            ready_at = now + min(max(left, 0.0), attempt.backoff_s)
            self._ready_at[attempt.attempt_id] = ready_at
        return max(ready_at - now, 0.0)

    def keep_only(self, attempt_ids: Iterable[str]) -> None:
        if not self._ready_at:
            return
        kept = set(attempt_ids)
        self._ready_at = {k: at for k, at in self._ready_at.items() if k in kept}
