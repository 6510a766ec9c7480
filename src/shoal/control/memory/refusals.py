"""Refused requests that have no event of their own: counted by caller until one event reports them all.

No caller can flood the log with refusals, and none can hide one refusal among others, because each route has
its own count. A refusal because of another project is counted like a request for something that does not
exist, so that both replies take the same time. Events are written at fixed times. Memory is bounded. A crash
loses what was counted since the last event.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.control.actor import Actor

MAX_CALLERS = 1024
"""If there are more, those that were refused longest ago are counted together."""
MAX_STRANGERS = 32
"""Addresses that wrong tokens come from. Further addresses are counted together, because one sender may have
any number of addresses, and each would get its own event.
"""
MAX_ROUTES = 100
"""Routes of one caller. Shoal has fewer routes than that."""
MAX_PATHS = 10
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0
"""While a caller goes on, the distance between its events doubles up to this."""
OTHER = "other"
EVERYBODY_ELSE = Actor(kind="unknown", id="others", name="others")


class CallerRefusals(msgspec.Struct, kw_only=True):
    """Requests of one caller that were refused since the last event about it."""

    actor: Actor
    due_at: float
    pause_s: float = FIRST_PAUSE_S
    since: float = 0.0
    until: float = 0.0
    routes: Counter[str] = msgspec.field(default_factory=Counter)
    """Refused requests by method, route and status."""
    elsewhere: int = 0
    """Those of `routes` that were about projects the caller may not see."""
    nowhere: int = 0
    """Requests for things that do not exist. They are not counted in `routes`."""
    paths: list[str] = []
    """The first paths that were asked for."""

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

    def merge(self, other: CallerRefusals) -> None:
        """Count the other caller's refusals as this caller's."""
        self.since = min(filter(None, (self.since, other.since)), default=0.0)
        self.until = max(self.until, other.until)
        self.routes.update(other.routes)
        self.elsewhere += other.elsewhere
        self.nowhere += other.nowhere
        self.paths = list(dict.fromkeys((*other.paths, *self.paths)))[:MAX_PATHS]

    def event_data(self) -> dict[str, Any]:
        """Return the data of its event."""
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
    """The counts of all callers. Used on the event loop alone."""

    def __init__(self, monotonic: Callable[[], float], now: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._now = now
        self._callers: OrderedDict[str, CallerRefusals] = OrderedDict()

    def count(
        self, actor: Actor, route: str, path: str, *, is_elsewhere: bool = False, is_nowhere: bool = False
    ) -> None:
        """Count one refusal. Takes the same time whatever the reason was."""
        if self._is_one_too_many(actor):
            actor = EVERYBODY_ELSE
        key = f"{actor.kind}:{actor.id}"
        refused = self._callers.get(key)
        if refused is None:
            refused = self._begin(key, actor)
        self._callers.move_to_end(key)
        refused.add(route, path, self._now(), is_elsewhere=is_elsewhere, is_nowhere=is_nowhere)

    def take(self, *, is_all: bool = False) -> list[CallerRefusals]:
        """Return the counts that are due for an event, and start them again at 0. `is_all`: every count."""
        now, due = self._monotonic(), []
        for key, refused in list(self._callers.items()):
            if not is_all and refused.due_at > now:
                continue
            if refused.routes:
                due.append(refused)
                pause_s = refused.pause_s if is_all else min(2 * refused.pause_s, LONGEST_PAUSE_S)
                self._callers[key] = CallerRefusals(
                    actor=refused.actor, due_at=now + pause_s, pause_s=pause_s
                )
            elif not is_all:
                del self._callers[key]  # quiet since the last event, or only asked for what does not exist
        return due

    def put_back(self, taken: list[CallerRefusals]) -> None:
        """Take back counts whose event could not be written."""
        for refused in taken:
            key = f"{refused.actor.kind}:{refused.actor.id}"
            (self._callers.get(key) or self._begin(key, refused.actor)).merge(refused)

    def _is_one_too_many(self, actor: Actor) -> bool:
        kind = EVERYBODY_ELSE.kind
        if actor.kind != kind or f"{kind}:{actor.id}" in self._callers:
            return False
        return sum(refused.actor.kind == kind for refused in self._callers.values()) >= MAX_STRANGERS

    def _begin(self, key: str, actor: Actor) -> CallerRefusals:
        while len(self._callers) >= MAX_CALLERS:
            _, oldest = self._callers.popitem(last=False)
            if oldest.routes:
                rest = f"{EVERYBODY_ELSE.kind}:{EVERYBODY_ELSE.id}"
                self._callers.setdefault(rest, self._new(EVERYBODY_ELSE)).merge(oldest)
                self._callers.move_to_end(rest)
        refused = self._callers[key] = self._new(actor)
        return refused

    def _new(self, actor: Actor) -> CallerRefusals:
        caller = Actor(kind=actor.kind, id=actor.id, name=actor.name)
        return CallerRefusals(actor=caller, due_at=self._monotonic() + FIRST_PAUSE_S)
