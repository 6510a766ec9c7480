"""What both ends of a porch prove themselves with, made by the cluster's own authority.

None of it is kept: a replica's papers go with its order, those of data planes stand in the table.
"""

from __future__ import annotations

from shoal.clock import Clock
from shoal.identity.authority import SERVER_DAYS, Pair, make_client, make_porch
from shoal.porch import DATA_PLANE, name_of
from shoal.wire import Papers

RENEW_S = SERVER_DAYS * 86400 / 2
"""So long after the data planes' papers were made, they get new ones."""


class Porches:
    """Of a cluster whose nodes are other machines."""

    def __init__(self, authority: Pair, clock: Clock) -> None:
        self._authority = authority
        self._clock = clock
        self._shown: Papers | None = None
        self._made_at = 0.0

    def before(self, attempt_id: str) -> Papers:
        """For the porch before the replica that runs as this attempt; others each time."""
        return self._papers(make_porch(self._authority, name_of(attempt_id), self._clock.now()))

    def visitors(self) -> Papers:
        """For data planes. The same for months, and until the control plane starts again."""
        now = self._clock.now()
        if self._shown is None or not 0 <= now - self._made_at < RENEW_S:
            self._shown = self._papers(make_client(self._authority, DATA_PLANE, now))
            self._made_at = now
        return self._shown

    def _papers(self, pair: Pair) -> Papers:
        return Papers(
            certificate=pair.certificate.decode("ascii"),
            key=pair.key.decode("ascii"),
            authority=self._authority.certificate.decode("ascii"),
        )
