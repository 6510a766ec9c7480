"""What a waiting job could ask for instead so that it starts now: nothing is told that was not rehearsed.

Each change is one line of its spec. What costs the job least is told first: where it runs, then how long,
then how much it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import floor

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.request import Request
from shoal.scheduler.policy import Policy
from shoal.scheduler.rehearsal import Rehearsal
from shoal.scheduler.snapshot import Candidate, Snapshot
from shoal.scheduler.words import clock_time, joined, number_of

MOST_TOLD = 3
MOST_FACTS = 30_000
"""Nodes, holdings and candidates that are copied to try changes in: about half a second. The questions asked
of the copy, at most a dozen, take milliseconds each."""
TYPING_S = 120.0
"""A shorter limit must still be short enough when somebody has read about it and typed it."""
SHORTEST_S = 60.0
NUM_COMINGS = 4
"""So many moments are looked at for a limit that ends before them; the longest that works is told."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One that would start the job now or sooner, as of the moment it was tried."""

    setting: str
    """As a spec writes it: `nodes: 2`."""
    sentence: str
    request: Request
    starts_at: float | None = None
    """About when, in a likely future; None: now."""


START_IT = "start it"
"""What a change would do, in words."""
Told = tuple[str, str]
"""The setting, and what to say of it beside that."""
Idea = tuple[Request, Callable[[Allocation], Told]]


def changes(
    snapshot: Snapshot, policy: Policy, now: float, attempt_id: str, start_it: str = START_IT
) -> tuple[Change, ...]:
    """At most `MOST_TOLD`; none for a job that starts now anyway or does not wait."""
    waiting = next((one for one in snapshot.candidates if one.attempt_id == attempt_id), None)
    if waiting is None or waiting.unmet or waiting.not_before > now:
        return ()
    rehearsal = Rehearsal(snapshot, policy, now)
    if attempt_id in rehearsal.starting or rehearsal.start(waiting, waiting.request) is not None:
        return ()
    ideas = (
        _looser(waiting.request),
        _other_gpus(waiting.request, snapshot),
        _shorter(waiting, _comings(snapshot, rehearsal, now), now),
        _elastic(waiting, rehearsal),
        _fewer(waiting, rehearsal),
    )
    tried = (_first_that_works(waiting, alike, rehearsal, start_it) for alike in ideas)
    return tuple(islice((change for change in tried if change is not None), MOST_TOLD))


def _first_that_works(
    waiting: Candidate, ideas: Iterator[Idea], rehearsal: Rehearsal, start_it: str
) -> Change | None:
    for request, tell in ideas:
        given = rehearsal.start(waiting, request)
        if given is not None:
            setting, aside = tell(given)
            said = f"`{setting}` would {start_it} now"
            return Change(setting=setting, sentence=f"{said} ({aside})" if aside else said, request=request)
    return None


def _looser(asked: Request) -> Iterator[Idea]:
    """Close together if possible, instead of close together or not at all."""
    if asked.topology is not None and asked.topology.can_be_looser:
        topology = msgspec.structs.replace(asked.topology, is_required=False)
        yield _with(asked, topology=topology), _always(("topology.mode: preferred", ""))


def _other_gpus(asked: Request, snapshot: Snapshot) -> Iterator[Idea]:
    """GPUs of any kind."""
    gpus = asked.gpus
    if gpus is None or gpus.kind is None:
        return
    kinds = {node.name: {gpu.index: gpu.kind for gpu in node.gpus} for node in snapshot.nodes}

    def tell(given: Allocation) -> Told:
        taken = sorted({kinds[share.node][index] for share in given for index in share.gpu_ids})
        return f"gpus: {gpus.amount:g}", f"any kind; now {joined(taken)}"

    yield _with(asked, gpus=msgspec.structs.replace(gpus, kind=None)), tell


def _comings(snapshot: Snapshot, rehearsal: Rehearsal, now: float) -> set[float]:
    """When nodes are needed for others: a promised start, a reservation, maintenance."""
    promised = {one.at for one in rehearsal.promises if one.at is not None}
    return promised | {window.from_at for window in snapshot.windows if window.from_at > now}


def _shorter(waiting: Candidate, comings: set[float], now: float) -> Iterator[Idea]:
    """Gone before its nodes are needed, unless it must be expected to take longer."""
    asked, least_s = waiting.request, max(_known_s(waiting), SHORTEST_S)
    for at in sorted(comings, reverse=True)[:NUM_COMINGS]:
        limit_s = floor((at - now - TYPING_S - asked.grace_s) / 60) * 60.0
        told_at = clock_time(at, now)
        is_shorter = asked.time_limit_s is None or limit_s < asked.time_limit_s
        if limit_s < least_s or not is_shorter or told_at is None:
            continue
        told = f"time_limit: {_typed(limit_s)}", f"if it needs no more; it would be gone before {told_at}"
        yield _with(asked, time_limit_s=limit_s), _always(told)


def _known_s(waiting: Candidate) -> float:
    """What it is expected to take, if runs like it tell; a time near its limit is only the limit again."""
    limit_s, expected_s = waiting.request.time_limit_s, waiting.expected_s or 0.0
    return expected_s if limit_s is None or expected_s <= limit_s / 2 else 0.0


def _elastic(waiting: Candidate, rehearsal: Rehearsal) -> Iterator[Idea]:
    """As many nodes as it could have now, and more when there are."""
    asked = waiting.request
    count = _most_now(waiting, rehearsal)
    if count:
        told = f"nodes: {count}..{asked.max_nodes}", f"on {number_of(count, 'node')}"
        yield _with(asked, min_nodes=count), _always(told)


def _fewer(waiting: Candidate, rehearsal: Rehearsal) -> Iterator[Idea]:
    asked = waiting.request
    count = _most_now(waiting, rehearsal)
    if count:
        yield _with(asked, min_nodes=count, max_nodes=count), _always((f"nodes: {count}", ""))


def _most_now(waiting: Candidate, rehearsal: Rehearsal) -> int:
    """On how many nodes it could start, fewer than it asks for."""
    asked = waiting.request
    if asked.min_nodes == 1:
        return 0
    return len(rehearsal.start(waiting, _with(asked, min_nodes=1, max_nodes=asked.min_nodes - 1)) or ())


def _always(told: Told) -> Callable[[Allocation], Told]:
    return lambda _: told


def _with(asked: Request, **fields: object) -> Request:
    return msgspec.structs.replace(asked, **fields)


def _typed(seconds: float) -> str:
    """Whole minutes as a spec takes them."""
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours}h{minutes}m" if hours and minutes else f"{hours}h" if hours else f"{minutes}m"
