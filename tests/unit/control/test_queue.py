"""The queue in memory costs what changed, not what waits; and nobody waits without being told why."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.control import place as placing
from shoal.control.explain import explain
from shoal.control.queue import look
from shoal.control.told import FRESH_S
from shoal.engines.fake import Act, always
from shoal.model.job import Job
from shoal.model.node import NodeState
from shoal.scheduler import Explanation, Plan, Policy, Snapshot, Why, plan
from shoal.wire import EndKind
from tests.support.lab import ANA, Lab, now

WHOLE = {"cpus": 8}


class Plans:
    """Counts what is planned."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def __call__(self, snapshot: Snapshot, policy: Policy, at: float) -> Plan:
        self.seen.append(snapshot)
        return plan(snapshot, policy, at)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    counted = Plans()
    monkeypatch.setattr(placing, "plan", counted)
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


def test_newcomer_who_asks_what_others_wait_for_is_told_without_a_plan(full: Lab, plans: Plans) -> None:
    job = full.submit(resources=WHOLE)
    full.place()
    assert plans.seen == []
    quick = told(full, job)
    full.clock.advance(FRESH_S + 1)
    full.place()
    assert len(plans.seen) == 1
    assert quick == told(full, job)
    assert quick.why is Why.RESOURCES


@pytest.mark.parametrize(
    "asked",
    [
        {"resources": {"cpus": 4}},
        {"resources": {**WHOLE, "memory": "1GB"}},
        {"resources": WHOLE, "array": {"indices": [0, 1], "at_once": 1}},
    ],
)
def test_newcomer_who_asks_something_else_is_planned_for(
    full: Lab, plans: Plans, asked: dict[str, Any]
) -> None:
    full.submit(**asked)
    full.place()
    assert len(plans.seen) == 1


def test_what_is_given_back_is_given_to_who_waits_longest(full: Lab, plans: Plans) -> None:
    newcomer = full.submit(resources=WHOLE)
    full.place()
    running = full.core.queue.snapshot((), full.core.backoff, 0.0)[0].holdings[0].job_id
    now(full.plane.stop_job(ANA, running))
    full.turn()
    assert len(plans.seen) == 1
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


def test_job_that_waits_for_another_is_not_planned_for_and_says_what_it_waits_for(plans: Plans) -> None:
    lab = Lab(script=always(Act(run_s=10.0)))
    first = lab.running(name="first")
    second = lab.submit(after=[first.job_id])
    lab.place()
    assert all(one.job_id != second.job_id for snapshot in plans.seen for one in snapshot.candidates)
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
    assert len(plans.seen) == 2
    assert lab.status(job) == "starting"
