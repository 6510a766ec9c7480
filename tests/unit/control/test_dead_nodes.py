"""Nodes that operators declare dead: when they may, who contradicts them, and what begins anew."""

from __future__ import annotations

import msgspec
import pytest

from shoal.control.leases import QUIET_S
from shoal.engines.base import Observation
from shoal.engines.fake import Act, always
from shoal.errors import StateError
from shoal.model.attempt import EndReason
from shoal.model.node import NodeState
from shoal.wire import Phase, Renewal
from tests.support.lab import ANA, Lab, now


def test_an_operators_word_that_a_node_is_dead_is_evidence() -> None:
    lab = Lab()
    job = lab.running()
    (lost,) = lab.attempt(job).node_names
    lab.cluster.cut(lost)
    lab.cluster.power_off(lost)
    lab.turn()
    with pytest.raises(StateError, match=f"{job.reference} there has been silent for 0 s") as refused:
        lab.decide(lost, NodeState.DEAD)
    assert f"if it is off, say so in 21 s: `shoal nodes declare-dead {lost}`" in (refused.value.hint or "")
    lab.clock.advance(QUIET_S + 1)
    lab.turn()
    assert lab.status(job) == "running"
    lab.decide(lost, NodeState.DEAD)
    lab.heal()
    first = lab.attempts(job)[0]
    assert (first.reason, first.message) == (EndReason.LOST, f"{lost}: declared dead by ana")
    lab.clock.advance(1)
    lab.turn()
    assert lab.status(job) == "running"
    assert lab.attempt(job).node_names != (lost,)


def test_the_living_rest_of_a_gang_is_stopped_when_a_node_of_it_is_declared_dead() -> None:
    lab = Lab(num_nodes=3, script=always(Act(run_s=None, stop_s=5.0)))
    job = lab.running(resources={"nodes": 3, "cpus": 1})
    lab.cluster.cut("n1")
    lab.cluster.power_off("n1")
    lab.clock.advance(QUIET_S + 1)
    lab.heal()
    lab.decide("n1", NodeState.DEAD)
    lab.heal()
    assert lab.status(job) == "stopping"
    lab.watch()
    lab.clock.advance(5)
    lab.watch()
    assert lab.attempts(job)[0].reason is EndReason.LOST
    assert lab.runs() == []


def test_a_dead_node_that_answers_again_is_asked_what_runs_there() -> None:
    lab = Lab(script=always(Act(run_s=None, stop_s=5.0)))
    job = lab.running()
    (late,) = lab.attempt(job).node_names
    lab.cluster.cut(late)
    lab.clock.advance(QUIET_S + 1)
    lab.heal()
    lab.decide(late, NodeState.DEAD)
    lab.cluster.heal(late)
    lab.heal()
    assert lab.status(job) == "stopping"
    assert len(lab.runs()) == 1
    lab.clock.advance(5)
    lab.watch()
    assert lab.attempts(job)[0].reason is EndReason.PREEMPTED


def test_a_job_on_its_way_to_a_dead_node_is_not_given_up_before_its_submission_is_answered() -> None:
    lab = Lab()
    job = lab.running()
    attempt = lab.attempt(job)
    (lost,) = attempt.node_names
    lab.cluster.power_off(lost)
    lab.cluster.cut(lost)
    lab.clock.advance(QUIET_S + 1)
    lab.heal()
    lab.decide(lost, NodeState.DEAD)
    lab.core.submitting.add(attempt.attempt_id)
    lab.heal()
    assert lab.attempt(job) == attempt
    lab.core.submitting.discard(attempt.attempt_id)
    lab.heal()
    assert lab.attempts(job)[0].reason is EndReason.LOST


def test_nothing_is_placed_on_a_dead_node_until_it_is_resumed() -> None:
    lab = Lab(num_nodes=1)
    lab.heal()
    lab.cluster.power_off("n1")
    lab.heal()
    lab.decide("n1", NodeState.DEAD)
    lab.cluster.power_on("n1")
    job = lab.submit()
    lab.turn()
    assert lab.status(job) == "queued"
    lab.decide("n1", NodeState.READY)
    lab.turn()
    assert lab.status(job) == "running"


def test_a_node_that_answers_is_not_declared_dead() -> None:
    lab = Lab(num_nodes=1)
    lab.heal()
    with pytest.raises(StateError, match="answers"):
        lab.decide("n1", NodeState.DEAD)


def test_who_declares_a_node_dead_that_its_cluster_counts_on_is_told_to_say_it_again() -> None:
    lab = Lab(num_nodes=1)
    lab.running()
    with pytest.raises(StateError, match="as far as its cluster knows") as refused:
        lab.decide("n1", NodeState.DEAD)
    told = "if the node is off, its cluster has yet to notice: say it again in a minute"
    assert refused.value.hint == f"stop it with `shoal drain n1`; {told}"


def test_what_an_engine_said_before_it_was_away_keeps_no_node_from_being_declared_dead() -> None:
    lab = Lab(num_nodes=1)
    job = lab.running()
    lab.engine.lose_all()
    lab.cluster.power_off("n1")
    lab.turn()
    assert lab.node("n1").facts.is_alive, "as it last said"
    with pytest.raises(StateError, match=f"{job.reference} there has been silent for 0 s"):
        lab.decide("n1", NodeState.DEAD)
    lab.clock.advance(QUIET_S + 1)
    lab.turn()
    told = lab.plane.explain(lab.job(job), lab.attempts(job))
    assert told is not None
    assert "`shoal nodes declare-dead n1`" in (told.hint or "")
    with pytest.raises(StateError, match=f"still holds {job.reference}"):
        now(lab.plane.remove_node(ANA, "n1"))
    lab.decide("n1", NodeState.DEAD)
    lab.heal()
    first = lab.attempts(job)[0]
    assert (first.reason, first.message) == (EndReason.LOST, "n1: declared dead by ana")
    now(lab.plane.remove_node(ANA, "n1"))


def test_who_speaks_on_a_node_contradicts_its_death_while_the_engine_is_away() -> None:
    lab = Lab(num_nodes=1)
    job = lab.running()
    lab.engine.lose_all()
    lab.clock.advance(QUIET_S + 1)
    lab.turn()
    lab.decide("n1", NodeState.DEAD)
    lab.core.leases.heard(lab.attempt(job).attempt_id, "n1")
    lab.heal()
    assert (lab.status(job), len(lab.attempts(job))) == ("running", 1)
    lab.clock.advance(QUIET_S + 1)
    lab.heal()
    assert lab.attempts(job)[0].reason is EndReason.LOST


@pytest.mark.parametrize("closed", ["drained in Slurm: bad fan", ""])
def test_who_speaks_on_a_node_that_its_cluster_has_closed_or_calls_down_contradicts_its_death(
    closed: str,
) -> None:
    """A slurmd that died, or an administrator who drains, says nothing about the supervisors there."""
    lab = Lab()
    job = lab.running()
    (where,) = lab.attempt(job).node_names
    facts = lab.cluster.facts[where]
    lab.cluster.facts[where] = msgspec.structs.replace(facts, is_alive=False, closed=closed)
    lab.turn()
    with pytest.raises(StateError, match=f"{job.reference} there has been silent for 0 s") as refused:
        lab.decide(where, NodeState.DEAD)
    assert f"`shoal drain {where}`" in (refused.value.hint or "")
    lab.clock.advance(QUIET_S + 1)
    lab.decide(where, NodeState.DEAD)
    lab.core.leases.heard(lab.attempt(job).attempt_id, where)
    lab.heal()
    assert (lab.status(job), len(lab.attempts(job))) == ("running", 1), "it spoke before it was replaced"


def test_a_node_on_which_another_job_is_heard_from_is_not_declared_dead_for_a_silent_one() -> None:
    lab = Lab(num_nodes=1)
    silent, well = lab.running(), lab.running()
    facts = lab.cluster.facts["n1"]
    lab.cluster.facts["n1"] = msgspec.structs.replace(facts, is_alive=False, closed="drained in Slurm")
    lab.heal()
    lab.clock.advance(QUIET_S + 1)
    lab.core.leases.heard(lab.attempt(well).attempt_id, "n1")
    with pytest.raises(StateError) as refused:
        lab.decide("n1", NodeState.DEAD)
    assert well.reference in refused.value.message
    assert silent.reference not in refused.value.message


def test_a_node_is_silent_since_its_last_word_and_not_since_its_engine_stopped_to_count_on_it() -> None:
    """An engine takes a keeper for alive for a while after each word: that is no later word."""
    lab = Lab(num_nodes=1)
    job = lab.running()
    look = lab.engine.list_owned

    async def late() -> list[Observation]:
        return [msgspec.structs.replace(seen, silent_s=QUIET_S + 1) for seen in await look()]

    lab.core.engine.list_owned = late  # type: ignore[method-assign]
    facts = lab.cluster.facts["n1"]
    lab.cluster.facts["n1"] = msgspec.structs.replace(facts, is_alive=False)
    lab.clock.advance(QUIET_S + 1)
    lab.turn()
    assert begin_anew(lab, "n1") == (job.job_id,)


def begin_anew(lab: Lab, name: str, key: str | None = None) -> tuple[str, ...]:
    return now(lab.plane.set_node_state(ANA, name, NodeState.DEAD, key=key)).begin_anew


def test_who_declares_a_node_dead_is_told_which_jobs_begin_anew() -> None:
    lab = Lab(num_nodes=1, script=always(Act(run_s=None, stop_s=60.0)))
    stopping, goes_on = lab.running(), lab.running()
    lab.cluster.cut("n1")
    lab.stop(stopping)
    lab.clock.advance(QUIET_S + 1)
    lab.turn()
    assert begin_anew(lab, "n1", key="k") == (goes_on.job_id,)
    lab.heal()
    assert begin_anew(lab, "n1", key="k") == (goes_on.job_id,), "as it was decided, whatever came of it since"
    assert (lab.status(stopping), len(lab.attempts(stopping))) == ("cancelled", 1)
    assert (lab.status(goes_on), len(lab.attempts(goes_on))) == ("queued", 2)


def test_a_gang_whose_share_on_a_dead_node_had_ended_does_not_begin_anew_for_it() -> None:
    lab = Lab(script=lambda order: Act(run_s=5.0 if order.node == "n1" else None))
    job = lab.running(resources={"nodes": 2, "cpus": 1})
    lab.clock.advance(6)
    lab.turn()
    assert lab.attempt(job).nodes_left == ("n2",)
    lab.cluster.cut("n1")
    lab.heal()
    assert begin_anew(lab, "n1") == ()
    lab.heal()
    assert (lab.status(job), len(lab.attempts(job))) == ("running", 1)


def test_what_waits_in_the_queue_of_an_engine_that_is_away_speaks_for_no_node() -> None:
    lab = Lab(num_nodes=1, script=always(Act(claim_s=600.0)))
    look = lab.engine.list_owned

    async def queued() -> list[Observation]:
        return [msgspec.structs.replace(seen, is_queued=True) for seen in await look()]

    lab.core.engine.list_owned = queued  # type: ignore[method-assign]
    job = lab.running()
    assert lab.core.leases.waits(lab.attempt(job).attempt_id)
    lab.engine.lose_all()
    lab.heal()
    assert lab.decide("n1", NodeState.DEAD).state is NodeState.DEAD


def test_who_waited_at_the_last_look_and_speaks_since_contradicts_the_death_of_his_node() -> None:
    lab = Lab(num_nodes=1, script=always(Act(claim_s=600.0)))
    own = lab.attempt(lab.running())
    lab.engine.lose_all()
    lab.heal()
    lab.core.leases.trouble(own.attempt_id, "n1", "the cluster cannot be asked", is_queued=True)
    renewal = Renewal(attempt_id=own.attempt_id, epoch=own.epoch, node="n1", phase=Phase.PREPARING)
    now(lab.plane.renew(renewal))
    with pytest.raises(StateError, match="may be alive"):
        lab.decide("n1", NodeState.DEAD)


def test_a_cluster_that_has_suspended_a_share_speaks_for_nobody_on_its_node() -> None:
    """Its word holds off the fence: what is suspended cannot keep it."""
    lab = Lab(num_nodes=1)
    job = lab.running()
    look = lab.engine.list_owned

    async def suspended() -> list[Observation]:
        return [msgspec.structs.replace(seen, is_hearsay=True, raw="SUSPENDED") for seen in await look()]

    lab.core.engine.list_owned = suspended  # type: ignore[method-assign]
    facts = lab.cluster.facts["n1"]
    lab.cluster.facts["n1"] = msgspec.structs.replace(facts, is_alive=False)
    lab.clock.advance(15)
    lab.turn()
    with pytest.raises(StateError, match="silent for 15 s") as refused:
        lab.decide("n1", NodeState.DEAD)
    assert "in 6 s" in (refused.value.hint or "")
    lab.clock.advance(QUIET_S - 14)
    lab.turn()
    assert lab.core.leases.share_silence_s(lab.attempt(job), "n1") == 0
    assert begin_anew(lab, "n1") == (job.job_id,)
