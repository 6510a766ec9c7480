"""What data planes count, added up second by second: what scaling and rollouts are decided by. In memory.

Counters of a process only ever grow while it lives. The first word of one that nobody heard of before is
where its counting begins: a restarted control plane must not take a year of requests for a second's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from shoal.serving.table import BOUNDS_S, Count, Report

FRESH_S = 5.0
"""A process not heard from for so long has nothing in it, as far as anybody knows."""
GONE_S = 60.0
"""One not heard from for so long is none any more, and begins anew if it is heard again."""
KEPT = 3600
"""Seconds remembered of each service, one by one."""
MINUTES_KEPT = 1440
"""And minutes before them, each as its worst second."""
KEPT_S = 86400.0
"""What is always within both: nobody can tell by more."""

Name = tuple[str, str]
"""Project and service."""


class Sample(msgspec.Struct, kw_only=True):
    """One second of a service, over all processes; or the most of several, long ago."""

    at: int
    """On the clock of whoever listens, in whole seconds."""
    in_flight: int = 0
    queued: int = 0
    """The most of it within the second."""
    requests: int = 0
    tokens: int = 0
    seconds: int = 1
    """Somebody counted in: each had at most what is said here, and `at` is the last of them."""

    def absorb(self, later: Sample) -> None:
        self.at = later.at
        self.in_flight = max(self.in_flight, later.in_flight)
        self.queued = max(self.queued, later.queued)
        self.requests = max(self.requests, later.requests)
        self.tokens = max(self.tokens, later.tokens)
        self.seconds += later.seconds


class Stats(msgspec.Struct, kw_only=True):
    """Of one release, since it was first counted."""

    requests: int = 0
    errors: int = 0
    first_byte_s: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def since(self, before: Stats) -> Stats:
        return Stats(
            requests=self.requests - before.requests,
            errors=self.errors - before.errors,
            first_byte_s=[
                now - then for now, then in zip(self.first_byte_s, before.first_byte_s, strict=True)
            ],
        )

    def copy(self) -> Stats:
        return Stats(requests=self.requests, errors=self.errors, first_byte_s=list(self.first_byte_s))


class Traffic:
    def __init__(self) -> None:
        self._reports: dict[str, tuple[Report, float]] = {}
        self._samples: dict[Name, deque[Sample]] = {}
        self._minutes: dict[Name, deque[Sample]] = {}
        self._stats: dict[tuple[str, str, int], Stats] = {}
        self._since: float | None = None

    def heard(self, report: Report, now: float) -> None:
        """One process said what it counts."""
        if self._since is None:
            self._since = now
        known = self._reports.get(report.process_id)
        self._reports[report.process_id] = (report, now)
        self._reports = {who: told for who, told in self._reports.items() if now - told[1] < GONE_S}
        if known is not None:
            before = {(one.project, one.name, one.release): one for one in known[0].counts}
            for count in report.counts:
                self._add(count, before.get((count.project, count.name, count.release)), now)
        for name in {(count.project, count.name) for count in report.counts}:
            self._look(name, now)
        if report.is_last:
            del self._reports[report.process_id]

    def samples(self, project: str, name: str) -> tuple[Sample, ...]:
        """Oldest first; none before somebody counted."""
        return (*self._minutes.get((project, name), ()), *self._samples.get((project, name), ()))

    def stats(self, project: str, name: str, release: int) -> Stats:
        return self._stats.get((project, name, release), Stats()).copy()

    def is_idle(self, replica_id: str, version: int, now: float) -> bool:
        """Whether everybody who may send requests knows the table of this version, and has none in there."""
        fresh = self._fresh(now)
        if self._since is None or now - self._since < FRESH_S:
            return False  # somebody else may be there who did not come to speak yet
        if not fresh or len(fresh) < len(self._reports):
            return False  # who is silent may be serving on: then only time tells
        in_flight = sum(
            one.in_flight for report in fresh for one in report.health if one.replica_id == replica_id
        )
        return in_flight == 0 and all(report.version >= version for report in fresh)

    def knows(self, version: int, now: float) -> bool:
        """Whether everybody who may serve said that they go by the table of this version, or a newer one.

        Who is silent counts until it is `GONE_S`; for `FRESH_S` after the first word, others may be there.
        """
        if self._since is None or now - self._since < FRESH_S:
            return False
        return all(report.version >= version for report, at in self._reports.values() if now - at < GONE_S)

    def forget(self, names: Iterable[Name]) -> None:
        """Keep only these services."""
        kept = set(names)
        self._samples = {name: known for name, known in self._samples.items() if name in kept}
        self._minutes = {name: known for name, known in self._minutes.items() if name in kept}
        self._stats = {key: known for key, known in self._stats.items() if key[:2] in kept}

    def _fresh(self, now: float) -> list[Report]:
        return [report for report, at in self._reports.values() if now - at <= FRESH_S]

    def _add(self, count: Count, before: Count | None, now: float) -> None:
        before = before or Count(project=count.project, name=count.name, release=count.release)
        requests = max(0, count.requests - before.requests)
        sample = self._sample((count.project, count.name), now)
        sample.requests += requests
        sample.tokens += max(0, count.tokens - before.tokens)
        stats = self._stats.setdefault((count.project, count.name, count.release), Stats())
        stats.requests += requests
        stats.errors += max(0, count.errors - before.errors)
        for place, number in enumerate(count.first_byte_s[: len(stats.first_byte_s)]):
            earlier = before.first_byte_s[place] if place < len(before.first_byte_s) else 0
            stats.first_byte_s[place] += max(0, number - earlier)

    def _look(self, name: Name, now: float) -> None:
        counts = [
            count
            for report in self._fresh(now)
            for count in report.counts
            if (count.project, count.name) == name
        ]
        sample = self._sample(name, now)
        sample.in_flight = max(sample.in_flight, sum(count.in_flight for count in counts))
        sample.queued = max(sample.queued, sum(count.queued for count in counts))

    def _sample(self, name: Name, now: float) -> Sample:
        samples = self._samples.setdefault(name, deque())
        if not samples or samples[-1].at != int(now):
            samples.append(Sample(at=int(now)))
        if len(samples) > KEPT:
            self._fold(name, samples.popleft())
        return samples[-1]

    def _fold(self, name: Name, sample: Sample) -> None:
        minutes = self._minutes.setdefault(name, deque(maxlen=MINUTES_KEPT))
        if minutes and minutes[-1].at // 60 == sample.at // 60:
            minutes[-1].absorb(sample)
        else:
            minutes.append(sample)
