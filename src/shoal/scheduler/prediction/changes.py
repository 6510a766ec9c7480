"""What a waiting job could ask for instead so that it starts now. Every change that is shown was tried.

`Rehearsal` is a copy of the planner in which changed requests are tried. Each change is one line of the job's
spec. The change that costs the job least comes first: where it runs, then how long, then how much it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import floor

import msgspec

from shoal.model.attempt import Allocation
from shoal.model.job import ResourceRequest
from shoal.scheduler.explain.text import clock_time, joined, number_of
from shoal.scheduler.facts.plan import Promise
from shoal.scheduler.facts.policy import Policy
from shoal.scheduler.facts.snapshot import Candidate, Snapshot
from shoal.scheduler.planner import Planner


class Rehearsal:
    """A copy of one moment. Costs one copy of the facts, and then one cycle per question."""

    def __init__(self, snapshot: Snapshot, policy: Policy, now: float) -> None:
        self._planner = Planner.of(snapshot, policy)
        self._now = now
        self._last = max((candidate.order for candidate in snapshot.candidates), default=0) + 1
        result = self._planner.plan(now)
        self.promises: tuple[Promise, ...] = result.promises
        self.starting = frozenset(start.attempt_id for start in result.starts)
        """Attempts that start as they are."""

    def start(self, candidate: Candidate, request: ResourceRequest) -> Allocation | None:
        """Return what the job would be given now if it were cancelled and submitted again with `request`;
        None: nothing.
        """
        planner = self._planner
        planner.add(resubmitted(candidate, request, self._now, self._last))
        result = planner.plan(self._now)
        for start in result.starts:
            planner.undo(start.attempt_id)
        planner.add(candidate)
        allocations = (
            start.allocation for start in result.starts if start.attempt_id == candidate.attempt_id
        )
        return next(allocations, None)


def resubmitted(candidate: Candidate, request: ResourceRequest, now: float, order: int) -> Candidate:
    """Return the same job, submitted now and after all others: no job keeps a place that another request
    earned.

    Its expected run time and score stay as they are, because a smaller request would score better.
    """
    due_at, expected_s, limit_s = candidate.due_at, candidate.expected_s, request.time_limit_s
    if due_at is not None:
        due_at += max(now - candidate.submitted_at, 0.0)
    if expected_s is not None and limit_s is not None:
        expected_s = min(expected_s, limit_s)
    return msgspec.structs.replace(
        candidate,
        request=request,
        order=order,
        submitted_at=max(now, candidate.submitted_at),
        expected_s=expected_s,
        due_at=due_at,
    )


MAX_CHANGES_SHOWN = 3
MOST_FACTS = 30_000
"""Nodes, holdings and candidates that may be copied to try changes: about half a second. The questions asked
of the copy, at most a dozen, take milliseconds each."""
TYPING_S = 120.0
"""A shorter limit must still be short enough after a person has read about it and typed it."""
SHORTEST_S = 60.0
MAX_TIMES_TRIED = 4
"""How many end times are tried for a shorter limit. The longest limit that works is shown."""


class RequestChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that would start the job now or sooner, as of the time it was tried."""

    setting: str
    """As a spec writes it: `nodes: 2`."""
    sentence: str
    request: ResourceRequest
    starts_at: float | None = None
    """About when, in a likely future; None: now."""


START_IT = "start it"
"""What a change would do, in words."""
ChangeText = tuple[str, str]
"""The setting, and a remark on it."""
ChangeIdea = tuple[ResourceRequest, Callable[[Allocation], ChangeText]]


def changes_starting_now(
    snapshot: Snapshot, policy: Policy, now: float, attempt_id: str, start_it: str = START_IT
) -> tuple[RequestChange, ...]:
    """Return at most `MAX_CHANGES_SHOWN` changes; none for a job that starts now anyway or does not wait."""
    waiting = next(
        (candidate for candidate in snapshot.candidates if candidate.attempt_id == attempt_id), None
    )
    if waiting is None or waiting.unmet or waiting.not_before > now:
        return ()
    rehearsal = Rehearsal(snapshot, policy, now)
    if attempt_id in rehearsal.starting or rehearsal.start(waiting, waiting.request) is not None:
        return ()
    ideas = (
        _looser(waiting.request),
        _other_gpus(waiting.request, snapshot),
        _shorter(waiting, _times_nodes_are_needed(snapshot, rehearsal, now), now),
        _elastic(waiting, rehearsal),
        _fewer(waiting, rehearsal),
    )
    tried = (_first_that_works(waiting, ideas_of_kind, rehearsal, start_it) for ideas_of_kind in ideas)
    return tuple(islice((change for change in tried if change is not None), MAX_CHANGES_SHOWN))


def _first_that_works(
    waiting: Candidate, ideas: Iterator[ChangeIdea], rehearsal: Rehearsal, start_it: str
) -> RequestChange | None:
    for request, tell in ideas:
        allocation = rehearsal.start(waiting, request)
        if allocation is not None:
            setting, remark = tell(allocation)
            sentence = f"`{setting}` would {start_it} now"
            return RequestChange(
                setting=setting, sentence=f"{sentence} ({remark})" if remark else sentence, request=request
            )
    return None


def _looser(request: ResourceRequest) -> Iterator[ChangeIdea]:
    """Close together if possible, instead of required."""
    if request.topology is not None and request.topology.can_be_looser:
        topology = msgspec.structs.replace(request.topology, is_required=False)
        yield _with(request, topology=topology), _always(("topology.mode: preferred", ""))


def _other_gpus(request: ResourceRequest, snapshot: Snapshot) -> Iterator[ChangeIdea]:
    """GPUs of any kind."""
    gpus = request.gpus
    if gpus is None or gpus.kind is None:
        return
    kinds = {node.name: {gpu.index: gpu.kind for gpu in node.gpus} for node in snapshot.nodes}

    def tell(allocation: Allocation) -> ChangeText:
        kinds_given = sorted({kinds[task.node][index] for task in allocation for index in task.gpu_ids})
        return f"gpus: {gpus.amount:g}", f"any kind; now {joined(kinds_given)}"

    yield _with(request, gpus=msgspec.structs.replace(gpus, kind=None)), tell


def _times_nodes_are_needed(snapshot: Snapshot, rehearsal: Rehearsal, now: float) -> set[float]:
    """Return when nodes are needed for others: a promised start, a reservation, maintenance."""
    promised = {promise.at for promise in rehearsal.promises if promise.at is not None}
    return promised | {window.from_at for window in snapshot.windows if window.from_at > now}


def _shorter(waiting: Candidate, needed_at: set[float], now: float) -> Iterator[ChangeIdea]:
    """A time limit that ends before its nodes are needed, unless the job is expected to take longer."""
    request, least_s = waiting.request, max(_expected_s(waiting), SHORTEST_S)
    for at in sorted(needed_at, reverse=True)[:MAX_TIMES_TRIED]:
        limit_s = floor((at - now - TYPING_S - request.grace_s) / 60) * 60.0
        clock = clock_time(at, now)
        is_shorter = request.time_limit_s is None or limit_s < request.time_limit_s
        if limit_s < least_s or not is_shorter or clock is None:
            continue
        text = f"time_limit: {_typed(limit_s)}", f"if it needs no more; it would be gone before {clock}"
        yield _with(request, time_limit_s=limit_s), _always(text)


def _expected_s(waiting: Candidate) -> float:
    """Return its expected run time if similar runs tell one. A time near its limit is only the
    limit again.
    """
    limit_s, expected_s = waiting.request.time_limit_s, waiting.expected_s or 0.0
    return expected_s if limit_s is None or expected_s <= limit_s / 2 else 0.0


def _elastic(waiting: Candidate, rehearsal: Rehearsal) -> Iterator[ChangeIdea]:
    """As many nodes as it could have now, and more when they are free."""
    request = waiting.request
    count = _most_now(waiting, rehearsal)
    if count:
        text = f"nodes: {count}..{request.max_nodes}", f"on {number_of(count, 'node')}"
        yield _with(request, min_nodes=count), _always(text)


def _fewer(waiting: Candidate, rehearsal: Rehearsal) -> Iterator[ChangeIdea]:
    request = waiting.request
    count = _most_now(waiting, rehearsal)
    if count:
        yield _with(request, min_nodes=count, max_nodes=count), _always((f"nodes: {count}", ""))


def _most_now(waiting: Candidate, rehearsal: Rehearsal) -> int:
    """Return on how many nodes it could start, fewer than it asks for."""
    request = waiting.request
    if request.min_nodes == 1:
        return 0
    return len(rehearsal.start(waiting, _with(request, min_nodes=1, max_nodes=request.min_nodes - 1)) or ())


def _always(text: ChangeText) -> Callable[[Allocation], ChangeText]:
    return lambda _: text


def _with(request: ResourceRequest, **fields: object) -> ResourceRequest:
    return msgspec.structs.replace(request, **fields)


def _typed(seconds: float) -> str:
    """Whole minutes, as a spec writes them."""
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours}h{minutes}m" if hours and minutes else f"{hours}h" if hours else f"{minutes}m"
