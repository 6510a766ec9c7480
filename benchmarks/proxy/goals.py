"""What Shoal set out to reach with everything on, and whether this run shows it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.proxy.contestants import ALL_ON as OURS
from benchmarks.proxy.samples import Case, Samples

ROUTERS = ("vLLM router", "SGLang router")
RAY = "Ray Serve"


@dataclass(frozen=True)
class Goal:
    what: str
    seen: float | None
    """None: nothing to compare with was there."""
    limit: float
    unit: str
    is_ceiling: bool

    @property
    def verdict(self) -> str:
        if self.seen is None:
            return "not measured"
        is_met = self.seen <= self.limit if self.is_ceiling else self.seen >= self.limit
        return "met" if is_met else "missed"

    def row(self) -> list[str]:
        bound = "at most" if self.is_ceiling else "at least"
        seen = "-" if self.seen is None else f"{self.seen:.2f}{self.unit}"
        return [self.what, f"{bound} {self.limit:g}{self.unit}", seen, self.verdict]


def goals(
    samples: Samples, unary: Sequence[Case], streams: Sequence[Case], rest: Case, whole: Sequence[Case]
) -> list[Goal]:
    """Each by its worst case. `rest` is one request at a time, `whole` those of Ray Serve."""
    beside = [samples.cost(case, OURS, "nginx") for case in unary if samples.has(case, OURS, "nginx")]
    events = [samples.cost(case, OURS, "nginx") for case in streams if samples.has(case, OURS, "nginx")]
    added = (
        samples.p50_s(rest, OURS) - samples.p50_s(rest, "direct")
        if samples.has(rest, OURS, "direct")
        else None
    )
    routers = [
        samples.cost(case, name, OURS) for case in unary for name in ROUTERS if samples.has(case, name, OURS)
    ]
    ray = [case for case in whole if samples.has(case, RAY, OURS)]
    return [
        Goal("CPU of a request beside nginx", max(beside, default=None), 1.6, "x", is_ceiling=True),
        Goal("CPU of an event beside nginx", max(events, default=None), 1.25, "x", is_ceiling=True),
        Goal("added p50", None if added is None else added * 1000, 0.3, " ms", is_ceiling=True),
        Goal("CPU of a request, routers' beside ours", min(routers, default=None), 3, "x", is_ceiling=False),
        Goal(
            "CPU of a request, Ray Serve's proxy beside ours",
            min((samples.cost(case, RAY, OURS) for case in ray), default=None),
            20,
            "x",
            is_ceiling=False,
        ),
        Goal(
            "requests/s end to end beside Ray Serve",
            min((samples.speed(case, OURS, RAY) for case in ray), default=None),
            5,
            "x",
            is_ceiling=False,
        ),
    ]
