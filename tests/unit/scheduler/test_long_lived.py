"""What a planner remembers is bounded by what there is, however long it lives, and survives a failed plan."""

from __future__ import annotations

import msgspec
import pytest

from shoal.model.attempt import NodeShare
from shoal.scheduler import GpuView, Planner, Policy
from shoal.scheduler.amounts import demand_of
from shoal.scheduler.capacity import Capacity
from shoal.scheduler.cycle import Cycle
from shoal.scheduler.fit import Finders
from tests.support.clusters import NOW, holding, job, node, request

TIMES = 2000
FEW = 200


def test_finder_forgets_states_of_nodes_that_are_behind_the_best_one() -> None:
    capacity = Capacity([node("tight", cpus=2.0), node("wide")])
    finder = Finders(capacity).of(demand_of(request()).need)
    share = NodeShare(node="wide", cpus=1.0, memory_bytes=1)
    for _ in range(TIMES):
        capacity.take(share, NOW)
        assert finder.ranked(frozenset(), 1) == ["tight"]
        capacity.give(share, NOW)
        assert finder.ranked(frozenset(), 1) == ["tight"]
    assert len(finder._queue) < FEW
    assert finder.ranked(frozenset()) == ["tight", "wide"]


def test_job_that_rests_is_told_of_before_every_plan_and_remembered_once() -> None:
    planner = Planner(Policy())
    planner.set_node(node("n", gpus=0))
    for number in range(TIMES):
        planner.add(job(1, request(), not_before=NOW + 600.0 + number * 1e-6))
        assert planner.plan(NOW).look_again_at is not None
    assert len(planner._moments) < FEW
    assert [start.attempt_id for start in planner.plan(NOW + 601.0).starts] == ["att-1"]


def test_jobs_that_came_and_went_are_not_remembered_until_they_would_have_been_due() -> None:
    planner = Planner(Policy())
    rows = planner._book.rows
    rows.come_to(NOW)
    rows.add(job(0, request(), due_at=NOW + 10.0))
    for number in range(1, TIMES):
        rows.add(job(number, request(), due_at=NOW + 36_000.0))
        rows.remove(f"att-{number}")
    assert len(rows._moments) < FEW
    assert rows.next_due() == NOW + 10.0


def test_plan_that_fails_half_way_has_started_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(Policy())
    planner.set_node(node("n"))
    planner.add(job(1, request(gpus=8)))
    before = planner.snapshot()

    def fail(self: Cycle, rows: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Cycle, "_start_shortest", fail)
        with pytest.raises(MemoryError):
            planner.plan(NOW)
    facts = msgspec.structs.replace(planner.snapshot(), usages=before.usages)
    assert (facts, planner.has_unconfirmed) == (before, False)
    assert [start.attempt_id for start in planner.plan(NOW).starts] == ["att-1"]


def test_who_takes_any_gpu_starts_on_none_of_the_kind_that_is_promised() -> None:
    kinds = ("A100", "A100", "H100", "H100")
    mixed = node("n", cpus=8.0, gpus=0)
    mixed = msgspec.structs.replace(mixed, gpus=tuple(GpuView(at, kind) for at, kind in enumerate(kinds)))
    planner = Planner(Policy())
    planner.set_node(mixed)
    busy = (NodeShare(node="n", cpus=6.0, memory_bytes=1),)
    planner.hold(holding(1, {}, allocation=busy, time_limit_s=100.0, placed_at=NOW))
    planner.add(job(1, request(gpus=2, kind="A100", cpus=4.0, time_limit_s=50.0)))
    planner.add(job(2, request(gpus=2, cpus=1.0)))
    made = planner.plan(NOW)
    assert [(one.attempt_id, one.at) for one in made.promises] == [("att-1", NOW + 100.0)]
    for start in made.starts:
        assert not {0, 1}.intersection(start.allocation[0].gpu_ids)
    planner.release("held-1", NOW + 100.0)
    assert "att-1" in [start.attempt_id for start in planner.plan(NOW + 100.0).starts]
