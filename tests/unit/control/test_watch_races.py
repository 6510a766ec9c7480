"""What happens between two reads of a loop, one small scenario for each order of events."""

from __future__ import annotations

import msgspec
import pytest

from shoal.control.actor import SHOAL, Actor
from shoal.engines.base import Observation, Submission
from shoal.engines.fake import Act, Verb, always
from shoal.errors import Bug, StoreUnavailable
from shoal.model.attempt import Attempt, EndReason
from shoal.model.evidence import UNSTARTED, Evidence
from shoal.model.job import Job
from shoal.model.moves import AttemptEvent
from shoal.store import Tx
from tests.support.planes.bench import ControlPlaneLab


def only_one_runs(lab: ControlPlaneLab, job: Job) -> bool:
    """Nothing runs but the newest attempt, and only while it is recorded as holding its nodes."""
    newest = lab.attempt(job)
    return {attempt_id for attempt_id, _ in lab.running_tasks()} <= {newest.attempt_id}


def test_an_attempt_started_after_the_records_were_read_is_not_taken_for_a_stray() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit()
    lab.engine.meanwhile("before look", lab.place)
    lab.watch()
    assert lab.running_tasks() == [(lab.attempt(job).attempt_id, "n1")]


def test_job_started_in_place_of_one_that_ended_is_not_recorded_beside_it() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(run_s=5.0)))
    first = lab.running_job(resources={"cpus": 8})
    second = lab.submit(resources={"cpus": 8})

    def the_first_ends() -> None:
        lab.clock.advance(6)
        lab.watch()

    lab.store.meanwhile("before read", the_first_ends)
    lab.place()
    ended_at, placed_at = lab.attempt(first).ended_at, lab.attempt(second).placed_at
    assert ended_at is not None
    assert placed_at is not None
    assert placed_at >= ended_at


def test_stop_during_a_submission_does_not_end_the_attempt_unseen() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit()

    def stopped_and_looked_at() -> None:
        lab.stop(job)
        lab.watch()
        assert lab.status(job) == "stopping"

    lab.engine.meanwhile("before submit", stopped_and_looked_at)
    lab.place()
    assert only_one_runs(lab, job)
    lab.watch()
    lab.watch()
    assert (lab.status(job), lab.running_tasks()) == ("cancelled", [])


def test_a_submission_that_ends_between_the_two_reads_is_seen_by_the_second() -> None:
    """The records are read while the submission is under way, and the engine is asked once it is done."""
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit()
    lab.store.meanwhile("after write", lambda: lab.stop(job))
    lab.place()
    lab.watch()
    assert (lab.status(job), lab.running_tasks(), lab.cluster.native_ids) == ("cancelled", [], {})


def test_attempt_stopped_before_submission_is_never_submitted() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    jobs = [lab.submit(), lab.submit()]

    def second_is_stopped_and_seen_to_be_nowhere() -> None:
        lab.stop(jobs[1])
        lab.watch()
        assert lab.status(jobs[1]) == "cancelled"

    lab.engine.meanwhile("before submit", second_is_stopped_and_seen_to_be_nowhere)
    lab.place()
    assert {attempt_id for attempt_id, _ in lab.running_tasks()} == {lab.attempt(jobs[0]).attempt_id}


def test_an_attempt_that_ended_and_was_forgotten_meanwhile_has_not_been_lost() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=1.0)))
    job = lab.running_job()
    lab.clock.advance(1)

    def another_look_ends_and_forgets_it() -> None:
        lab.watch()
        lab.watch()
        assert lab.cluster.tasks() == []

    lab.engine.meanwhile("before look", another_look_ends_and_forgets_it)
    lab.watch()
    assert (lab.status(job), len(lab.attempts(job))) == ("succeeded", 1)


def test_a_retry_started_between_the_two_reads_is_left_alone() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    lab.stop(job)
    lab.watch()

    def retried_and_started() -> None:
        lab.retry(job)
        lab.place()

    lab.engine.meanwhile("before look", retried_and_started)
    lab.watch()
    assert lab.running_tasks() == [(lab.attempt(job).attempt_id, "n1")]


def test_a_stop_after_the_engine_was_asked_is_acted_on_by_the_stop_itself() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    lab.engine.meanwhile("after look", lambda: lab.stop(job))
    lab.watch()
    assert lab.running_tasks() == []
    lab.watch()
    assert lab.status(job) == "cancelled"


def test_two_launches_of_one_attempt_at_once_are_one_submission() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit()
    taken: list[Submission] = []
    inner = lab.cluster.accept

    def take(submission: Submission, delay_s: float = 0.0, *, is_stillborn: bool = False) -> str:
        taken.append(submission)
        return inner(submission, delay_s, is_stillborn=is_stillborn)

    lab.cluster.accept = take  # type: ignore[method-assign]
    lab.engine.meanwhile("before submit", lab.watch)
    lab.place()
    lab.watch()
    assert [s.attempt_id for s in taken] == [lab.attempt(job).attempt_id]


def test_a_submission_whose_answer_was_lost_is_found_and_not_started_again() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit()
    lab.engine.lose_connection(Verb.SUBMIT, is_after=True)
    lab.place()
    assert (lab.status(job), len(lab.running_tasks())) == ("starting", 1)
    lab.restart()
    lab.watch()
    assert (lab.status(job), len(lab.attempts(job)), len(lab.running_tasks())) == ("running", 1, 1)


@pytest.mark.parametrize("is_answer_lost", [False, True])
def test_attempt_unsubmitted_for_a_fence_is_not_submitted_and_replaced_at_once(
    is_answer_lost: bool,
) -> None:
    """The engine accepts submissions again in the very look in which the fence passes."""
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit(fence="60s")
    lab.engine.lose_connection(Verb.SUBMIT)
    lab.place()
    lab.watch()
    lab.clock.advance(121)
    if is_answer_lost:
        lab.engine.lose_connection(Verb.SUBMIT, is_after=True)
    else:
        lab.engine.lose_connection(None)
    lab.watch()
    assert lab.attempts(job)[0].reason is EndReason.LOST
    assert lab.running_tasks() == []
    lab.clock.advance(1)
    lab.place()
    assert only_one_runs(lab, job)
    assert len(lab.running_tasks()) == 1


def test_an_engine_that_cannot_be_asked_ends_nothing() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    lab.engine.lose_connection(Verb.LIST_OWNED)
    lab.watch()
    assert lab.status(job) == "running"


def test_a_stray_of_an_ended_attempt_is_stopped_and_then_forgotten() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    lab.cluster.cut("n1")
    lab.watch()
    lab.clock.advance(1861)
    lab.cluster.tasks()[0].act = Act(run_s=None)
    lab.watch()
    assert lab.attempts(job)[0].reason is EndReason.FENCED
    lab.cluster.heal("n1")
    lab.watch()
    lab.watch()
    assert lab.cluster.tasks(lab.attempts(job)[0].attempt_id) == []


def test_attempt_without_a_record_is_left_for_a_person_to_judge() -> None:
    """As after a restore of the database: what runs was accepted by another history."""
    lab = ControlPlaneLab()
    lab.running_job()
    stranger = ControlPlaneLab()
    stranger.cluster = lab.cluster
    stranger.restart()
    stranger.watch()
    assert len(lab.running_tasks()) == 1


def test_one_attempt_that_cannot_be_judged_does_not_hide_the_others() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=1.0)))
    bad, good = lab.running_job(), lab.running_job()
    advance = lab.core.records.recorder.advance
    bad_id = lab.attempt(bad).attempt_id

    def broken(tx: Tx, attempt_id: str, event: AttemptEvent, actor: Actor = SHOAL) -> Attempt | None:
        if attempt_id == bad_id:
            raise Bug("the table has no such move")
        return advance(tx, attempt_id, event, actor)

    lab.core.records.recorder.advance = broken  # type: ignore[method-assign, assignment]
    lab.clock.advance(1)
    with pytest.raises(Bug):
        lab.watch()
    assert (lab.status(bad), lab.status(good)) == ("running", "succeeded")


def test_missing_store_stops_the_look_at_the_first_write() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=1.0)))
    lab.running_job()
    lab.clock.advance(1)

    def gone() -> None:
        raise StoreUnavailable("no space left on device")

    lab.store.meanwhile("before write", gone)
    with pytest.raises(StoreUnavailable):
        lab.watch()
    lab.watch()
    assert lab.running_tasks() == []


def test_stop_of_an_unreachable_node_is_sent_at_the_next_look() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    lab.engine.meanwhile("before cancel", lambda: lab.cluster.cut("n1"))
    lab.stop(job)
    assert lab.running_tasks() != []
    lab.cluster.heal("n1")
    lab.watch()
    lab.watch()
    assert lab.status(job) == "cancelled"


@pytest.mark.parametrize("evidence", UNSTARTED)
def test_task_in_the_clusters_own_queue_is_not_submitted_again(
    monkeypatch: pytest.MonkeyPatch, evidence: Evidence
) -> None:
    lab, submitted = ControlPlaneLab(), list[str]()
    lab.heal()
    lab.submit()
    lab.place()
    look, submit = lab.engine.list_owned, lab.engine.submit

    async def waiting() -> list[Observation]:
        seen = await look()
        return [msgspec.structs.replace(observation, evidence=evidence) for observation in seen]

    async def noted(submission: Submission) -> str:
        submitted.append(submission.attempt_id)
        return await submit(submission)

    monkeypatch.setattr(lab.engine, "list_owned", waiting)
    monkeypatch.setattr(lab.engine, "submit", noted)
    lab.watch()
    assert bool(submitted) is (evidence is Evidence.PENDING)
