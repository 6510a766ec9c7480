"""A job of two nodes that is drilled: what its supervisors say, and what the control plane makes of it."""

from __future__ import annotations

from typing import Any

from shoal.control.drill_watch import watch_drills
from shoal.control.drills import AskedDrill, history
from shoal.model.drill import Drill, DrillKind, DrillResult
from shoal.model.job import Job
from shoal.store import EventFilter
from shoal.wire import (
    Drilled,
    DrillOrder,
    EndKind,
    NodeOutcome,
    Phase,
    Recovery,
    Renewal,
    RenewalAnswer,
    Signs,
)
from tests.support.lab import ANA, Lab, now

SPEC: dict[str, Any] = {"resources": {"nodes": 2, "cpus": 1}, "retry": {"max": 3}, "checkpoint": {}}


def a_job(lab: Lab, **fields: Any) -> Job:
    """Running on n1 and n2."""
    job = lab.running(**{**SPEC, **fields})
    for node in lab.attempt(job).node_names:
        say(lab, job, node, started_at=1.0)
    assert lab.status(job) == "running"
    return job


def say(lab: Lab, job: Job, node: str = "n1", **fields: Any) -> RenewalAnswer:
    attempt = lab.attempt(job)
    values: dict[str, Any] = {"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "node": node}
    return now(lab.plane.renew(Renewal(**{"phase": Phase.RUNNING, **values, **fields})))


def ask(lab: Lab, job: Job | None, kind: DrillKind = DrillKind.KILL_RANK, **fields: Any) -> Drill:
    asked = AskedDrill(kind=kind, job_id=job.job_id if job else "", **{"window_s": 5.0, **fields})
    return now(lab.plane.start_drill(ANA, asked))


def done(lab: Lab, order: DrillOrder | None, **fields: Any) -> Drilled:
    assert order is not None
    values: dict[str, Any] = {"at": lab.clock.now(), "step": 100, "step_s": 0.1}
    return Drilled(drill_id=order.drill_id, act=order.act, **{**values, **fields})


def look(lab: Lab, after_s: float = 0.0) -> DrillResult | None:
    """What is known of the newest drill after so long, with time for the last question."""
    lab.clock.advance(after_s)
    now(watch_drills(lab.core))
    lab.clock.advance(1.0)
    now(watch_drills(lab.core))
    wanted = EventFilter(kinds_prefix="drill.")
    return now(lab.store.read(lambda tx: history(tx, tx.events.latest(12, wanted))))[-1].result


def failed(lab: Lab, job: Job, node: str = "n2") -> NodeOutcome:
    attempt = lab.attempt(job)
    return NodeOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=node,
        kind=EndKind.SIGNALED,
        ended_at=lab.clock.now(),
        signal=9,
        message="rank 1 was killed",
    )


def recovery(lab: Lab, node: str, first_step: int) -> Recovery:
    values: dict[str, Any] = {"kept": 1, "spares": 0, "formed_s": 0.1, "joined_s": 0.2, "stepped_s": 0.5}
    at = lab.clock.now()
    return Recovery(generation=1, node=node, failed_at=at, first_step=first_step, **values)


def kill(lab: Lab, job: Job, **asked: Any) -> Drilled:
    """A rank of a program that tells of no step."""
    ask(lab, job, **asked)
    drilled = done(lab, say(lab, job, "n2").drill, step=None, step_s=None)
    say(lab, job, "n2", drilled=drilled, failure=failed(lab, job))
    return drilled


def run_again(
    lab: Lab,
    job: Job,
    drilled: Drilled,
    *,
    nodes: tuple[str, ...] = ("n1", "n2"),
    generation: int = 1,
    printed_s: float | None = 0.25,
    worked_s: float | None = 0.1,
) -> None:
    """Each node says that its ranks run in this group, and since when."""
    at = lab.clock.now()
    signs = Signs(
        generation=generation,
        started_at=at + 0.05,
        printed_at=None if printed_s is None else at + printed_s,
        worked_at=None if worked_s is None else at + worked_s,
    )
    for node in nodes:
        say(lab, job, node, generation=generation, drilled=drilled, signs=signs)
