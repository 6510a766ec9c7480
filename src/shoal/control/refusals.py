"""Refused requests that have no event of their own: counted by caller, until one event tells of them all.

Nobody floods the log with refusals, and nobody hides one among others: each route keeps a count of its own.
What is refused because it is in another project is counted like what is nowhere, so that neither answer takes
longer, and written at fixed times. Memory is bounded. A crash loses what was counted since the last event.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.control.actor import Actor

MAX_CALLERS = 1024
"""Those heard of longest ago are then counted together."""
MAX_STRANGERS = 32
"""Addresses that wrong tokens come from; others are counted together. One sender may have as many as there
are, and each would have an event of its own."""
MAX_ROUTES = 100
"""Of one caller; there are fewer routes than that."""
MAX_PATHS = 10
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0
"""While a caller goes on, its events come at twice the distance of the last two, up to this."""
OTHER = "other"
EVERYBODY_ELSE = Actor(kind="unknown", id="others", name="others")


class Refused(msgspec.Struct, kw_only=True):
    """What one caller was refused since the last event about it."""

    actor: Actor
    due_at: float
    pause_s: float = FIRST_PAUSE_S
    since: float = 0.0
    until: float = 0.0
    routes: Counter[str] = msgspec.field(default_factory=Counter)
    """Refused by method, route and status."""
    elsewhere: int = 0
    """Of these, for things of projects that the caller may not see."""
    nowhere: int = 0
    """Beside these, asked for what is not there at all."""
    paths: list[str] = []
    """Some of what was asked for, the first ones."""

    def add(self, route: str, path: str, now: float, *, is_elsewhere: bool, is_nowhere: bool) -> None:
        self.since = self.since or now
        self.until = now
        if is_nowhere:
            self.nowhere += 1
        else:
            self.routes[route if route in self.routes or len(self.routes) < MAX_ROUTES else OTHER] += 1
        self.elsewhere += is_elsewhere
        if not is_nowhere and len(self.paths) < MAX_PATHS and path not in self.paths:
            self.paths = [*self.paths, path]

    def merge(self, other: Refused) -> None:
        """Count the other's as if they were this caller's."""
        self.since = min(filter(None, (self.since, other.since)), default=0.0)
        self.until = max(self.until, other.until)
        self.routes.update(other.routes)
        self.elsewhere += other.elsewhere
        self.nowhere += other.nowhere
        self.paths = list(dict.fromkeys((*other.paths, *self.paths)))[:MAX_PATHS]

    def told(self) -> dict[str, Any]:
        """The data of its event."""
        count = self.routes.total()
        return {
            "what": f"{count} request{'' if count == 1 else 's'}",
            "count": count,
            "since": self.since,
            "until": self.until,
            "routes": dict(sorted(self.routes.items())),
            "elsewhere": self.elsewhere,
            "nowhere": self.nowhere,
            "paths": self.paths,
        }


class Refusals:
    """Used on the event loop alone."""

    def __init__(self, monotonic: Callable[[], float], now: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._now = now
        self._callers: OrderedDict[str, Refused] = OrderedDict()

    def count(
        self, actor: Actor, route: str, path: str, *, is_elsewhere: bool = False, is_nowhere: bool = False
    ) -> None:
        """One more. Takes the same time whatever it was refused for."""
        if self._is_one_too_many(actor):
            actor = EVERYBODY_ELSE
        key = f"{actor.kind}:{actor.id}"
        refused = self._callers.get(key)
        if refused is None:
            refused = self._begin(key, actor)
        self._callers.move_to_end(key)
        refused.add(route, path, self._now(), is_elsewhere=is_elsewhere, is_nowhere=is_nowhere)

    def take(self, *, is_all: bool = False) -> list[Refused]:
        """What is to be told now, which is counted anew from here; `is_all`: whatever there is."""
        now, found = self._monotonic(), []
        for key, refused in list(self._callers.items()):
            if not is_all and refused.due_at > now:
                continue
            if refused.routes:
                found.append(refused)
                pause_s = refused.pause_s if is_all else min(2 * refused.pause_s, LONGEST_PAUSE_S)
                self._callers[key] = Refused(actor=refused.actor, due_at=now + pause_s, pause_s=pause_s)
            elif not is_all:
                del self._callers[key]  # quiet since, or looked for what is nowhere
        return found

    def put_back(self, taken: list[Refused]) -> None:
        """They could not be told."""
        for refused in taken:
            key = f"{refused.actor.kind}:{refused.actor.id}"
            (self._callers.get(key) or self._begin(key, refused.actor)).merge(refused)

    def _is_one_too_many(self, actor: Actor) -> bool:
        kind = EVERYBODY_ELSE.kind
        if actor.kind != kind or f"{kind}:{actor.id}" in self._callers:
            return False
        return sum(refused.actor.kind == kind for refused in self._callers.values()) >= MAX_STRANGERS

    def _begin(self, key: str, actor: Actor) -> Refused:
        while len(self._callers) >= MAX_CALLERS:
            _, oldest = self._callers.popitem(last=False)
            if oldest.routes:
                rest = f"{EVERYBODY_ELSE.kind}:{EVERYBODY_ELSE.id}"
                self._callers.setdefault(rest, self._new(EVERYBODY_ELSE)).merge(oldest)
                self._callers.move_to_end(rest)
        refused = self._callers[key] = self._new(actor)
        return refused

    def _new(self, actor: Actor) -> Refused:
        who = Actor(kind=actor.kind, id=actor.id, name=actor.name)
        return Refused(actor=who, due_at=self._monotonic() + FIRST_PAUSE_S)
