"""Callers: the digest of their token, their limits (`CallerAccount`), and the fair queue of waiting
requests.

The control plane knows a caller by the same digest, which cannot be turned back into the token. Pure: the
time is an argument. In the fair queue, a caller with a hundred times its share waits behind its own
requests; the other callers do not wait behind them.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from math import inf
from typing import Protocol

from shoal.serving.proxy.local_reply import ProxyRefusal

_USER = re.compile(r"shl_(tok_[0-9a-z]{1,40})_([0-9a-f]{64})", re.ASCII)


_SHOAL_TOKEN = re.compile(r"\s*bearer\s+sh[a-z]_", re.IGNORECASE)


def has_shoal_token(authorization: str) -> bool:
    """Return whether this header shows a Shoal token, valid or not. No program may see one."""
    return _SHOAL_TOKEN.match(authorization) is not None


def digest_of(token: str) -> str:
    """Return the digest that the table holds for this token. For a token that Shoal did not make, as in a
    table written by hand, it is the SHA-256.
    """
    match = _USER.fullmatch(token)
    if match is None:
        return hashlib.sha256(token.encode()).hexdigest()
    # Bound to the token's id, in the form that the control plane stores: see `identity.tokens.hash_secret`.
    return hashlib.sha256(f"shoal-token\0{match[1]}\0{match[2]}".encode()).hexdigest()


MAX_STRANGERS = 10_000
"""Addresses that a public service tells apart. Further ones share one account."""


class Waiter(Protocol):
    """A request in the queue."""

    account: CallerAccount

    @property
    def weight_bytes(self) -> int: ...


class CallerAccount:
    """One caller of one service."""

    __slots__ = ("admitted", "bound", "drawn", "elsewhere", "filled_at", "level", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.admitted = 0
        """Requests here, waiting or bound."""
        self.bound = 0
        self.elsewhere = 0
        """The caller's requests in other processes of this port, as they last reported."""
        self.level = inf
        """Requests it may send at once. Below 0 if other processes let through more than there were."""
        self.drawn = 0
        """Requests ever taken off `level` in this process."""
        self.filled_at = 0.0
        self.waiting: deque[Waiter] = deque()

    def draw(self, rps: float, burst: float, now: float) -> ProxyRefusal | None:
        """Take one request off a bucket that holds `burst` of them, or return why there is none."""
        level = self.level + (now - self.filled_at) * rps
        self.filled_at = now
        if level < 1.0:
            self.level = level
            detail = f"more than {rps:g} requests a second"
            return ProxyRefusal(429, "limit.rps", detail, retry_s=(1.0 - level) / rps)
        self.level = (burst if level > burst else level) - 1.0  # noqa: FURB136 - for every request
        self.drawn += 1
        return None

    def charge(self, count: int, rps: float, burst: float, now: float) -> None:
        """Take off the same bucket what other processes let through."""
        self.level = min(burst, self.level + (now - self.filled_at) * rps) - count
        self.filled_at = now

    def too_many(self, concurrency: int) -> ProxyRefusal:
        detail = f"{self.admitted + self.elsewhere} requests at once; at most {concurrency} are taken"
        return ProxyRefusal(429, "limit.concurrency", detail, retry_s=1.0)


class HeldBytes:
    """Counts the bytes of requests that one process holds, for any reason and any caller."""

    __slots__ = ("bytes", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self.max_bytes = max_bytes


class FairQueue:
    """Requests that wait for a slot, bounded by count and bytes. The caller with the fewest
    running is next.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, CallerAccount] = {}
        """Callers with a waiting request. A caller that had a turn goes to the end."""
        self.count = 0
        self.bytes = 0

    def push(self, waiter: Waiter, *, max_count: int, max_bytes: int) -> list[Waiter] | None:
        """Queue the request. Return the requests dropped for it, which are the newest of the callers with
        the most waiting; or None if this request itself must be dropped.
        """
        dropped: list[Waiter] = []
        while self.count >= max_count or self.bytes + waiter.weight_bytes > max_bytes:
            longest = max(self._accounts.values(), key=lambda account: len(account.waiting), default=None)
            if longest is None or len(longest.waiting) <= len(waiter.account.waiting) + 1:
                for back in reversed(dropped):
                    self._append(back)
                return None
            dropped.append(longest.waiting[-1])
            self.remove(longest.waiting[-1])
        self._append(waiter)
        return dropped

    def first(self) -> Waiter:
        """Return the next request. Only valid while `count` is above 0."""
        return min(self._accounts.values(), key=lambda account: account.bound).waiting[0]

    def take(self, waiter: Waiter) -> None:
        """Remove a request that gets a slot. Its caller goes behind those with as many requests running."""
        self.remove(waiter)
        account = waiter.account
        if account.waiting:
            self._accounts[account.name] = self._accounts.pop(account.name)

    def remove(self, waiter: Waiter) -> None:
        """Remove a request that is bound, or whose caller is gone."""
        account = waiter.account
        account.waiting.remove(waiter)
        if not account.waiting:
            self._accounts.pop(account.name, None)
        self.count -= 1
        self.bytes -= waiter.weight_bytes

    def grow(self, num_bytes: int, *, max_bytes: int) -> bool:
        """Count the bytes by which a waiting request grew. Return False if that is more than may wait."""
        self.bytes += num_bytes
        return self.bytes <= max_bytes

    def drain(self) -> list[Waiter]:
        """Remove and return all requests."""
        waiters = [waiter for account in self._accounts.values() for waiter in account.waiting]
        for waiter in waiters:
            self.remove(waiter)
        return waiters

    def _append(self, waiter: Waiter) -> None:
        waiter.account.waiting.append(waiter)
        self._accounts.setdefault(waiter.account.name, waiter.account)
        self.count += 1
        self.bytes += waiter.weight_bytes
