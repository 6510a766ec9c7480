"""A planner's caches are bounded by the present facts, however long it lives, and survive a failed plan."""

from __future__ import annotations

import msgspec
import pytest

from shoal.model.attempt import NodeTask
from shoal.scheduler import GpuInfo, Planner, Policy
from shoal.scheduler.cycle import SchedulingCycle
from shoal.scheduler.facts.amounts import demand_of
from shoal.scheduler.facts.capacity import Capacity
from shoal.scheduler.placement.fit import NodeFinders
from tests.support.clusters import NOW, candidate, holding, node, request

TIMES = 2000
FEW = 200


def test_finder_drops_stale_groups_behind_the_best_one() -> None:
    capacity = Capacity([node("tight", cpus=2.0), node("wide")])
    finder = NodeFinders(capacity).of(demand_of(request()).need)
    task = NodeTask(node="wide", cpus=1.0, memory_bytes=1)
    for _ in range(TIMES):
        capacity.take(task, NOW)
        assert finder.ranked(frozenset(), 1) == ["tight"]
        capacity.give(task, NOW)
        assert finder.ranked(frozenset(), 1) == ["tight"]
    assert len(finder._queue) < FEW
    assert finder.ranked(frozenset()) == ["tight", "wide"]


def test_job_in_backoff_that_is_added_before_every_plan_is_stored_once() -> None:
    planner = Planner(Policy())
    planner.set_node(node("n", gpus=0))
    for number in range(TIMES):
        planner.add(candidate(1, request(), not_before=NOW + 600.0 + number * 1e-6))
        assert planner.plan(NOW).replan_at is not None
    assert len(planner._moments) < FEW
    assert [start.attempt_id for start in planner.plan(NOW + 601.0).starts] == ["att-1"]


def test_due_times_of_removed_jobs_are_dropped_before_they_pass() -> None:
    planner = Planner(Policy())
    queue = planner._state.queue
    queue.advance_to(NOW)
    queue.add(candidate(0, request(), due_at=NOW + 10.0))
    for number in range(1, TIMES):
        queue.add(candidate(number, request(), due_at=NOW + 36_000.0))
        queue.remove(f"att-{number}")
    assert len(queue._moments) < FEW
    assert queue.next_due() == NOW + 10.0


def test_plan_that_fails_half_way_starts_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(Policy())
    planner.set_node(node("n"))
    planner.add(candidate(1, request(gpus=8)))
    before = planner.snapshot()

    def fail(self: SchedulingCycle, groups: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(SchedulingCycle, "_start_shortest", fail)
        with pytest.raises(MemoryError):
            planner.plan(NOW)
    facts = msgspec.structs.replace(planner.snapshot(), usages=before.usages)
    assert (facts, planner.has_unconfirmed) == (before, False)
    assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-1"]


def test_job_for_any_gpu_takes_none_of_the_promised_kind() -> None:
    kinds = ("A100", "A100", "H100", "H100")
    mixed = node("n", cpus=8.0, gpus=0)
    mixed = msgspec.structs.replace(mixed, gpus=tuple(GpuInfo(at, kind) for at, kind in enumerate(kinds)))
    planner = Planner(Policy())
    planner.set_node(mixed)
    busy = (NodeTask(node="n", cpus=6.0, memory_bytes=1),)
    planner.hold(holding(1, {}, allocation=busy, time_limit_s=100.0, placed_at=NOW))
    planner.add(candidate(1, request(gpus=2, kind="A100", cpus=4.0, time_limit_s=50.0)))
    planner.add(candidate(2, request(gpus=2, cpus=1.0)))
    result = planner.plan(NOW)
    assert [(promise.attempt_id, promise.at) for promise in result.promises] == [("att-1", NOW + 100.0)]
    for start in result.starts:
        assert not {0, 1}.intersection(start.allocation[0].gpu_ids)
    planner.release("held-1", NOW + 100.0)
    assert "att-1" in [start.attempt_id for start in planner.plan(NOW + 100.0).starts]
