"""A job of two nodes that is drilled: what its supervisors say, and what the control plane makes of it."""

from __future__ import annotations

from typing import Any

from shoal.control.commands.drills import DrillRequest, drill_history
from shoal.control.loops.drill_watch import watch_drills
from shoal.model.drill import Drill, DrillKind, DrillReport
from shoal.model.job import Job
from shoal.store import EventFilter
from shoal.wire import (
    ActivitySigns,
    DrillCommand,
    DrillResult,
    EndKind,
    Recovery,
    Renewal,
    RenewalReply,
    TaskOutcome,
    TaskPhase,
)
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of

SPEC: dict[str, Any] = {"resources": {"nodes": 2, "cpus": 1}, "retry": {"max": 3}, "checkpoint": {}}


def drilled_job(lab: ControlPlaneLab, **fields: Any) -> Job:
    """Running on n1 and n2."""
    job = lab.running_job(**{**SPEC, **fields})
    for node in lab.attempt(job).node_names:
        renew_lease(lab, job, node, started_at=1.0)
    assert lab.status(job) == "running"
    return job


def renew_lease(lab: ControlPlaneLab, job: Job, node: str = "n1", **fields: Any) -> RenewalReply:
    attempt = lab.attempt(job)
    values: dict[str, Any] = {"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "node": node}
    return result_of(lab.plane.renew(Renewal(**{"phase": TaskPhase.RUNNING, **values, **fields})))


def start_drill(
    lab: ControlPlaneLab, job: Job | None, kind: DrillKind = DrillKind.KILL_RANK, **fields: Any
) -> Drill:
    asked = DrillRequest(kind=kind, job_id=job.job_id if job else "", **{"window_s": 5.0, **fields})
    return result_of(lab.plane.start_drill(ANA, asked))


def completed_drill(lab: ControlPlaneLab, command: DrillCommand | None, **fields: Any) -> DrillResult:
    assert command is not None
    values: dict[str, Any] = {"at": lab.clock.now(), "step": 100, "step_s": 0.1}
    return DrillResult(drill_id=command.drill_id, act=command.act, **{**values, **fields})


def newest_result(lab: ControlPlaneLab, after_s: float = 0.0) -> DrillReport | None:
    """What is known of the newest drill after so long, with time for the last question."""
    lab.clock.advance(after_s)
    result_of(watch_drills(lab.core.records, lab.core.running))
    lab.clock.advance(1.0)
    result_of(watch_drills(lab.core.records, lab.core.running))
    wanted = EventFilter(kinds_prefix="drill.")
    return result_of(lab.store.read(lambda tx: drill_history(tx, tx.events.latest(12, wanted))))[-1].result


def rank_failure(lab: ControlPlaneLab, job: Job, node: str = "n2") -> TaskOutcome:
    attempt = lab.attempt(job)
    return TaskOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=EndKind.SIGNALED,
        ended_at=lab.clock.now(),
        signal=9,
        message="rank 1 was killed",
    )


def recovery(lab: ControlPlaneLab, node: str, first_step: int) -> Recovery:
    values: dict[str, Any] = {
        "surviving_ranks": 1,
        "spare_ranks": 0,
        "formed_s": 0.1,
        "joined_s": 0.2,
        "stepped_s": 0.5,
    }
    at = lab.clock.now()
    return Recovery(rendezvous_round=1, node=node, failed_at=at, first_step=first_step, **values)


def kill_rank(lab: ControlPlaneLab, job: Job, **fields: Any) -> DrillResult:
    """A rank of a program that tells of no step."""
    start_drill(lab, job, **fields)
    drilled = completed_drill(lab, renew_lease(lab, job, "n2").drill, step=None, step_s=None)
    renew_lease(lab, job, "n2", drill_result=drilled, failure=rank_failure(lab, job))
    return drilled


def report_ranks_again(
    lab: ControlPlaneLab,
    job: Job,
    drill_result: DrillResult,
    *,
    nodes: tuple[str, ...] = ("n1", "n2"),
    rendezvous_round: int = 1,
    printed_s: float | None = 0.25,
    worked_s: float | None = 0.1,
) -> None:
    """Each node says that its ranks run in this group, and since when."""
    at = lab.clock.now()
    signs = ActivitySigns(
        rendezvous_round=rendezvous_round,
        started_at=at + 0.05,
        printed_at=None if printed_s is None else at + printed_s,
        worked_at=None if worked_s is None else at + worked_s,
    )
    for node in nodes:
        renew_lease(lab, job, node, rendezvous_round=rendezvous_round, drill_result=drill_result, signs=signs)
