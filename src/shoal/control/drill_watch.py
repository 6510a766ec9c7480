"""Follow drills that are under way to their end, and write down what came of them.

A drill survives the control plane: what was asked is read from the log of events again, and what was done is
said again by the supervisors.
"""

from __future__ import annotations

import msgspec
import structlog

from shoal.control.actor import SHOAL
from shoal.control.core import Core
from shoal.control.drill_book import Open, rounded
from shoal.control.drills import FINISHED, unfinished
from shoal.control.record import note
from shoal.errors import StoreUnavailable
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.drill import Drill, DrillKind, DrillOutcome, DrillResult, Sight, judge
from shoal.model.drill_control import judge_control
from shoal.store import Tx

log = structlog.get_logger()

LOOK_S, IDLE_S = 0.2, 1.0
MILLISECONDS = ("noticed_s", "stepped_s", "window_s", "watched_s")
FRESH_S = 0.6
"""How long after they were asked supervisors have said how far they are."""
LATE_S = 6.0
"""And so long by one that holds no question open: it says it with its next renewal."""


def pause_s(core: Core) -> float:
    """How long until the next look."""
    return LOOK_S if core.drills.open else IDLE_S


async def watch_drills(core: Core) -> None:
    """One look at every drill under way."""
    if core.drills.opened_at is None:
        for drill in await core.store.read(unfinished):
            # One that was asked for before this first look is our own.
            core.drills.open.setdefault(drill.drill_id, Open(drill, is_from_before=True))
        core.drills.opened_at = core.clock.now()
    failed: Exception | None = None
    for one in list(core.drills.open.values()):
        try:
            await _follow(core, one)
        except StoreUnavailable:
            raise
        except Exception as error:
            # One that cannot be judged must not keep the others from their end.
            log.exception("drill.failed", drill=one.drill.drill_id)
            failed = failed or error
    if failed is not None:
        raise failed


async def _follow(core: Core, one: Open) -> None:
    is_control = one.drill.kind is DrillKind.KILL_CONTROL
    result = await (_look_at_control(core, one) if is_control else _look(core, one))
    if result is not None and _is_fresh(core, one, result):
        await _finish(core, one.drill, result)


def _is_fresh(core: Core, one: Open, result: DrillResult) -> bool:
    """Whether goodput is measured up to now: first, supervisors are asked how far they are."""
    if result.outcome not in (DrillOutcome.RECOVERED, DrillOutcome.UNHARMED):
        return True
    now = core.clock.monotonic()
    if one.asked_at is None:
        one.asked_at = now
        for attempt_id in one.drill.running or (core.drills.newest.get(one.drill.drill_id, ""),):
            core.meetings.tell(attempt_id)
    return now >= one.asked_at + (FRESH_S if _is_told(one, result) else LATE_S)


def _is_told(one: Open, result: DrillResult) -> bool:
    """Whether a step was told of that ends the window: else the job stands still, or has yet to say."""
    if result.window_s is None or one.seen_at is None:
        return True
    done_at = one.done[-1].at if one.done else one.drill.started_at
    return one.seen_at >= done_at + one.drill.window_s - FRESH_S


async def _look(core: Core, one: Open) -> DrillResult | None:
    drill, book = one.drill, core.drills
    job, attempts = await core.store.read(
        lambda tx: (tx.jobs.get(drill.job_id), tx.attempts.of_job(drill.job_id))
    )
    later = tuple(attempt for attempt in attempts if attempt.epoch >= drill.epoch)
    if job is None or not later:
        return DrillResult(outcome=DrillOutcome.NOT_RECOVERED, because="nothing is known of the job any more")
    newest, now = later[-1], core.clock.now()
    book.newest[drill.drill_id] = newest.attempt_id
    _notice(one, later, now)
    progress = book.progress(newest.attempt_id, newest.node_names)
    one.seen_at = max((told.at for told in progress), default=None)
    sight = Sight(
        job=job,
        attempts=later,
        acts=one.done,
        progress=progress,
        noticed_at=one.noticed_at,
        signs=book.signs(newest),
    )
    return judge(drill, sight, now)


def _notice(one: Open, attempts: tuple[Attempt, ...], now: float) -> None:
    """The first sign that anybody gave of having noticed."""
    first = attempts[0]
    signs = [told.failed_at for told in first.recoveries if told.generation > one.drill.generation]
    signs += [at for at in (first.stop_asked_at, first.ended_at, one.noticed_at) if at is not None]
    if first.generation > one.drill.generation:
        signs.append(now)
    one.noticed_at = min(signs, default=None)


async def _look_at_control(core: Core, one: Open) -> DrillResult | None:
    drill, book = one.drill, core.drills
    found = await core.store.read(lambda tx: [tx.attempts.get(own) for own in sorted(drill.running)])
    attempts = [attempt for attempt in found if attempt is not None]
    silent = lost = 0
    over = set[str]()
    heard = [core.drills.opened_at or drill.started_at]
    for attempt in attempts:
        if attempt.state is AttemptState.ENDED:
            lost += attempt.reason not in (EndReason.SUCCEEDED, EndReason.CANCELLED)
            over.add(attempt.attempt_id)
            continue
        seen = [book.heard_at(attempt.attempt_id, node) for node in attempt.nodes_left]
        silent += None in seen
        heard += [at for at in seen if at is not None]
    progress = {own.attempt_id: book.progress(own.attempt_id, own.node_names) for own in attempts}
    newest = [told[0].at for own, told in progress.items() if told and own not in over]
    one.seen_at = min(newest, default=None)
    return judge_control(
        drill,
        core.clock.now(),
        back_at=book.opened_at if one.is_from_before else None,
        heard_at=None if silent else max(heard),
        num_lost=lost,
        over=over,
        progress={own: told[0] for own, told in progress.items() if told},
    )


async def _finish(core: Core, drill: Drill, result: DrillResult) -> None:
    numbers = {name: rounded(getattr(result, name)) for name in MILLISECONDS}
    step_s = None if result.step_s is None else round(result.step_s, 6)
    goodput = None if result.goodput is None else round(result.goodput, 4)
    result = msgspec.structs.replace(
        result, goodput=goodput, step_s=step_s, finished_at=core.clock.now(), **numbers
    )
    told = {"drill_id": drill.drill_id, "kind": drill.kind, "result": msgspec.to_builtins(result)}

    def write(tx: Tx) -> None:
        job = tx.jobs.get(drill.job_id) if drill.job_id else None
        note(tx, FINISHED, core.clock.now(), SHOAL, job=job, node=drill.node or None, data=told)

    await core.store.write(write)
    core.drills.close(drill.drill_id)
