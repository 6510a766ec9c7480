"""Attempts that have ended are forgotten whole, in one place, for every reason for which an attempt ends."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shoal.control.loops.place import place
from shoal.control.memory.attempt_table import AttemptMemory
from shoal.control.memory.open_drills import OpenDrill
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.drill import Drill, DrillKind
from shoal.model.moves import REASON_OF_KIND, AttemptEvent, StopRequested, SubmissionRefused, TaskEnded
from shoal.wire import (
    ActivitySigns,
    EndKind,
    Progress,
    Renewal,
    ReplicaStatus,
    TaskOutcome,
    TaskPhase,
    World,
)
from tests.support.planes.bench import ControlPlaneLab, result_of

KIND_OF_REASON = {reason: kind for kind, reason in REASON_OF_KIND.items() if kind is not EndKind.STOPPED}


def outcome(attempt: Attempt, kind: EndKind) -> TaskOutcome:
    return TaskOutcome(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=attempt.node_names[0],
        kind=kind,
        ended_at=1.0,
    )


def events_for(attempt: Attempt, reason: EndReason) -> list[AttemptEvent]:
    """The events by which an attempt ends for this reason."""
    if reason is EndReason.REFUSED:
        return [SubmissionRefused(message="no room")]
    if reason in KIND_OF_REASON:
        return [TaskEnded(outcome(attempt, KIND_OF_REASON[reason]))]
    return [StopRequested(reason=reason, by="ana"), TaskEnded(outcome(attempt, EndKind.STOPPED))]


def placed(lab: ControlPlaneLab, reason: EndReason) -> Attempt:
    """An attempt that runs; one that is only placed if no engine took it."""
    if reason is not EndReason.REFUSED:
        return lab.attempt(lab.running_job())
    lab.heal()
    job = lab.submit()
    result_of(place(lab.core.upkeep, lab.core.planning))
    return lab.attempt(job)


def renewal_of(attempt: Attempt) -> Renewal:
    return Renewal(
        attempt_id=attempt.attempt_id,
        epoch=attempt.epoch,
        node=attempt.node_names[0],
        phase=TaskPhase.RUNNING,
        world=World(size=1, ranks=1, is_whole=True),
        progress=Progress(rendezvous_round=0, step=1, at=1.0),
        signs=ActivitySigns(rendezvous_round=0, started_at=1.0),
    )


def remember_everything(lab: ControlPlaneLab, attempt: Attempt) -> None:
    """Note something in every part of the attempt's memory."""
    running, attempt_id, node = lab.core.running, attempt.attempt_id, attempt.node_names[0]
    running.follow([attempt])
    running.leases.note_alive(attempt_id, node)
    running.leases.note_submission(attempt_id)
    running.leases.note_trouble(attempt_id, node, "it waits", is_queued=True)
    running.leases.ran_for_s(attempt_id)
    running.rendezvous.announce(attempt_id, 0, 29_500)
    running.rank_failures.note(outcome(attempt, EndKind.EXITED), 0)
    running.worlds.note_renewal(renewal_of(attempt))
    running.drills.note_renewal(renewal_of(attempt), lab.clock.now())
    running.replicas.note_status(attempt_id, ReplicaStatus(address="10.0.0.7:8000"))
    running.replicas.order_sleep(attempt_id, should_sleep=True)
    running.checkpoint_times.note_checkpoint(attempt_id, lab.clock.now())


def end(lab: ControlPlaneLab, attempt: Attempt, reason: EndReason) -> Attempt:
    recorder = lab.core.records.recorder
    for event in events_for(attempt, reason):
        result_of(lab.store.write(lambda tx, event=event: recorder.advance(tx, attempt.attempt_id, event)))  # type: ignore[misc]
    after = lab.read(lambda tx: tx.attempts.get(attempt.attempt_id))
    assert after is not None
    return after


@pytest.mark.parametrize("reason", EndReason)
def test_attempt_that_has_ended_is_forgotten_whole(reason: EndReason) -> None:
    lab = ControlPlaneLab()
    attempt = placed(lab, reason)
    remember_everything(lab, attempt)
    assert attempt.attempt_id in lab.core.running.attempts
    after = end(lab, attempt, reason)
    assert (after.state, after.reason) == (AttemptState.ENDED, reason)
    lab.place()  # the planner sees the end, and needs the attempt's checkpoint no more
    lab.watch()
    assert attempt.attempt_id not in lab.core.running.attempts
    assert lab.core.running.attempts.get(attempt.attempt_id).alive_at == {}


def test_every_part_of_the_memory_is_tried_above() -> None:
    """A new field is one more thing to forget."""
    lab = ControlPlaneLab()
    attempt = lab.attempt(lab.running_job())
    remember_everything(lab, attempt)
    memory, nothing = lab.core.running.attempts.get(attempt.attempt_id), AttemptMemory()
    same = [
        field.name for field in fields(memory) if getattr(memory, field.name) == getattr(nothing, field.name)
    ]
    # These are set only while a caller waits, or while the loss of a task is looked for.
    assert same == ["speaking", "news", "check", "checked_round", "failure_news"]


def test_late_message_of_an_ended_attempt_is_forgotten_at_the_next_look() -> None:
    lab = ControlPlaneLab()
    attempt = lab.attempt(lab.running_job())
    end(lab, attempt, EndReason.SUCCEEDED)
    lab.watch()
    lab.core.running.leases.note_alive(attempt.attempt_id, "n1")
    assert attempt.attempt_id in lab.core.running.attempts
    lab.watch()
    assert attempt.attempt_id not in lab.core.running.attempts


def test_ended_attempt_is_remembered_until_its_drill_is_judged() -> None:
    lab = ControlPlaneLab()
    attempt = lab.attempt(lab.running_job())
    drill = Drill(drill_id="drl_1", kind=DrillKind.KILL_NODE, started_at=0.0, attempt_id=attempt.attempt_id)
    lab.core.running.drills.by_id["drl_1"] = OpenDrill(drill)
    end(lab, attempt, EndReason.LOST)
    lab.place()
    lab.watch()
    assert attempt.attempt_id in lab.core.running.attempts
    lab.core.running.drills.close("drl_1")
    lab.watch()
    assert attempt.attempt_id not in lab.core.running.attempts


def test_ended_attempt_is_remembered_while_its_renewal_is_answered() -> None:
    lab = ControlPlaneLab()
    attempt = lab.attempt(lab.running_job())
    end(lab, attempt, EndReason.SUCCEEDED)
    with lab.core.running.leases.speaking(attempt.attempt_id, "n1"):
        lab.watch()
        assert attempt.attempt_id in lab.core.running.attempts
    lab.watch()
    assert attempt.attempt_id not in lab.core.running.attempts
