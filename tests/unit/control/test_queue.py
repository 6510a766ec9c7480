"""The queue in memory costs what changed, not what waits; and nobody waits without being told why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from shoal.control.explain import explain
from shoal.control.queue import look
from shoal.engines.fake import Act, always
from shoal.errors import StoreUnavailable
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.scheduler import Explanation, Plan, Planner, Why
from shoal.scheduler.cycle import Cycle
from shoal.store import Tx
from shoal.wire import EndKind
from tests.support.lab import ANA, Lab, now

WHOLE = {"cpus": 8}


class Plans:
    """Counts the passes over everybody who waits, and the plans."""

    def __init__(self) -> None:
        self.num_whole = 0
        self.num = 0


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    counted = Plans()
    run, plan = Cycle.run, Planner.plan

    def count(self: Cycle) -> None:
        counted.num_whole += 1
        run(self)

    def made(self: Planner, at: float) -> Plan:
        counted.num += 1
        return plan(self, at)

    monkeypatch.setattr(Cycle, "run", count)
    monkeypatch.setattr(Planner, "plan", made)
    return counted


@pytest.fixture
def full() -> Lab:
    """One node, all of it taken, and a job that waits for it."""
    lab = Lab(num_nodes=1)
    lab.running(resources=WHOLE)
    lab.submit(resources=WHOLE)
    lab.place()
    lab.place()
    return lab


def told(lab: Lab, job: Job) -> Explanation:
    said = explain(lab.core, lab.job(job), lab.attempts(job))
    assert said is not None
    return said


def test_after_the_first_look_only_what_changed_is_read() -> None:
    lab = Lab()
    for _ in range(20):
        lab.submit()
    lab.place()
    lab.place()
    job = lab.submit()
    changes = lab.read(lambda tx: look(tx, lab.core.queue.seen))
    assert [found.job_id for found, _ in changes.jobs] == [job.job_id]


def test_newcomer_is_looked_at_without_asking_everybody_again(full: Lab, plans: Plans) -> None:
    job = full.submit(resources=WHOLE)
    full.place()
    assert (plans.num, plans.num_whole) == (1, 0)
    assert told(full, job).why is Why.RESOURCES


def test_what_is_given_back_is_given_to_who_waits_longest(full: Lab, plans: Plans) -> None:
    newcomer = full.submit(resources=WHOLE)
    full.place()
    now(full.plane.stop_job(ANA, full.core.planner.snapshot().holdings[0].job_id))
    full.turn()
    assert plans.num_whole == 1
    assert full.status(newcomer) == "queued"
    assert len(full.runs()) == 1


def test_node_that_opens_is_used_though_nothing_else_happened() -> None:
    lab = Lab(num_nodes=1)
    lab.heal()
    now(lab.plane.set_node_state(ANA, "n1", NodeState.CORDONED, "repair"))
    job = lab.submit()
    lab.place()
    assert told(lab, job).why is Why.NODES_CLOSED
    now(lab.plane.set_node_state(ANA, "n1", NodeState.READY))
    lab.place()
    assert lab.status(job) == "starting"


def test_job_that_waits_for_another_is_not_started_and_says_what_it_waits_for() -> None:
    lab = Lab(script=always(Act(run_s=10.0)))
    first = lab.running(name="first")
    second = lab.submit(after=[first.job_id])
    lab.place()
    assert lab.status(second) == "queued"
    said = told(lab, second)
    assert (said.why, said.sentence) == (Why.DEPENDENCY, "waits for `lab/1 first` to succeed")
    assert said.attempt_id == lab.attempt(second).attempt_id
    lab.clock.advance(10)
    lab.watch()
    lab.place()
    assert lab.status(second) == "starting"


def test_backoff_that_ends_is_noticed_though_newcomers_needed_no_plan() -> None:
    lab = Lab(num_nodes=1, script=always(Act(run_s=1.0, kind=EndKind.EXITED, exit_code=1)))
    job = lab.running(retry={"max": 3, "backoff": "4s"})
    lab.clock.advance(1)
    lab.watch()
    lab.place()
    assert told(lab, job).why is Why.BACKOFF
    lab.submit(after=[job.job_id])
    left_s = lab.place()
    assert left_s is not None
    assert left_s <= 4.0
    lab.clock.advance(4)
    lab.place()
    assert lab.status(job) == "starting"


def test_plan_that_could_not_be_recorded_is_made_again(plans: Plans) -> None:
    lab = Lab()
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


def test_one_that_rests_does_not_make_every_plan_a_whole_one(plans: Plans) -> None:
    lab = Lab(num_nodes=1, script=always(Act(run_s=1.0, kind=EndKind.EXITED, exit_code=1)))
    resting = lab.running(retry={"max": 3, "backoff": "10m"})
    lab.clock.advance(1)
    lab.watch()
    lab.running(resources=WHOLE)
    lab.submit(resources=WHOLE)
    lab.place()
    lab.place()
    before = plans.num_whole
    lab.submit(resources=WHOLE)
    lab.place()
    assert plans.num_whole == before
    assert told(lab, resting).why is Why.BACKOFF


def test_stamps_of_jobs_that_are_gone_are_recorded_with_no_decision(full: Lab) -> None:
    for _ in range(5):
        job = full.submit(resources=WHOLE)
        full.place()
        now(full.plane.stop_job(ANA, job.job_id))
        full.place()
    assert len(full.core.queue.fresh) == 1


def test_how_long_a_node_is_closed_is_told_as_of_now() -> None:
    lab = Lab(num_nodes=1)
    lab.heal()
    now(lab.plane.set_node_state(ANA, "n1", NodeState.CORDONED, "bad NVLink"))
    job = lab.submit()
    lab.place()
    lab.clock.advance(7200)
    lab.place()
    assert told(lab, job).details == ('n1 cordoned by ana 2 h ago ("bad NVLink")',)


def test_runs_are_learned_from_once_though_the_first_look_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(script=always(Act(run_s=10.0)))
    lab.running()
    lab.clock.advance(20.0)
    lab.watch()
    lab.restart()
    lab.heal()
    learned: list[int] = []
    monkeypatch.setattr("shoal.control.place.relearn", lambda _, runs: learned.append(len(runs)))
    read, fails = lab.core.store.read, iter([False, True])

    async def away(fn: Callable[[Tx], object]) -> object:
        if next(fails, False):
            raise StoreUnavailable("the server is away")
        return await read(fn)

    monkeypatch.setattr(lab.core.store, "read", away)
    for _ in range(3):
        with suppress(StoreUnavailable):
            lab.place()
    assert [count for count in learned if count] == [1]


def test_job_that_goes_on_comes_first_whatever_is_learned_about_its_like() -> None:
    lab = Lab(num_nodes=1, script=always(Act(run_s=1.0)))
    lab.running(name="train", resources=WHOLE, time_limit="10h")
    job = lab.submit(name="train", resources=WHOLE, time_limit="10h")
    attempt = lab.attempt(job)
    goes_on = msgspec.structs.replace(attempt, goes_on=True, version=attempt.version + 1)
    now(lab.store.write(lambda tx: tx.attempts.update(goes_on)))
    now(lab.plane.set_node_state(ANA, "n1", NodeState.CORDONED, "repair"))
    lab.place()
    (before,) = lab.core.planner.waiting
    lab.clock.advance(1)
    lab.watch()
    lab.place()
    (after,) = lab.core.planner.waiting
    assert before.expected_s != after.expected_s
    assert (before.due_at, after.due_at) == (None, None)


def test_a_look_at_many_jobs_is_taken_in_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is the same as at once: who waits for whom is known, also across two pieces."""
    monkeypatch.setattr("shoal.control.place.MAX_TAKEN_IN", 2)
    paused: list[bool] = []

    async def pause() -> None:
        paused.append(True)

    monkeypatch.setattr("shoal.control.place.anyio.lowlevel.checkpoint", pause)
    lab = Lab(num_nodes=1)
    first = lab.submit(resources={"cpus": 1})
    jobs = lab.submit_all(array=5, after=[f"{first.number}:ended"], resources={"cpus": 1}).jobs
    lab.turn()
    assert paused == [True, True]
    assert lab.status(first) == "running"
    assert {lab.status(job) for job in jobs} == {"queued"}
    lab.stop(first)
    lab.turn()
    lab.turn()
    assert {lab.status(job) for job in jobs} == {"running"}
