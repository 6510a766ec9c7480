"""The queue in memory costs what changed, not what waits, and every waiting job has a reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from shoal.control.commands.explain import explain
from shoal.control.memory.queue import read_changes
from shoal.engines.fake import Act, always
from shoal.errors import StoreUnavailable
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.scheduler import Explanation, Plan, Planner, WaitReason
from shoal.scheduler.cycle import SchedulingCycle
from shoal.store import Tx
from shoal.wire import EndKind
from tests.support.planes.bench import ANA, ControlPlaneLab, result_of

WHOLE = {"cpus": 8}


class Plans:
    """Counts the plans, and the passes over all waiting jobs."""

    def __init__(self) -> None:
        self.num_whole = 0
        self.num = 0


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    counted = Plans()
    run, plan = SchedulingCycle.run, Planner.plan

    def count(self: SchedulingCycle) -> None:
        counted.num_whole += 1
        run(self)

    def made(self: Planner, at: float) -> Plan:
        counted.num += 1
        return plan(self, at)

    monkeypatch.setattr(SchedulingCycle, "run", count)
    monkeypatch.setattr(Planner, "plan", made)
    return counted


@pytest.fixture
def full() -> ControlPlaneLab:
    """One node, all of it taken, and a job that waits for it."""
    lab = ControlPlaneLab(num_nodes=1)
    lab.running_job(resources=WHOLE)
    lab.submit(resources=WHOLE)
    lab.place()
    lab.place()
    return lab


def wait_reason(lab: ControlPlaneLab, job: Job) -> Explanation:
    explanation = explain(
        lab.core.records.clock,
        lab.core.running,
        lab.core.planning,
        lab.core.link,
        lab.stored_job(job),
        lab.attempts(job),
    )
    assert explanation is not None
    return explanation


def test_after_the_first_look_only_what_changed_is_read() -> None:
    lab = ControlPlaneLab()
    for _ in range(20):
        lab.submit()
    lab.place()
    lab.place()
    job = lab.submit()
    changes = lab.read(lambda tx: read_changes(tx, lab.core.planning.queue.seen_seq))
    assert [changed.job_id for changed, _ in changes.jobs] == [job.job_id]


def test_new_job_is_judged_without_judging_all_others_again(full: ControlPlaneLab, plans: Plans) -> None:
    job = full.submit(resources=WHOLE)
    full.place()
    assert (plans.num, plans.num_whole) == (1, 0)
    assert wait_reason(full, job).why is WaitReason.RESOURCES


def test_freed_resources_go_to_the_job_that_waits_longest(full: ControlPlaneLab, plans: Plans) -> None:
    newcomer = full.submit(resources=WHOLE)
    full.place()
    result_of(full.plane.stop_job(ANA, full.core.planning.planner.snapshot().holdings[0].job_id))
    full.run_loops()
    assert plans.num_whole == 1
    assert full.status(newcomer) == "queued"
    assert len(full.running_tasks()) == 1


def test_node_that_opens_is_used_without_another_event() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    result_of(lab.plane.set_node_state(ANA, "n1", NodeState.CORDONED, "repair"))
    job = lab.submit()
    lab.place()
    assert wait_reason(lab, job).why is WaitReason.NODES_CLOSED
    result_of(lab.plane.set_node_state(ANA, "n1", NodeState.READY))
    lab.place()
    assert lab.status(job) == "starting"


def test_dependent_job_is_not_started_and_names_its_dependency() -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=10.0)))
    first = lab.running_job(name="first")
    second = lab.submit(after=[first.job_id])
    lab.place()
    assert lab.status(second) == "queued"
    explanation = wait_reason(lab, second)
    assert (explanation.why, explanation.sentence) == (
        WaitReason.DEPENDENCY,
        "waits for `lab/1 first` to succeed",
    )
    assert explanation.attempt_id == lab.attempt(second).attempt_id
    lab.clock.advance(10)
    lab.watch()
    lab.place()
    assert lab.status(second) == "starting"


def test_end_of_a_backoff_is_noticed_although_new_jobs_needed_no_plan() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(run_s=1.0, kind=EndKind.EXITED, exit_code=1)))
    job = lab.running_job(retry={"max": 3, "backoff": "4s"})
    lab.clock.advance(1)
    lab.watch()
    lab.place()
    assert wait_reason(lab, job).why is WaitReason.BACKOFF
    lab.submit(after=[job.job_id])
    left_s = lab.place()
    assert left_s is not None
    assert left_s <= 4.0
    lab.clock.advance(4)
    lab.place()
    assert lab.status(job) == "starting"


def test_plan_that_could_not_be_recorded_is_made_again(plans: Plans) -> None:
    lab = ControlPlaneLab()
    lab.heal()
    job = lab.submit()

    def fail() -> None:
        raise OSError("no space left on device")

    lab.store.meanwhile("before write", fail)
    with pytest.raises(OSError, match="no space"):
        lab.place()
    lab.place()
    assert plans.num == 2
    assert lab.status(job) == "starting"


def test_job_in_backoff_does_not_make_every_plan_a_full_one(plans: Plans) -> None:
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(run_s=1.0, kind=EndKind.EXITED, exit_code=1)))
    resting = lab.running_job(retry={"max": 3, "backoff": "10m"})
    lab.clock.advance(1)
    lab.watch()
    lab.running_job(resources=WHOLE)
    lab.submit(resources=WHOLE)
    lab.place()
    lab.place()
    before = plans.num_whole
    lab.submit(resources=WHOLE)
    lab.place()
    assert plans.num_whole == before
    assert wait_reason(lab, resting).why is WaitReason.BACKOFF


def test_stamps_of_jobs_that_are_gone_are_recorded_with_no_decision(full: ControlPlaneLab) -> None:
    for _ in range(5):
        job = full.submit(resources=WHOLE)
        full.place()
        result_of(full.plane.stop_job(ANA, job.job_id))
        full.place()
    assert len(full.core.planning.queue.fresh_stamps) == 1


def test_closed_time_of_a_node_is_shown_as_of_now() -> None:
    lab = ControlPlaneLab(num_nodes=1)
    lab.heal()
    result_of(lab.plane.set_node_state(ANA, "n1", NodeState.CORDONED, "bad NVLink"))
    job = lab.submit()
    lab.place()
    lab.clock.advance(7200)
    lab.place()
    assert wait_reason(lab, job).details == ('n1 cordoned by ana 2 h ago ("bad NVLink")',)


def test_run_times_are_learned_once_although_the_first_look_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = ControlPlaneLab(script=always(Act(run_s=10.0)))
    lab.running_job()
    lab.clock.advance(20.0)
    lab.watch()
    lab.restart()
    lab.heal()
    learned: list[int] = []
    monkeypatch.setattr(
        "shoal.control.loops.place.learn_run_times", lambda _, runs: learned.append(len(runs))
    )
    read, fails = lab.core.records.store.read, iter([False, True])

    async def away(fn: Callable[[Tx], object]) -> object:
        if next(fails, False):
            raise StoreUnavailable("the server is away")
        return await read(fn)

    monkeypatch.setattr(lab.core.records.store, "read", away)
    for _ in range(3):
        with suppress(StoreUnavailable):
            lab.place()
    assert [count for count in learned if count] == [1]


def test_growing_job_comes_first_whatever_similar_runs_teach() -> None:
    lab = ControlPlaneLab(num_nodes=1, script=always(Act(run_s=1.0)))
    lab.running_job(name="train", resources=WHOLE, time_limit="10h")
    job = lab.submit(name="train", resources=WHOLE, time_limit="10h")
    attempt = lab.attempt(job)
    goes_on = msgspec.structs.replace(attempt, is_growth=True, version=attempt.version + 1)
    result_of(lab.store.write(lambda tx: tx.attempts.update(goes_on)))
    result_of(lab.plane.set_node_state(ANA, "n1", NodeState.CORDONED, "repair"))
    lab.place()
    (before,) = lab.core.planning.planner.waiting
    lab.clock.advance(1)
    lab.watch()
    lab.place()
    (after,) = lab.core.planning.planner.waiting
    assert before.expected_s != after.expected_s
    assert (before.due_at, after.due_at) == (None, None)


def test_many_changed_jobs_are_applied_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the same as at once: dependencies are known, also between jobs of two batches."""
    monkeypatch.setattr("shoal.control.loops.place.MAX_APPLIED_AT_ONCE", 2)
    paused: list[bool] = []

    async def pause() -> None:
        paused.append(True)

    monkeypatch.setattr("shoal.control.loops.place.anyio.lowlevel.checkpoint", pause)
    lab = ControlPlaneLab(num_nodes=1)
    first = lab.submit(resources={"cpus": 1})
    jobs = lab.submit_all(array=5, after=[f"{first.number}:ended"], resources={"cpus": 1}).jobs
    lab.run_loops()
    assert paused == [True, True]
    assert lab.status(first) == "running"
    assert {lab.status(job) for job in jobs} == {"queued"}
    lab.stop(first)
    lab.run_loops()
    lab.run_loops()
    assert {lab.status(job) for job in jobs} == {"running"}
