"""Handing attempts to the engine: what it gets, what follows from its refusals, and which other jobs are
affected.
"""

from __future__ import annotations

import pytest

from shoal.control.loops.launch import begin_submission_of
from shoal.control.loops.place import place
from shoal.engines.base import Submission
from shoal.engines.fake import Act, Verb, always
from shoal.errors import EngineRefused, StoreUnavailable
from shoal.identity import job_token, proof_key
from shoal.model.attempt import EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.spec import parse_job
from tests.support.planes.bench import ANA, KEY, SPEC, USER, ControlPlaneLab, node_facts, result_of
from tests.support.store_costs import counted_changes


def taken_by(lab: ControlPlaneLab) -> list[Submission]:
    """Submissions that the engine gets from now on."""
    taken: list[Submission] = []
    inner = lab.cluster.accept

    def take(submission: Submission, delay_s: float = 0.0, *, is_stillborn: bool = False) -> str:
        taken.append(submission)
        return inner(submission, delay_s, is_stillborn=is_stillborn)

    lab.cluster.accept = take  # type: ignore[method-assign]
    return taken


def refuse(message: str) -> None:
    raise EngineRefused(message)


def with_secret(lab: ControlPlaneLab) -> Job:
    spec = parse_job({**SPEC, "secrets": ["TOKEN"]})
    return result_of(lab.plane.submit(ANA, spec, project="lab", owner=USER, secrets={"TOKEN": "x"})).jobs[0]


def test_every_supervisor_gets_a_key_good_for_its_own_node_alone() -> None:
    lab = ControlPlaneLab()
    taken = taken_by(lab)
    attempt = lab.attempt(lab.running_job(resources={"nodes": 2, "cpus": 1}))
    (submission,) = taken
    assert {node: credentials.proof_key for node, credentials in submission.credentials.items()} == {
        node: proof_key(KEY, attempt.attempt_id, node) for node in ("n1", "n2")
    }
    assert {credentials.job_token for credentials in submission.credentials.values()} == {
        job_token(KEY, attempt.attempt_id)
    }


def test_secrets_travel_beside_the_task_spec_and_never_in_it() -> None:
    lab = ControlPlaneLab()
    taken = taken_by(lab)
    with_secret(lab)
    lab.run_loops()
    (submission,) = taken
    assert submission.credentials["n1"].secrets == {"TOKEN": "x"}
    assert "TOKEN" not in repr(submission.task_specs)


def test_attempt_is_submitted_again_unchanged_after_a_restart() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    taken = taken_by(lab)
    lab.submit(resources={"nodes": 2, "gpus": 2})
    lab.place()
    tasks = dict(lab.cluster._tasks)
    lab.cluster._tasks.clear()
    lab.restart()
    lab.watch()
    lab.cluster._tasks.update(tasks)
    first, second = taken
    assert first == second


def test_refused_job_fails_with_the_engines_message_and_is_not_retried() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit(retry={"max": 5, "on": ["exit", "signal", "oom", "setup", "time_limit"]})
    lab.engine.meanwhile("before submit", lambda: refuse("no such partition `gpu`"))
    lab.place()
    attempt = lab.attempt(job)
    assert attempt.reason is EndReason.REFUSED
    assert (lab.status(job), lab.stored_job(job).because) == (
        "failed",
        "fake refused it: no such partition `gpu`",
    )
    assert (len(lab.attempts(job)), lab.stored_job(job).losses) == (1, 0)


def killed_before_it_is_handed_over(lab: ControlPlaneLab, **spec: object) -> Job:
    """The plan is on disk, and the engine does not know of it."""
    lab.heal()
    job = lab.submit(**spec)
    lab.engine.lose_connection(Verb.SUBMIT)
    lab.place()
    lab.restart()
    return job


@pytest.mark.parametrize("is_noticed", [False, True])
def test_job_whose_node_left_before_submission_runs_elsewhere(
    is_noticed: bool,
) -> None:
    lab = ControlPlaneLab()
    job = killed_before_it_is_handed_over(lab)
    del lab.cluster.facts["n1"]
    if is_noticed:
        lab.heal()
    lab.watch()
    first = lab.attempts(job)[0]
    assert (first.reason, first.message) == (EndReason.LOST, "n1: no such node as `n1`; there are n2")
    lab.clock.advance(1)
    lab.run_loops()
    assert (lab.status(job), lab.stored_job(job).failures, lab.stored_job(job).losses) == ("running", 0, 1)
    assert lab.running_tasks() == [(lab.attempt(job).attempt_id, "n2")]


def test_job_whose_gpus_are_gone_runs_elsewhere() -> None:
    lab = ControlPlaneLab()
    job = killed_before_it_is_handed_over(lab, resources={"gpus": 4})
    lab.cluster.facts["n1"] = node_facts("n1", gpus=3)
    lab.run_loops()
    assert "`n1` has no GPU 3; it has 3" in lab.attempts(job)[0].message
    lab.clock.advance(1)
    lab.run_loops()
    assert (lab.status(job), lab.stored_job(job).losses) == ("running", 1)
    assert lab.running_tasks() == [(lab.attempt(job).attempt_id, "n2")]


def test_gang_that_lost_a_node_before_submission_waits_for_another() -> None:
    lab = ControlPlaneLab()
    job = killed_before_it_is_handed_over(lab, resources={"nodes": 2, "cpus": 1})
    gone = lab.cluster.facts.pop("n2")
    lab.run_loops()
    lab.watch()
    assert (lab.attempts(job)[0].reason, lab.running_tasks(), lab.stored_job(job).outcome) == (
        EndReason.LOST,
        [],
        None,
    )
    lab.cluster.facts["n2"] = gone
    lab.clock.advance(1)
    lab.run_loops()
    assert (lab.status(job), len(lab.running_tasks())) == ("running", 2)


def test_secrets_that_cannot_be_opened_end_their_own_job_and_no_other() -> None:
    """The key file was replaced. Other jobs must still be watched."""
    lab = ControlPlaneLab()
    lab.heal()
    bad, good = with_secret(lab), lab.submit()
    lab.restart(key=bytes(32))
    lab.run_loops()
    assert (lab.status(bad), lab.status(good)) == ("failed", "running")
    assert (
        lab.stored_job(bad).because == f"the secrets of {bad.job_id} cannot be opened with this server's key"
    )


def test_decision_is_recorded_with_the_part_that_was_still_possible() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    gone, placed, waiting = lab.submit(), lab.submit(), lab.submit(resources={"cpus": 7})
    lab.store.meanwhile("before write", lambda: lab.stop(gone))
    lab.place()
    (event,) = lab.events("plan.made")
    assert len(event.data["starts"]) == 2
    assert event.data["placed"] == [lab.attempt(placed).attempt_id]
    assert event.data["waiting"] == 1
    assert [lab.status(job) for job in (gone, placed, waiting)] == ["cancelled", "starting", "queued"]


def test_a_cycle_that_starts_nothing_writes_nothing() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.running_job(resources={"cpus": 8})
    lab.submit()
    events = len(lab.events())
    lab.place()
    lab.place()
    assert len(lab.events()) == events


def test_attempts_under_submission_are_not_taken_again() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    lab.submit()
    lab.submit()
    placed = result_of(place(lab.core.upkeep, lab.core.planning)).placed
    first, second = placed
    lab.core.running.submitting.add(first)
    assert [
        starting.attempt.attempt_id
        for starting in result_of(begin_submission_of(lab.core.records.store, lab.core.running, placed))
    ] == [second]
    assert lab.core.running.submitting == {first, second}


def test_attempt_that_is_no_longer_starting_is_neither_taken_nor_left_marked() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit()
    placed = result_of(place(lab.core.upkeep, lab.core.planning)).placed
    result_of(lab.plane.stop_job(ANA, job.job_id))
    assert (
        result_of(begin_submission_of(lab.core.records.store, lab.core.running, [*placed, "att_nobody"]))
        == []
    )
    assert lab.core.running.submitting == set()


def test_attempt_that_cannot_be_read_is_launched_later_and_says_so() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit()
    placed = result_of(place(lab.core.upkeep, lab.core.planning)).placed

    async def away(fn: object) -> None:
        raise StoreUnavailable("the disk is full")

    read, lab.core.records.store.read = lab.core.records.store.read, away  # type: ignore[assignment,method-assign]
    assert result_of(begin_submission_of(lab.core.records.store, lab.core.running, placed)) == []
    lab.core.records.store.read = read  # type: ignore[method-assign]
    assert lab.core.running.submitting == set()
    assert lab.core.running.leases.troubles(lab.attempt(job).attempt_id) == ("the disk is full",)


def test_attempt_after_a_loss_gets_no_node_that_has_just_gone() -> None:
    lab = ControlPlaneLab(script=always(Act(claim_s=600.0)))
    job = lab.submit()
    lab.run_loops()
    assert (lab.status(job), lab.attempt(job).node_names) == ("starting", ("n1",))
    lab.cluster.power_off("n1")  # and no loop has looked at the nodes since
    lab.watch()
    assert lab.attempts(job)[0].reason is EndReason.LOST
    lab.place()
    assert lab.attempt(job).node_names == ("n2",)


def test_plan_with_many_starts_is_recorded_in_batches_as_one_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.control.loops.place.MAX_AT_ONCE", 2)
    lab = ControlPlaneLab()
    jobs = lab.submit_all(array=7).jobs
    with counted_changes() as changes:
        lab.run_loops()
    assert {lab.status(job) for job in jobs} == {"running"}
    (event,) = lab.events("plan.made")
    assert len(event.data["starts"]) == 7
    assert event.data["placed"] == [lab.attempt(job).attempt_id for job in jobs]
    assert max(change.num_statements for change in changes) < 7 * 4  # each start takes four at least


def test_starts_whose_node_left_while_the_plan_was_recorded_wait_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.control.loops.place.MAX_AT_ONCE", 2)
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    jobs = lab.submit_all(array=5).jobs
    lab.store.meanwhile("after write", lambda: lab.set_node_state("n1", NodeState.CORDONED))
    lab.place()
    assert [lab.status(job) for job in jobs] == ["starting"] * 2 + ["queued"] * 3
    lab.set_node_state("n1", NodeState.READY)
    lab.run_loops()
    assert {lab.status(job) for job in jobs} == {"running"}


def test_doomed_jobs_end_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.control.loops.place.MAX_AT_ONCE", 2)
    lab = ControlPlaneLab()
    first = lab.submit()
    jobs = lab.submit_all(array=7, after=[first.reference]).jobs
    lab.stop(first)
    with counted_changes() as changes:
        lab.place()
    assert {lab.status(job) for job in jobs} == {"cancelled"}
    assert max(change.num_statements for change in changes) < 7 * 5
