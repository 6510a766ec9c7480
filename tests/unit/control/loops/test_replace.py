"""A single lost task is started again, on its node or on another, and its attempt goes on."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shoal.control import StaleRenewal
from shoal.control.commands.windows import WindowRequest
from shoal.control.loops.replace import MAX_QUICK, record_end
from shoal.control.loops.watch import REPLACEMENT_PATIENCE_S
from shoal.control.memory.attempt_table import AttemptMemories
from shoal.control.memory.leases import FENCE_MARGIN_S
from shoal.control.memory.supervisor_reports import SingleFlight
from shoal.engines.fake import Act, SentRenewal, Verb
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState, WindowKind
from shoal.model.retry import LONG_LIFE_S
from shoal.sim.history.facts import facts_of
from shoal.sim.history.replay import DecisionReplay
from shoal.store import EventFilter
from shoal.wire import EndKind
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of

GANG = {"nodes": 2, "cpus": 1, "gpus": 2}
RETRY = {"max": 3, "on": ["exit", "signal"]}


def a_gang(lab: ControlPlaneLab, **fields: object) -> Job:
    return lab.running_job(**{"resources": GANG, "retry": RETRY, **fields})


def lose(lab: ControlPlaneLab, job: Job, node: str) -> Attempt:
    lab.cluster.kill_supervisor(lab.attempt(job).attempt_id, node)
    lab.watch()
    return lab.attempt(job)


def runs(lab: ControlPlaneLab) -> set[tuple[str, int]]:
    return {(task_spec.identity.node, task_spec.identity.replacement) for task_spec in lab.cluster.running()}


def decisions_follow_from_the_log(lab: ControlPlaneLab) -> int:
    events = result_of(lab.store.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 20)))
    verdicts = list(
        DecisionReplay(lab.core.planning.planner.policy).verdicts(facts_of(msgspec.to_builtins(events)))
    )
    assert all(verdict.is_equal for verdict in verdicts), verdicts
    return sum(len(verdict.decision.replacements) for verdict in verdicts)


def test_lost_task_restarts_on_its_node_and_the_other_runs_on() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    attempt = lose(lab, job, "n2")
    assert (attempt.state, attempt.rendezvous_round, attempt.nodes_to_start) == (
        AttemptState.RUNNING,
        1,
        ("n2",),
    )
    assert runs(lab) == {("n1", 0), ("n2", 1)}
    lab.watch()
    assert lab.attempt(job).nodes_to_start == ()
    assert len(lab.attempts(job)) == 1
    assert (lab.stored_job(job).losses, lab.stored_job(job).failures) == (0, 0)


def test_loss_costs_no_retry_and_failures_cost_as_many_as_before() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab, retry={"max": 1, "on": ["exit", "signal"]})
    attempt = lose(lab, job, "n2")
    assert (attempt.rendezvous_round, attempt.restarts) == (1, 0)


def test_task_moves_to_another_node_if_its_own_takes_no_work() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = a_gang(lab)
    lab.cluster.power_off("n2")
    lab.watch()
    assert lab.attempt(job).node_names == ("n1", "n2"), "nothing is recorded before it is planned"
    lab.core.running.leases.note_trouble(lab.attempt(job).attempt_id, "n2", "something of it does not die")
    lab.place()
    attempt = lab.attempt(job)
    assert (attempt.node_names, attempt.rendezvous_round) == (("n1", "n3"), 1)
    assert lab.core.running.leases.troubles(attempt.attempt_id) == (), "n2 has nothing of it any more"
    assert attempt.logged_nodes == ("n1", "n2", "n3")
    assert runs(lab) == {("n1", 0), ("n3", 1)}
    assert decisions_follow_from_the_log(lab) == 1
    lab.place()
    assert lab.core.planning.planner.snapshot().holdings[0].allocation == attempt.allocation


def test_first_node_is_replaced_like_any_other_and_keeps_its_place_among_the_ranks() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = a_gang(lab)
    lab.cluster.power_off("n1")
    lab.watch()
    lab.place()
    assert lab.attempt(job).node_names == ("n3", "n2")
    assert runs(lab) == {("n3", 1), ("n2", 0)}


def test_without_a_free_node_the_attempt_ends_and_says_so() -> None:
    lab = ControlPlaneLab(num_nodes=2)
    job = a_gang(lab)
    lab.cluster.power_off("n2")
    lab.watch()
    lab.place()
    assert lab.attempts(job)[0].state is AttemptState.STOPPING
    for _ in range(2):
        lab.watch()
        lab.clock.advance(60)
    first = lab.attempts(job)[0]
    assert first.reason is EndReason.LOST
    assert first.message.endswith(
        "no other node could take its place at once: needs another node with 2 GPUs; the only such nodes are "
        "n1 and n2, which are its own, excluded by its log rules or `exclude_nodes`, or not where its "
        "`topology` requires"
    )
    assert decisions_follow_from_the_log(lab) == 1


def test_reason_without_a_free_node_is_the_one_that_waiting_jobs_get() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = a_gang(lab)
    lab.running_job(resources={"gpus": 4})
    lab.cluster.power_off("n2")
    lab.watch()
    lab.place()
    (outcome,) = lab.attempts(job)[0].outcomes
    assert "no other node could take its place at once: needs 1 node with 2 free GPUs" in outcome.message


def test_other_jobs_start_in_the_decision_that_moves_a_task() -> None:
    lab = ControlPlaneLab(num_nodes=4)
    job = a_gang(lab)
    lab.cluster.power_off("n2")
    lab.watch()
    urgent = lab.submit(resources={"gpus": 4}, priority="production")
    lab.place()
    assert lab.attempt(job).node_names == ("n1", "n3"), "the task goes before a job that waits"
    assert lab.attempt(urgent).node_names == ("n4",)
    decision = lab.events("plan.made")[-1].data
    assert [planned["lost_node"] for planned in decision["replacements"]] == ["n2"]
    assert decision["placed"] == [lab.attempt(job).attempt_id, lab.attempt(urgent).attempt_id]
    assert decisions_follow_from_the_log(lab) == 1


def test_tasks_of_two_jobs_are_moved_by_one_decision() -> None:
    lab = ControlPlaneLab(num_nodes=5)
    first, second = a_gang(lab), a_gang(lab, priority="production")
    assert lab.attempt(first).node_names == lab.attempt(second).node_names == ("n1", "n2")
    lab.cluster.power_off("n2")
    lab.watch()
    lab.place()
    moved = {lab.attempt(job).node_names for job in (first, second)}
    assert moved <= {("n1", "n3"), ("n1", "n4"), ("n1", "n5")}
    assert len([event for event in lab.events("plan.made") if event.data["replacements"]]) == 1
    assert decisions_follow_from_the_log(lab) == 2


def test_first_node_is_not_replaced_by_a_node_with_another_address() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = a_gang(lab)
    lab.cluster.power_off("n1")
    lab.watch()
    node = lab.node("n3")
    facts = msgspec.structs.replace(node.facts, address="10.0.0.3")
    moved = msgspec.structs.replace(node, facts=facts, version=node.version + 1)
    result_of(lab.store.write(lambda tx: tx.nodes.put(moved)))
    lab.place()
    (outcome,) = lab.attempts(job)[0].outcomes
    assert outcome.message.endswith("it was the first node, and the others know only its address")
    assert not lab.core.planning.planner.has_unconfirmed


def test_window_declared_after_the_plan_keeps_the_task_from_its_nodes() -> None:
    lab = ControlPlaneLab(num_nodes=4)
    job = a_gang(lab)
    lab.cluster.power_off("n2")
    lab.watch()

    def declare() -> None:
        window = WindowRequest(kind=WindowKind.MAINTENANCE, nodes=("n3",), duration_s=3600.0)
        result_of(lab.plane.declare_window(ANA, window))

    lab.store.meanwhile("before write", declare)
    lab.place()
    assert lab.attempt(job).node_names == ("n1", "n2"), "the plan did not know of the window"
    assert not lab.core.planning.planner.has_unconfirmed
    lab.watch()
    lab.place()
    assert lab.attempt(job).node_names == ("n1", "n4")
    assert decisions_follow_from_the_log(lab) == 2


def test_explanation_names_a_lost_task_until_it_is_planned_for() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = a_gang(lab)
    lab.cluster.power_off("n2")
    lab.watch()
    before = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert before is not None
    assert before.sentence == "its task on n2 was lost; the next plan looks for another node"
    lab.place()
    after = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert after is None or "looks for another node" not in after.sentence


def test_explanation_says_why_no_other_node_takes_the_task_while_that_is_recorded() -> None:
    lab = ControlPlaneLab(num_nodes=2)
    job = a_gang(lab)
    lab.cluster.power_off("n2")
    lab.watch()
    stored, attempts = lab.stored_job(job), lab.attempts(job)
    sentences: list[str] = []

    def ask() -> None:
        explanation = lab.plane.explain(stored, attempts)
        sentences.append(explanation.sentence if explanation else "")

    lab.store.meanwhile("before write", ask)
    lab.place()
    assert sentences[0].startswith(
        "its task on n2 was lost, and no other node can take it over: needs another node with 2 GPUs"
    )


def test_lost_task_is_found_again_if_its_decision_does_not_reach_the_disk() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = a_gang(lab)
    lab.cluster.power_off("n2")
    lab.watch()

    def fail() -> None:
        raise OSError("disk full")

    lab.store.meanwhile("before write", fail)
    with pytest.raises(OSError, match="disk full"):
        lab.place()
    assert not lab.core.planning.planner.has_unconfirmed
    assert lab.attempt(job).node_names == ("n1", "n2")
    lab.watch()
    lab.place()
    assert lab.attempt(job).node_names == ("n1", "n3")


def test_cordoned_node_gets_no_task_back() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = a_gang(lab)
    result_of(lab.plane.set_node_state(ANA, "n2", NodeState.CORDONED))
    lose(lab, job, "n2")
    lab.place()
    assert lab.attempt(job).node_names == ("n1", "n3")


def test_two_nodes_lost_at_once_are_both_replaced() -> None:
    lab = ControlPlaneLab(num_nodes=5)
    job = a_gang(lab, resources={**GANG, "nodes": 3})
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.kill_supervisor(attempt_id, "n2")
    lab.cluster.power_off("n3")
    lab.watch()
    lab.place()
    assert lab.attempt(job).node_names == ("n1", "n2", "n4")
    assert runs(lab) == {("n1", 0), ("n2", 1), ("n4", 2)}


def test_job_is_placed_again_when_every_task_is_lost() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    for node in ("n1", "n2"):
        lab.cluster.kill_supervisor(attempt_id, node)
    lab.watch()
    assert [attempt.reason for attempt in lab.attempts(job)] == [EndReason.LOST, None]


def test_job_without_retries_gets_a_new_attempt() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job(resources=GANG)
    attempt = lose(lab, job, "n2")
    assert attempt.state is AttemptState.STOPPING


def test_task_that_is_lost_again_and_again_at_once_is_given_up() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    for _ in range(MAX_QUICK):
        assert lose(lab, job, "n2").state is AttemptState.RUNNING
        lab.watch()
    assert lose(lab, job, "n2").state is AttemptState.STOPPING


def test_task_that_lives_long_enough_is_replaced_without_limit() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    for count in range(1, 8):
        lab.clock.advance(60)
        assert lose(lab, job, "n2").rendezvous_round == count
        lab.watch()
    assert runs(lab) == {("n1", 0), ("n2", 7)}


def test_replaced_task_that_comes_back_is_told_to_stop() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.clock.advance(5)
    (old,) = [sent for sent in lab.cluster.renewals() if sent.renewal.node == "n2"]
    lose(lab, job, "n2")
    with pytest.raises(StaleRenewal, match="replacement 0 is stale"):
        result_of(lab.plane.renew(old.renewal))
    lab.cluster.reject(SentRenewal(renewal=old.renewal, sent_at=old.sent_at))
    assert ("n2", 1) in runs(lab), f"what was meant for the old one does not stop the new one of {attempt_id}"


def test_late_end_of_a_replaced_task_changes_nothing() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    before = lose(lab, job, "n2")
    lost = before.replacements[0].lost
    after = result_of(
        lab.store.write(
            lambda tx: record_end(
                lab.core.records, lab.core.running, lab.core.link.engine, tx, before.attempt_id, lost
            )
        )
    )
    assert after == lab.attempt(job)
    assert (after.state, after.outcomes, after.rendezvous_round) == (AttemptState.RUNNING, (), 1)


@pytest.mark.parametrize("when", ["before submit", "after submit"])
def test_control_plane_killed_while_it_submits_a_task_submits_it_again(when: str) -> None:
    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    lab = ControlPlaneLab()
    job = a_gang(lab)
    lab.engine.meanwhile(when, die)
    lab.cluster.kill_supervisor(lab.attempt(job).attempt_id, "n2")
    with pytest.raises(Killed):
        lab.watch()
    lab.restart()
    lab.run_loops()
    lab.watch()
    assert runs(lab) == {("n1", 0), ("n2", 1)}
    assert lab.attempt(job).nodes_to_start == ()


def test_task_that_cannot_be_submitted_is_given_up_within_two_minutes() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    lab.engine.lose_connection(Verb.SUBMIT)
    assert lose(lab, job, "n2").nodes_to_start == ("n2",)
    lab.clock.advance(REPLACEMENT_PATIENCE_S / 2)
    lab.watch()
    assert lab.attempt(job).state is AttemptState.RUNNING
    lab.clock.advance(REPLACEMENT_PATIENCE_S)
    lab.watch()
    lab.clock.advance(1)
    lab.watch()
    assert lab.attempts(job)[0].state is AttemptState.STOPPING


def test_stop_of_a_job_with_a_task_under_replacement_ends_it() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    lab.engine.meanwhile("before submit", lambda: lab.stop(job))
    lose(lab, job, "n2")
    for _ in range(3):
        lab.clock.advance(40)
        lab.watch()
    assert lab.attempt(job).reason is EndReason.CANCELLED
    assert runs(lab) == set()


def test_ranks_that_fail_because_a_task_was_lost_are_explained_by_the_loss() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.kill_supervisor(attempt_id, "n2")
    lab.cluster.kill_rank(attempt_id, "n1")
    for sent in lab.cluster.renewals():
        lab.cluster.deliver_reply(sent, result_of(lab.plane.renew(sent.renewal)))
    attempt = lab.attempt(job)
    assert (attempt.rendezvous_round, attempt.restarts) == (1, 0)
    assert attempt.replacements[0].lost.kind is EndKind.LOST
    assert runs(lab) == {("n1", 0), ("n2", 1)}


def test_silence_of_a_lost_task_does_not_count_for_its_replacement() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    lab.clock.advance(REPLACEMENT_PATIENCE_S + 5)
    lab.engine.lose_connection(Verb.SUBMIT)
    lose(lab, job, "n2")
    lab.clock.advance(1)
    lab.watch()
    assert lab.attempt(job).state is AttemptState.RUNNING
    lab.engine.lose_connection(None)
    lab.watch()
    assert runs(lab) == {("n1", 0), ("n2", 1)}


def test_fenced_task_is_restarted_at_the_same_look() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab, fence="60s")
    lab.cluster.cut("n2")
    for _ in range(13):
        lab.clock.advance(10)
        if lab.core.running.leases.task_silence_s(lab.attempt(job), "n2") > 60 + FENCE_MARGIN_S:
            lab.engine.meanwhile("after look", lambda: lab.cluster.heal("n2"))
        for sent in lab.cluster.renewals():
            lab.cluster.deliver_reply(sent, result_of(lab.plane.renew(sent.renewal)))
        lab.watch()
    attempt = lab.attempt(job)
    assert [replaced.lost.kind for replaced in attempt.replacements] == [EndKind.FENCED]
    assert (attempt.state, runs(lab)) == (AttemptState.RUNNING, {("n1", 0), ("n2", 1)})


def test_task_that_was_taken_and_does_not_begin_is_given_up() -> None:
    lab = ControlPlaneLab(
        script=lambda task_spec: Act(run_s=None, claim_s=1e6 if task_spec.identity.replacement else 0.0)
    )
    job = a_gang(lab)
    lab.clock.advance(REPLACEMENT_PATIENCE_S + 5)
    lose(lab, job, "n2")
    lab.watch()
    assert (lab.attempt(job).state, runs(lab)) == (AttemptState.RUNNING, {("n1", 0)})
    lab.clock.advance(REPLACEMENT_PATIENCE_S + 1)
    lab.watch()
    assert lab.attempt(job).state is AttemptState.STOPPING
    for _ in range(3):
        lab.clock.advance(40)
        lab.watch()
    first = lab.attempts(job)[0]
    assert (first.reason, first.message) == (
        EndReason.LOST,
        "n2: the task in place of a lost one did not begin",
    )


def test_gang_that_loses_its_nodes_after_long_runs_is_never_lost_twice_in_a_row() -> None:
    lab = ControlPlaneLab(
        script=lambda task_spec: Act(run_s=None, claim_s=1e6 if task_spec.identity.replacement else 0.0)
    )
    job = a_gang(lab)
    for epoch in (1, 2, 3):
        lab.clock.advance(LONG_LIFE_S)
        lab.watch()
        lose(lab, job, "n2")
        while lab.attempt(job).epoch == epoch:
            lab.clock.advance(40)
            lab.run_loops()
        assert lab.stored_job(job).losses == 1
        lab.run_loops()


def test_rank_that_fails_after_a_loss_does_not_take_the_blame_for_it() -> None:
    lab = ControlPlaneLab()
    job = a_gang(lab)
    lab.clock.advance(1)
    lab.cluster.kill_rank(lab.attempt(job).attempt_id, "n1", signal=11)
    sent = [renewal for renewal in lab.cluster.renewals() if renewal.renewal.failure is not None]
    lab.clock.advance(1)
    lose(lab, job, "n2")
    assert len(sent) == 1
    result_of(lab.plane.renew(sent[0].renewal))
    attempt = lab.attempt(job)
    assert attempt.failure is not None
    assert (attempt.rendezvous_round, attempt.failure.node, attempt.failure.kind) == (1, "n2", EndKind.LOST)


def test_failures_of_one_rendezvous_round_are_checked_once() -> None:
    lab = ControlPlaneLab(num_nodes=4)
    job = a_gang(lab, resources={**GANG, "nodes": 4})
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.kill_supervisor(attempt_id, "n4")
    for node in ("n1", "n2", "n3"):
        lab.cluster.kill_rank(attempt_id, node)
    sent = lab.cluster.renewals()
    checks: list[str] = []
    for renewal in sent:
        lab.engine.meanwhile("before look", lambda: checks.append(attempt_id))
        result_of(lab.plane.renew(renewal.renewal))
    assert (len(sent), len(checks)) == (3, 1)
    assert lab.attempt(job).rendezvous_round == 1


def test_one_check_serves_all_concurrent_callers_and_a_failed_one_serves_none() -> None:
    single_flight = SingleFlight(AttemptMemories())
    taken: list[int] = []

    async def check() -> None:
        taken.append(len(taken))
        await asyncio.sleep(0)
        if len(taken) == 1:
            raise OSError("the first one fails")

    async def ask() -> list[BaseException | None]:
        checks = (single_flight.run("att", 0, check) for _ in range(9))
        return await asyncio.gather(*checks, return_exceptions=True)

    answers = asyncio.run(ask())
    assert (len(taken), sum(isinstance(answer, OSError) for answer in answers)) == (2, 1)
