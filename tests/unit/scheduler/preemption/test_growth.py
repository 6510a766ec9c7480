"""An elastic job restarts on more nodes if these are idle and it pays, and not otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.model.attempt import NodeTask
from shoal.model.job import GpuRequest, ResourceRequest
from shoal.scheduler import Candidate, GpuInfo, NodeInfo, Plan, Planner, Policy, WaitReason
from shoal.scheduler.facts.cluster_state import ClusterState, holding_of
from shoal.scheduler.facts.plan import EvictionGround
from shoal.scheduler.placement.reservations import CapacityReservations
from shoal.scheduler.preemption.growth import growth_reservation

HOUR = 3600.0
GPUS = tuple(GpuInfo(index, "H100") for index in range(8))


def elastic_request(least: int, most: int, **fields: Any) -> ResourceRequest:
    return ResourceRequest(min_nodes=least, max_nodes=most, cpus=8.0, gpus=GpuRequest(count=8), **fields)


def candidate(name: str, request: ResourceRequest, at: float = 0.0) -> Candidate:
    return Candidate(
        attempt_id=name, job_id=name, project="vision", order=int(at), submitted_at=at, request=request
    )


def planner_with_idle_nodes(request: ResourceRequest) -> Planner:
    """Four nodes, of which the job got two. The others were in use when it started, and are free since."""
    planner = Planner(Policy())
    for number in range(4):
        planner.set_node(NodeInfo(name=f"n{number}", cpus=8.0, memory_bytes=64, gpus=GPUS))
    planner.add(candidate("first", elastic_request(2, 2)))
    assert planner.plan(0.0).starts
    planner.add(candidate("elastic", request, 1.0))
    (start,) = planner.plan(1.0).starts
    assert len(start.allocation) == 2
    planner.release("first", 2.0)
    return planner


def plan_after_save(planner: Planner, saved_at: float | None, now: float) -> Plan:
    if saved_at is not None:
        planner.save("elastic", saved_at)
    return planner.plan(now)


def test_job_with_a_checkpoint_grows_onto_idle_nodes() -> None:
    (eviction,) = plan_after_save(
        planner_with_idle_nodes(elastic_request(1, 4)), 2 * HOUR - 60, 2 * HOUR
    ).evictions
    assert (eviction.ground, eviction.attempt_id, eviction.num_nodes) == (EvictionGround.GROWTH, "elastic", 4)
    assert eviction.lost_s == 60 + 120


@pytest.mark.parametrize(
    "why,request_,saved_at,now",
    [
        ("no checkpoint of it is known", elastic_request(1, 4), None, 2 * HOUR),
        ("it has all the nodes it can use", elastic_request(1, 2), 2 * HOUR - 60, 2 * HOUR),
        ("it has just begun", elastic_request(1, 4), 500.0, 599.0),
        ("more is done again than is won", elastic_request(1, 4), HOUR, 2 * HOUR),
        (
            "its limit ends it soon",
            elastic_request(1, 4, time_limit_s=2 * HOUR + 300),
            2 * HOUR - 60,
            2 * HOUR,
        ),
    ],
)
def test_job_does_not_grow_if(
    why: str, request_: ResourceRequest, saved_at: float | None, now: float
) -> None:
    assert plan_after_save(planner_with_idle_nodes(request_), saved_at, now).evictions == (), why


def test_job_does_not_grow_onto_nodes_with_work_from_outside_shoal() -> None:
    planner = planner_with_idle_nodes(elastic_request(1, 4))
    for name in ("n0", "n1"):
        planner.set_node(NodeInfo(name=name, cpus=8.0, memory_bytes=64, gpus=GPUS, is_busy=True))
    assert plan_after_save(planner, 2 * HOUR - 60, 2 * HOUR).evictions == ()


def test_no_job_grows_while_another_waits() -> None:
    planner = planner_with_idle_nodes(elastic_request(1, 4))
    planner.add(candidate("wide", elastic_request(3, 3), 3.0))
    assert plan_after_save(planner, 2 * HOUR - 60, 2 * HOUR).evictions == ()


def test_job_that_can_never_run_here_does_not_prevent_growth() -> None:
    planner = planner_with_idle_nodes(elastic_request(1, 4))
    planner.add(candidate("huge", elastic_request(9, 9), 3.0))
    assert plan_after_save(planner, 2 * HOUR - 60, 2 * HOUR).evictions


def test_job_grows_once_the_gain_is_twice_the_repeated_work() -> None:
    """From two nodes to four, a minute after a checkpoint: half of what it has run, against six minutes."""
    assert plan_after_save(planner_with_idle_nodes(elastic_request(1, 4)), 660.0, 720.0).evictions == ()
    assert plan_after_save(planner_with_idle_nodes(elastic_request(1, 4)), 661.0, 721.0).evictions


def test_running_job_gets_an_explanation_of_what_its_growth_waits_for() -> None:
    planner = planner_with_idle_nodes(elastic_request(1, 4))
    plan_after_save(planner, None, 60.0)
    explanation = planner.explain_growth("elastic", 60.0)
    assert explanation is not None
    assert "no checkpoint of it was seen" in explanation.sentence
    planner.add(candidate("wide", elastic_request(3, 3), 3.0))
    planner.plan(61.0)
    explanation = planner.explain_growth("elastic", 61.0)
    assert explanation is not None
    assert "1 job waits" in explanation.sentence
    assert planner.explain_growth("wide", 61.0) is None


def test_stopping_job_is_not_asked_to_grow_again() -> None:
    planner = planner_with_idle_nodes(elastic_request(1, 4))
    assert plan_after_save(planner, 2 * HOUR - 60, 2 * HOUR).evictions
    held = next(holding for holding in planner.snapshot().holdings if holding.attempt_id == "elastic")

    planner.hold(msgspec.structs.replace(held, is_stopping=True))
    assert planner.plan(2 * HOUR + 1).evictions == ()


def stopping(planner: Planner, now: float) -> Planner:
    """Carry out the plan's growth up to the request to stop."""
    (eviction,) = planner.plan(now).evictions
    held = next(
        holding for holding in planner.snapshot().holdings if holding.attempt_id == eviction.attempt_id
    )
    planner.hold(msgspec.structs.replace(held, is_stopping=True, grows_to=eviction.num_nodes))
    return planner


def test_nodes_for_growth_are_reserved_until_the_job_has_stopped() -> None:
    planner = planner_with_idle_nodes(elastic_request(1, 4))
    planner.save("elastic", 2 * HOUR - 60)
    stopping(planner, 2 * HOUR)
    planner.add(candidate("late", elastic_request(1, 1), 2 * HOUR + 1))
    result = planner.plan(2 * HOUR + 2)
    assert result.starts == ()
    assert result.promises == ()
    explanation = planner.explain("late", 2 * HOUR + 2)
    assert explanation is not None
    assert explanation.why is WaitReason.BEHIND
    assert explanation.details == ("`elastic` is stopping, and goes on with more nodes",)
    planner.release("elastic", 2 * HOUR + 5)
    planner.add(candidate("elastic again", elastic_request(1, 4), 1.0))
    starts = {start.attempt_id: len(start.allocation) for start in planner.plan(2 * HOUR + 5).starts}
    assert starts == {"elastic again": 4}


def test_higher_priority_does_not_wait_for_a_job_that_grows() -> None:
    planner = planner_with_idle_nodes(elastic_request(1, 4))
    planner.save("elastic", 2 * HOUR - 60)
    stopping(planner, 2 * HOUR)
    planner.add(msgspec.structs.replace(candidate("urgent", elastic_request(1, 1), 2 * HOUR), priority=10))
    assert [start.attempt_id for start in planner.plan(2 * HOUR + 2).starts] == ["urgent"]


def test_growth_reservation_includes_the_power_of_its_own_nodes() -> None:
    """A job within its quota that may evict others does not count on what the growing job releases."""
    labels = {"rack": "r1", "gpu_watts": "100"}
    state = ClusterState(Policy(power_caps={"r1": 3000.0}))
    for number in range(4):
        state.set_node(NodeInfo(name=f"n{number}", cpus=8.0, memory_bytes=64, gpus=GPUS, labels=labels))
    tasks = tuple(NodeTask(node=f"n{n}", cpus=8.0, memory_bytes=64, gpu_ids=tuple(range(8))) for n in (0, 1))
    held = msgspec.structs.replace(
        holding_of(candidate("elastic", elastic_request(1, 4)), tasks, 0.0), is_stopping=True, grows_to=3
    )
    state.hold(held)
    reservations = CapacityReservations(state.capacity, state.windows, state.power)
    reservation = growth_reservation(state, reservations, held, 1.0)
    assert reservation is not None
    assert dict(reservation.draw.watts) == {"r1": 3 * 800_000}
    assert reservation.draw.spare == {"r1": 600_000}


def test_two_jobs_do_not_stop_for_the_same_idle_nodes() -> None:
    planner = Planner(Policy())
    for number in range(4):
        planner.set_node(NodeInfo(name=f"n{number}", cpus=8.0, memory_bytes=64, gpus=GPUS))
    planner.add(candidate("first", elastic_request(2, 2)))
    planner.plan(0.0)
    planner.add(candidate("filler", elastic_request(1, 1)))
    planner.plan(0.0)
    planner.add(candidate("one", elastic_request(1, 3), 1.0))
    planner.plan(1.0)
    planner.release("filler", 1.0)
    planner.add(candidate("two", elastic_request(1, 3), 1.0))
    planner.plan(1.0)
    planner.release("first", 2.0)
    for name in ("one", "two"):
        planner.save(name, 2 * HOUR - 60)
    stopping(planner, 2 * HOUR)
    assert planner.plan(2 * HOUR + 1).evictions == ()


def plan_from_snapshot(planner: Planner, now: float) -> tuple[Plan, Planner]:
    """Plan with a planner made from the same facts."""
    fresh = Planner.of(planner.snapshot(), planner.policy)
    return fresh.plan(now), fresh


def test_newcomer_ranked_before_a_growing_job_may_use_its_nodes() -> None:
    planner = planner_with_idle_nodes(elastic_request(1, 4))
    planner.save("elastic", 2 * HOUR - 60)
    stopping(planner, 2 * HOUR)
    for name, count, at in (("wide", 4, 2 * HOUR + 1), ("urgent", 1, 2 * HOUR + 2)):
        planner.add(msgspec.structs.replace(candidate(name, elastic_request(count, count), at), priority=10))
        fresh, _ = plan_from_snapshot(planner, at)
        assert planner.plan(at).starts == fresh.starts
    assert planner.holds("urgent")


def test_growing_jobs_reserve_idle_nodes_in_priority_order() -> None:
    planner = Planner(Policy())
    for number in range(4):
        planner.set_node(NodeInfo(name=f"n{number}", cpus=8.0, memory_bytes=64, gpus=GPUS))
    for number, (name, priority) in enumerate((("a", -1), ("b", 0))):
        task = NodeTask(node=f"n{number}", cpus=8.0, memory_bytes=64, gpu_ids=tuple(range(8)))
        held = holding_of(candidate(name, elastic_request(1, 2)), (task,), 0.0)
        planner.hold(msgspec.structs.replace(held, priority=priority, is_stopping=True, grows_to=2))
    planner.add(candidate("quick", elastic_request(1, 1), 1.0))
    planner.add(msgspec.structs.replace(candidate("late", elastic_request(1, 1), 1.0), priority=-1))
    assert [start.attempt_id for start in planner.plan(2.0).starts] == ["quick"]
    for now in (2.0, 3.0):
        _, fresh = plan_from_snapshot(planner, now)
        planner.plan(now)
        explanation = planner.explain("late", now)
        assert explanation is not None
        assert explanation.facts["behind_job_id"] == "b"
        assert explanation == fresh.explain("late", now)
