"""A share that is lost alone is begun anew, on its node or on another, and its attempt goes on."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shoal.control import StaleRenewal
from shoal.control.leases import FENCE_MARGIN_S
from shoal.control.looks import Looks
from shoal.control.replace import MAX_QUICK, record_end
from shoal.control.watch import REPLACED_S
from shoal.engines.fake import Act, SentRenewal, Verb
from shoal.model.attempt import Attempt, AttemptState, EndReason
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.model.retry import LONG_LIFE_S
from shoal.sim.history.facts import facts_of
from shoal.sim.history.replay import Replay
from shoal.store import EventFilter
from shoal.wire import EndKind
from tests.support.lab import ANA, Lab, now

GANG = {"nodes": 2, "cpus": 1, "gpus": 2}
RETRY = {"max": 3, "on": ["exit", "signal"]}


def a_gang(lab: Lab, **fields: object) -> Job:
    return lab.running(**{"resources": GANG, "retry": RETRY, **fields})


def lose(lab: Lab, job: Job, node: str) -> Attempt:
    lab.cluster.kill_supervisor(lab.attempt(job).attempt_id, node)
    lab.watch()
    return lab.attempt(job)


def runs(lab: Lab) -> set[tuple[str, int]]:
    return {(order.node, order.incarnation) for order in lab.cluster.running()}


def decisions_follow_from_the_log(lab: Lab) -> int:
    events = now(lab.store.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 20)))
    verdicts = list(Replay(lab.core.planner.policy).verdicts(facts_of(msgspec.to_builtins(events))))
    assert all(verdict.is_equal for verdict in verdicts), verdicts
    return sum(verdict.decision.replaces is not None for verdict in verdicts)


def test_lost_share_begins_anew_on_its_node_and_the_other_runs_on() -> None:
    lab = Lab()
    job = a_gang(lab)
    attempt = lose(lab, job, "n2")
    assert (attempt.state, attempt.generation, attempt.nodes_to_start) == (AttemptState.RUNNING, 1, ("n2",))
    assert runs(lab) == {("n1", 0), ("n2", 1)}
    lab.watch()
    assert lab.attempt(job).nodes_to_start == ()
    assert len(lab.attempts(job)) == 1
    assert (lab.job(job).losses, lab.job(job).failures) == (0, 0)


def test_loss_costs_no_retry_and_failures_cost_as_many_as_before() -> None:
    lab = Lab()
    job = a_gang(lab, retry={"max": 1, "on": ["exit", "signal"]})
    attempt = lose(lab, job, "n2")
    assert (attempt.generation, attempt.restarts) == (1, 0)


def test_share_goes_on_at_another_node_when_its_own_takes_no_work() -> None:
    lab = Lab(num_nodes=3)
    job = a_gang(lab)
    lab.cluster.power_off("n2")
    lab.watch()
    assert lab.attempt(job).node_names == ("n1", "n2"), "nothing is recorded before it is planned"
    lab.core.leases.trouble(lab.attempt(job).attempt_id, "n2", "something of it does not die")
    lab.place()
    attempt = lab.attempt(job)
    assert (attempt.node_names, attempt.generation) == (("n1", "n3"), 1)
    assert lab.core.leases.troubles(attempt.attempt_id) == (), "n2 has nothing of it any more"
    assert attempt.logged_nodes == ("n1", "n2", "n3")
    assert runs(lab) == {("n1", 0), ("n3", 1)}
    assert decisions_follow_from_the_log(lab) == 1
    lab.place()
    assert lab.core.planner.snapshot().holdings[0].allocation == attempt.allocation


def test_first_node_is_replaced_like_any_other_and_keeps_its_place_among_the_ranks() -> None:
    lab = Lab(num_nodes=3)
    job = a_gang(lab)
    lab.cluster.power_off("n1")
    lab.watch()
    lab.place()
    assert lab.attempt(job).node_names == ("n3", "n2")
    assert runs(lab) == {("n3", 1), ("n2", 0)}


def test_without_a_free_node_the_attempt_ends_and_says_so() -> None:
    lab = Lab(num_nodes=2)
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
    assert "no other node could take its place" in first.message
    assert decisions_follow_from_the_log(lab) == 1


def test_cordoned_node_gets_no_share_back() -> None:
    lab = Lab(num_nodes=3)
    job = a_gang(lab)
    now(lab.plane.set_node_state(ANA, "n2", NodeState.CORDONED))
    lose(lab, job, "n2")
    lab.place()
    assert lab.attempt(job).node_names == ("n1", "n3")


def test_two_nodes_lost_at_once_are_both_replaced() -> None:
    lab = Lab(num_nodes=5)
    job = a_gang(lab, resources={**GANG, "nodes": 3})
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.kill_supervisor(attempt_id, "n2")
    lab.cluster.power_off("n3")
    lab.watch()
    lab.place()
    assert lab.attempt(job).node_names == ("n1", "n2", "n4")
    assert runs(lab) == {("n1", 0), ("n2", 1), ("n4", 2)}


def test_when_every_share_is_lost_the_job_is_placed_anew() -> None:
    lab = Lab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    for node in ("n1", "n2"):
        lab.cluster.kill_supervisor(attempt_id, node)
    lab.watch()
    assert [one.reason for one in lab.attempts(job)] == [EndReason.LOST, None]


def test_job_without_retries_is_placed_anew_as_before() -> None:
    lab = Lab()
    job = lab.running(resources=GANG)
    attempt = lose(lab, job, "n2")
    assert attempt.state is AttemptState.STOPPING


def test_share_that_is_lost_again_and_again_at_once_is_given_up() -> None:
    lab = Lab()
    job = a_gang(lab)
    for _ in range(MAX_QUICK):
        assert lose(lab, job, "n2").state is AttemptState.RUNNING
        lab.watch()
    assert lose(lab, job, "n2").state is AttemptState.STOPPING


def test_share_that_was_lost_slowly_is_replaced_for_as_long_as_it_takes() -> None:
    lab = Lab()
    job = a_gang(lab)
    for count in range(1, 8):
        lab.clock.advance(60)
        assert lose(lab, job, "n2").generation == count
        lab.watch()
    assert runs(lab) == {("n1", 0), ("n2", 7)}


def test_old_incarnation_that_comes_back_is_told_to_stop() -> None:
    lab = Lab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.clock.advance(5)
    (old,) = [sent for sent in lab.cluster.renewals() if sent.renewal.node == "n2"]
    lose(lab, job, "n2")
    with pytest.raises(StaleRenewal, match="incarnation 0 is stale"):
        now(lab.plane.renew(old.renewal))
    lab.cluster.reject(SentRenewal(renewal=old.renewal, sent_at=old.sent_at))
    assert ("n2", 1) in runs(lab), f"what was meant for the old one does not stop the new one of {attempt_id}"


def test_late_word_of_the_end_of_a_replaced_share_changes_nothing() -> None:
    lab = Lab()
    job = a_gang(lab)
    before = lose(lab, job, "n2")
    lost = before.replacements[0].lost
    after = now(lab.store.write(lambda tx: record_end(lab.core, tx, before.attempt_id, lost)))
    assert after == lab.attempt(job)
    assert (after.state, after.outcomes, after.generation) == (AttemptState.RUNNING, (), 1)


@pytest.mark.parametrize("when", ["before submit", "after submit"])
def test_control_plane_that_dies_while_it_hands_a_share_over_hands_it_over_again(when: str) -> None:
    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    lab = Lab()
    job = a_gang(lab)
    lab.engine.meanwhile(when, die)
    lab.cluster.kill_supervisor(lab.attempt(job).attempt_id, "n2")
    with pytest.raises(Killed):
        lab.watch()
    lab.restart()
    lab.turn()
    lab.watch()
    assert runs(lab) == {("n1", 0), ("n2", 1)}
    assert lab.attempt(job).nodes_to_start == ()


def test_share_that_cannot_be_handed_over_is_given_up_within_a_minute_or_two() -> None:
    lab = Lab()
    job = a_gang(lab)
    lab.engine.lose(Verb.SUBMIT)
    assert lose(lab, job, "n2").nodes_to_start == ("n2",)
    lab.clock.advance(REPLACED_S / 2)
    lab.watch()
    assert lab.attempt(job).state is AttemptState.RUNNING
    lab.clock.advance(REPLACED_S)
    lab.watch()
    lab.clock.advance(1)
    lab.watch()
    assert lab.attempts(job)[0].state is AttemptState.STOPPING


def test_stop_of_a_job_whose_share_is_being_replaced_ends_it() -> None:
    lab = Lab()
    job = a_gang(lab)
    lab.engine.meanwhile("before submit", lambda: lab.stop(job))
    lose(lab, job, "n2")
    for _ in range(3):
        lab.clock.advance(40)
        lab.watch()
    assert lab.attempt(job).reason is EndReason.CANCELLED
    assert runs(lab) == set()


def test_ranks_that_fail_because_a_share_was_lost_are_explained_by_the_loss() -> None:
    lab = Lab()
    job = a_gang(lab)
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.kill_supervisor(attempt_id, "n2")
    lab.cluster.kill_rank(attempt_id, "n1")
    for sent in lab.cluster.renewals():
        lab.cluster.answer(sent, now(lab.plane.renew(sent.renewal)))
    attempt = lab.attempt(job)
    assert (attempt.generation, attempt.restarts) == (1, 0)
    assert attempt.replacements[0].lost.kind is EndKind.LOST
    assert runs(lab) == {("n1", 0), ("n2", 1)}


def test_silence_of_a_lost_share_is_not_that_of_the_one_in_its_place() -> None:
    lab = Lab()
    job = a_gang(lab)
    lab.clock.advance(REPLACED_S + 5)
    lab.engine.lose(Verb.SUBMIT)
    lose(lab, job, "n2")
    lab.clock.advance(1)
    lab.watch()
    assert lab.attempt(job).state is AttemptState.RUNNING
    lab.engine.lose(None)
    lab.watch()
    assert runs(lab) == {("n1", 0), ("n2", 1)}


def test_share_that_was_fenced_is_begun_anew_at_the_same_look() -> None:
    lab = Lab()
    job = a_gang(lab, fence="60s")
    lab.cluster.cut("n2")
    for _ in range(13):
        lab.clock.advance(10)
        if lab.core.leases.share_silence_s(lab.attempt(job), "n2") > 60 + FENCE_MARGIN_S:
            lab.engine.meanwhile("after look", lambda: lab.cluster.heal("n2"))
        for sent in lab.cluster.renewals():
            lab.cluster.answer(sent, now(lab.plane.renew(sent.renewal)))
        lab.watch()
    attempt = lab.attempt(job)
    assert [one.lost.kind for one in attempt.replacements] == [EndKind.FENCED]
    assert (attempt.state, runs(lab)) == (AttemptState.RUNNING, {("n1", 0), ("n2", 1)})


def test_share_that_was_taken_and_does_not_begin_is_given_up() -> None:
    lab = Lab(script=lambda order: Act(run_s=None, claim_s=1e6 if order.incarnation else 0.0))
    job = a_gang(lab)
    lab.clock.advance(REPLACED_S + 5)
    lose(lab, job, "n2")
    lab.watch()
    assert (lab.attempt(job).state, runs(lab)) == (AttemptState.RUNNING, {("n1", 0)})
    lab.clock.advance(REPLACED_S + 1)
    lab.watch()
    assert lab.attempt(job).state is AttemptState.STOPPING
    for _ in range(3):
        lab.clock.advance(40)
        lab.watch()
    first = lab.attempts(job)[0]
    assert (first.reason, first.message) == (
        EndReason.LOST,
        "n2: the share in place of a lost one did not begin",
    )


def test_gang_whose_nodes_others_get_each_time_it_has_run_for_long_is_never_lost_twice_in_a_row() -> None:
    lab = Lab(script=lambda order: Act(run_s=None, claim_s=1e6 if order.incarnation else 0.0))
    job = a_gang(lab)
    for epoch in (1, 2, 3):
        lab.clock.advance(LONG_LIFE_S)
        lab.watch()
        lose(lab, job, "n2")
        while lab.attempt(job).epoch == epoch:
            lab.clock.advance(40)
            lab.turn()
        assert lab.job(job).losses == 1
        lab.turn()


def test_rank_that_fails_after_a_loss_does_not_take_the_blame_for_it() -> None:
    lab = Lab()
    job = a_gang(lab)
    lab.clock.advance(1)
    lab.cluster.kill_rank(lab.attempt(job).attempt_id, "n1", signal=11)
    sent = [one for one in lab.cluster.renewals() if one.renewal.failure is not None]
    lab.clock.advance(1)
    lose(lab, job, "n2")
    assert len(sent) == 1
    now(lab.plane.renew(sent[0].renewal))
    attempt = lab.attempt(job)
    assert attempt.failure is not None
    assert (attempt.generation, attempt.failure.node, attempt.failure.kind) == (1, "n2", EndKind.LOST)


def test_failures_of_one_generation_are_looked_into_once() -> None:
    lab = Lab(num_nodes=4)
    job = a_gang(lab, resources={**GANG, "nodes": 4})
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.kill_supervisor(attempt_id, "n4")
    for node in ("n1", "n2", "n3"):
        lab.cluster.kill_rank(attempt_id, node)
    sent = lab.cluster.renewals()
    looks: list[str] = []
    for one in sent:
        lab.engine.meanwhile("before look", lambda: looks.append(attempt_id))
        now(lab.plane.renew(one.renewal))
    assert (len(sent), len(looks)) == (3, 1)
    assert lab.attempt(job).generation == 1


def test_one_look_serves_all_who_ask_while_it_is_under_way_and_one_that_fails_serves_nobody() -> None:
    looks = Looks()
    taken: list[int] = []

    async def look() -> None:
        taken.append(len(taken))
        await asyncio.sleep(0)
        if len(taken) == 1:
            raise OSError("the first one fails")

    async def ask() -> list[BaseException | None]:
        asked = (looks.once("att", 0, look) for _ in range(9))
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(ask())
    assert (len(taken), sum(isinstance(one, OSError) for one in answers)) == (2, 1)
