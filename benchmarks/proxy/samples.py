"""What was seen in every round, and its medians; ratios are made within a round. Pure."""

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
    """Every request has an id and a trace of its own: other values at the same places of heads as long."""
    is_unlike: bool = False
    """And a query of its own, and a cookie of another length: its first line never comes again."""


@dataclass(frozen=True)
class Sample:
    """One burst at one contestant."""

    cpu_us: float
    """Of the proxy, for a request or an event."""
    rate: float
    """Requests or events a second."""
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
        return statistics.median(one.cpu_us for one in self.of(case, name))

    def rate(self, case: Case, name: str) -> float:
        return statistics.median(one.rate for one in self.of(case, name))

    def p50_s(self, case: Case, name: str) -> float:
        return statistics.median(one.p50_s for one in self.of(case, name))

    def p99_s(self, case: Case, name: str) -> float:
        return statistics.median(one.p99_s for one in self.of(case, name))

    def failed(self, case: Case, name: str) -> int:
        return sum(one.failed for one in self.of(case, name))

    def cost(self, case: Case, name: str, other: str) -> float:
        """How many times the CPU of `other`. Compared within each round: a busy machine slows both."""
        pairs = zip(self.of(case, name), self.of(case, other), strict=True)
        return statistics.median(one.cpu_us / two.cpu_us for one, two in pairs)

    def speed(self, case: Case, name: str, other: str) -> float:
        """How many times the requests a second of `other`."""
        pairs = zip(self.of(case, name), self.of(case, other), strict=True)
        return statistics.median(one.rate / two.rate for one, two in pairs)
