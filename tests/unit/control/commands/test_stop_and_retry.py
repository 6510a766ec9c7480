"""Stopping and retrying a job in every state it can be in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.control.commands.job_records import resolve_reference
from shoal.engines.fake import Act, Verb, always, by_run
from shoal.errors import Denied, LimitReached, NotFound, SpecError, StateError
from shoal.model.attempt import AttemptState, EndReason
from shoal.model.job import JobOutcome
from shoal.model.node import NodeState
from shoal.spec import parse_job
from shoal.store import KeyReused
from shoal.wire import EndKind
from tests.support.planes.bench import ANA, SPEC, USER, ControlPlaneLab, result_of

SLOW_TO_STOP = always(Act(run_s=None, stop_s=20.0))
FAILS = always(Act(run_s=1.0, kind=EndKind.EXITED, exit_code=3, message="rank 0 exited with code 3"))


def test_a_queued_job_is_cancelled_at_once_and_nothing_ever_runs() -> None:
    lab = ControlPlaneLab()
    job = lab.stop(lab.submit())
    assert (job.outcome, job.because) == (JobOutcome.CANCELLED, "stopped by ana")
    assert lab.attempt(job).message == "stopped by ana before it started"
    lab.run_loops()
    assert lab.running_tasks() == []
    assert lab.cluster.native_ids == {}


def test_a_job_that_waits_out_its_backoff_is_cancelled_at_once() -> None:
    lab = ControlPlaneLab(script=FAILS)
    job = lab.running_job(retry={"max": 3})
    lab.clock.advance(1)
    lab.watch()
    assert lab.status(job) == "queued"
    assert lab.stop(job).outcome is JobOutcome.CANCELLED
    assert [a.reason for a in lab.attempts(job)] == [EndReason.EXIT, EndReason.CANCELLED]


def test_placed_job_that_the_engine_never_got_is_cancelled_without_a_start() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit()
    lab.engine.lose_connection(Verb.SUBMIT)
    lab.place()
    assert lab.status(job) == "starting"
    lab.stop(job)
    assert lab.status(job) == "stopping"
    lab.watch()
    assert lab.status(job) == "cancelled"
    assert lab.cluster.native_ids == {}


def test_a_running_job_keeps_its_allocation_until_its_end_is_seen() -> None:
    lab = ControlPlaneLab(script=SLOW_TO_STOP)
    job = lab.running_job(resources={"gpus": 4, "nodes": 2}, grace="60s")
    assert lab.status(job) == "running"
    assert lab.stop(job).outcome is None
    assert lab.status(job) == "stopping"
    waiting = lab.submit(resources={"gpus": 1})
    lab.run_loops()
    assert lab.status(waiting) == "queued"
    lab.clock.advance(20)
    lab.run_loops()
    assert (lab.status(job), lab.status(waiting)) == ("cancelled", "running")


def test_stop_that_did_not_reach_the_engine_is_sent_again() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    lab.engine.lose_connection(Verb.CANCEL)
    lab.stop(job)
    assert lab.running_tasks() != []
    lab.restart()
    lab.watch()
    lab.watch()
    assert lab.status(job) == "cancelled"
    assert lab.running_tasks() == []


def test_stopping_twice_is_recorded_once() -> None:
    lab = ControlPlaneLab(script=SLOW_TO_STOP)
    job = lab.running_job(grace="60s")
    lab.stop(job)
    lab.stop(job)
    assert len(lab.events("job.stop_asked")) == 1


def test_stopping_a_job_that_has_ended_changes_nothing() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=1.0)))
    job = lab.running_job()
    lab.clock.advance(1)
    lab.watch()
    before = lab.stored_job(job)
    assert lab.stop(job) == before
    assert before.outcome is JobOutcome.SUCCEEDED
    assert lab.events("job.stop_asked") == []


def test_a_job_that_succeeds_while_it_is_asked_to_stop_has_succeeded() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=5.0, stop_s=20.0)))
    job = lab.running_job(grace="60s")
    lab.stop(job)
    lab.clock.advance(6)
    lab.watch()
    assert lab.status(job) == "succeeded"


def test_a_drained_job_that_is_also_stopped_is_not_started_again() -> None:
    lab = ControlPlaneLab(script=SLOW_TO_STOP)
    job = lab.running_job(grace="60s")
    node = lab.attempt(job).node_names[0]
    result_of(lab.plane.set_node_state(ANA, node, NodeState.DRAINING))
    lab.heal()
    assert lab.attempt(job).stop_reason is EndReason.PREEMPTED
    lab.stop(job)
    lab.clock.advance(20)
    lab.run_loops()
    assert lab.status(job) == "cancelled"
    assert len(lab.attempts(job)) == 1


def test_a_stop_with_the_same_key_is_one_stop_even_after_a_retry() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    lab.stop(job, key="k")
    lab.watch()
    lab.retry(job)
    lab.run_loops()
    assert lab.stop(job, key="k").is_open
    assert lab.status(job) == "running"
    with pytest.raises(KeyReused):
        lab.stop(lab.submit(), key="k")


def test_stopping_an_unknown_job_says_so() -> None:
    lab = ControlPlaneLab()
    with pytest.raises(NotFound, match="no job `job_none`"):
        result_of(lab.plane.stop_job(ANA, "job_none"))


def test_stopping_an_array_stops_what_is_open_and_leaves_what_has_ended() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    result = lab.submit_all(array=3, resources={"gpus": 2})
    lab.run_loops()
    assert [lab.status(job) for job in result.jobs] == ["running", "running", "queued"]
    lab.stop(result.jobs[0])
    lab.watch()
    assert result.array_id is not None
    stopped = result_of(lab.plane.stop_array(ANA, result.array_id))
    assert [job.number for job in stopped.jobs] == [2, 3]
    assert stopped.count == 2
    lab.watch()
    assert {lab.status(job) for job in result.jobs} == {"cancelled"}


def test_stopping_an_array_again_with_the_same_key_gives_the_first_answer() -> None:
    lab = ControlPlaneLab()
    result = lab.submit_all(array=3)
    lab.run_loops()
    assert result.array_id is not None
    first = result_of(lab.plane.stop_array(ANA, result.array_id, key="k"))
    lab.watch()
    again = result_of(lab.plane.stop_array(ANA, result.array_id, key="k"))
    assert [job.job_id for job in again.jobs] == [job.job_id for job in first.jobs]
    assert {job.outcome for job in again.jobs} == {JobOutcome.CANCELLED}
    assert again.count == 3
    assert [event.data["count"] for event in lab.events("array.stop_asked")] == [3]
    assert [event.actor for event in lab.events("attempt.stopping")] == ["user:ana"] * 3


@pytest.mark.parametrize("state", ["queued", "starting", "running", "stopping"])
def test_an_open_job_cannot_be_retried(state: str) -> None:
    lab = ControlPlaneLab(script=always(Act(prepare_s=1.0, run_s=None, stop_s=20.0)))
    job = lab.submit(grace="60s")
    if state != "queued":
        lab.run_loops()
    if state in {"running", "stopping"}:
        lab.clock.advance(1)
        lab.watch()
    if state == "stopping":
        lab.stop(job)
    assert lab.status(job) == state
    with pytest.raises(StateError, match="job lab/1 has not ended; only an ended job can be tried again"):
        lab.retry(job)
    assert len(lab.attempts(job)) == 1


def test_a_cancelled_job_can_be_retried_with_a_clean_slate() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    lab.stop(job)
    lab.watch()
    again = lab.retry(job)
    assert (again.outcome, again.because, again.stop_asked_by, again.epoch) == (None, "", None, 2)
    lab.run_loops()
    assert lab.status(job) == "running"
    assert [a.epoch for a in lab.attempts(job)] == [1, 2]


def test_a_failed_job_gets_its_own_retries_back() -> None:
    lab = ControlPlaneLab(script=FAILS)
    job = lab.running_job()
    lab.clock.advance(1)
    lab.watch()
    ended = lab.stored_job(job)
    assert (ended.outcome, ended.exit_code, ended.failures) == (JobOutcome.FAILED, 3, 1)
    again = lab.retry(job)
    assert (again.failures, again.exit_code, again.ended_at) == (0, None, None)


def test_retrying_with_the_same_key_makes_one_attempt() -> None:
    lab = ControlPlaneLab()
    job = lab.submit()
    lab.stop(job)
    lab.retry(job, key="k")
    assert lab.retry(job, key="k").epoch == 2
    assert len(lab.attempts(job)) == 2


def test_a_retry_counts_against_the_quota_like_a_submit() -> None:
    lab = ControlPlaneLab(max_open_jobs=1)
    first = lab.submit()
    lab.stop(first)
    lab.submit()
    with pytest.raises(LimitReached, match="has 1 open jobs; 1 more would pass its limit of 1"):
        lab.retry(first)
    assert lab.status(first) == "cancelled"


def test_a_retry_asks_for_what_its_project_and_this_cluster_allow_today() -> None:
    lab = ControlPlaneLab(queues=("default", "night"))
    job = lab.submit(queue="night", priority=50)
    lab.stop(job)
    result_of(lab.plane.update_project(ANA, "lab", {"max_priority": 49}))
    with pytest.raises(Denied, match="priority 50 is above 49"):
        lab.retry(job)
    result_of(lab.plane.update_project(ANA, "lab", {"max_priority": 50}))
    lab.settings = replace(lab.settings, queues=("default",))
    lab.restart()
    with pytest.raises(SpecError, match="no queue `night`"):
        lab.retry(job)
    assert lab.status(job) == "cancelled"


def test_a_job_that_had_secrets_cannot_run_again_without_them() -> None:
    lab = ControlPlaneLab()
    spec = parse_job({**SPEC, "secrets": ["TOKEN"]})
    result = result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, secrets={"TOKEN": "x"}))
    job = result.jobs[0]
    lab.stop(job)
    assert lab.read(lambda tx: tx.secrets.get(job.job_id)) is None
    with pytest.raises(StateError, match="the secrets of job lab/1 were thrown away when it ended"):
        lab.retry(job)


def test_secrets_outlive_the_attempts_of_an_open_job() -> None:
    lab = ControlPlaneLab(script=by_run({"train": Act(run_s=1.0, kind=EndKind.EXITED, exit_code=1)}))
    spec = parse_job({**SPEC, "secrets": ["TOKEN"], "retry": {"max": 1, "backoff": 0}})
    job = result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, secrets={"TOKEN": "x"})).jobs[0]
    lab.run_loops()
    lab.clock.advance(1)
    lab.run_loops()
    assert lab.attempt(job).epoch == 2
    assert lab.attempt(job).state is AttemptState.RUNNING
    assert lab.read(lambda tx: tx.secrets.get(job.job_id)) is not None


def test_a_retried_job_is_found_under_its_old_number() -> None:
    lab = ControlPlaneLab()
    job = lab.submit()
    lab.stop(job)
    lab.retry(job)
    (reference,) = lab.read(lambda tx: resolve_reference(tx, "lab/1", ("lab",)))
    assert reference.job.job_id == job.job_id
