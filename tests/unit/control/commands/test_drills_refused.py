"""Drills that are refused, with the command to type instead."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.control.commands import drills
from shoal.control.commands.drills import DrillRequest
from shoal.engines.fake import Act, always
from shoal.errors import SpecError, StateError
from shoal.model.attempt import TaskReplacement
from shoal.model.drill import DrillKind
from shoal.model.job import ReplicaRef
from shoal.wire import ProbeSpec, Progress
from tests.support.planes.bench import ControlPlaneLab
from tests.support.planes.drilled_job import SPEC, drilled_job, rank_failure, renew_lease, start_drill


@pytest.fixture
def lab() -> ControlPlaneLab:
    return ControlPlaneLab(script=always(Act(claim_s=1000.0, stop_s=1000.0)))


def test_hang_of_a_program_that_reports_no_step_is_refused_first(
    lab: ControlPlaneLab,
) -> None:
    job = drilled_job(lab)
    lab.clock.advance(drills.SETTLED_S + 1)
    with pytest.raises(StateError, match="so a rank that hangs could not be noticed; nothing was done"):
        start_drill(lab, job, DrillKind.HANG, is_forced=True)
    renew_lease(lab, job, "n2", progress=Progress(rendezvous_round=0, step=3, at=lab.clock.now()))
    assert start_drill(lab, job, DrillKind.HANG).kind is DrillKind.HANG


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"retry": {"max": 0}}, DrillKind.KILL_RANK, "has no `retry`: it would end as failed"),
        ({"checkpoint": None}, DrillKind.KILL_NODE, "it may begin from the start again"),
        ({"checkpoint": None}, DrillKind.CORRUPT_CHECKPOINT, "there is none to damage"),
        ({"fence": "60s"}, DrillKind.PARTITION, "after 60 s without an answer"),
    ],
)
def test_drill_that_would_end_the_job_is_refused(
    lab: ControlPlaneLab, fields: dict[str, Any], kind: DrillKind, message: str
) -> None:
    job = drilled_job(lab, **fields)
    with pytest.raises(StateError, match=message):
        start_drill(lab, job, kind, for_s=60.0)
    assert start_drill(lab, job, kind, for_s=60.0, is_forced=True).kind is kind


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        (DrillKind.KILL_RANK, "it would end, and another take its place", "`--force` does it"),
        (DrillKind.KILL_NODE, "it would end, and another take its place", "`--force` does it"),
        (
            DrillKind.CORRUPT_CHECKPOINT,
            "it keeps no checkpoints to damage",
            "`shoal drill kill-rank lab/1 --force`",
        ),
    ],
)
def test_drill_that_would_end_a_replica_is_refused_with_a_fitting_hint(
    lab: ControlPlaneLab, kind: DrillKind, message: str, hint: str
) -> None:
    place = ReplicaRef(service_id="svc_1", service="chat", release=1, slot=1, probe=ProbeSpec())
    job = msgspec.structs.replace(drilled_job(lab), replica=place)
    with pytest.raises(StateError, match=f"a replica of service chat: {message}") as wrong:
        drills._check_survives(job, lab.attempt(job), DrillRequest(kind=kind, job_id=job.job_id))
    assert str(wrong.value.hint).startswith(hint)


def test_lost_tasks_use_up_no_retry(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab, retry={"max": 1})
    lost = (TaskReplacement(rendezvous_round=1, at=1.0, lost=rank_failure(lab, job), node="n2"),)
    attempt = msgspec.structs.replace(lab.attempt(job), rendezvous_round=1, replacements=lost)
    request = DrillRequest(kind=DrillKind.KILL_RANK, job_id=job.job_id)
    drills._check_survives(job, attempt, request)
    with pytest.raises(StateError, match="has no retry left"):
        drills._check_survives(job, msgspec.structs.replace(attempt, rendezvous_round=2), request)


@pytest.mark.parametrize(
    ("retry", "rendezvous_round", "message", "hint"),
    [
        ({"max": 0}, 0, "has no `retry`", "`retry: {max: 3}`"),
        ({"max": 3}, 3, "has no retry left of the 3 it had", "`retry: {max: 6}`"),
        ({"max": 1000}, 1000, "has no retry left of the 1000 it had", "`retry: {max: 1000}`"),
        (
            {"max": 2, "on": ["exit"]},
            0,
            "has no `retry` on `signal`",
            "`retry: {max: 5, on: [exit, signal]}`",
        ),
    ],
)
def test_refusal_for_a_job_without_a_retry_left_names_how_many_it_needs(
    lab: ControlPlaneLab, retry: dict[str, Any], rendezvous_round: int, message: str, hint: str
) -> None:
    job = drilled_job(lab, retry=retry)
    attempt = msgspec.structs.replace(lab.attempt(job), rendezvous_round=rendezvous_round)
    with pytest.raises(StateError) as refused:
        drills._check_survives(job, attempt, DrillRequest(kind=DrillKind.KILL_RANK, job_id=job.job_id))
    assert message in refused.value.message
    assert (refused.value.hint or "").startswith(f"submit it with {hint};")


@pytest.mark.parametrize(
    ("fields", "hint"), [({"rank": 9}, "--rank 1, the last"), ({"node": "n9x"}, "--node n2")]
)
def test_drill_of_a_missing_rank_or_node_is_refused_with_a_command(
    lab: ControlPlaneLab, fields: dict[str, Any], hint: str
) -> None:
    with pytest.raises(SpecError) as refused:
        start_drill(lab, drilled_job(lab), **fields)
    assert refused.value.hint == hint


def test_one_fault_at_a_time(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job)
    with pytest.raises(StateError, match="is under way"):
        start_drill(lab, job, DrillKind.HANG)


def test_one_fault_at_a_time_is_decided_by_the_log(lab: ControlPlaneLab) -> None:
    job = drilled_job(lab)
    start_drill(lab, job, within_s=30.0)
    lab.core.running.drills.by_id.clear()
    for other, kind in ((job, DrillKind.KILL_RANK), (None, DrillKind.KILL_CONTROL)):
        with pytest.raises(StateError, match="is under way"):
            start_drill(lab, other, kind)
    lab.clock.advance(200.0)
    assert start_drill(lab, job).kind is DrillKind.KILL_RANK, (
        "a drill without a follower does not last for ever"
    )


@pytest.mark.parametrize(
    "fields",
    [{"rank": 2}, {"kind": DrillKind.KILL_NODE, "node": "n3"}, {"kind": DrillKind.KILL_RANK, "rank": 9}],
)
def test_drill_of_a_job_that_does_not_exist_is_refused(lab: ControlPlaneLab, fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        start_drill(lab, drilled_job(lab), **fields)


def test_a_job_that_does_not_run_cannot_be_drilled(lab: ControlPlaneLab) -> None:
    job = lab.running_job(**SPEC)
    with pytest.raises(StateError, match="is starting; a drill needs one that runs"):
        start_drill(lab, job)
