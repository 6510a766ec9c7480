"""A log as a past that can be replayed, and as a workload."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.control.commands import arrays
from shoal.control.commands import submit as submitting
from shoal.control.commands.windows import WindowRequest
from shoal.engines.fake import Act, always
from shoal.model.moves import TaskEnded
from shoal.model.node import NodeState, WindowKind
from shoal.sim.cluster_shapes import ClusterShape
from shoal.sim.history.facts import Fact, NodeFact, QueuedFact, facts_of
from shoal.sim.history.losses import losses_in, without_losses
from shoal.sim.history.past import Past, past_of
from shoal.sim.history.replay import DecisionReplay
from shoal.sim.twin import simulate_workload
from shoal.sim.workload import Workload
from shoal.sim.workload_changes import with_nodes
from shoal.spec import parse_job
from shoal.store import EventFilter
from shoal.wire import EndKind, TaskOutcome
from tests.support.planes.bench import ANA, SPEC, USER, ControlPlaneLab, result_in_loop, result_of

FAILS = always(Act(run_s=2.0, kind=EndKind.EXITED, exit_code=1))


def facts(lab: ControlPlaneLab) -> list[tuple[int, Fact]]:
    events = lab.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 30))
    return list(facts_of(msgspec.to_builtins(events)))


def turns(lab: ControlPlaneLab, count: int, seconds: float = 1.0) -> None:
    for _ in range(count):
        lab.clock.advance(seconds)
        lab.run_loops()


def test_every_decision_of_a_busy_queue_comes_out_equal() -> None:
    lab = ControlPlaneLab(num_nodes=2, script=always(Act(run_s=3.0)))
    lab.heal()
    first = lab.submit(resources={"cpus": 6}, time_limit="1m")
    lab.submit(resources={"nodes": 2, "cpus": 8}, time_limit="1m")
    lab.submit_all(array={"indices": "0-4", "at_once": 2}, resources={"cpus": 2}, priority=5)
    lab.submit(after=[first.job_id])
    turns(lab, 12)
    result_of(lab.plane.set_node_state(ANA, "n1", NodeState.DRAINING, "repair"))
    lab.submit(resources={"cpus": 3})
    turns(lab, 8)
    verdicts = list(DecisionReplay().verdicts(facts(lab)))
    assert len(verdicts) >= 5
    assert all(verdict.is_equal for verdict in verdicts)


def test_decisions_around_a_node_that_is_gone_and_comes_back_come_out_equal() -> None:
    lab = ControlPlaneLab(num_nodes=2, script=always(Act(run_s=3.0)))
    lab.cluster.facts |= {
        name: msgspec.structs.replace(one, is_simulated=False) for name, one in lab.cluster.facts.items()
    }
    lab.heal()
    lab.submit_all(array={"indices": "0-5"}, resources={"nodes": 2, "cpus": 8}, time_limit="1m")
    turns(lab, 5)
    away = lab.cluster.facts.pop("n2")
    turns(lab, 30, 30.0)
    result_of(lab.plane.set_node_state(ANA, "n2", NodeState.CORDONED, "repair"))
    lab.submit(resources={"cpus": 8})
    turns(lab, 5)
    result_of(lab.plane.set_node_state(ANA, "n2", NodeState.READY, ""))
    lab.cluster.facts["n2"] = away
    turns(lab, 30)
    seen = [event.kind for event in lab.events("node.") if event.node == "n2"]
    assert [kind for kind in seen if kind in ("node.gone", "node.back")] == ["node.gone", "node.back"]
    verdicts = list(DecisionReplay().verdicts(facts(lab)))
    assert len(verdicts) >= 7
    assert all(verdict.is_equal for verdict in verdicts)


def test_decisions_around_a_node_that_its_cluster_closes_and_opens_come_out_equal() -> None:
    lab = ControlPlaneLab(num_nodes=2, script=always(Act(run_s=3.0)))
    lab.heal()
    lab.submit_all(array={"indices": "0-5"}, resources={"nodes": 2, "cpus": 8}, time_limit="1m")
    turns(lab, 5)
    open_facts = lab.cluster.facts["n2"]
    lab.cluster.facts["n2"] = msgspec.structs.replace(open_facts, closed="drained in Slurm: bad fan")
    lab.cluster.cut("n2")
    turns(lab, 10)
    waiting = lab.submit(resources={"nodes": 2, "cpus": 8})
    turns(lab, 2)
    explanation = lab.plane.explain(lab.stored_job(waiting), lab.attempts(waiting))
    assert "n2 drained in Slurm: bad fan" in str(explanation)
    lab.cluster.facts["n2"] = open_facts
    lab.cluster.heal("n2")
    turns(lab, 30)
    assert all(verdict.is_equal for verdict in DecisionReplay().verdicts(facts(lab)))
    assert not any(fact.is_lost for _, fact in facts(lab) if isinstance(fact, NodeFact)), "it never failed"


def test_decisions_around_a_node_that_others_come_to_and_leave_come_out_equal() -> None:
    lab = ControlPlaneLab(num_nodes=2, script=always(Act(run_s=1.0)))
    lab.heal()
    facts_of = lab.cluster.facts["n1"]
    went = []
    for is_busy in (False, True, False):
        lab.cluster.facts["n1"] = msgspec.structs.replace(facts_of, is_busy=is_busy)
        turns(lab, 2)
        job = lab.submit(resources={"cpus": 1})
        turns(lab, 5)
        went.append(lab.attempts(job)[0].node_names)
    assert went == [("n1",), ("n2",), ("n1",)]
    events = [(event.kind, event.data) for event in lab.events("node.") if event.node == "n1"]
    assert events[1:] == [("node.busy", {}), ("node.idle", {})], "no more than that: they come and go all day"
    verdicts = list(DecisionReplay().verdicts(facts(lab)))
    assert len(verdicts) >= 3
    assert all(verdict.is_equal for verdict in verdicts)


def test_retries_and_their_backoff_are_part_of_the_past() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=FAILS)
    lab.heal()
    lab.submit(retry={"max": 2, "backoff": "4s"})
    turns(lab, 30)
    verdicts = list(DecisionReplay().verdicts(facts(lab)))
    assert len(verdicts) == 3
    assert all(verdict.is_equal for verdict in verdicts)


def test_decision_to_move_an_externally_stopped_job_comes_out_equal() -> None:
    lab = ControlPlaneLab(num_nodes=2)
    job = lab.running_job()
    (first,) = lab.attempts(job)
    stopped = TaskOutcome(
        attempt_id=first.attempt_id,
        epoch=first.epoch,
        node=first.node_names[0],
        kind=EndKind.STOPPED,
        ended_at=lab.clock.now(),
        is_external_stop=True,
    )
    result_of(
        lab.store.write(
            lambda tx: lab.core.records.recorder.advance(tx, first.attempt_id, TaskEnded(stopped))
        )
    )
    turns(lab, 2)
    assert [one.node_names for one in lab.attempts(job)] == [("n1",), ("n2",)]
    verdicts = list(DecisionReplay().verdicts(facts(lab)))
    assert len(verdicts) == 2
    assert all(verdict.is_equal for verdict in verdicts)


def test_past_becomes_a_workload_with_the_run_times_of_its_last_attempts() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(run_s=5.0)))
    lab.heal()
    first = lab.submit(name="a", resources={"cpus": 8})
    lab.submit(name="b", resources={"cpus": 8}, after=[first.job_id])
    waited_for = lab.submit(name="c", resources={"cpus": 8})
    lab.submit(name="waits", resources={"cpus": 1}, after=[waited_for.job_id])
    lab.stop(lab.submit(name="given-up", resources={"cpus": 8}))
    turns(lab, 12)
    past = past_of(facts(lab))
    jobs = {job.name: job for job in past.workload.jobs}
    assert set(jobs) == {"a", "b", "c", "waits"}
    assert past.num_given_up == 1
    assert past.num_open >= 1
    assert jobs["b"].submitted_at >= jobs["a"].submitted_at + 5
    assert all(5 <= jobs[name].run_s <= 7 for name in "ab")
    assert jobs["waits"].run_s > 0
    assert [node.name for node in past.workload.nodes] == ["n1"]


def test_node_that_came_later_comes_later_in_the_workload() -> None:
    lab = ControlPlaneLab(num_nodes=2, script=always(Act(run_s=5.0)))
    lab.heal()
    lab.submit()
    lab.run_loops()
    result_of(lab.plane.set_node_state(ANA, "n2", NodeState.CORDONED, "repair"))
    past = past_of(facts(lab))
    (change,) = past.workload.changes
    assert (change.name, change.view is not None and change.view.closed_because is not None) == ("n2", True)


def limited_past() -> tuple[ControlPlaneLab, Past]:
    """Two nodes, one in maintenance from the second minute on, and an array that runs two at a time."""
    lab = ControlPlaneLab(num_nodes=2, script=always(Act(run_s=20.0)))
    lab.heal()
    window = WindowRequest(
        kind=WindowKind.MAINTENANCE, nodes=("n1",), from_at=lab.clock.now() + 60, duration_s=300
    )
    result_of(lab.plane.declare_window(ANA, window))
    lab.submit_all(name="array", array={"indices": "0-5", "at_once": 2}, resources={"cpus": 1})
    lab.submit_all(name="wide", array={"indices": "0-5"}, resources={"cpus": 8}, time_limit="30s")
    turns(lab, 100, 5.0)
    return lab, past_of(facts(lab))


def starts_and_ends(workload: Workload, past: Past, name: str) -> list[tuple[float, float]]:
    outcome = simulate_workload(workload, past.policy)
    times = zip(workload.jobs, outcome.starts, outcome.ends, strict=True)
    return sorted((start, end) for job, start, end in times if job.name == name)


def test_past_with_windows_and_limited_arrays_reproduces() -> None:
    lab, past = limited_past()
    verdicts = list(DecisionReplay().verdicts(facts(lab)))
    assert len(verdicts) >= 6
    assert all(verdict.is_equal for verdict in verdicts)
    assert past.num_open == 0


def test_array_runs_as_many_at_once_in_the_simulated_past_as_it_did() -> None:
    _, past = limited_past()
    more = with_nodes(past.workload, [ClusterShape(4, 4, "fake")])
    for workload in (past.workload, more):
        times = starts_and_ends(workload, past, "array")
        assert len(times) == 6
        at_once = [sum(begin <= start < end for begin, end in times) for start, _ in times]
        assert max(at_once) == 2


def test_maintenance_of_the_past_keeps_its_node_free_in_the_simulation() -> None:
    _, past = limited_past()
    (declared,) = [change for change in past.workload.windows if change.windows]
    (window,) = declared.windows
    outcome = simulate_workload(past.workload, past.policy)
    open_too = simulate_workload(msgspec.structs.replace(past.workload, windows=()), past.policy)
    assert max(outcome.ends) > max(open_too.ends)
    wide = starts_and_ends(past.workload, past, "wide")
    in_it = [(start, end) for start, end in wide if start < window.until_at and end > window.from_at]
    at_once = [sum(begin <= start < end for begin, end in in_it) for start, _ in in_it]
    assert max(at_once, default=0) <= 1, "only one node is left in the window"


def past_with_a_loss() -> ControlPlaneLab:
    """Two nodes for 200 s, one of which is away for 50 of them."""
    lab = ControlPlaneLab(num_nodes=2, script=always(Act(run_s=20.0)))
    lab.heal()
    lab.submit(resources={"cpus": 1})
    turns(lab, 50)
    lab.cluster.power_off("n2")
    turns(lab, 50)
    lab.cluster.power_on("n2")
    turns(lab, 99)
    lab.submit(resources={"cpus": 1})
    turns(lab, 1)
    return lab


def test_rate_of_failures_is_learned_from_the_log() -> None:
    seen = losses_in(facts(past_with_a_loss()))
    assert seen.num_failures == 1
    assert 348 <= seen.service_s <= 352
    assert 49 <= seen.away_s <= 52
    learned = seen.rate()
    assert learned is not None
    assert (learned.mtbf_s, learned.repair_s) == (seen.service_s, seen.away_s)
    assert seen.rate(repair_s=7.0).repair_s == 7.0  # type: ignore[union-attr]


def test_node_that_was_drained_did_not_fail() -> None:
    lab = ControlPlaneLab(num_nodes=2, script=always(Act(run_s=5.0)))
    lab.heal()
    lab.submit()
    result_of(lab.plane.set_node_state(ANA, "n1", NodeState.DRAINING, "repair"))
    turns(lab, 10)
    seen = losses_in(facts(lab))
    assert (seen.num_failures, seen.rate()) == (0, None)


def test_recorded_failures_give_way_to_drawn_ones() -> None:
    past = past_of(facts(past_with_a_loss()))
    assert [change.is_loss for change in past.workload.changes] == [True, False]
    assert without_losses(past.workload).changes == ()


def test_eviction_after_a_restart_forgets_the_checkpoints_that_were_known_before() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    for seconds in (10.0, 20.0, 30.0):
        job = lab.running_job(resources={"cpus": 8})
        lab.clock.advance(100.0)
        lab.core.running.checkpoint_times.note_checkpoint(
            lab.attempt(job).attempt_id, lab.clock.now() - seconds
        )
    for _ in range(2):
        lab.submit(resources={"cpus": 8}, priority="production")
        lab.place()
        lab.restart()
    assert len(lab.events("job.evicted")) == 2
    assert all(verdict.is_equal for verdict in DecisionReplay().verdicts(facts(lab)))


def submit(lab: ControlPlaneLab, project: str, **spec: Any) -> None:
    lab.clock.advance(1.0)
    wanted = parse_job({**SPEC, "priority": "production", **spec})
    result_of(lab.plane.submit(ANA, wanted, project=project, owner=USER))


@pytest.mark.parametrize(
    ("ran", "waits"),
    [
        (("vision", "lab"), [("lab", "default"), ("lab", "default"), ("vision", "default")]),
        (("lab",), [("lab", "default"), ("lab", "default"), ("vision", "default")]),
        (("lab",), [("lab", "default"), ("lab", "default"), ("lab", "night")]),
    ],
    ids=["another had something", "no project had anything", "queues of one project"],
)
def test_start_after_a_restart_and_a_clock_set_back_counts_as_it_did(
    ran: tuple[str, ...], waits: list[tuple[str, str]]
) -> None:
    """By the clock, the last job ended before it began, so after the restart its project has no account. A
    replay without the restart has an account with a later date, and the next start would count at once up to
    that date.
    """
    lab = ControlPlaneLab(num_nodes=3, script=always(Act(run_s=600.0)), queues=("default", "night"))
    result_in_loop(lab.plane.create_project(ANA, "vision", {}))
    for project in ran:
        submit(lab, project, resources={"cpus": 8})
        lab.run_loops()
        lab.clock.advance(600.0)
    lab.clock.jump(-3600.0)
    lab.run_loops()
    for project, queue in waits:
        submit(lab, project, queue=queue, resources={"cpus": 8})
    lab.restart()
    lab.place()
    verdicts = list(DecisionReplay().verdicts(facts(lab)))
    assert len(verdicts[-1].starts) == 3
    assert [verdict.decision.starts for verdict in verdicts] == [verdict.starts for verdict in verdicts]


def test_elements_that_were_recorded_later_count_from_when_their_array_was_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def later(*_: object) -> None:
        return None

    monkeypatch.setattr(arrays, "MAX_RECORDED", 2)
    monkeypatch.setattr(submitting, "finish_submission", later)
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(run_s=3.0)))
    lab.heal()
    lab.submit_all(array={"indices": "0-5"}, resources={"cpus": 8})
    monkeypatch.undo()
    lab.clock.advance(1.0)
    lab.submit(resources={"cpus": 8})
    lab.clock.advance(1.0)
    result_of(arrays.finish_arrays(lab.core.records, lab.core.link.engine, lab.core.sealing))
    turns(lab, 30)
    past = facts(lab)
    assert len({fact.candidate.submitted_at for _, fact in past if isinstance(fact, QueuedFact)}) == 2
    assert all(verdict.is_equal for verdict in DecisionReplay().verdicts(past))
