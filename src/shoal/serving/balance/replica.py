"""A replica as this process sees it in use: its requests, its failures and its idle connections.

This module opens no connection (`proxy/upstream.py` does) and reads no clock (callers pass the time).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from shoal.serving.table import BOUNDS_S, ReplicaConfig

if TYPE_CHECKING:
    from shoal.serving.proxy.upstream import Upstream

OTHER_ZONE_FACTOR = 2.0
"""A replica in another zone is picked when the ones here have this many times as much to do."""
MAX_FAILURES = 5
"""Consecutive replies that mean that the replica cannot serve, after which it is ejected for a while."""
FIRST_EJECTION_S = 2.0
LONGEST_EJECTION_S = 60.0
MAX_BLOCKS = 32768
"""Prefix blocks remembered for one replica: about 4 million tokens, more than its own cache holds."""


class ReleaseTally:
    """Counters of the requests of one release of a service."""

    __slots__ = ("errors", "first_byte", "in_flight", "release", "requests", "tokens")

    def __init__(self, release: int) -> None:
        self.release = release
        self.in_flight = 0
        self.requests = 0
        self.errors = 0
        self.first_byte = [0] * (len(BOUNDS_S) + 1)
        self.tokens = 0


class LiveReplica:
    """`outstanding` counts requests of this process only. It may have up to `cap` of them in the replica:
    all that the other processes leave of the replica's cap, and at least its own `part`.
    """

    __slots__ = (
        "cap",
        "checks_failed",
        "ejected_until",
        "ejections",
        "elsewhere",
        "ends_head",
        "failures",
        "full",
        "handicap",
        "idle",
        "is_draining",
        "is_refusing",
        "outstanding",
        "part",
        "picked",
        "prefill_tokens",
        "secret_lines",
        "seed",
        "seen",
        "spec",
        "tally",
    )

    def __init__(
        self,
        spec: ReplicaConfig,
        tally: ReleaseTally,
        *,
        cap: int,
        share: float = 1.0,
        zone: str = "",
        is_public: bool = False,
    ) -> None:
        self.elsewhere = 0
        self.idle: list[Upstream] = []
        self.outstanding = 0
        self.picked = 0
        self.failures = 0
        self.checks_failed = 0
        self.ejections = 0
        self.ejected_until = 0.0
        self.is_refusing = False
        """No process listens there. Nothing is sent until a check connects."""
        self.prefill_tokens = 0
        self.seen: OrderedDict[int, None] = OrderedDict()
        self.seed = spread(spec.replica_id.encode())
        self.update(spec, tally, cap=cap, share=share, zone=zone, is_public=is_public)

    def update(
        self, spec: ReplicaConfig, tally: ReleaseTally, *, cap: int, share: float, zone: str, is_public: bool
    ) -> None:
        """Take the settings of a newer table."""
        self.spec = spec
        self.tally = tally
        self.full = cap
        self.part = max(1, round(cap * share))
        self.set_elsewhere(self.elsewhere)
        self.is_draining = spec.is_draining
        is_local = not zone or not spec.zone or zone == spec.zone
        self.handicap = (1.0 if is_local else OTHER_ZONE_FACTOR) / max(spec.weight, 1e-6)
        self.secret_lines = _secret_lines(spec.secret.encode(), is_public=is_public)
        self.ends_head = b"\r\n%b\r\n" % self.secret_lines
        """Goes after a request's id, which is the last header."""

    def set_elsewhere(self, elsewhere: int) -> None:
        """Record how many requests the other processes have in this replica."""
        self.elsewhere = elsewhere
        self.cap = max(self.part, self.full - elsewhere)

    def succeed(self) -> None:
        self.failures = 0
        self.ejections = 0

    def fail(self, now: float, *, is_refused: bool = False) -> bool:
        """Count a failure. Return whether the replica is ejected now: at once if it refuses connections."""
        self.failures += 1
        self.is_refusing = self.is_refusing or is_refused
        if not is_refused and self.failures < MAX_FAILURES:
            return False
        self.ejected_until = now + min(LONGEST_EJECTION_S, FIRST_EJECTION_S * 2**self.ejections)
        self.ejections += 1
        self.failures = 0
        return True

    def is_ejected(self, now: float) -> bool:
        return self.is_refusing or self.ejected_until > now

    def close_idle(self) -> None:
        while self.idle:
            self.idle.pop().close()

    def num_matched_blocks(self, chain: tuple[int, ...]) -> int:
        """Return how many leading blocks of a prompt the replica has seen recently."""
        seen = self.seen
        for index, block in enumerate(chain):
            if block not in seen:
                return index
        return len(chain)

    def remember(self, chain: tuple[int, ...]) -> None:
        seen = self.seen
        for block in chain:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > MAX_BLOCKS:
            seen.popitem(last=False)


def spread(text: bytes) -> int:
    """Hash to 64 bits, evenly over all texts and the same in every process."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _secret_lines(secret: bytes, *, is_public: bool) -> bytes:
    """Return the headers that prove to the replica that a data plane calls. In a public service, which needs
    no Shoal token, `Authorization` is between the caller and the program.
    """
    if not secret:
        return b""
    secret_line = b"x-shoal-secret: %b\r\n" % secret
    return secret_line if is_public else b"authorization: Bearer %b\r\n%b" % (secret, secret_line)
