"""What supervisors report, and what of it is accepted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.engines.fake import Act, always
from shoal.errors import StateError
from shoal.model.attempt import AttemptState, EndReason
from shoal.model.job import Job
from shoal.wire import EndKind, Renewal, RenewalReply, TaskOutcome, TaskPhase
from tests.support.planes.bench import ControlPlaneLab, result_of

SLOW = always(Act(claim_s=1000.0, stop_s=1000.0))
"""Nothing happens by itself: the control plane learns everything from renewals."""


@pytest.fixture
def lab() -> ControlPlaneLab:
    return ControlPlaneLab(script=SLOW)


def renewal(lab: ControlPlaneLab, job: Job, node: str = "n1", **fields: Any) -> Renewal:
    attempt = lab.attempt(job)
    values: dict[str, Any] = {"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "node": node}
    return Renewal(**{"phase": TaskPhase.RUNNING, **values, **fields})


def outcome(lab: ControlPlaneLab, job: Job, node: str = "n1", **fields: Any) -> TaskOutcome:
    attempt = lab.attempt(job)
    values: dict[str, Any] = {"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "node": node}
    return TaskOutcome(**{"kind": EndKind.SUCCEEDED, "ended_at": 5.0, **values, **fields})


def send(lab: ControlPlaneLab, message: Renewal) -> RenewalReply:
    return result_of(lab.plane.renew(message))


def test_gang_runs_once_every_node_reported_its_start(lab: ControlPlaneLab) -> None:
    job = lab.running_job(resources={"nodes": 2, "cpus": 1})
    send(lab, renewal(lab, job, "n1", started_at=1.0))
    assert lab.status(job) == "starting"
    send(lab, renewal(lab, job, "n2", started_at=1.0))
    assert lab.status(job) == "running"


def test_gang_runs_although_one_node_ended_before_its_start_was_seen(lab: ControlPlaneLab) -> None:
    job = lab.running_job(resources={"nodes": 2, "cpus": 1})
    send(lab, renewal(lab, job, "n1", phase=TaskPhase.ENDED, outcome=outcome(lab, job, "n1")))
    send(lab, renewal(lab, job, "n2", started_at=1.0))
    assert lab.status(job) == "running"
    other = lab.running_job(resources={"nodes": 2, "cpus": 1})
    send(lab, renewal(lab, other, "n2", started_at=1.0))
    send(lab, renewal(lab, other, "n1", phase=TaskPhase.ENDED, outcome=outcome(lab, other, "n1")))
    assert lab.status(other) == "running"


def test_a_renewal_is_a_sign_of_life_and_costs_no_write(lab: ControlPlaneLab) -> None:
    job = lab.running_job()
    events = len(lab.events())
    lab.clock.advance(15)
    assert send(lab, renewal(lab, job, phase=TaskPhase.PREPARING)) == RenewalReply()
    assert lab.core.running.leases.silence_s(lab.attempt(job).attempt_id, "n1") == 0
    assert len(lab.events()) == events


def test_outcome_is_recorded_when_it_is_answered_and_may_be_repeated(lab: ControlPlaneLab) -> None:
    job = lab.running_job()
    message = renewal(
        lab,
        job,
        phase=TaskPhase.ENDED,
        outcome=outcome(lab, job, kind=EndKind.EXITED, exit_code=7, message="rank 0: 7"),
    )
    send(lab, message)
    assert (lab.status(job), lab.stored_job(job).exit_code, lab.stored_job(job).because) == (
        "failed",
        7,
        "n1: rank 0: 7",
    )
    events = len(lab.events())
    assert send(lab, message) == RenewalReply()
    assert len(lab.events()) == events


def test_a_second_different_outcome_of_a_node_changes_nothing(lab: ControlPlaneLab) -> None:
    job = lab.running_job()
    send(lab, renewal(lab, job, phase=TaskPhase.ENDED, outcome=outcome(lab, job)))
    send(
        lab,
        renewal(lab, job, phase=TaskPhase.ENDED, outcome=outcome(lab, job, kind=EndKind.EXITED, exit_code=1)),
    )
    assert lab.status(job) == "succeeded"


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_renewal_with_another_epoch_is_refused_and_no_sign_of_life(
    lab: ControlPlaneLab, epoch: int
) -> None:
    job = lab.running_job()
    lab.core.running.leases.note_alive(lab.attempt(job).attempt_id, "n1")
    lab.clock.advance(15)
    with pytest.raises(StateError, match=f"epoch {epoch} is stale; the attempt has epoch 1"):
        send(lab, renewal(lab, job, epoch=epoch, started_at=1.0))
    assert lab.core.running.leases.silence_s(lab.attempt(job).attempt_id, "n1") == 15
    assert lab.status(job) == "starting"


def test_a_node_the_attempt_was_never_placed_on_is_refused(lab: ControlPlaneLab) -> None:
    job = lab.running_job()
    with pytest.raises(StateError, match="was never placed on n2"):
        send(lab, renewal(lab, job, "n2", started_at=1.0))


def test_renewal_of_an_unknown_attempt_is_refused(lab: ControlPlaneLab) -> None:
    job = lab.running_job()
    with pytest.raises(StateError, match="attempt att_none was never placed on n1"):
        send(lab, renewal(lab, job, attempt_id="att_none"))


def test_an_attempt_still_in_the_queue_cannot_be_renewed(lab: ControlPlaneLab) -> None:
    job = lab.submit()
    with pytest.raises(StateError, match="was never placed on n1"):
        send(lab, renewal(lab, job))


@pytest.mark.parametrize("wrong", [{"attempt_id": "att_other"}, {"node": "n2"}, {"epoch": 9}])
def test_an_outcome_about_something_else_is_refused(lab: ControlPlaneLab, wrong: dict[str, Any]) -> None:
    job = lab.running_job(resources={"nodes": 2, "cpus": 1})
    about = msgspec.structs.replace(outcome(lab, job), **wrong)
    with pytest.raises(StateError, match="the outcome is not about the attempt and node that report it"):
        send(lab, renewal(lab, job, phase=TaskPhase.ENDED, outcome=about))
    assert lab.attempt(job).outcomes == ()


def test_a_supervisor_whose_attempt_has_ended_is_told_to_stop_at_once(lab: ControlPlaneLab) -> None:
    job = lab.running_job()
    message = renewal(lab, job)
    send(lab, renewal(lab, job, phase=TaskPhase.ENDED, outcome=outcome(lab, job)))
    with pytest.raises(StateError, match="has ended: succeeded"):
        send(lab, message)


def test_a_late_outcome_of_an_old_attempt_does_not_touch_the_new_one(lab: ControlPlaneLab) -> None:
    job = lab.running_job()
    old = renewal(lab, job, phase=TaskPhase.ENDED, outcome=outcome(lab, job, kind=EndKind.LOST))
    send(lab, old)
    assert lab.attempt(job).epoch == 2
    lab.clock.advance(1)
    lab.run_loops()
    send(lab, old)
    assert lab.status(job) == "starting"
    assert lab.attempt(job).outcomes == ()


def test_stop_reply_carries_the_jobs_grace_and_the_reason(lab: ControlPlaneLab) -> None:
    job = lab.running_job(grace="5m")
    lab.stop(job)
    assert lab.status(job) == "stopping"
    answer = send(lab, renewal(lab, job))
    assert answer == RenewalReply(should_stop=True, grace_s=300.0, because="stopped by ana")


def test_the_rest_of_a_gang_is_told_to_stop_after_the_first_failure(lab: ControlPlaneLab) -> None:
    job = lab.running_job(resources={"nodes": 2, "cpus": 1}, grace="7s")
    failed = outcome(lab, job, "n1", kind=EndKind.SIGNALED, signal=11)
    send(lab, renewal(lab, job, "n1", phase=TaskPhase.ENDED, outcome=failed))
    answer = send(lab, renewal(lab, job, "n2"))
    assert (answer.should_stop, answer.grace_s) == (True, 7.0)
    stopped = outcome(lab, job, "n2", kind=EndKind.STOPPED)
    send(lab, renewal(lab, job, "n2", phase=TaskPhase.ENDED, outcome=stopped))
    attempt = lab.attempt(job)
    assert (attempt.state, attempt.reason) == (AttemptState.ENDED, EndReason.SIGNAL)
    assert lab.stored_job(job).exit_code == 139


def test_killed_rank_is_blamed_although_its_peers_reported_first(lab: ControlPlaneLab) -> None:
    retry = {"max": 3, "on": ["exit", "signal"]}
    job = lab.running_job(resources={"nodes": 2, "cpus": 1}, retry=retry)
    for node in ("n1", "n2"):
        send(lab, renewal(lab, job, node, started_at=1.0))
    peer = outcome(lab, job, "n2", kind=EndKind.EXITED, exit_code=1, rank=1, message="connection reset")
    killed = outcome(lab, job, "n1", kind=EndKind.SIGNALED, signal=9, rank=0, message="was killed")
    for message in (peer, killed, peer):
        answer = send(lab, renewal(lab, job, message.node, failure=message))
        assert answer.rendezvous_round == 1, "one group follows, however many nodes tell of the failure"
    attempt = lab.attempt(job)
    assert (attempt.rendezvous_round, attempt.failure) == (1, killed)
    kinds = [event.kind for event in lab.events()]
    assert kinds.count("attempt.regrouped") == kinds.count("attempt.explained") == 1


def test_node_of_the_hung_rank_is_blamed_although_a_waiting_one_reported_first(
    lab: ControlPlaneLab,
) -> None:
    job = lab.running_job(resources={"nodes": 2, "cpus": 1}, retry={"max": 3, "on": ["exit", "signal"]})
    for node in ("n1", "n2"):
        send(lab, renewal(lab, job, node, started_at=1.0))
    waited = outcome(lab, job, "n2", kind=EndKind.SIGNALED, is_hang=True, message="all wait")
    killed = outcome(lab, job, "n1", kind=EndKind.SIGNALED, signal=9, rank=0, is_hang=True, message="hung")
    for message in (waited, killed, waited):
        assert send(lab, renewal(lab, job, message.node, failure=message)).rendezvous_round == 1
    assert lab.attempt(job).failure == killed


@pytest.mark.parametrize("is_hang", [True, False])
def test_every_node_is_told_when_the_group_is_ended_for_a_hang(
    lab: ControlPlaneLab, *, is_hang: bool
) -> None:
    retry = {"max": 3, "on": ["exit", "signal"]}
    job = lab.running_job(resources={"nodes": 2, "cpus": 1}, retry=retry)
    for node in ("n1", "n2"):
        assert not send(lab, renewal(lab, job, node, started_at=1.0)).is_after_hang
    hung = outcome(lab, job, "n1", kind=EndKind.SIGNALED, signal=9, rank=0, is_hang=is_hang)
    send(lab, renewal(lab, job, "n1", failure=hung))
    answer = send(lab, renewal(lab, job, "n2"))
    assert (answer.rendezvous_round, answer.is_after_hang) == (1, is_hang)
