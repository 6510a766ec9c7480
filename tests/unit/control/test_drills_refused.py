"""Drills that are refused, with what to type instead."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.control import drills
from shoal.control.drills import AskedDrill
from shoal.engines.fake import Act, always
from shoal.errors import SpecError, StateError
from shoal.model.attempt import Replacement
from shoal.model.drill import DrillKind
from shoal.model.job import ReplicaPlace
from shoal.wire import Probe, Progress
from tests.support.drilled_job import SPEC, a_job, ask, failed, say
from tests.support.lab import Lab


@pytest.fixture
def lab() -> Lab:
    return Lab(script=always(Act(claim_s=1000.0, stop_s=1000.0)))


def test_hang_of_a_program_that_tells_of_no_step_is_refused_before_anything_is_done(lab: Lab) -> None:
    job = a_job(lab)
    lab.clock.advance(drills.SETTLED_S + 1)
    with pytest.raises(StateError, match="so nobody could tell that a rank hangs; nothing was done"):
        ask(lab, job, DrillKind.HANG, is_forced=True)
    say(lab, job, "n2", progress=Progress(generation=0, step=3, at=lab.clock.now()))
    assert ask(lab, job, DrillKind.HANG).kind is DrillKind.HANG


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"retry": {"max": 0}}, DrillKind.KILL_RANK, "has no `retry`: it would end as failed"),
        ({"checkpoint": None}, DrillKind.KILL_NODE, "it may begin from the start again"),
        ({"checkpoint": None}, DrillKind.CORRUPT_CHECKPOINT, "there is none to damage"),
        ({"fence": "60s"}, DrillKind.PARTITION, "after 60 s without an answer"),
    ],
)
def test_what_would_be_the_end_of_a_job_is_refused(
    lab: Lab, fields: dict[str, Any], kind: DrillKind, words: str
) -> None:
    job = a_job(lab, **fields)
    with pytest.raises(StateError, match=words):
        ask(lab, job, kind, for_s=60.0)
    assert ask(lab, job, kind, for_s=60.0, is_forced=True).kind is kind


@pytest.mark.parametrize(
    ("kind", "words", "hint"),
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
def test_what_would_be_the_end_of_a_replica_is_refused_with_what_fits_one(
    lab: Lab, kind: DrillKind, words: str, hint: str
) -> None:
    place = ReplicaPlace(service_id="svc_1", service="chat", release=1, slot=1, probe=Probe())
    job = msgspec.structs.replace(a_job(lab), replica=place)
    with pytest.raises(StateError, match=f"a replica of service chat: {words}") as wrong:
        drills._check_survives(job, lab.attempt(job), AskedDrill(kind=kind, job_id=job.job_id))
    assert str(wrong.value.hint).startswith(hint)


def test_lost_shares_use_up_no_retry(lab: Lab) -> None:
    job = a_job(lab, retry={"max": 1})
    lost = (Replacement(generation=1, at=1.0, lost=failed(lab, job), node="n2"),)
    attempt = msgspec.structs.replace(lab.attempt(job), generation=1, replacements=lost)
    asked = AskedDrill(kind=DrillKind.KILL_RANK, job_id=job.job_id)
    drills._check_survives(job, attempt, asked)
    with pytest.raises(StateError, match="has no retry left"):
        drills._check_survives(job, msgspec.structs.replace(attempt, generation=2), asked)


@pytest.mark.parametrize(
    ("retry", "generation", "message", "hint"),
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
def test_job_without_a_retry_left_is_told_how_many_it_needs(
    lab: Lab, retry: dict[str, Any], generation: int, message: str, hint: str
) -> None:
    job = a_job(lab, retry=retry)
    attempt = msgspec.structs.replace(lab.attempt(job), generation=generation)
    with pytest.raises(StateError) as refused:
        drills._check_survives(job, attempt, AskedDrill(kind=DrillKind.KILL_RANK, job_id=job.job_id))
    assert message in refused.value.message
    assert (refused.value.hint or "").startswith(f"submit it with {hint};")


@pytest.mark.parametrize(
    ("asked", "hint"), [({"rank": 9}, "--rank 1, the last"), ({"node": "n9x"}, "--node n2")]
)
def test_aim_at_what_the_job_has_not_is_refused_with_what_to_type(
    lab: Lab, asked: dict[str, Any], hint: str
) -> None:
    with pytest.raises(SpecError) as refused:
        ask(lab, a_job(lab), **asked)
    assert refused.value.hint == hint


def test_one_fault_at_a_time(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job)
    with pytest.raises(StateError, match="is under way"):
        ask(lab, job, DrillKind.HANG)


def test_one_fault_at_a_time_is_decided_by_the_log(lab: Lab) -> None:
    job = a_job(lab)
    ask(lab, job, within_s=30.0)
    lab.core.drills.open.clear()
    for other, kind in ((job, DrillKind.KILL_RANK), (None, DrillKind.KILL_CONTROL)):
        with pytest.raises(StateError, match="is under way"):
            ask(lab, other, kind)
    lab.clock.advance(200.0)
    assert ask(lab, job).kind is DrillKind.KILL_RANK, "one that nobody follows does not last for ever"


@pytest.mark.parametrize(
    "fields",
    [{"rank": 2}, {"kind": DrillKind.KILL_NODE, "node": "n3"}, {"kind": DrillKind.KILL_RANK, "rank": 9}],
)
def test_a_drill_of_what_is_not_there_is_refused(lab: Lab, fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        ask(lab, a_job(lab), **fields)


def test_a_job_that_does_not_run_cannot_be_drilled(lab: Lab) -> None:
    job = lab.running(**SPEC)
    with pytest.raises(StateError, match="is starting; a drill needs one that runs"):
        ask(lab, job)
