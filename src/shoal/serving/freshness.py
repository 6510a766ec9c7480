"""How old a data plane's knowledge may be: for how long no control plane has confirmed its table.

A data plane serves what it knows for as long as no control plane answers. It cannot hear of revoked tokens
meanwhile, so its health check fails after `STALE_S`, and a balancer in front prefers others.
"""

from __future__ import annotations

from math import inf

from shoal.clock import Clock
from shoal.serving.problem import Refused

STALE_S = 8.0
"""A revoked token must be refused, or the check must fail, within 10 s: this leaves 2 s to notice."""
HEALTH = b"/-/health"


class Freshness:
    """`limit_s`: infinite where the table comes from a file, which nobody has to confirm."""

    def __init__(self, clock: Clock, limit_s: float = inf) -> None:
        self._clock = clock
        self.limit_s = limit_s
        self._confirmed_at: float | None = None

    def confirm(self) -> None:
        """A control plane that leads said that the table in use is the newest."""
        self._confirmed_at = self._clock.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last confirmation; infinite before the first."""
        return inf if self._confirmed_at is None else self._clock.monotonic() - self._confirmed_at

    @property
    def is_stale(self) -> bool:
        return self.silent_s > self.limit_s

    @property
    def problem(self) -> Refused | None:
        """What the health check answers while the table is stale; None while it is fresh."""
        if not self.is_stale:
            return None
        since = "since this process began" if self.silent_s == inf else f"for {self.silent_s:.0f} s"
        told = f"no control plane has confirmed the table {since}; the limit is {self.limit_s:g} s"
        return Refused(503, "plane.stale", told, retry_s=1.0)
