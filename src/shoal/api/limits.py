"""What one peer or one caller may cost us: wrong tokens, audit entries, open streams. Bounded memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal.errors import LimitReached
from shoal.identity import Caller, CallerKind

MAX_PEERS = 4096
PEOPLE_SHARE = 0.5
"""Of the event streams: jobs do not get these."""
ALL_JOBS = "all jobs together"


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
    """How many event streams are open: in all, of each person, and of all jobs of a project or an owner.

    A job's token is a caller of its own, so jobs are counted by project and by owner. All jobs together hold
    at most half of the streams: the other half is for people.
    """

    def __init__(self, max_total: int, max_per_account: int) -> None:
        self._max_total = max_total
        self._max_of_jobs = max(int(max_total * (1 - PEOPLE_SHARE)), 1)
        self._max_per_account = max_per_account
        self._open: Counter[str] = Counter()
        self._total = 0

    @contextmanager
    def held(self, caller: Caller) -> Iterator[None]:
        """One slot for as long as the block lasts. Raises `LimitReached`."""
        names = _counted_as(caller)
        self._check(names)
        self._open.update(names)
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._open.subtract(names)
            for name in names:
                if not self._open[name]:
                    del self._open[name]

    def _check(self, names: tuple[str, ...]) -> None:
        limits = {name: self._max_of_jobs if name == ALL_JOBS else self._max_per_account for name in names}
        counts = [(f"of {name}", self._open[name], limit) for name, limit in limits.items()]
        for whose, count, limit in (*counts, ("in all", self._total, self._max_total)):
            if count >= limit:
                raise LimitReached(
                    f"{count} streams {whose} are open; at most {limit} may be",
                    hint="close one and try again",
                )


def _counted_as(caller: Caller) -> tuple[str, ...]:
    if caller.kind is not CallerKind.JOB:
        return (f"{caller.kind} {caller.name}",)
    return (f"jobs of project {caller.project}", f"jobs of owner {caller.owner}", ALL_JOBS)


def account_of(caller: Caller) -> str:
    """Against whom the connections and reads of a token are counted: for jobs, all those of their owner."""
    return f"jobs of owner {caller.owner}" if caller.kind is CallerKind.JOB else f"{caller.kind} {caller.id}"


def is_machine(caller: Caller) -> bool:
    """Whether the token is one of our own parts: a supervisor's or a data plane's."""
    return caller.kind not in (CallerKind.USER, CallerKind.JOB)
