"""Follow drills that are under way to their end, and record their results.

A drill survives the control plane: the next control plane reads what was asked from the event log, and
supervisors repeat what was done.
"""

from __future__ import annotations

import msgspec
import structlog

from shoal.clock import Clock
from shoal.control.actor import SHOAL
from shoal.control.capabilities import Records
from shoal.control.commands.drills import FINISHED, unfinished_drills
from shoal.control.memory.open_drills import OpenDrill, to_milliseconds
from shoal.control.memory.running import RunningAttempts
from shoal.control.record import record_event
from shoal.errors import StoreUnavailable
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.drill import Drill, DrillEvidence, DrillKind, DrillOutcome, DrillReport, judge_drill
from shoal.model.drill_control import judge_control_drill
from shoal.store import Tx

log = structlog.get_logger()

LOOK_S, IDLE_S = 0.2, 1.0
MILLISECONDS = ("noticed_s", "stepped_s", "window_s", "watched_s")
FRESH_S = 0.6
"""Time in which supervisors answer a question about their progress."""
LATE_S = 6.0
"""The same for a supervisor that has no renewal waiting for a reply: it reports with its next renewal."""


def pause_s(running: RunningAttempts) -> float:
    """Return the time until the next look."""
    return LOOK_S if running.drills.by_id else IDLE_S


async def watch_drills(records: Records, running: RunningAttempts) -> None:
    """Look at every drill under way."""
    if running.drills.opened_at is None:
        for drill in await records.store.read(unfinished_drills):
            # A drill that was started before this first look is this control plane's own.
            running.drills.by_id.setdefault(drill.drill_id, OpenDrill(drill, is_from_before=True))
        running.drills.opened_at = records.clock.now()
    failed: Exception | None = None
    for open_drill in list(running.drills.by_id.values()):
        try:
            await _follow(records, running, open_drill)
        except StoreUnavailable:
            raise
        except Exception as error:
            # A drill that cannot be judged must not keep the others from their end.
            log.exception("drill.failed", drill=open_drill.drill.drill_id)
            failed = failed or error
    if failed is not None:
        raise failed


async def _follow(records: Records, running: RunningAttempts, open_drill: OpenDrill) -> None:
    is_control = open_drill.drill.kind is DrillKind.KILL_CONTROL
    result = await (
        _judge_control_plane(records, running, open_drill)
        if is_control
        else _judge_job(records, running, open_drill)
    )
    if result is not None and _is_fresh(records.clock, running, open_drill, result):
        await _finish(records, running, open_drill.drill, result)


def _is_fresh(clock: Clock, running: RunningAttempts, open_drill: OpenDrill, result: DrillReport) -> bool:
    """Whether goodput is measured up to now. If not, ask supervisors first how far they are."""
    if result.outcome not in (DrillOutcome.RECOVERED, DrillOutcome.UNHARMED):
        return True
    now = clock.monotonic()
    if open_drill.asked_at is None:
        open_drill.asked_at = now
        for attempt_id in open_drill.drill.running or (
            running.drills.newest.get(open_drill.drill.drill_id, ""),
        ):
            running.rendezvous.notify(attempt_id)
    return now >= open_drill.asked_at + (FRESH_S if _is_window_reported(open_drill, result) else LATE_S)


def _is_window_reported(open_drill: OpenDrill, result: DrillReport) -> bool:
    """Whether a step that ends the window was reported. If not, the job makes no steps, or has
    yet to report.
    """
    if result.window_s is None or open_drill.seen_at is None:
        return True
    done_at = open_drill.done[-1].at if open_drill.done else open_drill.drill.started_at
    return open_drill.seen_at >= done_at + open_drill.drill.window_s - FRESH_S


async def _judge_job(records: Records, running: RunningAttempts, open_drill: OpenDrill) -> DrillReport | None:
    drill, drills = open_drill.drill, running.drills
    job, attempts = await records.store.read(
        lambda tx: (tx.jobs.get(drill.job_id), tx.attempts.of_job(drill.job_id))
    )
    later = tuple(attempt for attempt in attempts if attempt.epoch >= drill.epoch)
    if job is None or not later:
        return DrillReport(
            outcome=DrillOutcome.NOT_RECOVERED, because="the records have no such job any more"
        )
    newest, now = later[-1], records.clock.now()
    drills.newest[drill.drill_id] = newest.attempt_id
    _notice(open_drill, later, now)
    progress = drills.progress(newest.attempt_id, newest.node_names)
    open_drill.seen_at = max((report.at for report in progress), default=None)
    evidence = DrillEvidence(
        job=job,
        attempts=later,
        acts=open_drill.done,
        progress=progress,
        noticed_at=open_drill.noticed_at,
        signs=drills.signs(newest),
    )
    return judge_drill(drill, evidence, now)


def _notice(open_drill: OpenDrill, attempts: tuple[Attempt, ...], now: float) -> None:
    """Note the first sign that a supervisor or the control plane noticed the fault."""
    first = attempts[0]
    signs = [
        recovery.failed_at
        for recovery in first.recoveries
        if recovery.rendezvous_round > open_drill.drill.rendezvous_round
    ]
    signs += [at for at in (first.stop_asked_at, first.ended_at, open_drill.noticed_at) if at is not None]
    if first.rendezvous_round > open_drill.drill.rendezvous_round:
        signs.append(now)
    open_drill.noticed_at = min(signs, default=None)


async def _judge_control_plane(
    records: Records, running: RunningAttempts, open_drill: OpenDrill
) -> DrillReport | None:
    drill, drills = open_drill.drill, running.drills
    recorded = await records.store.read(
        lambda tx: [tx.attempts.get(attempt_id) for attempt_id in sorted(drill.running)]
    )
    attempts = [attempt for attempt in recorded if attempt is not None]
    silent = lost = 0
    over = set[str]()
    renewed_at = [running.drills.opened_at or drill.started_at]
    for attempt in attempts:
        if attempt.state is AttemptState.ENDED:
            lost += attempt.reason not in (EndReason.SUCCEEDED, EndReason.CANCELLED)
            over.add(attempt.attempt_id)
            continue
        seen = [drills.first_renewal_at(attempt.attempt_id, node) for node in attempt.nodes_left]
        silent += None in seen
        renewed_at += [at for at in seen if at is not None]
    progress = {
        attempt.attempt_id: drills.progress(attempt.attempt_id, attempt.node_names) for attempt in attempts
    }
    newest = [reports[0].at for attempt_id, reports in progress.items() if reports and attempt_id not in over]
    open_drill.seen_at = min(newest, default=None)
    return judge_control_drill(
        drill,
        records.clock.now(),
        back_at=drills.opened_at if open_drill.is_inherited else None,
        heard_at=None if silent else max(renewed_at),
        num_lost=lost,
        over=over,
        progress={attempt_id: reports[0] for attempt_id, reports in progress.items() if reports},
    )


async def _finish(records: Records, running: RunningAttempts, drill: Drill, result: DrillReport) -> None:
    numbers = {name: to_milliseconds(getattr(result, name)) for name in MILLISECONDS}
    step_s = None if result.step_s is None else round(result.step_s, 6)
    goodput = None if result.goodput is None else round(result.goodput, 4)
    result = msgspec.structs.replace(
        result, goodput=goodput, step_s=step_s, finished_at=records.clock.now(), **numbers
    )
    data = {"drill_id": drill.drill_id, "kind": drill.kind, "result": msgspec.to_builtins(result)}

    def write(tx: Tx) -> None:
        job = tx.jobs.get(drill.job_id) if drill.job_id else None
        record_event(tx, FINISHED, records.clock.now(), SHOAL, job=job, node=drill.node or None, data=data)

    await records.store.write(write)
    running.drills.close(drill.drill_id)
