"""When a queued attempt may be tried again, proof against a wall clock that jumps.

The delay is recorded as a duration. The control plane that queues the attempt, or the first time it sees
it another one, turns it into a deadline on its own monotonic clock, never later than the duration itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.clock import Clock
from shoal.model.attempt import Attempt


class Backoff:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready_at: dict[str, float] = {}

    def begin(self, attempt: Attempt) -> None:
        """It is being queued now. Called on the store's thread; one that is rolled back does no harm."""
        if attempt.backoff_s > 0:
            self._ready_at[attempt.attempt_id] = self._clock.monotonic() + attempt.backoff_s

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
        """Forget the others, but for those that have just begun and may not be known to the caller yet."""
        if not self._ready_at:
            return
        kept, now = set(attempt_ids), self._clock.monotonic()
        # A copy, and one by one: `begin` may add to it at any moment.
        for attempt_id, ready_at in list(self._ready_at.items()):
            if attempt_id not in kept and ready_at <= now:
                self._ready_at.pop(attempt_id, None)
