"""What a waiting job could ask for so that it starts now or sooner; the latter is played in one future.

In that future everybody runs for as long as half of the runs like theirs did. The job as it is and the job
as it could be are both put into it, so that what differs is the change alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec

from shoal.model.request import Request
from shoal.scheduler.ahead import RunTime, look_ahead
from shoal.scheduler.changes import MOST_FACTS, MOST_TOLD, START_IT, Change, changes
from shoal.scheduler.policy import Policy
from shoal.scheduler.predict import FACTS_A_START, MOST_WORK, Expect, num_facts
from shoal.scheduler.rehearsal import resubmitted
from shoal.scheduler.snapshot import Candidate, Holding, Snapshot
from shoal.scheduler.words import clock_time

MOST_OF_WAIT = 0.75
"""Only what saves at least a quarter of the wait, and `LEAST_S`, is told: futures are no more exact."""
LEAST_S = 300.0
MOST_PLAYED = 5
"""The job as it is, and at most four changes."""


class Tried(NamedTuple):
    changes: tuple[Change, ...]
    not_looked: str | None = None
    """Which changes were not looked for, and why; None: all were."""


def all_changes(
    snapshot: Snapshot,
    policy: Policy,
    now: float,
    attempt_id: str,
    expect: Expect,
    start_it: str = START_IT,
) -> Tried:
    """Those that start it now, and if they are few, those that start it sooner.

    `start_it`: what that comes to where a cluster starts it in a turn of its own.
    """
    waiting = next((one for one in snapshot.candidates if one.attempt_id == attempt_id), None)
    if waiting is None or waiting.unmet:
        return Tried(())
    facts = f"{num_facts(snapshot):,} nodes, running and waiting jobs are too many"
    if num_facts(snapshot) > MOST_FACTS:
        return Tried((), f"no changes were tried: {facts} to copy for it")
    at_once = changes(snapshot, policy, now, attempt_id, start_it)
    if len(at_once) == MOST_TOLD:
        return Tried(at_once)
    if _max_starts(snapshot) <= 0:
        return Tried(at_once, f"only changes that would start it now were tried: {facts} to play a future of")
    later = sooner(snapshot, policy, now, waiting, expect, MOST_TOLD, start_it)
    return Tried((*at_once, *without(later, at_once))[:MOST_TOLD])


def sooner(
    snapshot: Snapshot,
    policy: Policy,
    now: float,
    waiting: Candidate,
    expect: Expect,
    most: int,
    start_it: str = START_IT,
) -> tuple[Change, ...]:
    """At most `most`; none where the futures are too much work."""
    max_starts = _max_starts(snapshot)
    if max_starts <= 0 or most <= 0:
        return ()
    run_time, attempt_id = _middle(expect, now), waiting.attempt_id

    def starts_at(candidate: Candidate) -> float | None:
        others = [one for one in snapshot.candidates if one.attempt_id != attempt_id]
        facts = msgspec.structs.replace(snapshot, candidates=(*others, candidate))
        return look_ahead(facts, policy, now, (attempt_id,), run_time, max_starts).starts.get(attempt_id)

    as_it_is = starts_at(waiting)
    if as_it_is is None or as_it_is - now < LEAST_S:
        return ()
    last = max(one.order for one in snapshot.candidates) + 1
    by_then = min(now + MOST_OF_WAIT * (as_it_is - now), as_it_is - LEAST_S)
    found: list[Change] = []
    for setting, request in _ideas(waiting.request):
        at = starts_at(resubmitted(waiting, request, now, last))
        if at is not None and at <= by_then:
            when = f"would {start_it} {_when(at, as_it_is, now)}"
            found.append(
                Change(setting=setting, sentence=f"`{setting}` {when}", request=request, starts_at=at)
            )
    return tuple(sorted(found, key=lambda change: change.starts_at or now)[:most])


def _max_starts(snapshot: Snapshot) -> int:
    """That may be planned in one of the futures."""
    return MOST_WORK // MOST_PLAYED - num_facts(snapshot) // FACTS_A_START


def without(found: Collection[Change], told: Collection[Change]) -> tuple[Change, ...]:
    """Those that change something else than what was told already."""
    known = {change.setting.partition(":")[0] for change in told}
    return tuple(change for change in found if change.setting.partition(":")[0] not in known)


def _ideas(asked: Request) -> Iterator[tuple[str, Request]]:
    replace = msgspec.structs.replace
    if asked.topology is not None and asked.topology.can_be_looser:
        yield "topology.mode: preferred", replace(asked, topology=replace(asked.topology, is_required=False))
    if asked.gpus is not None and asked.gpus.kind is not None:
        yield f"gpus: {asked.gpus.amount:g}", replace(asked, gpus=replace(asked.gpus, kind=None))
    if asked.min_nodes > 1:
        half = asked.min_nodes // 2
        yield f"nodes: {half}..{asked.max_nodes}", replace(asked, min_nodes=half)
        yield f"nodes: {half}", replace(asked, min_nodes=half, max_nodes=half)


def _when(at: float, as_it_is: float, now: float) -> str:
    told, instead_of = clock_time(at, now), clock_time(as_it_is, now)
    return f"about {told} instead of {instead_of}" if told and instead_of else "sooner"


def _middle(expect: Expect, now: float) -> RunTime:
    known: dict[str, float] = {}

    def run_time(work: Candidate | Holding) -> float:
        if work.attempt_id not in known:
            elapsed_s = max(now - work.placed_at, 0.0) if isinstance(work, Holding) else 0.0
            known[work.attempt_id] = expect(work).quantile(0.5, elapsed_s=elapsed_s)
        return known[work.attempt_id]

    return run_time
