"""Evidence, silence and time: when an attempt is given up, and when it must not be."""

from __future__ import annotations

import pytest

from shoal.control.loops.watch import LATE_STOP_S
from shoal.control.memory.leases import FENCE_MARGIN_S
from shoal.engines.fake import Act, Verb, always
from shoal.engines.fake.task import NEVER
from shoal.model.attempt import EndReason
from shoal.model.job import Job
from shoal.model.retry import LONG_LIFE_S
from shoal.wire import EndKind
from tests.support.planes.bench import ControlPlaneLab

FENCE_S = 60.0
GANG = {"nodes": 2, "cpus": 1}


def carry_renewals(lab: ControlPlaneLab) -> None:
    """The network works for the nodes that are not cut off."""
    for sent in lab.cluster.renewals():
        work = lab.plane.renew(sent.renewal)
        with pytest.raises(StopIteration) as answered:
            work.send(None)
        lab.cluster.deliver_reply(sent, answered.value.value)


def let_pass(lab: ControlPlaneLab, seconds: float, step_s: float = 5.0) -> None:
    """Let time pass in which supervisors renew and the control plane looks."""
    end = lab.clock.monotonic() + seconds
    while lab.clock.monotonic() < end:
        lab.clock.advance(min(step_s, end - lab.clock.monotonic()))
        carry_renewals(lab)
        lab.watch()


def reasons(lab: ControlPlaneLab, job: Job) -> list[EndReason | None]:
    return [attempt.reason for attempt in lab.attempts(job)]


def test_a_dead_supervisor_is_evidence_and_its_job_is_repaired_at_once() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    lab.cluster.kill_supervisor(lab.attempt(job).attempt_id, "n1")
    lab.watch()
    assert reasons(lab, job) == [EndReason.LOST, None]
    assert (lab.stored_job(job).losses, lab.stored_job(job).failures) == (1, 0)
    lab.clock.advance(0.5)
    lab.run_loops()
    assert lab.status(job) == "running"


@pytest.mark.parametrize("is_killed", [True, False])
def test_losses_are_counted_in_a_row_and_waiting_for_a_fence_is_no_run_time(is_killed: bool) -> None:
    """Three short lives, and then a long one, or a machine that is silent for as long as two."""
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(fence=f"{2 * LONG_LIFE_S:.0f}s")
    for row in range(1, 4):
        let_pass(lab, 10.0)
        lab.cluster.kill_supervisor(lab.attempt(job).attempt_id, "n1")
        lab.watch()
        assert lab.stored_job(job).losses == row
        lab.clock.advance(1.0)
        lab.run_loops()
    if is_killed:
        let_pass(lab, LONG_LIFE_S + 10.0)
        lab.cluster.kill_supervisor(lab.attempt(job).attempt_id, "n1")
        lab.watch()
    else:
        let_pass(lab, 10.0)
        lab.cluster.cut("n1")
        let_pass(lab, 2 * LONG_LIFE_S + FENCE_MARGIN_S + 10.0)
    assert reasons(lab, job)[3:] == [EndReason.LOST if is_killed else EndReason.FENCED, None]
    assert lab.stored_job(job).losses == (1 if is_killed else 4)


def test_silence_is_not_evidence_until_the_fence_has_certainly_passed() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(fence=f"{FENCE_S:.0f}s")
    lab.cluster.cut("n1")
    let_pass(lab, FENCE_S + FENCE_MARGIN_S)
    assert lab.status(job) == "running"
    assert lab.running_tasks() == []
    let_pass(lab, 1)
    assert reasons(lab, job) == [EndReason.FENCED, None]
    assert lab.attempts(job)[0].message == "no sign of life from n1"


@pytest.mark.parametrize("by", [3600, -3600])
def test_jump_of_the_clock_ends_no_attempt(by: float) -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(fence=f"{FENCE_S:.0f}s", time_limit="1h")
    lab.clock.jump(by)
    let_pass(lab, 300)
    assert lab.status(job) == "running"


def test_a_restarted_control_plane_counts_silence_from_its_own_start() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(fence=f"{FENCE_S:.0f}s")
    lab.cluster.cut("n1")
    let_pass(lab, 110)
    lab.restart()
    let_pass(lab, 110)
    assert lab.status(job) == "running"
    let_pass(lab, 20)
    assert reasons(lab, job)[0] is EndReason.FENCED


def test_unreachable_job_goes_on_when_it_is_seen_again() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(fence="10m")
    lab.cluster.cut("n1")
    let_pass(lab, 300)
    lab.cluster.heal("n1")
    let_pass(lab, 600)
    assert (lab.status(job), len(lab.attempts(job))) == ("running", 1)


def test_unreachable_node_does_not_hold_its_gang_for_ever() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job(resources=GANG, fence=f"{FENCE_S:.0f}s", grace="2s")
    lab.cluster.cut("n1")
    let_pass(lab, FENCE_S + FENCE_MARGIN_S)
    assert lab.status(job) == "running"
    let_pass(lab, 10)
    assert reasons(lab, job) == [EndReason.FENCED, None]
    assert lab.running_tasks() == []
    ends = {outcome.node: outcome.kind for outcome in lab.attempts(job)[0].outcomes}
    assert ends == {"n1": EndKind.FENCED, "n2": EndKind.STOPPED}


def test_engine_outage_longer_than_the_fence_kills_no_renewing_job() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(fence=f"{FENCE_S:.0f}s")
    lab.engine.lose_connection(Verb.LIST_OWNED)
    let_pass(lab, 600)
    assert lab.status(job) == "running"
    assert len(lab.running_tasks()) == 1


def hanging(lab: ControlPlaneLab, **spec: object) -> Job:
    """A job whose supervisor does not keep its time limit."""
    job = lab.running_job(**spec)
    for task in lab.cluster.tasks():
        task._first_end = (NEVER, task.act.kind)
    return job


def test_a_supervisor_that_keeps_its_time_limit_is_believed() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job(time_limit="30s")
    let_pass(lab, 30)
    assert (lab.status(job), lab.attempt(job).reason) == ("failed", EndReason.TIME_LIMIT)
    assert lab.stored_job(job).because == "n1: time_limit"


def test_a_supervisor_that_hangs_is_stopped_some_time_after_its_limit() -> None:
    lab = ControlPlaneLab()
    job = hanging(lab, time_limit="30s", grace="2s")
    let_pass(lab, 30 + LATE_STOP_S - 1)
    assert lab.status(job) == "running"
    let_pass(lab, 15)
    assert (lab.status(job), lab.attempt(job).reason) == ("failed", EndReason.TIME_LIMIT)
    assert lab.stored_job(job).because == "stopped by the time limit"


def test_a_time_limit_can_be_tried_again_where_the_job_says_so() -> None:
    lab = ControlPlaneLab()
    job = hanging(lab, time_limit="30s", grace="2s", retry={"max": 1, "on": ["time_limit"]})
    let_pass(lab, 30 + LATE_STOP_S + 15)
    assert reasons(lab, job) == [EndReason.TIME_LIMIT, None]


def test_a_restart_gives_a_hanging_supervisor_its_whole_limit_again() -> None:
    lab = ControlPlaneLab()
    job = hanging(lab, time_limit="30s")
    let_pass(lab, 80)
    lab.restart()
    let_pass(lab, 80)
    assert lab.status(job) == "running"
    let_pass(lab, 20)
    assert lab.attempt(job).stop_reason is EndReason.TIME_LIMIT


def test_job_without_a_time_limit_is_never_overdue() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job()
    let_pass(lab, 86_400, step_s=600)
    assert lab.status(job) == "running"


def test_a_running_gang_is_adopted_by_the_next_control_plane() -> None:
    lab = ControlPlaneLab()
    job = lab.running_job(resources=GANG)
    before = lab.attempt(job)
    lab.restart()
    lab.run_loops()
    assert (lab.status(job), lab.attempt(job)) == ("running", before)
    assert len(lab.cluster.native_ids) == 1


def test_end_during_a_control_plane_outage_is_learned_with_its_exit_code() -> None:
    lab = ControlPlaneLab(
        script=always(Act(run_s=10.0, kind=EndKind.EXITED, exit_code=7, message="rank 0 exited with 7"))
    )
    job = lab.running_job()
    lab.clock.advance(3600)
    lab.restart()
    lab.run_loops()
    ended = lab.stored_job(job)
    assert (ended.outcome, ended.exit_code, ended.because) == ("failed", 7, "n1: rank 0 exited with 7")


def test_processes_that_outlive_their_supervisor_are_never_fenced_and_keep_their_resources() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    job = lab.running_job(fence=f"{FENCE_S:.0f}s", resources={"gpus": 4})
    lab.cluster.orphan(lab.attempt(job).attempt_id, "n1", 10_000)
    other = lab.submit(resources={"gpus": 4})
    let_pass(lab, 5)
    lab.cluster.cut("n1")
    let_pass(lab, 10 * (FENCE_S + FENCE_MARGIN_S), step_s=30)
    lab.restart()
    let_pass(lab, 10 * (FENCE_S + FENCE_MARGIN_S), step_s=30)
    lab.cluster.heal("n1")
    lab.run_loops()
    assert (lab.status(job), lab.status(other)) == ("stopping", "queued")
    assert lab.running_tasks() == [(lab.attempt(job).attempt_id, "n1")]
    explanation = lab.plane.explain(lab.stored_job(job), lab.attempts(job))
    assert explanation is not None
    assert (explanation.why, explanation.facts) == ("orphaned", {"nodes": ["n1"]})
    lab.clock.advance(10_000)
    lab.watch()
    assert reasons(lab, job) == [EndReason.LOST, None]


def test_a_gang_that_lost_a_supervisor_is_stopped_and_held_until_all_of_it_is_gone() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=None, stop_s=500)))
    job = lab.running_job(fence=f"{FENCE_S:.0f}s", grace="15m", resources=GANG)
    attempt_id = lab.attempt(job).attempt_id
    lab.cluster.orphan(attempt_id, "n2", 1000)
    let_pass(lab, 450)
    assert len(lab.running_tasks()) == 2
    let_pass(lab, 450)
    assert lab.running_tasks() == [(attempt_id, "n2")]
    assert lab.status(job) == "stopping"
    let_pass(lab, 110)
    assert reasons(lab, job) == [EndReason.LOST, None]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_no_fence_passes_over_a_supervisor_that_may_still_wake_up(num_nodes: int) -> None:
    """The supervisor hangs before its claim: not begun, listed, and free to begin at any moment."""
    wakes_s = 10_000.0
    lab = ControlPlaneLab(
        script=lambda task_spec: Act(claim_s=wakes_s if task_spec.identity.node == "n1" else 0.0, run_s=None)
    )
    lab.heal()
    job = lab.submit(fence="60s", resources={"nodes": num_nodes, "cpus": 1})
    lab.place()
    first = lab.attempt(job).attempt_id
    for _ in range(5):
        lab.clock.advance(61)
        lab.engine.lose_connection(Verb.CANCEL)
        lab.watch()
        assert lab.attempt(job).attempt_id == first
    lab.engine.lose_connection(None)
    lab.watch()
    lab.watch()
    assert reasons(lab, job)[0] in (EndReason.LOST, EndReason.FENCED)
    lab.clock.advance(wakes_s)
    assert first not in {attempt_id for attempt_id, _ in lab.running_tasks()}
