"""Decayed usage from the store alone: what fair share starts from after a restart.

Every ten minutes the usage of each project is written down with the newest event it covers. After a crash
it is that, and what the attempts that ended since had, and what is held still. So a crash at any
instruction loses nothing, and what has to be read is bounded by ten minutes of work.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import msgspec

from shoal.control.core import Core
from shoal.model.attempt import Attempt
from shoal.scheduler.devices import held_by
from shoal.scheduler.fair import Fair, Usage
from shoal.scheduler.tree import Tree
from shoal.store import EventFilter, Tx

KEY = "usage"
MAX_EVENTS = 200_000
"""Read back at most so many: only a log that was never written down from is longer."""
PAGE = 1000
ENDED = EventFilter(kinds_prefix="attempt.ended")


class Recalled(msgspec.Struct, frozen=True):
    """Usage of each project, and the newest event it covers."""

    seen: int
    usages: tuple[Usage, ...]


def recall(tx: Tx, half_life_s: float) -> Recalled:
    """As of this transaction. What is held counts up to each usage's `at`; `Fair.hold` goes on from there."""
    seen = tx.events.head().seq
    text = tx.meta.get(KEY)
    before = msgspec.json.decode(text, type=Recalled) if text else Recalled(0, ())
    fair = Fair(Tree(), half_life_s)
    fair.tell(before.usages)
    told_at = {usage.project: usage.at for usage in before.usages}
    for attempt in _ended(tx, max(before.seen, seen - MAX_EVENTS)):
        if attempt.placed_at is None or attempt.ended_at is None:
            continue
        since = max(attempt.placed_at, told_at.get(attempt.project, -inf))
        if attempt.ended_at > since:
            fair.charge(attempt.project, held_by(attempt.allocation), since, attempt.ended_at)
    hold_all(tx, fair)
    return Recalled(seen, fair.usages())


def hold_all(tx: Tx, fair: Fair) -> None:
    """All that is held now."""
    for _, attempt in tx.attempts.holding():
        if attempt.placed_at is not None:
            fair.hold(attempt.project, held_by(attempt.allocation), attempt.placed_at)


async def write_down(core: Core) -> None:
    """May be repeated. What happens between the two steps is after `seen`, and read next time."""
    recalled = await core.store.read(lambda tx: recall(tx, core.planner.policy.half_life_s))
    text = msgspec.json.encode(recalled).decode()
    await core.store.write(lambda tx: tx.meta.set(KEY, text))


def _ended(tx: Tx, after: int) -> Iterator[Attempt]:
    while events := tx.events.page(after, ENDED, PAGE):
        for event in events:
            attempt = tx.attempts.get(event.attempt_id) if event.attempt_id else None
            if attempt is not None:
                yield attempt
        after = events[-1].seq
