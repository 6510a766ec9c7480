"""The reports of all data planes, added up second by second, for scaling and rollouts. In memory only.

A process's counters only grow while it lives. The first report of a process sets its starting point, because
a restarted control plane must not count a year of requests as one second's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from shoal.serving.table import BOUNDS_S, ReleaseCounters, ServingReport

FRESH_S = 5.0
"""A process silent for this long counts as having no requests."""
GONE_S = 60.0
"""A process silent for this long is gone. If it reports again, it counts as new."""
SECONDS_KEPT = 3600
"""Seconds remembered of each service, one by one."""
MINUTES_KEPT = 1440
"""Minutes remembered before those, each by its worst second."""
KEPT_S = 86400.0
"""A period that both always cover, so callers may rely on it."""

Name = tuple[str, str]
"""Project and service."""


class Sample(msgspec.Struct, kw_only=True):
    """One second of a service over all processes, or the maximum of several seconds long ago."""

    at: int
    """Whole seconds on the control plane's clock."""
    in_flight: int = 0
    queued: int = 0
    """The maximum within the second."""
    requests: int = 0
    tokens: int = 0
    seconds: int = 1
    """Seconds with a report in this sample. Each had at most these values, and `at` is the last of them."""

    def absorb(self, later: Sample) -> None:
        self.at = later.at
        self.in_flight = max(self.in_flight, later.in_flight)
        self.queued = max(self.queued, later.queued)
        self.requests = max(self.requests, later.requests)
        self.tokens = max(self.tokens, later.tokens)
        self.seconds += later.seconds


class Stats(msgspec.Struct, kw_only=True):
    """Counters of one release since it was first counted."""

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
        self._reports: dict[str, tuple[ServingReport, float]] = {}
        self._samples: dict[Name, deque[Sample]] = {}
        self._minutes: dict[Name, deque[Sample]] = {}
        self._stats: dict[tuple[str, str, int], Stats] = {}
        self._since: float | None = None

    def record(self, report: ServingReport, now: float) -> None:
        """Take a report of one process."""
        if self._since is None:
            self._since = now
        previous = self._reports.get(report.process_id)
        self._reports[report.process_id] = (report, now)
        self._reports = {
            process_id: entry for process_id, entry in self._reports.items() if now - entry[1] < GONE_S
        }
        if previous is not None:
            before = {(count.project, count.name, count.release): count for count in previous[0].counts}
            for count in report.counts:
                self._add(count, before.get((count.project, count.name, count.release)), now)
        for name in {(count.project, count.name) for count in report.counts}:
            self._record_load(name, now)
        if report.is_last:
            del self._reports[report.process_id]

    def samples(self, project: str, name: str) -> tuple[Sample, ...]:
        """Return samples, oldest first; empty before the first report."""
        return (*self._minutes.get((project, name), ()), *self._samples.get((project, name), ()))

    def stats(self, project: str, name: str, release: int) -> Stats:
        return self._stats.get((project, name, release), Stats()).copy()

    def is_idle(self, replica_id: str, version: int, now: float) -> bool:
        """Return whether all data planes know the table of this version, and none has requests in the
        replica.
        """
        fresh = self._fresh(now)
        if self._since is None or now - self._since < FRESH_S:
            return False  # a data plane that has not reported may exist
        if not fresh or len(fresh) < len(self._reports):
            return False  # a silent process may still serve, so only the drain time helps
        in_flight = sum(
            health.in_flight
            for report in fresh
            for health in report.health
            if health.replica_id == replica_id
        )
        return in_flight == 0 and all(report.version >= version for report in fresh)

    def is_known_everywhere(self, version: int, now: float) -> bool:
        """Return whether every data plane has reported a table of this version or a newer one.

        A silent process counts until `GONE_S`. Until `FRESH_S` after the first report, others may exist.
        """
        if self._since is None or now - self._since < FRESH_S:
            return False
        return all(report.version >= version for report, at in self._reports.values() if now - at < GONE_S)

    def forget(self, names: Iterable[Name]) -> None:
        """Keep only these services."""
        names_kept = set(names)
        self._samples = {name: value for name, value in self._samples.items() if name in names_kept}
        self._minutes = {name: value for name, value in self._minutes.items() if name in names_kept}
        self._stats = {key: value for key, value in self._stats.items() if key[:2] in names_kept}

    def _fresh(self, now: float) -> list[ServingReport]:
        return [report for report, at in self._reports.values() if now - at <= FRESH_S]

    def _add(self, count: ReleaseCounters, before: ReleaseCounters | None, now: float) -> None:
        before = before or ReleaseCounters(project=count.project, name=count.name, release=count.release)
        requests = max(0, count.requests - before.requests)
        sample = self._sample((count.project, count.name), now)
        sample.requests += requests
        sample.tokens += max(0, count.tokens - before.tokens)
        stats = self._stats.setdefault((count.project, count.name, count.release), Stats())
        stats.requests += requests
        stats.errors += max(0, count.errors - before.errors)
        for index, number in enumerate(count.first_byte_s[: len(stats.first_byte_s)]):
            earlier = before.first_byte_s[index] if index < len(before.first_byte_s) else 0
            stats.first_byte_s[index] += max(0, number - earlier)

    def _record_load(self, name: Name, now: float) -> None:
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
        if len(samples) > SECONDS_KEPT:
            self._fold(name, samples.popleft())
        return samples[-1]

    def _fold(self, name: Name, sample: Sample) -> None:
        minutes = self._minutes.setdefault(name, deque(maxlen=MINUTES_KEPT))
        if minutes and minutes[-1].at // 60 == sample.at // 60:
            minutes[-1].absorb(sample)
        else:
            minutes.append(sample)
