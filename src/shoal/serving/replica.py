"""A replica as this process knows it by using it: what is in it, whether it can be trusted, idle connections.

Opens nothing and reads no clock: `upstream.py` does the former, whoever calls tells the time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from shoal.serving.table import BOUNDS_S, Replica

if TYPE_CHECKING:
    from shoal.serving.upstream import Upstream

FOREIGN = 2.0
"""A replica in another zone is taken when one here has this many times as much to do."""
MAX_FAILURES = 5
"""In a row, of answers that say the replica cannot; then it is left alone for a while."""
FIRST_EJECTION_S = 2.0
LONGEST_EJECTION_S = 60.0
MAX_BLOCKS = 32768
"""Of prefixes remembered for one replica: about 4 million tokens, more than its own cache holds."""


class Tally:
    """What became of the requests of one release of a service."""

    __slots__ = ("errors", "first_byte", "in_flight", "release", "requests", "tokens")

    def __init__(self, release: int) -> None:
        self.release = release
        self.in_flight = 0
        self.requests = 0
        self.errors = 0
        self.first_byte = [0] * (len(BOUNDS_S) + 1)
        self.tokens = 0


class LiveReplica:
    """`outstanding` counts requests of this process alone. It may have `cap` of them there: all that other
    processes leave of what the replica takes, and its own `part` in any case.
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
        spec: Replica,
        tally: Tally,
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
        """Nobody listens there: nothing is sent until somebody does."""
        self.prefill_tokens = 0
        self.seen: OrderedDict[int, None] = OrderedDict()
        self.seed = spread(spec.replica_id.encode())
        self.told(spec, tally, cap=cap, share=share, zone=zone, is_public=is_public)

    def told(
        self, spec: Replica, tally: Tally, *, cap: int, share: float, zone: str, is_public: bool
    ) -> None:
        """A newer table names it again."""
        self.spec = spec
        self.tally = tally
        self.full = cap
        self.part = max(1, round(cap * share))
        self.shared(self.elsewhere)
        self.is_draining = spec.is_draining
        is_local = not zone or not spec.zone or zone == spec.zone
        self.handicap = (1.0 if is_local else FOREIGN) / max(spec.weight, 1e-6)
        self.secret_lines = _secret_lines(spec.secret.encode(), is_public=is_public)
        self.ends_head = b"\r\n%b\r\n" % self.secret_lines
        """After a request's id, which stands last."""

    def shared(self, elsewhere: int) -> None:
        """Other processes have so many requests there."""
        self.elsewhere = elsewhere
        self.cap = max(self.part, self.full - elsewhere)

    def succeed(self) -> None:
        self.failures = 0
        self.ejections = 0

    def fail(self, now: float, *, is_refused: bool = False) -> bool:
        """Whether it is to be left alone from now on. At once if it does not even take connections."""
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

    def matched(self, chain: tuple[int, ...]) -> int:
        """How many leading blocks of a prompt it has seen lately."""
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
    """64 bits that say which of many it is: the same in every process, and evenly over all texts."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _secret_lines(secret: bytes, *, is_public: bool) -> bytes:
    """Headers that prove to the replica whom it hears. Where callers need no token of ours,
    `Authorization` is between them and the program.
    """
    if not secret:
        return b""
    ours = b"x-shoal-secret: %b\r\n" % secret
    return ours if is_public else b"authorization: Bearer %b\r\n%b" % (secret, ours)
