"""What a waiting job could ask for so that it starts now or sooner. A later start is tried in one likely
future.

In that future every job runs for the median of similar runs. The job as it is and the job as it could be are
both put into it, so that the change is the only difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec

from shoal.model.job import ResourceRequest
from shoal.scheduler.explain.text import clock_time
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Holding, Snapshot
from shoal.scheduler.prediction.changes import (
    MAX_CHANGES_SHOWN,
    MOST_FACTS,
    START_IT,
    RequestChange,
    changes_starting_now,
    resubmitted,
)
from shoal.scheduler.prediction.scenarios import (
    FACTS_PER_START,
    MOST_WORK,
    ExpectRunTime,
    RunTime,
    look_ahead,
    num_facts,
)

MOST_OF_WAIT = 0.75
"""A change is shown only if it saves at least a quarter of the wait, and `LEAST_S`: futures are no more exact
than that."""
LEAST_S = 300.0
MOST_PLAYED = 5
"""The job as it is, and at most four changes."""


class ChangeSuggestions(NamedTuple):
    changes: tuple[RequestChange, ...]
    not_looked: str | None = None
    """Which changes were not tried, and why; None: all were."""


def suggest_changes(
    snapshot: Snapshot,
    policy: Policy,
    now: float,
    attempt_id: str,
    expect: ExpectRunTime,
    start_it: str = START_IT,
) -> ChangeSuggestions:
    """Return the changes that start it now and, if these are few, the changes that start it sooner.

    `start_it`: what a change does if the cluster has a queue of its own.
    """
    waiting = next(
        (candidate for candidate in snapshot.candidates if candidate.attempt_id == attempt_id), None
    )
    if waiting is None or waiting.unmet:
        return ChangeSuggestions(())
    too_many = f"{num_facts(snapshot):,} nodes, running and waiting jobs are too many"
    if num_facts(snapshot) > MOST_FACTS:
        return ChangeSuggestions((), f"no changes were tried: {too_many} to copy for it")
    immediate = changes_starting_now(snapshot, policy, now, attempt_id, start_it)
    if len(immediate) == MAX_CHANGES_SHOWN:
        return ChangeSuggestions(immediate)
    if _max_starts(snapshot) <= 0:
        return ChangeSuggestions(
            immediate, f"only changes that would start it now were tried: {too_many} to play a future of"
        )
    later = changes_starting_sooner(snapshot, policy, now, waiting, expect, MAX_CHANGES_SHOWN, start_it)
    return ChangeSuggestions((*immediate, *without(later, immediate))[:MAX_CHANGES_SHOWN])


def changes_starting_sooner(
    snapshot: Snapshot,
    policy: Policy,
    now: float,
    waiting: Candidate,
    expect: ExpectRunTime,
    most: int,
    start_it: str = START_IT,
) -> tuple[RequestChange, ...]:
    """Return at most `most` changes; none if the futures are too much work."""
    max_starts = _max_starts(snapshot)
    if max_starts <= 0 or most <= 0:
        return ()
    run_time, attempt_id = _middle(expect, now), waiting.attempt_id

    def starts_at(candidate: Candidate) -> float | None:
        others = [other for other in snapshot.candidates if other.attempt_id != attempt_id]
        facts = msgspec.structs.replace(snapshot, candidates=(*others, candidate))
        return look_ahead(facts, policy, now, (attempt_id,), run_time, max_starts).starts.get(attempt_id)

    as_it_is = starts_at(waiting)
    if as_it_is is None or as_it_is - now < LEAST_S:
        return ()
    last = max(other.order for other in snapshot.candidates) + 1
    by_then = min(now + MOST_OF_WAIT * (as_it_is - now), as_it_is - LEAST_S)
    changes: list[RequestChange] = []
    for setting, request in _ideas(waiting.request):
        at = starts_at(resubmitted(waiting, request, now, last))
        if at is not None and at <= by_then:
            when = f"would {start_it} {_when(at, as_it_is, now)}"
            changes.append(
                RequestChange(setting=setting, sentence=f"`{setting}` {when}", request=request, starts_at=at)
            )
    return tuple(sorted(changes, key=lambda change: change.starts_at or now)[:most])


def _max_starts(snapshot: Snapshot) -> int:
    """Return how many starts may be planned in one of the futures."""
    return MOST_WORK // MOST_PLAYED - num_facts(snapshot) // FACTS_PER_START


def without(
    changes: Collection[RequestChange], listed: Collection[RequestChange]
) -> tuple[RequestChange, ...]:
    """Return the changes of settings that are not in `listed`."""
    listed_settings = {change.setting.partition(":")[0] for change in listed}
    return tuple(change for change in changes if change.setting.partition(":")[0] not in listed_settings)


def _ideas(asked_request: ResourceRequest) -> Iterator[tuple[str, ResourceRequest]]:
    replace = msgspec.structs.replace
    if asked_request.topology is not None and asked_request.topology.can_be_looser:
        yield (
            "topology.mode: preferred",
            replace(asked_request, topology=replace(asked_request.topology, is_required=False)),
        )
    if asked_request.gpus is not None and asked_request.gpus.kind is not None:
        yield (
            f"gpus: {asked_request.gpus.amount:g}",
            replace(asked_request, gpus=replace(asked_request.gpus, kind=None)),
        )
    if asked_request.min_nodes > 1:
        half = asked_request.min_nodes // 2
        yield f"nodes: {half}..{asked_request.max_nodes}", replace(asked_request, min_nodes=half)
        yield f"nodes: {half}", replace(asked_request, min_nodes=half, max_nodes=half)


def _when(at: float, as_it_is: float, now: float) -> str:
    clock, instead_of = clock_time(at, now), clock_time(as_it_is, now)
    return f"about {clock} instead of {instead_of}" if clock and instead_of else "sooner"


def _middle(expect: ExpectRunTime, now: float) -> RunTime:
    run_times: dict[str, float] = {}

    def run_time(work: Candidate | Holding) -> float:
        if work.attempt_id not in run_times:
            elapsed_s = max(now - work.placed_at, 0.0) if isinstance(work, Holding) else 0.0
            run_times[work.attempt_id] = expect(work).quantile(0.5, elapsed_s=elapsed_s)
        return run_times[work.attempt_id]

    return run_time
