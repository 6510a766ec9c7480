"""A log as a past that can be lived through again, and as a workload."""

from __future__ import annotations

import msgspec

from shoal.engines.fake import Act, always
from shoal.model.node import NodeState
from shoal.sim.history.facts import Fact, facts_of
from shoal.sim.history.replay import Replay
from shoal.sim.history.workload import past_of
from shoal.store import EventFilter
from shoal.wire import EndKind
from tests.support.lab import ANA, Lab, now

FAILS = always(Act(run_s=2.0, kind=EndKind.EXITED, exit_code=1))


def facts(lab: Lab) -> list[tuple[int, Fact]]:
    events = lab.read(lambda tx: tx.events.page(0, EventFilter(), 1 << 30))
    return list(facts_of(msgspec.to_builtins(events)))


def turns(lab: Lab, count: int, seconds: float = 1.0) -> None:
    for _ in range(count):
        lab.clock.advance(seconds)
        lab.turn()


def test_every_decision_of_a_busy_queue_comes_out_equal() -> None:
    lab = Lab(num_nodes=2, script=always(Act(run_s=3.0)))
    lab.heal()
    first = lab.submit(resources={"cpus": 6}, time_limit="1m")
    lab.submit(resources={"nodes": 2, "cpus": 8}, time_limit="1m")
    lab.submit_all(array={"indices": "0-4", "at_once": 2}, resources={"cpus": 2}, priority=5)
    lab.submit(after=[first.job_id])
    turns(lab, 12)
    now(lab.plane.set_node_state(ANA, "n1", NodeState.DRAINING, "repair"))
    lab.submit(resources={"cpus": 3})
    turns(lab, 8)
    verdicts = list(Replay().verdicts(facts(lab)))
    assert len(verdicts) >= 5
    assert all(verdict.is_equal for verdict in verdicts)


def test_retries_and_their_backoff_are_part_of_the_past() -> None:
    lab = Lab(num_nodes=1, script=FAILS)
    lab.heal()
    lab.submit(retry={"max": 2, "backoff": "4s"})
    turns(lab, 30)
    verdicts = list(Replay().verdicts(facts(lab)))
    assert len(verdicts) == 3
    assert all(verdict.is_equal for verdict in verdicts)


def test_past_becomes_a_workload_with_the_run_times_of_its_last_attempts() -> None:
    lab = Lab(num_nodes=1, script=always(Act(run_s=5.0)))
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
    lab = Lab(num_nodes=2, script=always(Act(run_s=5.0)))
    lab.heal()
    lab.submit()
    lab.turn()
    now(lab.plane.set_node_state(ANA, "n2", NodeState.CORDONED, "repair"))
    past = past_of(facts(lab))
    (change,) = past.workload.changes
    assert (change.name, change.view is not None and change.view.closed_because is not None) == ("n2", True)
