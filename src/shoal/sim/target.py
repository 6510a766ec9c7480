"""What a planner promises its users: `p95 wait < 10m`."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from shoal.errors import SpecError
from shoal.sim.report import Report
from shoal.spec.quantity import parse_number, parse_seconds

EXAMPLE = '--target "p95 wait < 10m"'


class Statistic(StrEnum):
    MEAN = "mean"
    P50 = "p50"
    P95 = "p95"
    P99_9 = "p99.9"
    MAX = "max"


class Measure(StrEnum):
    WAIT = "wait"
    SLOWDOWN = "slowdown"
    COMPLETION = "completion"


WORDS = re.compile(r"(?P<statistic>\S+)\s+(?P<measure>\w+)\s*<\s*(?P<bound>\S+)")


class Target(msgspec.Struct, frozen=True):
    statistic: Statistic
    measure: Measure
    bound: float
    """Seconds; of a slowdown, times."""
    text: str

    def value(self, report: Report) -> float:
        waits = report.overall
        distribution = {
            Measure.WAIT: waits.wait_s,
            Measure.SLOWDOWN: waits.slowdown,
            Measure.COMPLETION: waits.completion_s,
        }[self.measure]
        return float(getattr(distribution, self.statistic.replace(".", "_")))

    def is_met(self, report: Report) -> bool:
        """Also by every job: one that is refused has not waited less."""
        return not report.num_refused and self.value(report) < self.bound


def parse_target(text: str) -> Target:
    found = WORDS.fullmatch(text.strip())
    if found is None:
        raise SpecError(f"`--target {text}`: a target is STATISTIC MEASURE < BOUND", hint=EXAMPLE)
    choices = f"a target is about {' '.join(Statistic)} of {' '.join(Measure)}"
    for word, known in ((found["statistic"], Statistic), (found["measure"], Measure)):
        if word not in set(known):
            raise SpecError(f"`--target {text}`: no `{word}`; {choices}", hint=EXAMPLE)
    statistic, measure = Statistic(found["statistic"]), Measure(found["measure"])
    try:
        read = parse_number if measure is Measure.SLOWDOWN else parse_seconds
        return Target(statistic, measure, read(found["bound"]), " ".join(text.split()))
    except ValueError as error:
        raise SpecError(f"`--target {text}`: {error}; {choices}", hint=EXAMPLE) from None
