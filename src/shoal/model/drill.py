"""A drill: a fault that a person asked for on a live job, and the report of how the job came
through. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from shoal.model import drill_measures
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.drill_measures import measure_goodput, undisturbed_s
from shoal.model.job import Job, JobOutcome
from shoal.wire import ActivitySigns, DrillAct, DrillCommand, DrillResult, Progress

HANG_SHARE = 0.8
"""Fraction of the drill's time limit after which a hung rank is continued if the hang was not noticed."""
LEAST_WATCH_S = 10.0
"""Shortest time that ranks of a program that reports no steps must run to count as recovered."""
UNREAD = "the ranks restarted before they could be killed: they may not have read what was damaged"


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
    """The job continued after a recovery."""
    UNHARMED = "unharmed"
    """The job continued as if nothing had happened."""
    NOT_RECOVERED = "not recovered"
    CRASH_LOOP = "crash loop"
    """Its ranks began again, and failed again."""
    NOT_DONE = "not done"
    """Nothing happened to its ranks."""


class ActivitySign(StrEnum):
    """What shows that ranks run when their program reports no steps."""

    OUTPUT = "output"
    CPU = "cpu"
    START = "start"


class Drill(msgspec.Struct, frozen=True, kw_only=True):
    """A drill as it was requested, against the attempt at that time. `kill-control` has no job."""

    drill_id: str
    kind: DrillKind
    started_at: float
    by: str = ""
    job_id: str = ""
    attempt_id: str = ""
    epoch: int = 0
    rendezvous_round: int = 0
    nodes: tuple[str, ...] = ()
    node: str = ""
    """The node of the drill, or of its first step if it has several."""
    rank: int | None = None
    for_s: float = 0.0
    window_s: float = 20.0
    """Length of the window in which goodput is measured, from the act."""
    within_s: float = 120.0
    """A job that has not continued within this time counts as not recovered."""
    running: dict[str, Progress | None] = {}
    """`kill-control`: the attempts that ran, by id."""


class DrillReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a drill. Seconds count from the act. None means unknown."""

    outcome: DrillOutcome
    because: str = ""
    detail: str = ""
    """What was done, if the drill itself does not describe it."""
    noticed_s: float | None = None
    """Until the failure was detected. For `kill-control`, until the control plane answered again."""
    stepped_s: float | None = None
    """Until every rank had made another step. If the program reports no steps, until its ranks ran again."""
    sign: ActivitySign | None = None
    """What showed that the ranks of a program without steps ran again."""
    watched_s: float | None = None
    """How long the ranks were watched from then on without a failure."""
    num_ended: int = 0
    """How often ranks that had begun again failed."""
    steps_lost: int | None = None
    goodput: float | None = None
    """The undisturbed time for the steps made in the window, divided by the length of the window."""
    window_s: float | None = None
    """The actual length of the window, from the act."""
    step_s: float | None = None
    """The undisturbed pace: the pace before the act or the pace after it, the faster of the two."""
    new_attempts: int = 0
    tells_steps: bool = True
    """False if the program reported no steps, before or after the act. The drill was then judged by the ranks
    alone.
    """
    finished_at: float = 0.0


class DrillEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The observations that a drill is judged by."""

    job: Job
    attempts: tuple[Attempt, ...]
    """In order, from the attempt that the drill was done to."""
    acts: tuple[DrillResult, ...] = ()
    """What supervisors reported as done, in order of arrival."""
    progress: tuple[Progress, ...] = ()
    """The newest progress of each node of the newest attempt that has reported any."""
    noticed_at: float | None = None
    signs: tuple[ActivitySigns, ...] = ()
    """Activity on each node in the newest round of the newest attempt, once all nodes have reported."""


def drill_command_for(drill: Drill, node: str, acts: Sequence[DrillResult]) -> DrillCommand | None:
    """What this node has to do now. None if it has nothing to do, or nothing any more."""
    act = _act_of(drill, node, acts)
    if act is None:
        return None
    is_alone = act in (DrillAct.KILL_RANK, DrillAct.HANG_RANK)
    bound_s = drill.within_s * HANG_SHARE
    return DrillCommand(
        drill_id=drill.drill_id,
        act=act,
        rank=drill.rank if is_alone else None,
        for_s=drill.for_s if act is DrillAct.CUT_OFF else bound_s,
        rendezvous_round=drill.rendezvous_round,
    )


_ACTS = {
    DrillKind.KILL_RANK: DrillAct.KILL_RANK,
    DrillKind.KILL_NODE: DrillAct.KILL_NODE,
    DrillKind.HANG: DrillAct.HANG_RANK,
    DrillKind.PARTITION: DrillAct.CUT_OFF,
    DrillKind.CORRUPT_CHECKPOINT: DrillAct.CORRUPT,
}


def _act_of(drill: Drill, node: str, acts: Sequence[DrillResult]) -> DrillAct | None:
    # A supervisor reports only its newest act, so ranks are killed only after the damage.
    damaging = (DrillAct.CORRUPT, DrillAct.KILL_RANKS)
    is_damaged = any(done.act in damaging and not done.refusal for done in acts)
    if is_damaged:
        # If every rank is gone, no survivor has the state, so the ranks must read what was damaged.
        return DrillAct.KILL_RANKS
    return _ACTS.get(drill.kind) if node == drill.node else None


def judge_drill(drill: Drill, evidence: DrillEvidence, now: float) -> DrillReport | None:
    """The report of the drill. None while it is open."""
    refused = next((done.refusal for done in evidence.acts if done.refusal), "")
    if refused:
        return DrillReport(outcome=DrillOutcome.NOT_DONE, because=refused, finished_at=now)
    done = _act_done(drill, evidence)
    went_on = _continued_at(drill, evidence) if done is not None else None
    count = _num_ended(drill, evidence)
    if done is not None and drill_measures.is_crash_loop(evidence.job, count):
        return _crash_loop(evidence, done, count, now)
    if done is None or (went_on is None and not _is_unharmed(drill, evidence, done)):
        return _unfinished_report(drill, evidence, done, now)
    stepped_at, first_step = went_on or (None, None)
    is_harmed, is_mute = stepped_at is not None, _reports_no_steps(evidence)
    watch_until = _watch_until(drill, done, stepped_at, count, is_mute=is_mute)
    if now < watch_until and evidence.job.is_open:
        return None
    ends_at = max(done.at + drill.window_s, stepped_at or 0.0)
    if not evidence.job.is_open and evidence.job.ended_at is not None:
        ends_at = min(ends_at, evidence.job.ended_at)
    goodput, window_s, step_s = _goodput(done, evidence.progress, ends_at)
    return DrillReport(
        outcome=DrillOutcome.RECOVERED if is_harmed else DrillOutcome.UNHARMED,
        because=UNREAD if done.act is DrillAct.CORRUPT else "",
        detail=next((act.detail for act in evidence.acts if act.detail), ""),
        noticed_s=_since(done.at, _detected_at(evidence, stepped_at)),
        stepped_s=_since(done.at, stepped_at),
        steps_lost=_repeated_steps(done, first_step) if is_harmed or is_mute else 0,
        goodput=goodput,
        window_s=window_s,
        step_s=step_s,
        sign=_sign(evidence.signs) if is_harmed and is_mute else None,
        watched_s=_since(stepped_at, watch_until) if stepped_at is not None else None,
        num_ended=count,
        new_attempts=len(evidence.attempts) - 1,
        tells_steps=not is_mute,
        finished_at=now,
    )


def _watch_until(
    drill: Drill, done: DrillResult, stepped_at: float | None, count: int, *, is_mute: bool
) -> float:
    """Until when no rank may fail again. Goodput is measured from the act.

    If ranks report no steps, or have failed again before, only their survival shows that they recovered.
    """
    until = max(done.at + drill.window_s, stepped_at or 0.0)
    if stepped_at is None or not (is_mute or count):
        return until
    return max(until, stepped_at + max(drill.window_s, LEAST_WATCH_S if is_mute else 0.0))


def _num_ended(drill: Drill, evidence: DrillEvidence) -> int:
    is_of_ranks = drill.kind in ON_RANKS
    return drill_measures.count_new_failures(
        evidence.attempts, drill.rendezvous_round, is_of_ranks=is_of_ranks
    )


def _sign(signs: Sequence[ActivitySigns]) -> ActivitySign:
    """The weakest of the signs that the nodes reported."""
    if all(sign.printed_at is not None for sign in signs):
        return ActivitySign.OUTPUT
    is_at_work = all(sign.printed_at or sign.worked_at for sign in signs)
    return ActivitySign.CPU if is_at_work else ActivitySign.START


def _act_done(drill: Drill, evidence: DrillEvidence) -> DrillResult | None:
    """When the harm was done, and how far the job was then."""
    if drill.kind is DrillKind.KILL_NODE and not evidence.acts and evidence.noticed_at is not None:
        # The node was lost before its last report arrived.
        return DrillResult(drill_id=drill.drill_id, act=DrillAct.KILL_NODE, at=drill.started_at)
    if drill.kind is not DrillKind.CORRUPT_CHECKPOINT:
        return evidence.acts[0] if evidence.acts else None
    killed = [act for act in evidence.acts if act.act is DrillAct.KILL_RANKS]
    damaged = _damaged(evidence)
    if not killed:
        # Ranks of a later round than the drill's are not killed, so the damage is all there will be.
        return damaged if _is_later(drill, evidence) or not evidence.job.is_open else None
    # The report of the act may be missing because the control plane restarted meanwhile.
    before = damaged or killed[0]
    return msgspec.structs.replace(killed[0], step=before.step, step_s=before.step_s)


def _damaged(evidence: DrillEvidence) -> DrillResult | None:
    return next((act for act in evidence.acts if act.act is DrillAct.CORRUPT), None)


def _is_later(drill: Drill, evidence: DrillEvidence) -> bool:
    """Whether a later round or attempt follows the one that the drill was done to."""
    newest = evidence.attempts[-1]
    return newest.epoch > drill.epoch or newest.rendezvous_round > drill.rendezvous_round


def _continued_at(drill: Drill, evidence: DrillEvidence) -> tuple[float, int | None] | None:
    """When every node of a later round had made a step, and how many steps were complete then."""
    newest = evidence.attempts[-1]
    runs = newest.state is AttemptState.RUNNING or newest.reason is EndReason.SUCCEEDED
    if not _is_later(drill, evidence) or not runs:
        return None
    if _reports_no_steps(evidence):
        ran = max((sign.ran_at for sign in evidence.signs), default=None)
        return None if ran is None else (ran, None)
    recoveries = [
        recovery for recovery in newest.recoveries if recovery.rendezvous_round == newest.rendezvous_round
    ]
    if {recovery.node for recovery in recoveries} >= set(newest.node_names):
        ended = [recovery.failed_at + (recovery.stepped_s or recovery.formed_s) for recovery in recoveries]
        steps = [recovery.first_step for recovery in recoveries if recovery.first_step is not None]
        return max(ended), min(steps, default=None)
    return None


def _reports_no_steps(evidence: DrillEvidence) -> bool:
    """Whether no node has reported a step, before the act or since."""
    recoveries = evidence.attempts[-1].recoveries
    steps = [act.step for act in evidence.acts] + [recovery.first_step for recovery in recoveries]
    return not evidence.progress and all(step is None for step in steps)


def _is_unharmed(drill: Drill, evidence: DrillEvidence, done: DrillResult) -> bool:
    """Whether nothing has followed the act, for a drill that may have no effect."""
    newest = evidence.attempts[-1]
    is_same = (newest.epoch, newest.rendezvous_round) == (drill.epoch, drill.rendezvous_round)
    return drill.kind is DrillKind.PARTITION and is_same and newest.state is AttemptState.RUNNING


def _unfinished_report(
    drill: Drill, evidence: DrillEvidence, done: DrillResult | None, now: float
) -> DrillReport | None:
    """The job has not continued. Return the report if waiting longer is useless, else None."""
    job = evidence.job
    if not job.is_open and done is None:
        early = f"the job had ended ({job.outcome}) before the drill did anything"
        return DrillReport(outcome=DrillOutcome.NOT_DONE, because=early, finished_at=now)
    if not job.is_open:
        is_well = job.outcome is JobOutcome.SUCCEEDED
        sign = "its ranks were seen again" if _reports_no_steps(evidence) else "its next step was reported"
        message = f"it ended well before {sign}" if is_well else job.because
        return DrillReport(
            outcome=DrillOutcome.RECOVERED if is_well else DrillOutcome.NOT_RECOVERED,
            because=message or f"the job was {job.outcome}",
            noticed_s=_since(done.at, evidence.noticed_at) if done is not None else None,
            new_attempts=len(evidence.attempts) - 1,
            tells_steps=not _reports_no_steps(evidence),
            finished_at=now,
        )
    if now < (done.at if done is not None else drill.started_at) + drill.within_s:
        return None
    if done is None:
        damaged = _damaged(evidence)
        silent = f"the supervisor on {drill.node} was not reached within {drill.within_s:g} s"
        alive = f"no rank was killed within {drill.within_s:g} s, but the newest checkpoint is damaged"
        return DrillReport(
            outcome=DrillOutcome.NOT_DONE,
            because=silent if damaged is None else alive,
            detail="" if damaged is None else damaged.detail,
            finished_at=now,
        )
    if count := _num_ended(drill, evidence):
        return _crash_loop(evidence, done, count, now)
    newest = evidence.attempts[-1]
    missed = "its ranks did not run again" if _reports_no_steps(evidence) else "no step"
    where = f"attempt {newest.epoch} is {newest.state}, rendezvous round {newest.rendezvous_round}"
    return DrillReport(
        outcome=DrillOutcome.NOT_RECOVERED,
        because=f"{missed} within {drill.within_s:g} s; {where}",
        noticed_s=_since(done.at, evidence.noticed_at),
        new_attempts=len(evidence.attempts) - 1,
        tells_steps=not _reports_no_steps(evidence),
        finished_at=now,
    )


def _crash_loop(evidence: DrillEvidence, done: DrillResult, count: int, now: float) -> DrillReport:
    return DrillReport(
        outcome=DrillOutcome.CRASH_LOOP,
        because=drill_measures.crash_loop_sentence(evidence.attempts, count),
        noticed_s=_since(done.at, evidence.noticed_at),
        num_ended=count,
        new_attempts=len(evidence.attempts) - 1,
        tells_steps=not _reports_no_steps(evidence),
        finished_at=now,
    )


def _detected_at(evidence: DrillEvidence, stepped_at: float | None) -> float | None:
    """When the failure of a job that continued was detected.

    If only the control plane's check detected it, that can be later than the first sign of the ranks that
    replaced the lost ones, because those ranks began after the loss.
    """
    if stepped_at is None:
        return None
    return stepped_at if evidence.noticed_at is None else min(evidence.noticed_at, stepped_at)


def _since(at: float, then: float | None) -> float | None:
    return None if then is None else max(0.0, then - at)


def _repeated_steps(done: DrillResult, first_step: int | None) -> int | None:
    """Complete steps that had to be done again."""
    if done.step is None or first_step is None:
        return None
    return max(0, done.step - first_step + 1)


def _goodput(
    done: DrillResult, progress: Sequence[Progress], ends_at: float
) -> tuple[float | None, float | None, float | None]:
    """Goodput, the window, and the undisturbed pace."""
    newest = max(progress, key=lambda report: report.at, default=None)
    step_s = undisturbed_s(done.step_s, newest.step_s if newest is not None else None)
    if newest is None or done.step is None or step_s is None:
        return None, None, None
    goodput, window_s = measure_goodput(newest.step - done.step, step_s, done.at, newest.at, ends_at)
    return goodput, window_s, step_s if goodput is not None else None
