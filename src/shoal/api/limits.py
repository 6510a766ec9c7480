"""What one peer or one caller may cost us: wrong tokens, audit entries, open streams. Bounded memory."""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.errors import LimitReached

MAX_PEERS = 4096


class Bucket:
    """Per name: `burst` at once, then `per_s`. Forgets the names seen longest ago."""

    def __init__(self, burst: int, per_s: float, monotonic: Callable[[], float]) -> None:
        self._burst = burst
        self._per_s = per_s
        self._monotonic = monotonic
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> bool:
        """Spend one; False when there is none left."""
        now = self._monotonic()
        left, at = self._left.pop(name, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_s)
        is_granted = left >= 1.0
        self._left[name] = (left - 1.0 if is_granted else left, now)
        if len(self._left) > MAX_PEERS:
            self._left.popitem(last=False)
        return is_granted


class StreamSlots:
    """How many event streams are open, in all and for each caller."""

    def __init__(self, max_total: int, max_per_caller: int) -> None:
        self._max_total = max_total
        self._max_per_caller = max_per_caller
        self._open: Counter[str] = Counter()

    @contextmanager
    def held(self, caller_id: str) -> Iterator[None]:
        """One slot for as long as the block lasts. Raises `LimitReached`."""
        if self._open[caller_id] >= self._max_per_caller or self._open.total() >= self._max_total:
            raise LimitReached(
                f"{self._open[caller_id]} streams of yours are open, {self._open.total()} in all; "
                f"at most {self._max_per_caller} and {self._max_total} may be",
                hint="close one and try again",
            )
        self._open[caller_id] += 1
        try:
            yield
        finally:
            self._open[caller_id] -= 1
            if not self._open[caller_id]:
                del self._open[caller_id]


def peer_of(client: tuple[str, int] | None) -> str:
    """Whom wrong tokens are counted against: the address we see, never one that a header claims."""
    if client is None:
        return "-"
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0][:64]
    if address.version == 6 and not address.is_loopback:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
