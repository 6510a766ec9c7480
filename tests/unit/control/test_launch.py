"""Handing attempts to the engine: what it gets, what its refusals become, and who else is affected."""

from __future__ import annotations

import pytest

from shoal.control.launch import take
from shoal.control.place import place
from shoal.engines.base import Submission
from shoal.engines.fake import Act, Verb, always
from shoal.errors import EngineRefused, StoreUnavailable
from shoal.identity import job_token, proof_key
from shoal.model.attempt import EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.spec import parse_job
from tests.support.lab import ANA, KEY, SPEC, USER, Lab, node_facts, now
from tests.support.transactions import counted


def taken_by(lab: Lab) -> list[Submission]:
    """Submissions the engine gets from now on."""
    taken: list[Submission] = []
    inner = lab.cluster.take

    def take(submission: Submission, delay_s: float = 0.0, *, is_stillborn: bool = False) -> str:
        taken.append(submission)
        return inner(submission, delay_s, is_stillborn=is_stillborn)

    lab.cluster.take = take  # type: ignore[method-assign]
    return taken


def refuse(words: str) -> None:
    raise EngineRefused(words)


def with_secret(lab: Lab) -> Job:
    spec = parse_job({**SPEC, "secrets": ["TOKEN"]})
    return now(lab.plane.submit(ANA, spec, project="lab", owner=USER, secrets={"TOKEN": "x"})).jobs[0]


def test_every_supervisor_gets_a_key_good_for_its_own_node_alone() -> None:
    lab = Lab()
    taken = taken_by(lab)
    attempt = lab.attempt(lab.running(resources={"nodes": 2, "cpus": 1}))
    (submission,) = taken
    assert {node: given.proof_key for node, given in submission.credentials.items()} == {
        node: proof_key(KEY, attempt.attempt_id, node) for node in ("n1", "n2")
    }
    assert {given.job_token for given in submission.credentials.values()} == {
        job_token(KEY, attempt.attempt_id)
    }


def test_secrets_travel_beside_the_order_and_never_in_it() -> None:
    lab = Lab()
    taken = taken_by(lab)
    with_secret(lab)
    lab.turn()
    (submission,) = taken
    assert submission.credentials["n1"].secrets == {"TOKEN": "x"}
    assert "TOKEN" not in repr(submission.orders)


def test_the_same_attempt_is_handed_over_with_the_same_content_after_a_restart() -> None:
    lab = Lab()
    lab.heal()
    taken = taken_by(lab)
    lab.submit(resources={"nodes": 2, "gpus": 2})
    lab.place()
    shares = dict(lab.cluster._shares)
    lab.cluster._shares.clear()
    lab.restart()
    lab.watch()
    lab.cluster._shares.update(shares)
    first, second = taken
    assert first == second


def test_a_refused_job_fails_with_the_engines_own_words_and_is_not_tried_again() -> None:
    lab = Lab()
    lab.heal()
    job = lab.submit(retry={"max": 5, "on": ["exit", "signal", "oom", "setup", "time_limit"]})
    lab.engine.meanwhile("before submit", lambda: refuse("no such partition `gpu`"))
    lab.place()
    attempt = lab.attempt(job)
    assert attempt.reason is EndReason.REFUSED
    assert (lab.status(job), lab.job(job).because) == (
        "failed",
        "fake refused it: no such partition `gpu`",
    )
    assert (len(lab.attempts(job)), lab.job(job).losses) == (1, 0)


def killed_before_it_is_handed_over(lab: Lab, **spec: object) -> Job:
    """Its plan is on disk, and the engine has not heard of it."""
    lab.heal()
    job = lab.submit(**spec)
    lab.engine.lose(Verb.SUBMIT)
    lab.place()
    lab.restart()
    return job


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_job_whose_node_left_before_it_was_handed_over_is_lost_there_and_runs_elsewhere(
    is_noticed: bool,
) -> None:
    lab = Lab()
    job = killed_before_it_is_handed_over(lab)
    del lab.cluster.facts["n1"]
    if is_noticed:
        lab.heal()
    lab.watch()
    first = lab.attempts(job)[0]
    assert (first.reason, first.message) == (EndReason.LOST, "n1: no such node as `n1`; there are n2")
    lab.clock.advance(1)
    lab.turn()
    assert (lab.status(job), lab.job(job).failures, lab.job(job).losses) == ("running", 0, 1)
    assert lab.runs() == [(lab.attempt(job).attempt_id, "n2")]


def test_a_job_whose_gpus_are_gone_is_lost_there_and_runs_elsewhere() -> None:
    lab = Lab()
    job = killed_before_it_is_handed_over(lab, resources={"gpus": 4})
    lab.cluster.facts["n1"] = node_facts("n1", gpus=3)
    lab.turn()
    assert "`n1` has no GPU 3; it has 3" in lab.attempts(job)[0].message
    lab.clock.advance(1)
    lab.turn()
    assert (lab.status(job), lab.job(job).losses) == ("running", 1)
    assert lab.runs() == [(lab.attempt(job).attempt_id, "n2")]


def test_a_gang_that_lost_a_node_before_it_was_handed_over_waits_for_another() -> None:
    lab = Lab()
    job = killed_before_it_is_handed_over(lab, resources={"nodes": 2, "cpus": 1})
    gone = lab.cluster.facts.pop("n2")
    lab.turn()
    lab.watch()
    assert (lab.attempts(job)[0].reason, lab.runs(), lab.job(job).outcome) == (EndReason.LOST, [], None)
    lab.cluster.facts["n2"] = gone
    lab.clock.advance(1)
    lab.turn()
    assert (lab.status(job), len(lab.runs())) == ("running", 2)


def test_secrets_that_cannot_be_opened_end_their_own_job_and_no_other() -> None:
    """The key file was replaced: watching must go on for everybody else."""
    lab = Lab()
    lab.heal()
    bad, good = with_secret(lab), lab.submit()
    lab.restart(key=bytes(32))
    lab.turn()
    assert (lab.status(bad), lab.status(good)) == ("failed", "running")
    assert lab.job(bad).because == f"the secrets of {bad.job_id} cannot be opened with this server's key"


def test_what_was_decided_is_recorded_with_what_was_still_possible() -> None:
    lab = Lab(num_nodes=1)
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
    lab = Lab(num_nodes=1)
    lab.running(resources={"cpus": 8})
    lab.submit()
    events = len(lab.events())
    lab.place()
    lab.place()
    assert len(lab.events()) == events


def test_attempts_that_are_being_submitted_already_are_not_taken_again() -> None:
    lab = Lab()
    lab.heal()
    lab.submit()
    lab.submit()
    placed = now(place(lab.core)).placed
    first, second = placed
    lab.core.submitting.add(first)
    assert [one.attempt.attempt_id for one in now(take(lab.core, placed))] == [second]
    assert lab.core.submitting == {first, second}


def test_what_is_not_starting_any_more_is_neither_taken_nor_left_marked() -> None:
    lab = Lab()
    lab.heal()
    job = lab.submit()
    placed = now(place(lab.core)).placed
    now(lab.plane.stop_job(ANA, job.job_id))
    assert now(take(lab.core, [*placed, "att_nobody"])) == []
    assert lab.core.submitting == set()


def test_what_cannot_be_read_is_launched_later_and_says_so() -> None:
    lab = Lab()
    lab.heal()
    job = lab.submit()
    placed = now(place(lab.core)).placed

    async def away(fn: object) -> None:
        raise StoreUnavailable("the disk is full")

    read, lab.core.store.read = lab.core.store.read, away  # type: ignore[assignment,method-assign]
    assert now(take(lab.core, placed)) == []
    lab.core.store.read = read  # type: ignore[method-assign]
    assert lab.core.submitting == set()
    assert lab.core.leases.troubles(lab.attempt(job).attempt_id) == ("the disk is full",)


def test_the_next_attempt_of_what_was_lost_before_it_began_is_given_no_node_that_has_just_gone() -> None:
    lab = Lab(script=always(Act(claim_s=600.0)))
    job = lab.submit()
    lab.turn()
    assert (lab.status(job), lab.attempt(job).node_names) == ("starting", ("n1",))
    lab.cluster.power_off("n1")  # and nobody has looked at the nodes since
    lab.watch()
    assert lab.attempts(job)[0].reason is EndReason.LOST
    lab.place()
    assert lab.attempt(job).node_names == ("n2",)


def test_a_plan_with_many_starts_is_written_some_at_a_time_and_is_one_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.control.place.MAX_AT_ONCE", 2)
    lab = Lab()
    jobs = lab.submit_all(array=7).jobs
    with counted() as changes:
        lab.turn()
    assert {lab.status(job) for job in jobs} == {"running"}
    (event,) = lab.events("plan.made")
    assert len(event.data["starts"]) == 7
    assert event.data["placed"] == [lab.attempt(job).attempt_id for job in jobs]
    assert max(change.num_statements for change in changes) < 7 * 4  # each start takes four at least


def test_starts_whose_node_went_while_the_plan_was_written_wait_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.control.place.MAX_AT_ONCE", 2)
    lab = Lab(num_nodes=1)
    lab.heal()
    jobs = lab.submit_all(array=5).jobs
    lab.store.meanwhile("after write", lambda: lab.decide("n1", NodeState.CORDONED))
    lab.place()
    assert [lab.status(job) for job in jobs] == ["starting"] * 2 + ["queued"] * 3
    lab.decide("n1", NodeState.READY)
    lab.turn()
    assert {lab.status(job) for job in jobs} == {"running"}


def test_jobs_that_wait_in_vain_end_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.control.place.MAX_AT_ONCE", 2)
    lab = Lab()
    first = lab.submit()
    jobs = lab.submit_all(array=7, after=[first.reference]).jobs
    lab.stop(first)
    with counted() as changes:
        lab.place()
    assert {lab.status(job) for job in jobs} == {"cancelled"}
    assert max(change.num_statements for change in changes) < 7 * 5
