"""Record a decision so that it can be made again, in events of limited size.

`evict` asks jobs to stop that give way to others, and records for both sides what that costs. It runs in the
transaction of the plan that chose the jobs and tells no supervisor. `watch` and the replies to renewals carry
the stop: a signal first, then the job's `grace` to save its work. An evicted job waits again in its old
place, and the eviction does not count against its retries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from shoal.control.actor import SHOAL
from shoal.control.capabilities import Planning
from shoal.control.memory.planner_input import label
from shoal.control.memory.queue import have_projects_changed
from shoal.control.record import AttemptRecorder, record_event
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job
from shoal.model.moves import StopRequested
from shoal.model.node import Window
from shoal.scheduler import Eviction, EvictionGround, Plan
from shoal.scheduler.explain.text import age
from shoal.scheduler.order.fair_share import Usage
from shoal.scheduler.preemption.costs import RESTART_S
from shoal.store import Tx

MAX_EVENT_BYTES = 256 << 10
"""Size of one event, unless a single start or stop in it takes more."""


class DecisionBasis(NamedTuple):
    """The facts that a plan was made from."""

    at: float
    seen_seq: int
    """The newest event."""
    saved: dict[str, float]
    """By attempt: checkpoints reported since the last plan that stopped a job. Empty if this
    plan stops none.
    """
    is_all_saved: bool
    """No other checkpoints were known: those recorded earlier were forgotten with the control plane that knew
    them.
    """
    usages: tuple[Usage, ...]
    """Usage of every project that had any, if it may have affected the decision; else empty."""
    windows: list[Window]

    def is_still_valid(self, tx: Tx) -> bool:
        """Whether windows and projects are as the plan saw them: a window declared or a limit lowered since
        then forbids what the plan gives away.
        """
        return tx.windows.all() == self.windows and not have_projects_changed(tx, self.seen_seq)


def record_decision(
    planning: Planning, tx: Tx, plan: Plan, placed: list[str], evicted: list[str], basis: DecisionBasis
) -> None:
    """Record what was decided, from the log up to which event, and which part of it was still possible.
    `placed`: the starts and replacements that were carried out.

    A reader of the log up to `seen` can make the same decision again: `shoal explain-decision`. What does not
    fit into `plan.made` stands in `plan.part` events right before it.
    """
    fresh = list(planning.queue.fresh_stamps.values())
    lists: dict[str, Any] = {
        "replacements": msgspec.to_builtins(plan.replacements),
        "starts": msgspec.to_builtins(plan.starts),
        "placed": placed,
        "evictions": msgspec.to_builtins(plan.evictions),
        "evicted": evicted,
        "saved": basis.saved,
        "usages": msgspec.to_builtins(basis.usages),
        "resting": planning.queue.resting,
        "stamps": {
            candidate.attempt_id: (candidate.expected_s, candidate.due_at, candidate.score)
            for candidate in fresh
        },
    }
    *parts, last = split_lists(lists, MAX_EVENT_BYTES)
    for part in parts:
        record_event(tx, "plan.part", basis.at, SHOAL, data=part)
    facts = {"waiting": planning.planner.num_waiting, "seen": basis.seen_seq}
    if basis.is_all_saved:
        facts["is_all_saved"] = True
    if parts:
        facts |= {"num_placed": len(placed), "num_evicted": len(evicted)}
    record_event(tx, "plan.made", basis.at, SHOAL, data={**last, **facts})


def split_lists(lists: dict[str, Any], max_bytes: int) -> list[dict[str, Any]]:
    """Split lists and mappings into parts of at most `max_bytes`. A part is larger only if a single entry is.

    Together and in order, the parts are the input. Each part has every key.
    """
    if len(msgspec.json.encode(lists)) <= max_bytes:
        return [lists]
    parts = [_empty(lists)]
    size = empty_bytes = len(msgspec.json.encode(parts[0]))
    for key, index, entry in _entries(lists):
        more = len(msgspec.json.encode((index, entry)))
        if size + more > max_bytes and size > empty_bytes:
            parts.append(_empty(lists))
            size = empty_bytes
        size += more
        if index is None:
            parts[-1][key].append(entry)
        else:
            parts[-1][key][index] = entry
    return parts


def _empty(lists: dict[str, Any]) -> dict[str, Any]:
    return {key: {} if isinstance(value, dict) else [] for key, value in lists.items()}


def _entries(lists: dict[str, Any]) -> Iterator[tuple[str, str | None, Any]]:
    for key, value in lists.items():
        if isinstance(value, dict):
            yield from ((key, index, entry) for index, entry in value.items())
        else:
            yield from ((key, None, entry) for entry in value)


RESTART_TEXT = f"{RESTART_S / 60:.0f} min to start again"
RUNNING_STATES = (AttemptState.STARTING, AttemptState.RUNNING)
Victim = tuple[Eviction, Job, Attempt]


def evict(recorder: AttemptRecorder, tx: Tx, evictions: Sequence[Eviction], now: float) -> list[str]:
    """Ask attempts to stop and return their ids. If anything has changed since the plan for one job, its
    evictions are left out, and the next plan uses the new facts.
    """
    evicted: list[str] = []
    if evictions and evictions[0].ground is EvictionGround.GROWTH:
        return _grow(recorder, tx, evictions[0], now)
    for for_id, evictions_for_one in groupby(evictions, key=lambda eviction: eviction.for_attempt_id):
        head = tx.attempts.get(for_id)
        victims = [_load(tx, eviction) for eviction in evictions_for_one]
        if head is None or head.state is not AttemptState.QUEUED:
            continue
        running = [victim for victim in victims if victim is not None]
        if len(running) == len(victims):
            _stop_all(recorder, tx, head, running, now)
            evicted += [attempt.attempt_id for _, _, attempt in running]
    return evicted


def _grow(recorder: AttemptRecorder, tx: Tx, eviction: Eviction, now: float) -> list[str]:
    """Stop an attempt so that it can grow. The nodes it goes on with are kept for it until it has stopped."""
    loaded = _load(tx, eviction)
    if loaded is None:
        return []
    _, job, attempt = loaded
    has, gets = len(attempt.allocation), eviction.num_nodes
    because = (
        f"stopped to go on with {gets} nodes instead of {has}: they stand idle, and at most "
        f"{_device_hours_text(attempt, eviction.lost_s)} are done again, {RESTART_TEXT} included"
    )
    stop = StopRequested(reason=EndReason.PREEMPTED, by=str(SHOAL), because=because, grows_to=gets)
    recorder.advance(tx, attempt.attempt_id, stop, now=now)
    data = {**_cost_facts(eviction), "has_nodes": has, "num_nodes": gets}
    record_event(tx, "job.grows", now, SHOAL, job=job, attempt=attempt, data=data)
    return [attempt.attempt_id]


def _load(tx: Tx, eviction: Eviction) -> Victim | None:
    """Return the eviction with its job and attempt, or None if the attempt no longer runs."""
    attempt = tx.attempts.get(eviction.attempt_id)
    if attempt is None or attempt.state not in RUNNING_STATES:
        return None
    job = tx.jobs.get(attempt.job_id)
    assert job is not None
    return eviction, job, attempt


def _stop_all(
    recorder: AttemptRecorder, tx: Tx, head: Attempt, victims: Sequence[Victim], now: float
) -> None:
    winner_job = tx.jobs.get(head.job_id)
    assert winner_job is not None
    for eviction, job, attempt in victims:
        because = eviction_message(eviction, job, winner_job, attempt, now)
        stop = StopRequested(reason=EndReason.PREEMPTED, by=str(SHOAL), because=because)
        data = {
            **_cost_facts(eviction),
            "for": label(winner_job) if winner_job.project == job.project else None,
        }
        # Before the stop, so that a reader of the log has counted the eviction when the job waits again.
        record_event(tx, "job.evicted", now, SHOAL, job=job, attempt=attempt, data=data)
        tx.jobs.update(msgspec.structs.replace(job, evictions=job.evictions + 1, version=job.version + 1))
        recorder.advance(tx, attempt.attempt_id, stop, now=now)
    total: dict[str, Any] = {
        "num_jobs": len(victims),
        "lost_device_s": sum(eviction.lost_device_s for eviction, _, _ in victims),
        "likely_device_s": sum(eviction.likely_device_s for eviction, _, _ in victims),
        "jobs": [label(job) for _, job, _ in victims if job.project == winner_job.project],
    }
    record_event(tx, "job.preempted_for", now, SHOAL, job=winner_job, attempt=head, data=total)


def _cost_facts(eviction: Eviction) -> dict[str, Any]:
    return {
        "ground": eviction.ground,
        "lost_s": eviction.lost_s,
        "lost_device_s": eviction.lost_device_s,
        "likely_device_s": eviction.likely_device_s,
        "saved_at": eviction.saved_at,
    }


def eviction_message(eviction: Eviction, job: Job, winner_job: Job, attempt: Attempt, now: float) -> str:
    """Return the message for the project of the job that stops, which may not know that the other project
    exists.
    """
    winner = label(winner_job) if winner_job.project == job.project else "a job of another project"
    if eviction.ground is EvictionGround.PRIORITY:
        right = f"priority {winner_job.priority} over {job.priority}"
    else:
        right = "its quota, of which this job borrowed"
    most = f"at a loss of at most {_device_hours_text(attempt, eviction.lost_s)}, {RESTART_TEXT} included"
    return f"gave way to {winner} ({right}), {most}; {_saved_text(eviction, attempt, now)}"


def _saved_text(eviction: Eviction, attempt: Attempt, now: float) -> str:
    """Return when the job last saved its work, or how its loss was estimated."""
    if eviction.saved_at is not None:
        return f"saved {age(now - eviction.saved_at)} before"
    unknown = "no checkpoint of it is known"
    if eviction.likely_device_s >= eviction.lost_device_s:
        return unknown
    likely_s = eviction.lost_s * eviction.likely_device_s / eviction.lost_device_s
    return f"{unknown}, so it counted as {_device_hours_text(attempt, likely_s)}, as the median of others"


def _device_hours_text(attempt: Attempt, lost_s: float) -> str:
    """Return an amount such as `3.2 GPU-hours`; CPU-hours for a job without GPUs."""
    num_gpus: float = sum(task.num_gpus for task in attempt.allocation)
    count = num_gpus or sum(task.cpus for task in attempt.allocation)
    hours = lost_s / 3600 * count
    return f"{hours:.2g} {'GPU' if num_gpus else 'CPU'}-hours"
