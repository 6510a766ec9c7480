"""What Shoal aims to reach with everything on, and whether this run shows it. Pure."""

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
    """None: there was nothing to compare with."""
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
    samples: Samples,
    unary: Sequence[Case],
    fresh: Sequence[Case],
    streams: Sequence[Case],
    rest: Case,
    unlike: Sequence[Case],
    whole: Sequence[Case],
) -> list[Goal]:
    """Judge each goal by its worst case.

    In `fresh` every request has an id and a trace of its own: whole heads never repeat, but their common
    parts do, and a proxy may cache those. In `unlike` the query is new each time, too, and so is a cookie's
    length, so caching helps nothing. `rest` is one request at a time, `whole` are those of Ray Serve. Routers
    are judged by POSTs to a chat endpoint, because they are made to route those.
    """
    chats = [case for case in unary if case.method == "POST"]
    new_chats = [case for case in fresh if case.method == "POST"]
    return [
        _ceiling("CPU of a request beside nginx", _costs(samples, unary, OURS, "nginx"), 1.6, "x"),
        _ceiling(
            "CPU of a request beside nginx, an id and a trace each",
            _costs(samples, fresh, OURS, "nginx"),
            1.6,
            "x",
        ),
        _ceiling(
            "CPU of a request beside nginx, a query and a cookie each",
            _costs(samples, unlike, OURS, "nginx"),
            1.6,
            "x",
        ),
        _ceiling("CPU of an event beside nginx", _costs(samples, streams, OURS, "nginx"), 1.25, "x"),
        _ceiling("added p50", _added_ms(samples, rest), 0.3, " ms"),
        *(
            _floor(f"CPU of a POST, {name} beside ours", _costs(samples, chats, name, OURS), 3)
            for name in ROUTERS
        ),
        *(
            _floor(
                f"CPU of a POST, {name} beside ours, an id and a trace each",
                _costs(samples, new_chats, name, OURS),
                3,
            )
            for name in ROUTERS
        ),
        _floor(f"CPU of a request, {RAY}'s proxy beside ours", _costs(samples, whole, RAY, OURS), 20),
        _floor(
            f"requests/s end to end beside {RAY}",
            [samples.speed(case, OURS, RAY) for case in whole if samples.has(case, OURS, RAY)],
            5,
        ),
    ]


def _costs(samples: Samples, cases: Sequence[Case], name: str, other: str) -> list[float]:
    return [samples.cost(case, name, other) for case in cases if samples.has(case, name, other)]


def _added_ms(samples: Samples, rest: Case) -> list[float]:
    if not samples.has(rest, OURS, "direct"):
        return []
    return [(samples.p50_s(rest, OURS) - samples.p50_s(rest, "direct")) * 1000]


def _ceiling(what: str, seen: list[float], limit: float, unit: str) -> Goal:
    return Goal(what, max(seen, default=None), limit, unit, is_ceiling=True)


def _floor(what: str, seen: list[float], limit: float) -> Goal:
    return Goal(what, min(seen, default=None), limit, "x", is_ceiling=False)
