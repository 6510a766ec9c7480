"""Evictions: which job is asked to stop, what both sides read, and what holds while it stops."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from shoal.control.commands.renewals import renew
from shoal.engines.fake import Act, always
from shoal.model.attempt import AttemptState, EndReason
from shoal.model.people import DeviceAmounts
from shoal.scheduler import Policy, WaitReason
from shoal.sim.history.facts import facts_of
from shoal.sim.history.replay import DecisionReplay
from shoal.spec import parse_job
from tests.support.planes.bench import ANA, SPEC, USER, ControlPlaneLab, result_in_loop, result_of

SLOW_TO_STOP = always(Act(run_s=None, stop_s=20.0))
WHOLE = {"gpus": 4, "cpus": 4}


def test_production_job_evicts_a_batch_job_and_starts_in_its_place() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=SLOW_TO_STOP)
    batch = lab.running_job(resources=WHOLE, grace="60s")
    lab.clock.advance(600)
    urgent = lab.submit(resources=WHOLE, priority="production")
    later = lab.submit(resources=WHOLE)
    lab.run_loops()
    assert [lab.status(job) for job in (batch, urgent, later)] == ["stopping", "queued", "queued"]
    explanation = lab.plane.explain(lab.stored_job(urgent), lab.attempts(urgent))
    assert explanation is not None
    assert explanation.why is WaitReason.MAKING_ROOM
    lab.clock.advance(20)
    lab.run_loops()
    assert [lab.status(job) for job in (batch, urgent, later)] == ["queued", "running", "queued"]
    assert lab.attempts(batch)[0].reason is EndReason.PREEMPTED
    assert lab.stored_job(batch).failures == 0


def test_both_jobs_show_the_cost_of_an_eviction() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    batch = lab.running_job(name="slow", resources=WHOLE)
    lab.clock.advance(3600)
    urgent = lab.submit(name="fast", resources=WHOLE, priority="production")
    lab.place()
    (evicted,) = lab.events("job.evicted")
    (gained,) = lab.events("job.preempted_for")
    assert (evicted.job_id, gained.job_id) == (batch.job_id, urgent.job_id)
    assert evicted.data["for"] == f"{urgent.reference} fast"
    assert gained.data["num_jobs"] == 1
    assert gained.data["lost_device_s"] == evicted.data["lost_device_s"]
    assert 3600 <= evicted.data["lost_s"] < 3800
    assert lab.attempt(batch).message == (
        f"gave way to {urgent.reference} fast (priority 50 over 0), at a loss of at most 4.1 GPU-hours, "
        "2 min to start again included; no checkpoint of it is known"
    )
    lab.run_loops()
    lab.run_loops()
    explanation = lab.plane.explain(lab.stored_job(batch), lab.attempts(batch))
    assert explanation is not None
    assert any("gave way to" in line for line in explanation.details)


def test_eviction_message_does_not_name_another_project() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.running_job(resources={"gpus": 2, "cpus": 2})
    borrower = lab.running_job(resources={"gpus": 2, "cpus": 2})
    lab.clock.advance(Policy().settle_s)
    result_of(lab.plane.update_project(ANA, "lab", {"quota": DeviceAmounts(gpus=2)}))
    result_in_loop(lab.plane.create_project(ANA, "hush", {"quota": DeviceAmounts(gpus=2)}))
    wanted = parse_job({**SPEC, "resources": {"gpus": 2, "cpus": 2}})
    (gains,) = result_of(lab.plane.submit(ANA, wanted, project="hush", owner=USER)).jobs
    lab.place()
    assert lab.status(borrower) == "stopping"
    assert "hush" not in lab.attempt(borrower).message
    assert lab.attempt(borrower).message.startswith("gave way to a job of another project (its quota")
    (evicted,) = lab.events("job.evicted")
    assert evicted.data["for"] is None
    (gained,) = lab.events("job.preempted_for")
    assert gained.data["jobs"] == []
    lab.run_loops()
    lab.run_loops()
    assert (lab.status(gains), lab.status(borrower)) == ("running", "queued")


def test_no_job_stops_for_one_that_was_cancelled_meanwhile() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    batch = lab.running_job(resources=WHOLE)
    urgent = lab.submit(resources=WHOLE, priority="production")
    lab.store.meanwhile("before write", lambda: lab.stop(urgent))
    lab.place()
    assert lab.status(batch) == "running"
    assert not lab.events("job.evicted")


def test_no_other_victim_stops_if_one_has_ended_meanwhile() -> None:
    lab = ControlPlaneLab(num_nodes=2)
    first, second = lab.running_job(resources=WHOLE), lab.running_job(resources=WHOLE)
    lab.clock.advance(Policy().settle_s)
    urgent = lab.submit(resources={**WHOLE, "nodes": 2}, priority="production")
    lab.store.meanwhile("before write", lambda: lab.stop(first))
    lab.place()
    assert lab.attempt(second).state is AttemptState.RUNNING
    lab.run_loops()
    lab.run_loops()
    assert (lab.status(urgent), lab.status(second)) == ("running", "queued")


def test_restarted_control_plane_evicts_no_job_again() -> None:
    lab = ControlPlaneLab(num_nodes=2, script=SLOW_TO_STOP)
    jobs = [lab.running_job(resources=WHOLE, grace="60s") for _ in range(2)]
    lab.clock.advance(Policy().settle_s)
    urgent = lab.submit(resources=WHOLE, priority="production")
    lab.place()
    lab.restart()
    lab.run_loops()
    lab.run_loops()
    assert sorted(lab.status(job) for job in jobs) == ["running", "stopping"]
    lab.clock.advance(20)
    lab.run_loops()
    assert lab.status(urgent) == "running"
    assert len(lab.events("job.evicted")) == 1


def test_job_that_has_only_begun_is_left_alone_until_it_has_settled() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    batch = lab.running_job(resources=WHOLE)
    urgent = lab.submit(resources=WHOLE, priority="production")
    next_look_s = lab.place()
    assert lab.status(batch) == "running"
    assert next_look_s is not None
    assert 0 < next_look_s <= Policy().settle_s
    lab.clock.advance(Policy().settle_s)
    for _ in range(3):
        lab.run_loops()
    assert (lab.status(batch), lab.status(urgent)) == ("queued", "running")
    assert _is_reproduced(lab)


def test_job_with_a_checkpoint_is_evicted_before_one_without() -> None:
    lab = ControlPlaneLab(num_nodes=2)
    silent = lab.running_job(name="silent", resources=WHOLE)
    lab.clock.advance(600)
    saver = lab.running_job(name="saver", resources=WHOLE)
    lab.clock.advance(1000)
    for sent in lab.cluster.renewals():
        if sent.renewal.attempt_id == lab.attempt(silent).attempt_id:
            result_of(
                renew(
                    lab.core.upkeep,
                    lab.core.inputs,
                    lab.core.services,
                    msgspec.structs.replace(sent.renewal, saved_s=30.0),
                )
            )
    lab.submit(resources=WHOLE, priority="production")
    lab.place()
    assert (lab.status(silent), lab.status(saver)) == ("stopping", "running")
    assert lab.attempt(silent).message.endswith(
        "at a loss of at most 0.17 GPU-hours, 2 min to start again included; saved 30 s before"
    )
    log = lab.read(lambda tx: tx.events.page(0, limit=10_000))
    verdicts = list(DecisionReplay().verdicts(facts_of(msgspec.to_builtins(log))))
    assert verdicts[-1].evictions
    assert all(verdict.is_equal for verdict in verdicts)


def test_elastic_job_with_checkpoints_grows_onto_idle_nodes() -> None:
    lab = ControlPlaneLab(num_nodes=3)
    small = [lab.running_job(resources=WHOLE) for _ in range(2)]
    elastic = lab.running_job(resources={**WHOLE, "nodes": "1..3"})
    assert len(lab.attempt(elastic).allocation) == 1
    for job in small:
        lab.stop(job)
    lab.run_loops()
    lab.clock.advance(7200)
    lab.core.running.checkpoint_times.note_checkpoint(lab.attempt(elastic).attempt_id, lab.clock.now() - 30)
    lab.place()
    (grows,) = lab.events("job.grows")
    assert (grows.data["has_nodes"], grows.data["num_nodes"]) == (1, 3)
    assert lab.attempt(elastic).message.startswith("stopped to go on with 3 nodes instead of 1")
    for _ in range(3):
        lab.run_loops()
    assert (lab.status(elastic), len(lab.attempt(elastic).allocation)) == ("running", 3)
    assert lab.stored_job(elastic).failures == 0
    events = msgspec.to_builtins(lab.events())
    assert all(verdict.is_equal for verdict in DecisionReplay().verdicts(facts_of(events)))


def test_no_job_takes_the_nodes_of_one_that_restarts_to_grow() -> None:
    lab = ControlPlaneLab(num_nodes=3, script=SLOW_TO_STOP)
    small = [lab.running_job(resources=WHOLE, grace="60s") for _ in range(2)]
    elastic = lab.running_job(resources={**WHOLE, "nodes": "1..3"}, grace="60s")
    for job in small:
        lab.stop(job)
    lab.run_loops()
    lab.clock.advance(20)
    lab.run_loops()
    lab.clock.advance(1200)
    lab.core.running.checkpoint_times.note_checkpoint(lab.attempt(elastic).attempt_id, lab.clock.now() - 30)
    lab.place()
    assert lab.status(elastic) == "stopping"
    late = lab.submit(resources=WHOLE, time_limit="1m")
    lab.run_loops()
    assert lab.status(late) == "queued"
    lab.clock.advance(20)
    for _ in range(3):
        lab.run_loops()
    assert (lab.status(elastic), len(lab.attempt(elastic).allocation)) == ("running", 3)
    assert lab.status(late) == "queued"
    assert _is_reproduced(lab)


def test_job_at_the_limit_of_evictions_runs_on_and_every_decision_is_reproduced() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    batch = lab.running_job(resources=WHOLE)
    for times in range(1, 1 + Policy().max_evictions):
        lab.clock.advance(Policy().settle_s)
        urgent = lab.submit(resources=WHOLE, priority="production")
        for _ in range(3):
            lab.run_loops()
        assert (lab.status(batch), lab.status(urgent)) == ("queued", "running")
        assert lab.stored_job(batch).evictions == times
        lab.stop(urgent)
        lab.run_loops()
        lab.run_loops()
        assert lab.status(batch) == "running"
    last = lab.submit(resources=WHOLE, priority="production")
    lab.run_loops()
    lab.run_loops()
    assert (lab.status(batch), lab.status(last)) == ("running", "queued")
    assert len(lab.events("job.evicted")) == Policy().max_evictions
    assert _is_reproduced(lab)


def test_costs_of_both_sides_add_up_over_several_evictions() -> None:
    """Two jobs have others stop for them. One of the two also evicts jobs that the other would
    have evicted.
    """
    lab = ControlPlaneLab(num_nodes=2)
    for _ in range(4):
        lab.running_job(resources={"gpus": 2, "cpus": 2})
    lab.clock.advance(300)
    first = lab.submit(resources=WHOLE, priority="production")
    lab.run_loops()
    lab.run_loops()
    lab.clock.advance(900)
    lab.submit(resources={**WHOLE, "nodes": 2}, priority="interactive")
    for _ in range(3):
        lab.run_loops()
    lab.stop(first)
    lab.run_loops()
    evicted, gained = lab.events("job.evicted"), lab.events("job.preempted_for")
    assert len(evicted) == sum(event.data["num_jobs"] for event in gained) >= 4
    for figure in ("lost_device_s", "likely_device_s"):
        lost = sum(event.data[figure] for event in evicted)
        assert lost == pytest.approx(sum(event.data[figure] for event in gained))
    counts = Counter(str(event.job_id) for event in evicted)
    jobs = lab.read(lambda tx: [tx.jobs.get(job_id) for job_id in counts])
    assert {job.job_id: job.evictions for job in jobs if job} == counts


def _is_reproduced(lab: ControlPlaneLab) -> bool:
    log = lab.read(lambda tx: tx.events.page(0, limit=10_000))
    return all(verdict.is_equal for verdict in DecisionReplay().verdicts(facts_of(msgspec.to_builtins(log))))
