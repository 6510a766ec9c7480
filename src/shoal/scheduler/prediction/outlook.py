"""When a waiting job will start, and what it could ask for so that it starts now.

A promise rests on the time limits of running jobs. `firm_starts` says which promises no waiting job can
delay. A promise leaves out jobs that may come first by then. Such a job is held back by a limit, a quota or
its array today, or becomes due only later. It may be of a project whose standing changes, or it may take
other or more nodes than it was promised. A promise also leaves out a job that starts beside it and uses up a
limit that both are under, or that is small enough for a quota that the promised job is too large for.

Names no job: an outlook is read by people who may not know that the other jobs exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from functools import cache
from typing import NamedTuple

import msgspec

from shoal.scheduler.explain.text import clock_time, number_of
from shoal.scheduler.facts.plan import Promise
from shoal.scheduler.facts.snapshot import Candidate, Snapshot
from shoal.scheduler.order.project_tree import ProjectTree
from shoal.scheduler.order.queue import QueuePosition, key_by_age, key_by_score
from shoal.scheduler.prediction.calibration import COVERAGE, NUM_ENOUGH, Calibration, Interval
from shoal.scheduler.prediction.changes import RequestChange
from shoal.scheduler.prediction.scenarios import FACTS_PER_START, MOST_WORK, StartSpan, num_facts


def firm_starts(snapshot: Snapshot, promises: Collection[Promise], now: float) -> dict[str, float]:
    """Return, by attempt, the promised starts that no waiting job can delay."""
    promised = {promise.attempt_id: promise.at for promise in promises if promise.at is not None}
    heads = [candidate for candidate in snapshot.candidates if candidate.attempt_id in promised]
    tree = ProjectTree(snapshot.projects)

    @cache
    def ceilings(project: str) -> frozenset[str]:
        return frozenset(
            view.name for view in tree.ancestry(project) if view.quota or view.limit or view.borrow
        )

    def is_firm(head: Candidate) -> bool:
        at, shared = promised[head.attempt_id], ceilings(head.project)
        return not any(
            _may_go_first(candidate, head, now, at) or not shared.isdisjoint(ceilings(candidate.project))
            for candidate in snapshot.candidates
            if candidate is not head
        )

    return {head.attempt_id: promised[head.attempt_id] for head in heads if is_firm(head)}


def _may_go_first(candidate: Candidate, head: Candidate, now: float, at: float) -> bool:
    """Whether it may, at any time until then."""
    if candidate.priority != head.priority or candidate.project != head.project:
        return candidate.priority >= head.priority
    moments = (now, min(max(candidate.due_at or now, now), at), at)
    return any(_position_at(candidate, moment) < _position_at(head, moment) for moment in moments)


def _position_at(candidate: Candidate, at: float) -> QueuePosition:
    """Return its place at that time among the candidates of its project and priority."""
    is_due = candidate.due_at is None or candidate.due_at <= at
    return not is_due, key_by_age(candidate) if is_due else key_by_score(candidate)


MINUTE_S = 60.0


class OutlookBasis(StrEnum):
    """What a start time rests on. Stable: `--json` and dashboards rely on it."""

    SCENARIOS = "scenarios"
    """Futures that the planner itself played, widened by what was learned from earlier starts."""
    PROMISE = "promise"
    """Only the time limits of running jobs: the queue is too long to play its futures."""
    NOTHING = "nothing"
    """It waits for something that has no known time, or is too far back in the queue."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """Times are None if they are unknown."""

    attempt_id: str
    basis: OutlookBasis
    earliest: float | None = None
    likely: float | None = None
    latest: float | None = None
    coverage: float | None = None
    """How often the start is between `earliest` and `latest`; None: always, unless another job goes first."""
    promised_at: float | None = None
    """By the time limits of running jobs, if no other job goes first."""
    is_firm: bool = False
    """No job that waits today can delay it: it starts by then unless a new job goes first."""
    sentence: str
    num_starts: int | None = None
    """How many starts were predicted here and then seen. `coverage` rests on them."""
    changes: tuple[RequestChange, ...] = ()
    not_looked: str | None = None
    """Which changes were not tried, and why; None: all were."""


def outlooks(
    snapshot: Snapshot,
    now: float,
    wanted: Collection[str],
    spans: Mapping[str, StartSpan],
    promises: Collection[Promise],
    calibration: Calibration,
) -> dict[str, Outlook]:
    """Return the outlook of each wanted attempt that waits."""
    promised = {promise.attempt_id: promise.at for promise in promises}
    firm = firm_starts(snapshot, promises, now)
    facts = num_facts(snapshot)
    unknown = _UNKNOWN if facts // FACTS_PER_START < MOST_WORK else _TOO_MANY.format(facts=facts)
    return {
        candidate.attempt_id: _outlook(
            candidate,
            now,
            spans.get(candidate.attempt_id),
            _PromisedStart(promised.get(candidate.attempt_id), candidate.attempt_id in firm),
            calibration,
            unknown,
        )
        for candidate in snapshot.candidates
        if candidate.attempt_id in wanted
    }


class _PromisedStart(NamedTuple):
    """The promised start of one job."""

    at: float | None
    is_firm: bool


def _outlook(
    waiting: Candidate,
    now: float,
    span: StartSpan | None,
    promised: _PromisedStart,
    calibration: Calibration,
    unknown: str,
) -> Outlook:
    attempt_id = waiting.attempt_id
    if waiting.unmet:
        return Outlook(attempt_id=attempt_id, basis=OutlookBasis.NOTHING, sentence=_UNMET)
    if span is None and promised.at is None:
        return Outlook(attempt_id=attempt_id, basis=OutlookBasis.NOTHING, sentence=unknown)
    if span is None:
        return Outlook(
            attempt_id=attempt_id,
            basis=OutlookBasis.PROMISE,
            earliest=now,
            latest=promised.at if promised.is_firm else None,
            promised_at=promised.at,
            is_firm=promised.is_firm,
            sentence=_promise_only(promised, now),
        )
    interval = clamp_to_promise(calibration.interval(span), promised.at if promised.is_firm else None, now)
    earliest, latest = now + interval.low_s, now + interval.high_s
    likely = min(max(now + span.middle_s, earliest), latest)
    return Outlook(
        attempt_id=attempt_id,
        basis=OutlookBasis.SCENARIOS,
        earliest=earliest,
        likely=likely,
        latest=latest,
        coverage=COVERAGE,
        num_starts=calibration.num_starts,
        promised_at=promised.at,
        is_firm=promised.is_firm,
        sentence=_between(earliest, likely, latest, promised, now, _sure(calibration.num_starts)),
    )


def clamp_to_promise(interval: Interval, firm_at: float | None, now: float) -> Interval:
    """Bound the interval by a promised start that no waiting job can delay."""
    if firm_at is None:
        return interval
    high_s = min(interval.high_s, max(firm_at - now, 0.0))
    return Interval(min(interval.low_s, high_s), high_s)


def with_cluster_queue(outlook: Outlook, cluster: str) -> Outlook:
    """Return the same outlook for a cluster with a queue of its own, in which Shoal does not know the other
    jobs.
    """
    if outlook.basis is OutlookBasis.NOTHING:
        return outlook
    then = f"that is when Shoal hands it to {cluster}, which starts it when the jobs of others there let it"
    return msgspec.structs.replace(outlook, sentence=f"{outlook.sentence}; {then}")


_UNMET = "its start cannot be predicted: it waits for other jobs to end first"
_UNKNOWN = (
    "its start cannot be predicted: what it waits for has no known end, or is too far ahead in the queue"
)

_UNLESS_NEW = "by the time limits of what runs, unless a new job goes first"
_UNLESS_PASSED = "by the time limits of what runs, unless a job goes first that waits now or comes"

_TOO_MANY = "its start was not predicted: {facts:,} nodes, running and waiting jobs are too many to simulate"


def _promise_only(promised: _PromisedStart, now: float) -> str:
    clock = clock_time(promised.at or now, now)
    by = f"by {clock}" if clock else "more than a year from now"
    if not promised.is_firm:
        return f"starts {by} {_UNLESS_PASSED}; the queue is too long to say more"
    return f"starts {by} at the latest, {_UNLESS_NEW}; the queue is too long to say more"


def _sure(num_starts: int) -> str:
    """How far to trust an interval. Until enough starts were seen here, it rests on those of one old log."""
    share = f"{COVERAGE:.0%} sure".replace("%", " %")
    if num_starts < NUM_ENOUGH:
        seen = number_of(num_starts, "start") if num_starts else "starts elsewhere, none here yet"
        return f"a guess from {seen}; {share} from {NUM_ENOUGH} on"
    return f"{share}, from {num_starts} starts"


def _between(
    earliest: float, likely: float, latest: float, promised: _PromisedStart, now: float, sure: str
) -> str:
    first = clock_time(earliest - MINUTE_S + 1.0, now) if earliest - now >= MINUTE_S else None
    about, last = clock_time(likely, now), clock_time(latest, now)
    if last is None or about is None:
        return "starts more than a year from now"
    when = f"between {first} and {last}" if first not in (None, last) else f"by {last}"
    sentence = f"starts {when}, about {about} ({sure})"
    start_by = None if promised.at is None else clock_time(promised.at, now)
    if start_by is None:
        return sentence
    latest_word = f"at the latest, {_UNLESS_NEW}" if promised.is_firm else _UNLESS_PASSED
    return f"{sentence}; {start_by} {latest_word}"
