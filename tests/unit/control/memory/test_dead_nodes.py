"""Nodes that operators declare dead: when they may, what contradicts them, and which jobs restart."""

from __future__ import annotations

import msgspec
import pytest

from shoal.control.memory.leases import QUIET_S
from shoal.engines.base import Observation
from shoal.engines.fake import Act, always
from shoal.errors import StateError
from shoal.model.attempt import EndReason
from shoal.model.evidence import Evidence
from shoal.model.node import NodeState
from shoal.wire import Renewal, TaskPhase
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of


def test_operators_declaration_that_a_node_is_dead_is_evidence() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    (lost,) = lab.attempt(job).node_names
    lab.cluster.cut(lost)
    lab.cluster.power_off(lost)
    lab.run_loops()
    with pytest.raises(StateError, match=f"{job.reference} there has been silent for 0 s") as refused:
        lab.set_node_state(lost, NodeState.DEAD)
    assert f"if it is off, say so in 21 s: `shoal nodes declare-dead {lost}`" in (refused.value.hint or "")
    lab.clock.advance(QUIET_S + 1)
    lab.run_loops()
    assert lab.status(job) == "running"
    lab.set_node_state(lost, NodeState.DEAD)
    lab.heal()
    first = lab.attempts(job)[0]
    assert (first.reason, first.message) == (EndReason.LOST, f"{lost}: declared dead by ana")
    lab.clock.advance(1)
    lab.run_loops()
    assert lab.status(job) == "running"
    assert lab.attempt(job).node_names != (lost,)


def test_the_living_rest_of_a_gang_is_stopped_when_a_node_of_it_is_declared_dead() -> None:
    lab = ControlPlaneLab(num_nodes=3, script=always(Act(run_s=None, stop_s=5.0)))
    job = lab.running_job(resources={"nodes": 3, "cpus": 1})
    lab.cluster.cut("n1")
    lab.cluster.power_off("n1")
    lab.clock.advance(QUIET_S + 1)
    lab.heal()
    lab.set_node_state("n1", NodeState.DEAD)
    lab.heal()
    assert lab.status(job) == "stopping"
    lab.watch()
    lab.clock.advance(5)
    lab.watch()
    assert lab.attempts(job)[0].reason is EndReason.LOST
    assert lab.running_tasks() == []


def test_a_dead_node_that_answers_again_is_asked_what_runs_there() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=None, stop_s=5.0)))
    job = lab.running_job()
    (late,) = lab.attempt(job).node_names
    lab.cluster.cut(late)
    lab.clock.advance(QUIET_S + 1)
    lab.heal()
    lab.set_node_state(late, NodeState.DEAD)
    lab.cluster.heal(late)
    lab.heal()
    assert lab.status(job) == "stopping"
    assert len(lab.running_tasks()) == 1
    lab.clock.advance(5)
    lab.watch()
    assert lab.attempts(job)[0].reason is EndReason.PREEMPTED


def test_job_under_submission_to_a_dead_node_is_not_given_up_before_the_answer() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    attempt = lab.attempt(job)
    (lost,) = attempt.node_names
    lab.cluster.power_off(lost)
    lab.cluster.cut(lost)
    lab.clock.advance(QUIET_S + 1)
    lab.heal()
    lab.set_node_state(lost, NodeState.DEAD)
    lab.core.running.submitting.add(attempt.attempt_id)
    lab.heal()
    assert lab.attempt(job) == attempt
    lab.core.running.submitting.discard(attempt.attempt_id)
    lab.heal()
    assert lab.attempts(job)[0].reason is EndReason.LOST


def test_nothing_is_placed_on_a_dead_node_until_it_is_resumed() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    lab.cluster.power_off("n1")
    lab.heal()
    lab.set_node_state("n1", NodeState.DEAD)
    lab.cluster.power_on("n1")
    job = lab.submit()
    lab.run_loops()
    assert lab.status(job) == "queued"
    lab.set_node_state("n1", NodeState.READY)
    lab.run_loops()
    assert lab.status(job) == "running"


def test_a_node_that_answers_is_not_declared_dead() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    with pytest.raises(StateError, match="answers"):
        lab.set_node_state("n1", NodeState.DEAD)


def test_declaring_an_alive_node_dead_is_refused_with_try_again() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.running_job()
    with pytest.raises(StateError, match="as far as its cluster knows") as refused:
        lab.set_node_state("n1", NodeState.DEAD)
    hint = "if the node is off, its cluster has yet to notice: say it again in a minute"
    assert refused.value.hint == f"stop it with `shoal drain n1`; {hint}"


def test_node_can_be_declared_dead_despite_the_engines_last_word_before_an_outage() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    lab.engine.lose_cluster()
    lab.cluster.power_off("n1")
    lab.run_loops()
    assert lab.node("n1").facts.is_alive, "as it last said"
    with pytest.raises(StateError, match=f"{job.reference} there has been silent for 0 s"):
        lab.set_node_state("n1", NodeState.DEAD)
    lab.clock.advance(QUIET_S + 1)
    lab.run_loops()
    explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert explanation is not None
    assert "`shoal nodes declare-dead n1`" in (explanation.hint or "")
    with pytest.raises(StateError, match=f"still holds {job.reference}"):
        result_of(lab.plane.remove_node(ANA, "n1"))
    lab.set_node_state("n1", NodeState.DEAD)
    lab.heal()
    first = lab.attempts(job)[0]
    assert (first.reason, first.message) == (EndReason.LOST, "n1: declared dead by ana")
    result_of(lab.plane.remove_node(ANA, "n1"))


def test_renewal_contradicts_a_declared_death_while_the_engine_is_away() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    lab.engine.lose_cluster()
    lab.clock.advance(QUIET_S + 1)
    lab.run_loops()
    lab.set_node_state("n1", NodeState.DEAD)
    lab.core.running.leases.note_alive(lab.attempt(job).attempt_id, "n1")
    lab.heal()
    assert (lab.status(job), len(lab.attempts(job))) == ("running", 1)
    lab.clock.advance(QUIET_S + 1)
    lab.heal()
    assert lab.attempts(job)[0].reason is EndReason.LOST


@pytest.mark.parametrize("closed", ["drained in Slurm: bad fan", ""])
def test_renewal_contradicts_a_declared_death_on_a_closed_or_down_node(
    closed: str,
) -> None:
    """A slurmd that died, or an administrator who drains, says nothing about the supervisors there."""
    lab = ControlPlaneLab()
    job = lab.running_job()
    (where,) = lab.attempt(job).node_names
    facts = lab.cluster.facts[where]
    lab.cluster.facts[where] = msgspec.structs.replace(facts, is_alive=False, closed=closed)
    lab.run_loops()
    with pytest.raises(StateError, match=f"{job.reference} there has been silent for 0 s") as refused:
        lab.set_node_state(where, NodeState.DEAD)
    assert f"`shoal drain {where}`" in (refused.value.hint or "")
    lab.clock.advance(QUIET_S + 1)
    lab.set_node_state(where, NodeState.DEAD)
    lab.core.running.leases.note_alive(lab.attempt(job).attempt_id, where)
    lab.heal()
    assert (lab.status(job), len(lab.attempts(job))) == ("running", 1), "it spoke before it was replaced"


def test_node_with_another_renewing_job_is_not_declared_dead() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    silent, well = lab.running_job(), lab.running_job()
    facts = lab.cluster.facts["n1"]
    lab.cluster.facts["n1"] = msgspec.structs.replace(facts, is_alive=False, closed="drained in Slurm")
    lab.heal()
    lab.clock.advance(QUIET_S + 1)
    lab.core.running.leases.note_alive(lab.attempt(well).attempt_id, "n1")
    with pytest.raises(StateError) as refused:
        lab.set_node_state("n1", NodeState.DEAD)
    assert well.reference in refused.value.message
    assert silent.reference not in refused.value.message


def test_silence_of_a_node_counts_from_its_last_renewal() -> None:
    """An engine takes a node agent for alive for a while after each report. That is no later report."""
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    list_owned = lab.engine.list_owned

    async def late() -> list[Observation]:
        return [msgspec.structs.replace(seen, silent_s=QUIET_S + 1) for seen in await list_owned()]

    lab.core.link.engine.list_owned = late  # type: ignore[method-assign]
    facts = lab.cluster.facts["n1"]
    lab.cluster.facts["n1"] = msgspec.structs.replace(facts, is_alive=False)
    lab.clock.advance(QUIET_S + 1)
    lab.run_loops()
    assert begin_anew(lab, "n1") == (job.job_id,)


def begin_anew(lab: ControlPlaneLab, name: str, key: str | None = None) -> tuple[str, ...]:
    return result_of(lab.plane.set_node_state(ANA, name, NodeState.DEAD, key=key)).restarted_job_ids


def test_declaring_a_node_dead_names_the_jobs_that_restart() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(run_s=None, stop_s=60.0)))
    stopping, goes_on = lab.running_job(), lab.running_job()
    lab.cluster.cut("n1")
    lab.stop(stopping)
    lab.clock.advance(QUIET_S + 1)
    lab.run_loops()
    assert begin_anew(lab, "n1", key="k") == (goes_on.job_id,)
    lab.heal()
    assert begin_anew(lab, "n1", key="k") == (goes_on.job_id,), "as it was decided, whatever came of it since"
    assert (lab.status(stopping), len(lab.attempts(stopping))) == ("cancelled", 1)
    assert (lab.status(goes_on), len(lab.attempts(goes_on))) == ("queued", 2)


def test_gang_does_not_restart_for_a_dead_node_whose_task_had_ended() -> None:
    lab = ControlPlaneLab(
        script=lambda task_spec: Act(run_s=5.0 if task_spec.identity.node == "n1" else None)
    )
    job = lab.running_job(resources={"nodes": 2, "cpus": 1})
    lab.clock.advance(6)
    lab.run_loops()
    assert lab.attempt(job).nodes_left == ("n2",)
    lab.cluster.cut("n1")
    lab.heal()
    assert begin_anew(lab, "n1") == ()
    lab.heal()
    assert (lab.status(job), len(lab.attempts(job))) == ("running", 1)


def test_queued_task_of_an_engine_in_outage_is_no_sign_of_life_of_a_node() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(claim_s=600.0)))
    list_owned = lab.engine.list_owned

    async def queued() -> list[Observation]:
        return [msgspec.structs.replace(seen, evidence=Evidence.QUEUED) for seen in await list_owned()]

    lab.core.link.engine.list_owned = queued  # type: ignore[method-assign]
    job = lab.running_job()
    assert lab.core.running.leases.queue_reasons(lab.attempt(job).attempt_id)
    lab.engine.lose_cluster()
    lab.heal()
    assert lab.set_node_state("n1", NodeState.DEAD).state is NodeState.DEAD


def test_queued_task_that_has_since_renewed_contradicts_a_declared_death() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(claim_s=600.0)))
    attempt = lab.attempt(lab.running_job())
    lab.engine.lose_cluster()
    lab.heal()
    lab.core.running.leases.note_trouble(
        attempt.attempt_id, "n1", "the cluster cannot be asked", is_queued=True
    )
    renewal = Renewal(
        attempt_id=attempt.attempt_id, epoch=attempt.epoch, node="n1", phase=TaskPhase.PREPARING
    )
    result_of(lab.plane.renew(renewal))
    with pytest.raises(StateError, match="may be alive"):
        lab.set_node_state("n1", NodeState.DEAD)


def test_suspended_task_is_no_sign_of_life_of_its_node() -> None:
    """The cluster's word holds off the fence, because a suspended task cannot keep its fence."""
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    list_owned = lab.engine.list_owned

    async def suspended() -> list[Observation]:
        return [
            msgspec.structs.replace(seen, evidence=Evidence.SUSPENDED, raw="SUSPENDED")
            for seen in await list_owned()
        ]

    lab.core.link.engine.list_owned = suspended  # type: ignore[method-assign]
    facts = lab.cluster.facts["n1"]
    lab.cluster.facts["n1"] = msgspec.structs.replace(facts, is_alive=False)
    lab.clock.advance(15)
    lab.run_loops()
    with pytest.raises(StateError, match="silent for 15 s") as refused:
        lab.set_node_state("n1", NodeState.DEAD)
    assert "in 6 s" in (refused.value.hint or "")
    lab.clock.advance(QUIET_S - 14)
    lab.run_loops()
    assert lab.core.running.leases.task_silence_s(lab.attempt(job), "n1") == 0
    assert begin_anew(lab, "n1") == (job.job_id,)
