"""Which replicas are started, drained and stopped."""

from __future__ import annotations

from shoal.serving.scaling.replica_steps import ObservedReplica, ReplicaSteps, decide


def replica(slot: int, release: int = 1, **facts: object) -> ObservedReplica:
    fields: dict[str, object] = {"is_ready": True, **facts}
    return ObservedReplica(replica_id=f"r{slot}", release=release, slot=slot, **fields)  # type: ignore[arg-type]


def steps(wanted: dict[int, int], *replicas: ObservedReplica, may_start: bool = True) -> ReplicaSteps:
    return decide(wanted, replicas, drain_s=5.0, may_start=may_start)


def test_missing_replicas_are_started_unless_it_is_too_early() -> None:
    assert steps({1: 3}, replica(1)).start == (1, 1)
    assert steps({1: 3}, replica(1), may_start=False).is_nothing


def test_starting_replicas_count() -> None:
    assert steps({1: 2}, replica(1), replica(2, is_ready=False)).is_nothing


def test_surplus_replica_that_is_not_ready_goes_first_then_the_youngest() -> None:
    plan = steps({1: 1}, replica(1), replica(2), replica(3, is_ready=False))
    assert plan.drain == ("r2",)
    assert plan.stop == (("r3", "not needed any more"),)


def test_drained_replica_stops_when_idle_or_after_the_drain_time() -> None:
    waiting = replica(1, draining_s=4.9)
    idle = replica(2, draining_s=0.1, is_idle=True)
    late = replica(3, draining_s=5.0)
    assert [replica_id for replica_id, _ in steps({}, waiting, idle, late).stop] == ["r2", "r3"]


def test_failing_replica_is_stopped_and_another_started_in_its_place() -> None:
    plan = steps({1: 1}, replica(1, failing="not heard from"))
    assert (plan.start, plan.stop) == ((1,), (("r1", "not heard from"),))


def test_replica_on_a_draining_node_serves_until_another_is_ready() -> None:
    leaving = replica(1, is_leaving=True)
    assert steps({1: 1}, leaving) == ReplicaSteps(start=(1,))
    assert steps({1: 1}, leaving, replica(2, is_ready=False)).is_nothing
    assert steps({1: 1}, leaving, replica(2)).drain == ("r1",)


def test_replicas_of_unwanted_releases_are_drained() -> None:
    plan = steps({2: 1}, replica(1, release=1), replica(2, release=2))
    assert plan == ReplicaSteps(drain=("r1",))
