"""Callers at the edge: what each may do (`Account`), and whose turn it is when requests wait (`FairQueue`).

Pure: the time is an argument. A caller with a hundred times its share waits behind its own requests, not
the others behind them.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Protocol

from shoal.serving.problem import Refused

MAX_STRANGERS = 10_000
"""Addresses that a public service tells apart; the others share one account."""


class Waiter(Protocol):
    """A request in the queue."""

    account: Account
    weight_bytes: int


class Account:
    """One caller of one service."""

    __slots__ = ("admitted", "bound", "drawn", "elsewhere", "filled_at", "level", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.admitted = 0
        """Requests here, waiting or bound."""
        self.bound = 0
        self.elsewhere = 0
        """Its requests in other processes of this port, as they said last."""
        self.level = inf
        """Requests it may send at once; below 0: others let through more than there was."""
        self.drawn = 0
        """Requests that were taken off `level` here, ever."""
        self.filled_at = 0.0
        self.waiting: deque[Waiter] = deque()

    def draw(self, rps: float, burst: float, now: float) -> Refused | None:
        """One request off a bucket that holds `burst` of them."""
        level = self.level + (now - self.filled_at) * rps
        self.filled_at = now
        if level < 1.0:
            self.level = level
            told = f"more than {rps:g} requests a second"
            return Refused(429, "limit.rps", told, retry_s=(1.0 - level) / rps)
        self.level = (burst if level > burst else level) - 1.0  # noqa: FURB136 - for every request
        self.drawn += 1
        return None

    def charge(self, count: int, rps: float, burst: float, now: float) -> None:
        """So many that other processes let through, off the same bucket as it is by now."""
        self.level = min(burst, self.level + (now - self.filled_at) * rps) - count
        self.filled_at = now

    def too_many(self, concurrency: int) -> Refused:
        told = f"{self.admitted + self.elsewhere} requests at once; at most {concurrency} are taken"
        return Refused(429, "limit.concurrency", told, retry_s=1.0)


class Held:
    """Bytes of requests that one process keeps, for whatever reason and whomever."""

    __slots__ = ("bytes", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self.max_bytes = max_bytes


class FairQueue:
    """Requests that wait for a slot, bounded by count and bytes; next is who has fewest running."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        """Those with something waiting; who had a turn goes to the end."""
        self.count = 0
        self.bytes = 0

    def push(self, waiter: Waiter, *, max_count: int, max_bytes: int) -> list[Waiter] | None:
        """Those who must leave for it, the newest of the caller with most waiting; None: it is itself one."""
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
        """Whose turn it is; only to be called while `count`."""
        return min(self._accounts.values(), key=lambda account: account.bound).waiting[0]

    def take(self, waiter: Waiter) -> None:
        """It has a slot; its caller's next request is behind those of callers with as many running."""
        self.remove(waiter)
        account = waiter.account
        if account.waiting:
            self._accounts[account.name] = self._accounts.pop(account.name)

    def remove(self, waiter: Waiter) -> None:
        """Bound, or its caller went away."""
        account = waiter.account
        account.waiting.remove(waiter)
        if not account.waiting:
            self._accounts.pop(account.name, None)
        self.count -= 1
        self.bytes -= waiter.weight_bytes

    def grew(self, waiter: Waiter, num_bytes: int, *, max_bytes: int) -> bool:
        """More of its body came, and is counted. False: it is more than may wait."""
        waiter.weight_bytes += num_bytes
        self.bytes += num_bytes
        return self.bytes <= max_bytes

    def drain(self) -> list[Waiter]:
        """All of them, out."""
        waiters = [waiter for account in self._accounts.values() for waiter in account.waiting]
        for waiter in waiters:
            self.remove(waiter)
        return waiters

    def _append(self, waiter: Waiter) -> None:
        waiter.account.waiting.append(waiter)
        self._accounts.setdefault(waiter.account.name, waiter.account)
        self.count += 1
        self.bytes += waiter.weight_bytes
