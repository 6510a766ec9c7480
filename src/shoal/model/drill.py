"""A drill: a fault that somebody asked for, on a live job, and what came of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from shoal.model import crash_loop
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.goodput import rate, undisturbed_s
from shoal.model.job import Job, JobOutcome
from shoal.wire import DrillAct, Drilled, DrillOrder, Progress, Signs

HANG_SHARE = 0.8
"""Of the time that a drill may take: a rank that nobody misses by then is continued."""
LEAST_WATCH_S = 10.0
"""How long ranks of a program that tells of no step must run, at least, to have recovered."""
UNREAD = "the ranks began anew before they could be killed: they may not have read what was damaged"


class DrillKind(StrEnum):
    KILL_RANK = "kill-rank"
    KILL_NODE = "kill-node"
    HANG = "hang"
    PARTITION = "partition"
    CORRUPT_CHECKPOINT = "corrupt-checkpoint"
    KILL_CONTROL = "kill-control"


ON_RANKS = frozenset({DrillKind.KILL_RANK, DrillKind.HANG, DrillKind.CORRUPT_CHECKPOINT})
"""Drills whose act is itself a failure of ranks."""


class DrillOutcome(StrEnum):
    RECOVERED = "recovered"
    """It went on, after a recovery."""
    UNHARMED = "unharmed"
    """It went on as if nothing had happened."""
    NOT_RECOVERED = "not recovered"
    CRASH_LOOP = "crash loop"
    """Its ranks began again, and failed again."""
    NOT_DONE = "not done"
    """Nothing happened to its ranks."""


class Sign(StrEnum):
    """What shows that ranks run that tell of no step."""

    OUTPUT = "output"
    CPU = "cpu"
    START = "start"


class Drill(msgspec.Struct, frozen=True, kw_only=True):
    """As it was asked for, of an attempt as it was then. `kill-control` is of no job."""

    drill_id: str
    kind: DrillKind
    started_at: float
    by: str = ""
    job_id: str = ""
    attempt_id: str = ""
    epoch: int = 0
    generation: int = 0
    nodes: tuple[str, ...] = ()
    node: str = ""
    """Where it is done; the first step of it, where there are several."""
    rank: int | None = None
    for_s: float = 0.0
    window_s: float = 20.0
    """Over how long goodput is measured, from when it was done."""
    within_s: float = 120.0
    """A job that has not gone on by then has not recovered."""
    running: dict[str, Progress | None] = {}
    """`kill-control`: the attempts that ran, by id."""


class DrillResult(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds count from when it was done. None: not known."""

    outcome: DrillOutcome
    because: str = ""
    told: str = ""
    """What was done, where the drill does not say it."""
    noticed_s: float | None = None
    """Until somebody knew; for `kill-control` until it answered again."""
    stepped_s: float | None = None
    """Until every rank had made another step; of a program that does not say, until its ranks ran again."""
    sign: Sign | None = None
    """Of such a program: by what that was seen."""
    watched_s: float | None = None
    """For how long they were watched from then on, and none of them failed."""
    num_ended: int = 0
    """How often ranks that had begun again failed."""
    steps_lost: int | None = None
    goodput: float | None = None
    """What the steps made in the window would have taken, undisturbed, over what it took."""
    window_s: float | None = None
    """How long it was in the end, from the act on."""
    step_s: float | None = None
    """What counts as undisturbed: the pace before the act or that after it, whichever is faster."""
    new_attempts: int = 0
    tells_steps: bool = True
    """False: the program told of no step, before or since, so that its ranks alone were judged."""
    finished_at: float = 0.0


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to judge a drill by."""

    job: Job
    attempts: tuple[Attempt, ...]
    """From the one that the drill was done to on, in order."""
    acts: tuple[Drilled, ...] = ()
    """What supervisors say they did, in order of arrival."""
    progress: tuple[Progress, ...] = ()
    """The newest, of each node of the newest attempt that has said it."""
    noticed_at: float | None = None
    signs: tuple[Signs, ...] = ()
    """What the newest group of the newest attempt shows on each node, once all nodes have told."""


def order_for(drill: Drill, node: str, acts: Sequence[Drilled]) -> DrillOrder | None:
    """What this node has to do now; None: nothing (any more)."""
    act = _act_of(drill, node, acts)
    if act is None:
        return None
    is_alone = act in (DrillAct.KILL_RANK, DrillAct.HANG_RANK)
    bound_s = drill.within_s * HANG_SHARE
    return DrillOrder(
        drill_id=drill.drill_id,
        act=act,
        rank=drill.rank if is_alone else None,
        for_s=drill.for_s if act is DrillAct.CUT_OFF else bound_s,
        generation=drill.generation,
    )


_ACTS = {
    DrillKind.KILL_RANK: DrillAct.KILL_RANK,
    DrillKind.KILL_NODE: DrillAct.KILL_NODE,
    DrillKind.HANG: DrillAct.HANG_RANK,
    DrillKind.PARTITION: DrillAct.CUT_OFF,
    DrillKind.CORRUPT_CHECKPOINT: DrillAct.CORRUPT,
}


def _act_of(drill: Drill, node: str, acts: Sequence[Drilled]) -> DrillAct | None:
    # A supervisor says its newest act alone: ranks are killed only after the damage.
    damaging = (DrillAct.CORRUPT, DrillAct.KILL_RANKS)
    is_damaged = any(done.act in damaging and not done.refusal for done in acts)
    if is_damaged:
        # With every rank gone no survivor has the state: they must read what was damaged.
        return DrillAct.KILL_RANKS
    return _ACTS.get(drill.kind) if node == drill.node else None


def judge(drill: Drill, sight: Sight, now: float) -> DrillResult | None:
    """What came of it; None while that is open."""
    refused = next((done.refusal for done in sight.acts if done.refusal), "")
    if refused:
        return DrillResult(outcome=DrillOutcome.NOT_DONE, because=refused, finished_at=now)
    done = _done(drill, sight)
    went_on = _went_on(drill, sight) if done is not None else None
    count = _num_ended(drill, sight)
    if done is not None and crash_loop.is_crash_loop(sight.job, count):
        return _crash_loop(sight, done, count, now)
    if done is None or (went_on is None and not _is_unharmed(drill, sight, done)):
        return _without_end(drill, sight, done, now)
    stepped_at, first_step = went_on or (None, None)
    is_harmed, is_mute = stepped_at is not None, _is_mute(sight)
    watch_until = _watch_until(drill, done, stepped_at, count, is_mute=is_mute)
    if now < watch_until and sight.job.is_open:
        return None
    ends_at = max(done.at + drill.window_s, stepped_at or 0.0)
    if not sight.job.is_open and sight.job.ended_at is not None:
        ends_at = min(ends_at, sight.job.ended_at)
    goodput, window_s, step_s = _goodput(done, sight.progress, ends_at)
    return DrillResult(
        outcome=DrillOutcome.RECOVERED if is_harmed else DrillOutcome.UNHARMED,
        because=UNREAD if done.act is DrillAct.CORRUPT else "",
        told=next((one.told for one in sight.acts if one.told), ""),
        noticed_s=_since(done.at, _noticed_by(sight, stepped_at)),
        stepped_s=_since(done.at, stepped_at),
        steps_lost=_lost(done, first_step) if is_harmed or is_mute else 0,
        goodput=goodput,
        window_s=window_s,
        step_s=step_s,
        sign=_sign(sight.signs) if is_harmed and is_mute else None,
        watched_s=_since(stepped_at, watch_until) if stepped_at is not None else None,
        num_ended=count,
        new_attempts=len(sight.attempts) - 1,
        tells_steps=not is_mute,
        finished_at=now,
    )


def _watch_until(
    drill: Drill, done: Drilled, stepped_at: float | None, count: int, *, is_mute: bool
) -> float:
    """Until when nothing may fail again. Goodput is measured from the act on. Of ranks that tell of no step,
    or that have failed again before, only that they live on shows that they recovered.
    """
    until = max(done.at + drill.window_s, stepped_at or 0.0)
    if stepped_at is None or not (is_mute or count):
        return until
    return max(until, stepped_at + max(drill.window_s, LEAST_WATCH_S if is_mute else 0.0))


def _num_ended(drill: Drill, sight: Sight) -> int:
    is_of_ranks = drill.kind in ON_RANKS
    return crash_loop.num_ended(sight.attempts, drill.generation, is_of_ranks=is_of_ranks)


def _sign(signs: Sequence[Signs]) -> Sign:
    """The weakest of the signs that the nodes gave."""
    if all(one.printed_at is not None for one in signs):
        return Sign.OUTPUT
    is_at_work = all(one.printed_at or one.worked_at for one in signs)
    return Sign.CPU if is_at_work else Sign.START


def _done(drill: Drill, sight: Sight) -> Drilled | None:
    """When the harm was done, and how far the job was then."""
    if drill.kind is DrillKind.KILL_NODE and not sight.acts and sight.noticed_at is not None:
        # It was lost before its last word was heard.
        return Drilled(drill_id=drill.drill_id, act=DrillAct.KILL_NODE, at=drill.started_at)
    if drill.kind is not DrillKind.CORRUPT_CHECKPOINT:
        return sight.acts[0] if sight.acts else None
    killed = [one for one in sight.acts if one.act is DrillAct.KILL_RANKS]
    damaged = _damaged(sight)
    if not killed:
        # Who follows the group that it was meant for is not killed: the damage is all there will be.
        return damaged if _is_later(drill, sight) or not sight.job.is_open else None
    # Of whoever did it nobody may have heard: the control plane was started again meanwhile.
    before = damaged or killed[0]
    return msgspec.structs.replace(killed[0], step=before.step, step_s=before.step_s)


def _damaged(sight: Sight) -> Drilled | None:
    return next((one for one in sight.acts if one.act is DrillAct.CORRUPT), None)


def _is_later(drill: Drill, sight: Sight) -> bool:
    """Whether another group follows the one that it was done to."""
    newest = sight.attempts[-1]
    return newest.epoch > drill.epoch or newest.generation > drill.generation


def _went_on(drill: Drill, sight: Sight) -> tuple[float, int | None] | None:
    """When every node of a later group had made a step, and how many were complete then."""
    newest = sight.attempts[-1]
    runs = newest.state is AttemptState.RUNNING or newest.reason is EndReason.SUCCEEDED
    if not _is_later(drill, sight) or not runs:
        return None
    if _is_mute(sight):
        ran = max((one.ran_at for one in sight.signs), default=None)
        return None if ran is None else (ran, None)
    told = [one for one in newest.recoveries if one.generation == newest.generation]
    if {one.node for one in told} >= set(newest.node_names):
        ended = [one.failed_at + (one.stepped_s or one.formed_s) for one in told]
        steps = [one.first_step for one in told if one.first_step is not None]
        return max(ended), min(steps, default=None)
    return None


def _is_mute(sight: Sight) -> bool:
    """Whether nobody has told of a step, before the act or since."""
    told = [one.step for one in sight.acts] + [one.first_step for one in sight.attempts[-1].recoveries]
    return not sight.progress and all(step is None for step in told)


def _is_unharmed(drill: Drill, sight: Sight, done: Drilled) -> bool:
    """Whether nothing has followed what was done, where nothing need to."""
    newest = sight.attempts[-1]
    is_same = (newest.epoch, newest.generation) == (drill.epoch, drill.generation)
    return drill.kind is DrillKind.PARTITION and is_same and newest.state is AttemptState.RUNNING


def _without_end(drill: Drill, sight: Sight, done: Drilled | None, now: float) -> DrillResult | None:
    """It has not gone on: is it still to be waited for?"""
    job = sight.job
    if not job.is_open and done is None:
        early = f"the job was over ({job.outcome}) before anything was done to it"
        return DrillResult(outcome=DrillOutcome.NOT_DONE, because=early, finished_at=now)
    if not job.is_open:
        is_well = job.outcome is JobOutcome.SUCCEEDED
        sign = "its ranks were heard of again" if _is_mute(sight) else "its next step was heard of"
        told = f"it ended well before {sign}" if is_well else job.because
        return DrillResult(
            outcome=DrillOutcome.RECOVERED if is_well else DrillOutcome.NOT_RECOVERED,
            because=told or f"the job was {job.outcome}",
            noticed_s=_since(done.at, sight.noticed_at) if done is not None else None,
            new_attempts=len(sight.attempts) - 1,
            tells_steps=not _is_mute(sight),
            finished_at=now,
        )
    if now < (done.at if done is not None else drill.started_at) + drill.within_s:
        return None
    if done is None:
        damaged = _damaged(sight)
        silent = f"the supervisor on {drill.node} was not reached within {drill.within_s:g} s"
        alive = f"no rank was killed within {drill.within_s:g} s, but the newest checkpoint is damaged"
        return DrillResult(
            outcome=DrillOutcome.NOT_DONE,
            because=silent if damaged is None else alive,
            told="" if damaged is None else damaged.told,
            finished_at=now,
        )
    if count := _num_ended(drill, sight):
        return _crash_loop(sight, done, count, now)
    newest = sight.attempts[-1]
    missed = "its ranks did not run again" if _is_mute(sight) else "no step"
    where = f"attempt {newest.epoch} is {newest.state}, group {newest.generation}"
    return DrillResult(
        outcome=DrillOutcome.NOT_RECOVERED,
        because=f"{missed} within {drill.within_s:g} s; {where}",
        noticed_s=_since(done.at, sight.noticed_at),
        new_attempts=len(sight.attempts) - 1,
        tells_steps=not _is_mute(sight),
        finished_at=now,
    )


def _crash_loop(sight: Sight, done: Drilled, count: int, now: float) -> DrillResult:
    return DrillResult(
        outcome=DrillOutcome.CRASH_LOOP,
        because=crash_loop.told(sight.attempts, count),
        noticed_s=_since(done.at, sight.noticed_at),
        num_ended=count,
        new_attempts=len(sight.attempts) - 1,
        tells_steps=not _is_mute(sight),
        finished_at=now,
    )


def _noticed_by(sight: Sight, stepped_at: float | None) -> float | None:
    """When somebody knew, of a job that went on. Where only the control plane's look says it, that can be
    later than the first sign of the ranks that replaced the lost ones, which began after it.
    """
    if stepped_at is None:
        return None
    return stepped_at if sight.noticed_at is None else min(sight.noticed_at, stepped_at)


def _since(at: float, then: float | None) -> float | None:
    return None if then is None else max(0.0, then - at)


def _lost(done: Drilled, first_step: int | None) -> int | None:
    """Complete steps that had to be done again."""
    if done.step is None or first_step is None:
        return None
    return max(0, done.step - first_step + 1)


def _goodput(
    done: Drilled, progress: Sequence[Progress], ends_at: float
) -> tuple[float | None, float | None, float | None]:
    """Goodput, the window, and the pace that counts as undisturbed."""
    newest = max(progress, key=lambda one: one.at, default=None)
    step_s = undisturbed_s(done.step_s, newest.step_s if newest is not None else None)
    if newest is None or done.step is None or step_s is None:
        return None, None, None
    goodput, window_s = rate(newest.step - done.step, step_s, done.at, newest.at, ends_at)
    return goodput, window_s, step_s if goodput is not None else None
