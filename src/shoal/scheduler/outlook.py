"""When a waiting job will start, as far as anybody can say, and what could be asked for so that it does now.

Names no job: an outlook is read by people who may not know that the others exist.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from shoal.scheduler.calibration import COVERAGE, NUM_ENOUGH, Calibration, Interval
from shoal.scheduler.changes import Change
from shoal.scheduler.firm import firm_starts
from shoal.scheduler.predict import FACTS_A_START, MOST_WORK, Span, num_facts
from shoal.scheduler.snapshot import Candidate, Snapshot
from shoal.scheduler.types import Promise
from shoal.scheduler.words import clock_time, number_of

MINUTE_S = 60.0


class Basis(StrEnum):
    """What a start time rests on. Stable: `--json` and dashboards rely on it."""

    SCENARIOS = "scenarios"
    """Futures that the planner itself made, widened by what was learned from earlier starts."""
    PROMISE = "promise"
    """The time limits of what runs, and nothing else: the queue is too long to play its futures."""
    NOTHING = "nothing"
    """It waits for what has no time, or is too far back in the queue."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """Times are None where nobody can say."""

    attempt_id: str
    basis: Basis
    earliest: float | None = None
    likely: float | None = None
    latest: float | None = None
    coverage: float | None = None
    """How often the start is between `earliest` and `latest`; None: always, unless somebody comes first."""
    promised_at: float | None = None
    """By the time limits of what runs, if nobody goes first."""
    is_firm: bool = False
    """Nobody who waits today can: it starts by then unless somebody new comes first."""
    sentence: str
    num_starts: int | None = None
    """How many starts were foreseen here and then seen, that `coverage` rests on."""
    changes: tuple[Change, ...] = ()
    not_looked: str | None = None
    """Which changes were not looked for, and why; None: all were."""


def outlooks(
    snapshot: Snapshot,
    now: float,
    wanted: Collection[str],
    spans: Mapping[str, Span],
    promises: Collection[Promise],
    calibration: Calibration,
) -> dict[str, Outlook]:
    """Of each of the wanted that waits."""
    promised = {promise.attempt_id: promise.at for promise in promises}
    firm = firm_starts(snapshot, promises, now)
    facts = num_facts(snapshot)
    unknown = _UNKNOWN if facts // FACTS_A_START < MOST_WORK else _TOO_MANY.format(facts=facts)
    return {
        one.attempt_id: _outlook(
            one,
            now,
            spans.get(one.attempt_id),
            _Start(promised.get(one.attempt_id), one.attempt_id in firm),
            calibration,
            unknown,
        )
        for one in snapshot.candidates
        if one.attempt_id in wanted
    }


class _Start(NamedTuple):
    """What it is promised."""

    at: float | None
    is_firm: bool


def _outlook(
    waiting: Candidate,
    now: float,
    span: Span | None,
    promised: _Start,
    calibration: Calibration,
    unknown: str,
) -> Outlook:
    attempt_id = waiting.attempt_id
    if waiting.unmet:
        return Outlook(attempt_id=attempt_id, basis=Basis.NOTHING, sentence=_UNMET)
    if span is None and promised.at is None:
        return Outlook(attempt_id=attempt_id, basis=Basis.NOTHING, sentence=unknown)
    if span is None:
        return Outlook(
            attempt_id=attempt_id,
            basis=Basis.PROMISE,
            earliest=now,
            latest=promised.at if promised.is_firm else None,
            promised_at=promised.at,
            is_firm=promised.is_firm,
            sentence=_promise_only(promised, now),
        )
    interval = within_promise(calibration.interval(span), promised.at if promised.is_firm else None, now)
    earliest, latest = now + interval.low_s, now + interval.high_s
    likely = min(max(now + span.middle_s, earliest), latest)
    return Outlook(
        attempt_id=attempt_id,
        basis=Basis.SCENARIOS,
        earliest=earliest,
        likely=likely,
        latest=latest,
        coverage=COVERAGE,
        num_starts=calibration.num_starts,
        promised_at=promised.at,
        is_firm=promised.is_firm,
        sentence=_between(earliest, likely, latest, promised, now, _sure(calibration.num_starts)),
    )


def within_promise(interval: Interval, firm_at: float | None, now: float) -> Interval:
    """Nobody is told of a start later than they are promised, where nobody who waits can put that off."""
    if firm_at is None:
        return interval
    high_s = min(interval.high_s, max(firm_at - now, 0.0))
    return Interval(min(interval.low_s, high_s), high_s)


def handed_on(found: Outlook, cluster: str) -> Outlook:
    """The same outlook where a cluster has a queue of its own: nobody here knows what others have in it."""
    if found.basis is Basis.NOTHING:
        return found
    then = f"that is when Shoal hands it to {cluster}, which starts it when the jobs of others there let it"
    return msgspec.structs.replace(found, sentence=f"{found.sentence}; {then}")


_UNMET = "nobody can say when it starts: it waits for other jobs to end first"
_UNKNOWN = (
    "nobody can say when it starts: what it waits for has no known end, or is too far ahead in the queue"
)

_UNLESS_NEW = "by the time limits of what runs, unless a new job goes first"
_UNLESS_PASSED = "by the time limits of what runs, unless a job goes first that waits now or comes"

_TOO_MANY = "nobody looked ahead: {facts:,} nodes, running and waiting jobs are too many to play futures of"


def _promise_only(promised: _Start, now: float) -> str:
    told = clock_time(promised.at or now, now)
    by = f"by {told}" if told else "more than a year from now"
    if not promised.is_firm:
        return f"starts {by} {_UNLESS_PASSED}; the queue is too long to say more"
    return f"starts {by} at the latest, {_UNLESS_NEW}; the queue is too long to say more"


def _sure(num_starts: int) -> str:
    """How far to trust an interval: until enough starts were seen here, it goes by those of one old log."""
    share = f"{COVERAGE:.0%} sure".replace("%", " %")
    if num_starts < NUM_ENOUGH:
        seen = number_of(num_starts, "start") if num_starts else "starts elsewhere, none here yet"
        return f"a guess from {seen}; {share} from {NUM_ENOUGH} on"
    return f"{share}, from {num_starts} starts"


def _between(earliest: float, likely: float, latest: float, promised: _Start, now: float, sure: str) -> str:
    first = clock_time(earliest - MINUTE_S + 1.0, now) if earliest - now >= MINUTE_S else None
    about, last = clock_time(likely, now), clock_time(latest, now)
    if last is None or about is None:
        return "starts later than anybody plans by the clock"
    when = f"between {first} and {last}" if first not in (None, last) else f"by {last}"
    told = f"starts {when}, about {about} ({sure})"
    start_by = None if promised.at is None else clock_time(promised.at, now)
    if start_by is None:
        return told
    latest_word = f"at the latest, {_UNLESS_NEW}" if promised.is_firm else _UNLESS_PASSED
    return f"{told}; {start_by} {latest_word}"
