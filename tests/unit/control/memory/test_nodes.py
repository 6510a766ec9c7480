"""What operators do with nodes, what the engine says of them, and what becomes of the work there."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from shoal.control.loops.heal import _drained, _finish_drains
from shoal.control.memory.health import FORGOTTEN_S, GONE_S, LATE_S, MAX_GAP_S, EngineOutage, first_line
from shoal.engines.fake import Act, Verb, always
from shoal.errors import EngineUnreachable, NotFound, SpecError, StateError
from shoal.model.attempt import EndReason
from shoal.model.node import NodeFacts, NodeState
from shoal.scheduler import WaitReason
from shoal.store import KeyReused
from shoal.store.tables.attempts import AttemptTable
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of


def test_the_nodes_an_engine_has_are_found_and_recorded_once() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    lab.heal()
    assert [event.node for event in lab.events("node.added")] == ["n1", "n2"]
    assert lab.node("n1").facts == lab.cluster.facts["n1"]


def test_decision_about_a_node_is_recorded_with_operator_and_reason() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    changed = lab.set_node_state("n1", NodeState.CORDONED, "bad NVLink")
    assert (changed.state, changed.by, changed.because) == (NodeState.CORDONED, "ana", "bad NVLink")
    (event,) = lab.events("node.cordoned")
    assert event.data == {"from": "ready", "to": "cordoned", "because": "bad NVLink"}


def test_decision_about_an_unknown_node_is_refused() -> None:
    lab = ControlPlaneLab()
    with pytest.raises(NotFound, match="no node `n9`"):
        lab.set_node_state("n9", NodeState.CORDONED)


def test_a_decision_with_the_same_key_is_made_once() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    lab.set_node_state("n1", NodeState.CORDONED, key="k")
    lab.set_node_state("n1", NodeState.READY)
    assert lab.set_node_state("n1", NodeState.CORDONED, key="k").state is NodeState.READY
    with pytest.raises(KeyReused):
        lab.set_node_state("n2", NodeState.CORDONED, key="k")


def test_a_cordoned_node_keeps_its_work_and_takes_no_more() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    lab.set_node_state("n1", NodeState.CORDONED)
    waiting = lab.submit()
    lab.run_loops()
    assert (lab.status(job), lab.status(waiting)) == ("running", "queued")
    lab.set_node_state("n1", NodeState.READY)
    lab.run_loops()
    assert lab.status(waiting) == "running"


def test_a_drain_moves_the_work_and_costs_no_retry() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    (left,) = lab.attempt(job).node_names
    lab.set_node_state(left, NodeState.DRAINING)
    lab.run_loops()
    first, second = lab.attempts(job)
    assert (first.reason, first.message) == (EndReason.PREEMPTED, f"stopped by the drain of {left}")
    assert second.node_names != (left,)
    assert (lab.status(job), lab.stored_job(job).failures, lab.stored_job(job).losses) == ("running", 0, 0)


def test_a_drain_is_over_when_the_last_job_has_left_and_not_before() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(run_s=None, stop_s=30)))
    lab.running_job(grace="60s")
    lab.set_node_state("n1", NodeState.DRAINING, "bad fan")
    lab.run_loops()
    lab.heal()
    assert lab.node("n1").state is NodeState.DRAINING
    lab.clock.advance(31)
    lab.watch()
    lab.heal()
    lab.heal()
    drained = lab.node("n1")
    assert (drained.state, drained.by, drained.because) == (NodeState.DRAINED, "ana", "bad fan")
    assert [event.data["to"] for event in lab.events("node.drain")] == ["draining", "drained"]
    lab.place()
    assert lab.running_tasks() == []
    assert lab.set_node_state("n1", NodeState.READY).takes_work
    lab.run_loops()
    assert len(lab.running_tasks()) == 1


def test_drain_continues_if_the_node_got_work_since_the_look() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    lab.set_node_state("n1", NodeState.DRAINING)
    empty = lab.read(_drained)
    assert [node.name for node in empty] == ["n1"]
    lab.set_node_state("n1", NodeState.READY)
    lab.running_job()
    lab.set_node_state("n1", NodeState.DRAINING)
    result_of(lab.store.write(partial(_finish_drains, lab.core.records.clock, empty)))
    assert lab.node("n1").state is NodeState.DRAINING


def test_end_of_many_drains_looks_through_no_jobs_while_others_wait_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(*_: object) -> None:
        raise AssertionError("this takes 50 ms for each node where 20,000 jobs run")

    lab = ControlPlaneLab(num_nodes=3)
    lab.heal()
    for name in ("n1", "n2", "n3"):
        lab.set_node_state(name, NodeState.DRAINING)
    monkeypatch.setattr(AttemptTable, "holding_on", look)
    lab.heal()
    assert {lab.node(name).state for name in ("n1", "n2", "n3")} == {NodeState.DRAINED}


def test_a_gang_is_moved_when_one_of_its_nodes_is_drained() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    job = lab.running_job(resources={"nodes": 2, "cpus": 1})
    lab.set_node_state("n1", NodeState.DRAINING)
    lab.run_loops()
    assert lab.attempt(job).node_names == ("n2", "n3")


def test_a_drained_job_that_fits_nowhere_else_waits_and_says_for_what() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    lab.set_node_state("n1", NodeState.DRAINING, "new cooling")
    lab.run_loops()
    assert lab.status(job) == "queued"
    explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert explanation is not None
    assert 'drained by ana 0 s ago ("new cooling")' in " ".join((explanation.sentence, *explanation.details))


def test_an_attempt_placed_while_its_node_is_drained_is_not_started_there() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    job = lab.submit()
    lab.store.meanwhile("before write", lambda: lab.set_node_state("n1", NodeState.DRAINING))
    lab.place()
    assert lab.status(job) == "queued"
    assert lab.cluster.native_ids == {}


def test_a_node_that_does_not_answer_keeps_its_work_and_takes_no_more() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    lab.cluster.cut("n1")
    waiting = lab.submit()
    lab.run_loops()
    assert (lab.status(job), lab.status(waiting)) == ("running", "queued")
    assert [event.kind for event in lab.events("node.")] == ["node.added", "node.silent"]
    lab.cluster.heal("n1")
    lab.run_loops()
    assert (lab.status(waiting), lab.events("node.")[-1].kind) == ("running", "node.answers")


def test_node_closed_by_its_cluster_is_not_called_silent() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    facts = lab.cluster.facts["n1"]
    shut = msgspec.structs.replace(facts, is_alive=False, closed="drained in Slurm: bad fan")
    kinds = []
    for listed in (shut, facts, shut, msgspec.structs.replace(facts, is_alive=False), shut):
        lab.cluster.facts["n1"] = listed
        before = len(lab.events("node."))
        lab.heal()
        kinds.append([event.kind.removeprefix("node.") for event in lab.events("node.")[before:]])
        logged = msgspec.convert(lab.events("node.")[-1].data, NodeFacts)
        assert logged == listed, "as a reader of the log alone knows it"
    assert kinds == [["changed"], ["changed"], ["changed"], ["silent", "changed"], ["answers", "changed"]]


def test_node_missing_from_the_engines_list_is_kept_as_silent() -> None:
    lab = ControlPlaneLab()
    lab.cluster.facts["n2"] = msgspec.structs.replace(lab.cluster.facts["n2"], is_simulated=False)
    lab.heal()
    del lab.cluster.facts["n2"]
    lab.heal()
    assert not lab.node("n2").facts.is_alive


def without(lab: ControlPlaneLab, name: str, seconds: float = GONE_S) -> None:
    """The engine answers for this long without naming this node, which is not simulated."""
    lab.cluster.facts[name] = msgspec.structs.replace(lab.cluster.facts[name], is_simulated=False)
    lab.heal()
    del lab.cluster.facts[name]
    absent(lab, seconds)


def absent(lab: ControlPlaneLab, seconds: float) -> None:
    lab.heal()
    for _ in range(int(seconds / MAX_GAP_S)):
        lab.clock.advance(MAX_GAP_S)
        lab.heal()


def never_fits(lab: ControlPlaneLab, **resources: object) -> str:
    with pytest.raises(SpecError) as refused:
        lab.submit(resources=resources)
    return refused.value.message


def test_a_node_that_is_gone_for_long_counts_for_no_job_and_is_named() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    lab.cluster.cut("n2")
    waiting = lab.submit(resources={"nodes": 2, "cpus": 8})
    without(lab, "n2", GONE_S - MAX_GAP_S)
    lab.submit(resources={"nodes": 2, "cpus": 8})
    lab.place()
    lab.clock.advance(MAX_GAP_S)
    lab.heal()
    lab.place()
    assert lab.node("n2").is_gone
    assert "`shoal nodes remove n2`" in lab.node("n2").remarks[-1]
    assert never_fits(lab, nodes=2, cpus=8).endswith("has 1; n2 would do, which the cluster lists no more")
    explanation = lab.plane.explain(lab.stored_job(waiting), lab.attempts(waiting))
    assert explanation is not None
    assert explanation.why is WaitReason.NEVER_FITS
    assert explanation.sentence.endswith("; n2 would do, which the cluster lists no more")
    assert "n2" not in never_fits(lab, nodes=3, cpus=8), "it would not have been enough"


def test_node_listed_again_keeps_its_state() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    lab.set_node_state("n2", NodeState.CORDONED, "bad fan")
    facts = lab.cluster.facts["n2"]
    without(lab, "n2", FORGOTTEN_S)
    assert (lab.node("n2").is_gone, lab.node("n2").state) == (True, NodeState.CORDONED)
    lab.set_node_state("n2", NodeState.READY)
    lab.set_node_state("n2", NodeState.CORDONED, "worse fan")
    lab.place()
    lab.cluster.facts["n2"] = facts
    lab.cluster.cut("n2")
    lab.heal()
    assert (lab.node("n2").is_gone, lab.node("n2").facts.is_alive) == (False, False), "silent is not gone"
    lab.place()
    lab.submit(resources={"nodes": 2, "cpus": 8})
    assert [event.kind for event in lab.events("node.") if event.node == "n2"][-4:] == [
        "node.ready",
        "node.cordoned",
        "node.back",
        "node.changed",
    ]


def test_missing_node_without_an_operators_decision_is_forgotten() -> None:
    lab = ControlPlaneLab()
    without(lab, "n2", FORGOTTEN_S)
    assert [node.name for node in lab.read(lambda tx: tx.nodes.all())] == ["n1"]
    assert [event.kind for event in lab.events("node.") if event.node == "n2"][1:] == [
        "node.silent",
        "node.gone",
        "node.removed",
    ]


def test_a_node_that_something_may_run_on_is_not_gone() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job(resources={"nodes": 2, "cpus": 1})
    without(lab, "n2", FORGOTTEN_S)
    assert (lab.node("n2").is_gone, lab.status(job)) == (False, "running")
    written: list[bool] = []
    lab.store.meanwhile("before write", lambda: written.append(True))
    lab.heal()
    assert not written, "there is nothing to record of it, however often it is looked for"
    lab.stop(job)
    lab.clock.advance(3600)
    lab.run_loops()
    assert lab.attempts(job)[0].ended_at is not None
    lab.heal()
    assert lab.read(lambda tx: tx.nodes.get("n2")) is None


def test_failed_or_empty_answer_makes_no_node_gone() -> None:
    lab = ControlPlaneLab()
    without(lab, "n2", GONE_S / 2)
    lab.engine.lose_connection(Verb.NODES)
    absent(lab, GONE_S)
    lab.engine.lose_connection(None)
    n1 = lab.cluster.facts["n1"] = msgspec.structs.replace(lab.cluster.facts["n1"], is_simulated=False)
    lab.heal()
    del lab.cluster.facts["n1"]
    absent(lab, GONE_S)
    lab.cluster.facts["n1"] = n1
    lab.heal()
    lab.clock.advance(GONE_S)
    lab.heal()
    assert not lab.node("n2").is_gone, "two answers say nothing about the time between them"
    lab.restart()
    absent(lab, GONE_S - MAX_GAP_S)
    assert not lab.node("n2").is_gone, "a control plane that starts counts from 0"
    lab.clock.advance(MAX_GAP_S)
    lab.heal()
    assert lab.node("n2").is_gone


def test_node_listed_for_a_moment_counts_as_missing_from_0_again() -> None:
    lab = ControlPlaneLab()
    facts = lab.cluster.facts["n2"]
    without(lab, "n2", GONE_S - MAX_GAP_S)
    lab.cluster.facts["n2"] = facts
    lab.heal()
    without(lab, "n2", GONE_S - MAX_GAP_S)
    assert not lab.node("n2").is_gone


def test_an_engine_that_cannot_be_asked_changes_no_node() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    lab.engine.lose_connection(Verb.NODES)
    lab.heal()
    assert all(n.facts.is_alive for n in lab.read(lambda tx: tx.nodes.all()))


def test_new_facts_do_not_undo_what_an_operator_decided() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    lab.set_node_state("n1", NodeState.CORDONED, "bad fan")
    lab.cluster.facts["n1"] = msgspec.structs.replace(lab.cluster.facts["n1"], cpus=4.0)
    lab.heal()
    assert (lab.node("n1").state, lab.node("n1").facts.cpus) == (NodeState.CORDONED, 4.0)


def test_a_node_that_is_gone_can_be_removed_and_is_new_when_it_comes_back() -> None:
    lab = ControlPlaneLab()
    lab.heal()
    lab.cluster.cut("n1")
    lab.heal()
    result_of(lab.plane.remove_node(ANA, "n1", key="k"))
    result_of(lab.plane.remove_node(ANA, "n1", key="k"))
    lab.heal()
    assert lab.read(lambda tx: tx.nodes.get("n1")) is None
    assert [event.actor for event in lab.events("node.removed")] == [str(ANA)]
    lab.cluster.heal("n1")
    lab.heal()
    assert lab.node("n1").facts.is_alive


def test_a_node_that_answers_or_holds_work_is_not_removed() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job()
    with pytest.raises(StateError, match="n1 answers"):
        result_of(lab.plane.remove_node(ANA, "n1"))
    lab.cluster.cut("n1")
    lab.heal()
    with pytest.raises(StateError, match=f"still holds {job.reference}"):
        result_of(lab.plane.remove_node(ANA, "n1"))
    with pytest.raises(NotFound):
        result_of(lab.plane.remove_node(ANA, "n9"))


def away(lab: ControlPlaneLab) -> EngineOutage | None:
    return lab.core.link.outages.current


def test_an_engine_that_answers_again_is_believed_again() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    lab.engine.lose_cluster()
    lab.heal()
    lab.clock.advance(60)
    lab.heal()
    why = "nodes: no connection to the fake cluster"
    assert away(lab) == EngineOutage(since=lab.clock.now() - 60, has_answered=True, why=why)
    lab.engine.lose_connection(None)
    lab.heal()
    assert away(lab) is None
    with pytest.raises(StateError, match="answers"):
        lab.set_node_state("n1", NodeState.DEAD)


def test_control_plane_restarted_during_an_outage_does_not_date_the_nodes_by_its_start() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    lab.engine.lose_cluster()
    lab.heal()
    lab.clock.advance(3 * 3600)
    lab.restart()
    lab.engine.lose_cluster()
    lab.heal()
    outage = away(lab)
    assert outage is not None
    assert (outage.since, outage.has_answered) == (lab.clock.now(), False)
    lab.engine.lose_connection(None)
    lab.heal()
    lab.engine.lose_cluster()
    lab.heal()
    outage = away(lab)
    assert outage is not None
    assert outage.has_answered


def test_late_answer_is_shown_before_the_engine_gives_up_and_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    asked_at = lab.clock.now()

    def shown() -> EngineOutage | None:
        return lab.core.link.outages.reported

    async def nodes() -> list[NodeFacts]:
        assert shown() is None
        lab.clock.advance(LATE_S)
        assert shown() == EngineOutage(since=asked_at, has_answered=True, why="no answer for 3 s so far")
        assert away(lab) is None
        with pytest.raises(StateError, match="answers"):
            lab.set_node_state("n1", NodeState.DEAD)
        lab.clock.advance(17)
        raise EngineUnreachable("Ray did not answer `nodes` within 20 s")

    monkeypatch.setattr(lab.engine, "nodes", nodes)
    lab.heal()
    outage = away(lab)
    assert outage is not None
    assert (outage.since, outage.why) == (asked_at, "Ray did not answer `nodes` within 20 s")
    monkeypatch.undo()
    lab.heal()
    lab.clock.advance(60)
    assert shown() is None, "no question is open now"


def test_only_the_first_line_of_an_engine_error_is_kept() -> None:
    assert first_line("\n ssh: refused \nand more") == "ssh: refused"
    assert first_line("x" * 500) == "x" * 197 + "..."


def test_abandoned_simulated_nodes_go_once_they_hold_nothing() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=None, stop_s=0.0)))
    job = lab.running_job()
    (used,) = lab.attempt(job).node_names
    lab.cluster.facts.clear()
    lab.heal()
    assert [node.name for node in lab.read(lambda tx: tx.nodes.all())] == [used]
    result_of(lab.plane.stop_job(ANA, job.job_id))
    lab.run_loops()
    lab.heal()
    assert lab.read(lambda tx: tx.nodes.all()) == []
