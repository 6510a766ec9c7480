"""When waiting jobs will start: worked out beside the event loop, and learned from as they do.

The facts are copied on the loop: 20 ms at 12,500 nodes and 50,000 waiting jobs, and less than one on clusters
of ordinary size. Everything else is the business of a thread, one question at a time, and each has a bound
on its work.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

import anyio
import msgspec

from shoal.control.actor import SHOAL, Actor
from shoal.control.core import Core
from shoal.engines.base import SupportsOwnQueue
from shoal.scheduler.calibration import Interval
from shoal.scheduler.changes import START_IT
from shoal.scheduler.outlook import Basis, Outlook, handed_on, outlooks
from shoal.scheduler.predict import Span, predict
from shoal.scheduler.sooner import all_changes

NUM_LEARNED_FROM = 8
"""Waiting jobs that nobody asked about, foreseen in one turn: intervals are right when somebody does."""


async def look_ahead(core: Core, actor: Actor, attempt_ids: Collection[str]) -> dict[str, Outlook]:
    """Of each of them that waits, all from the same futures. `LimitReached` when too many ask at once."""
    async with core.foreseen.one_at_a_time(actor.id):
        return await _look_ahead(core, attempt_ids)


async def look_ahead_and_around(core: Core, actor: Actor, attempt_id: str) -> Outlook | None:
    """One job's outlook with the changes that would start it now; None when it does not wait.

    `LimitReached` when too many ask at once.
    """
    async with core.foreseen.one_at_a_time(actor.id):
        found = (await _look_ahead(core, (attempt_id,))).get(attempt_id)
        if found is None:
            return None
        now, snapshot, policy = core.clock.now(), core.planner.snapshot(), core.planner.policy
        spread, cluster = core.stamps.spread, _own_queue(core)
        start_it = f"have it handed to {cluster}" if cluster else START_IT
        tried = await anyio.to_thread.run_sync(
            lambda: all_changes(snapshot, policy, now, attempt_id, spread, start_it)
        )
    return msgspec.structs.replace(found, changes=tried.changes, not_looked=tried.not_looked)


async def _look_ahead(core: Core, attempt_ids: Collection[str]) -> dict[str, Outlook]:
    now, snapshot, policy = core.clock.now(), core.planner.snapshot(), core.planner.policy
    promises = core.planner.promises

    def think() -> dict[str, Span]:
        return predict(snapshot, policy, now, attempt_ids, core.stamps.spread)

    spans = await anyio.to_thread.run_sync(think)
    found = outlooks(snapshot, now, attempt_ids, spans, promises, core.foreseen.calibration)
    for attempt_id, outlook in found.items():
        if outlook.basis is Basis.SCENARIOS:
            interval = Interval((outlook.earliest or now) - now, (outlook.latest or inf) - now)
            core.foreseen.say(attempt_id, spans[attempt_id], interval, now)
    cluster = _own_queue(core)
    return {own: handed_on(told, cluster) if cluster else told for own, told in found.items()}


def _own_queue(core: Core) -> str | None:
    """The cluster that starts what it is given in a turn of its own; None: what is placed starts."""
    return core.engine.own_queue if isinstance(core.engine, SupportsOwnQueue) else None


async def learn(core: Core) -> None:
    """Foresee some of those who came last, unless they were already, or somebody asks about others: then
    there is enough to do, and to learn from. Costs nothing while nobody waits.
    """
    waiting = [one for one in core.planner.waiting if one.attempt_id not in core.foreseen and not one.unmet]
    newest = sorted(waiting, key=lambda one: (-one.submitted_at, one.attempt_id))[:NUM_LEARNED_FROM]
    if newest and core.foreseen.is_idle:
        await look_ahead(core, SHOAL, [one.attempt_id for one in newest])
