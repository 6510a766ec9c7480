"""What was seen in every round, and its medians. Ratios are computed within a round. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    title: str
    method: str
    """`GET`, `POST` or `stream`."""
    connections: int
    is_fresh: bool = False
    """Every request has an id and a trace of its own: new values of the same length at the same places of the
    head."""
    is_unlike: bool = False
    """In addition, every request has a query of its own and a cookie of another length, so its first line
    never repeats."""


@dataclass(frozen=True)
class Sample:
    """One burst at one contestant."""

    cpu_us: float
    """CPU of the proxy, per request or event."""
    rate: float
    """Requests or events per second."""
    p50_s: float
    p99_s: float
    failed: int


@dataclass
class Samples:
    """By case and contestant, one for each round."""

    seen: dict[tuple[str, str], list[Sample]] = field(default_factory=lambda: defaultdict(list))

    def add(self, case: Case, name: str, sample: Sample) -> None:
        self.seen[case.title, name].append(sample)

    def has(self, case: Case, *names: str) -> bool:
        return all((case.title, name) in self.seen for name in names)

    def of(self, case: Case, name: str) -> list[Sample]:
        return self.seen[case.title, name]

    def cpu_us(self, case: Case, name: str) -> float:
        return statistics.median(sample.cpu_us for sample in self.of(case, name))

    def rate(self, case: Case, name: str) -> float:
        return statistics.median(sample.rate for sample in self.of(case, name))

    def p50_s(self, case: Case, name: str) -> float:
        return statistics.median(sample.p50_s for sample in self.of(case, name))

    def p99_s(self, case: Case, name: str) -> float:
        return statistics.median(sample.p99_s for sample in self.of(case, name))

    def failed(self, case: Case, name: str) -> int:
        return sum(sample.failed for sample in self.of(case, name))

    def cost(self, case: Case, name: str, other: str) -> float:
        """Return how many times the CPU of `other`. Compared within each round, because a busy machine slows
        both.
        """
        pairs = zip(self.of(case, name), self.of(case, other), strict=True)
        return statistics.median(sample.cpu_us / other_sample.cpu_us for sample, other_sample in pairs)

    def speed(self, case: Case, name: str, other: str) -> float:
        """Return how many times the requests per second of `other`."""
        pairs = zip(self.of(case, name), self.of(case, other), strict=True)
        return statistics.median(sample.rate / other_sample.rate for sample, other_sample in pairs)
