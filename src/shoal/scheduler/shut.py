"""Windows in the way of a job: on nodes that are free, with what would get it past, and on those to come."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from math import floor, inf

import msgspec

from shoal.model.window import Window, WindowKind
from shoal.scheduler.book import Book
from shoal.scheduler.claims import Claims
from shoal.scheduler.gang import choose
from shoal.scheduler.rows import RowKey
from shoal.scheduler.snapshot import Candidate
from shoal.scheduler.types import Explanation, Why
from shoal.scheduler.words import clock_time, duration, listed, num_nodes

NUM_TOLD = 4
IS_THEN = {WindowKind.MAINTENANCE: "in maintenance", WindowKind.RESERVATION: "reserved"}


def explain_windows(
    candidate: Candidate, key: RowKey, book: Book, claims: Claims, now: float
) -> Explanation | None:
    """None when it could start now if no job were promised anything."""
    shut = book.windows.shut(candidate.project, now, now + key.limit_s)
    demand, finder = key.demand, book.finders.of(key.demand.need)
    if not shut or choose(demand, finder, book.capacity, book.windows.nodes_of(shut)):
        return None
    free = set(finder.ranked(demand.excluded))
    windows = (book.windows.all[number] for number in shut)
    met = [window for window in windows if not free.isdisjoint(window.nodes)]
    told = [_told(window, free, now) for window in met]
    return Explanation(
        attempt_id="",
        job_id="",
        why=Why.WINDOW,
        sentence=f"{_asks(key, met, now)}; {told[0]}",
        details=tuple(told[1:NUM_TOLD]),
        hint=_shorter(candidate, key, book, claims, met, now),
        facts={
            "nodes_needed": demand.min_nodes,
            "nodes_free": len(free),
            "nodes_open": len(free - book.windows.nodes_of(shut)),
            "time_limit_s": None if key.limit_s == inf else key.limit_s,
            "windows": [_fact(window, free) for window in met],
        },
    )


def with_windows(
    said: Explanation, project: str, key: RowKey, book: Book, taken: AbstractSet[str], now: float
) -> Explanation:
    """Names the windows that a job which waits for nodes would meet on those it could have first: they too
    decide when it starts. `taken`: nodes that are kept for others.
    """
    turn = book.soonest.turn(book.allowed(project, key.demand), taken, now)
    if turn is None:
        return said
    at, names = (now if turn.at == inf else turn.at), set(turn.nodes)
    shut = (book.windows.all[number] for number in book.windows.shut(project, at, at + key.limit_s))
    met = [window for window in shut if not names.isdisjoint(window.nodes)]
    if not met:
        return said
    return msgspec.structs.replace(
        said,
        details=(*said.details, *(_told(window, names, now) for window in met[:NUM_TOLD])),
        facts={**said.facts, "windows": [_fact(window, names) for window in met]},
    )


def _asks(key: RowKey, met: list[Window], now: float) -> str:
    """What about it the windows are in the way of."""
    if all(window.from_at <= now for window in met):
        return f"needs {num_nodes(key.demand)}"
    return "has no time limit" if key.limit_s == inf else f"may run {duration(key.limit_s)} by its time limit"


def _told(window: Window, free: set[str], now: float) -> str:
    """Says nothing of whom a reservation is for: the reader may not know that the project exists."""
    names = [name for name in window.nodes if name in free]
    verb = "is" if len(names) == 1 else "are"
    when = f"until {_time(window.until_at, now)}"
    if window.from_at > now:
        # Downwards, as `shoal reserve` tells it: by then nobody may be there.
        when = f"from {_time(floor(window.from_at / 60) * 60, now)} {when}"
    because = f' ("{window.because}")' if window.because and window.kind is WindowKind.MAINTENANCE else ""
    return f"{listed(names)} {verb} {IS_THEN[window.kind]} {when}{because}"


def _time(at: float, now: float) -> str:
    return clock_time(at, now) or "a day in more than a year"


def _fact(window: Window, free: set[str]) -> dict[str, object]:
    return {
        "id": window.window_id,
        "kind": str(window.kind),
        "from_at": window.from_at,
        "until_at": window.until_at,
        "nodes": [name for name in window.nodes if name in free],
    }


def _shorter(
    candidate: Candidate, key: RowKey, book: Book, claims: Claims, met: list[Window], now: float
) -> str | None:
    """The longest time limit, in whole minutes, with which it could start this moment."""
    demand, finder = key.demand, book.finders.of(key.demand.need)
    for begins in sorted({window.from_at for window in met if window.from_at > now}, reverse=True):
        grace_s = candidate.request.grace_s
        minutes = max(floor((begins - now - grace_s) / 60), 0)
        bars = claims.bars(candidate.project, now, now + minutes * 60 + grace_s)
        barred = claims.barred(demand.need, bars)
        if minutes and choose(demand, finder, book.capacity, barred):
            return f"`time_limit: {minutes}m` or less could start now"
    return None
