"""Which replicas are started, drained and stopped."""

from __future__ import annotations

from shoal.serving.life import Seen, Steps, decide


def replica(slot: int, release: int = 1, **facts: object) -> Seen:
    told: dict[str, object] = {"is_ready": True, **facts}
    return Seen(replica_id=f"r{slot}", release=release, slot=slot, **told)  # type: ignore[arg-type]


def steps(wanted: dict[int, int], *replicas: Seen, may_start: bool = True) -> Steps:
    return decide(wanted, replicas, drain_s=5.0, may_start=may_start)


def test_missing_ones_are_started_unless_it_is_too_early() -> None:
    assert steps({1: 3}, replica(1)).start == (1, 1)
    assert steps({1: 3}, replica(1), may_start=False).is_nothing


def test_those_on_their_way_count() -> None:
    assert steps({1: 2}, replica(1), replica(2, is_ready=False)).is_nothing


def test_who_serves_nothing_goes_first_and_then_the_youngest() -> None:
    told = steps({1: 1}, replica(1), replica(2), replica(3, is_ready=False))
    assert told.drain == ("r2",)
    assert told.stop == (("r3", "not needed any more"),)


def test_drained_one_stops_when_it_is_idle_or_after_so_long() -> None:
    waiting = replica(1, draining_s=4.9)
    idle = replica(2, draining_s=0.1, is_idle=True)
    late = replica(3, draining_s=5.0)
    assert [one for one, _ in steps({}, waiting, idle, late).stop] == ["r2", "r3"]


def test_one_that_is_of_no_use_is_stopped_and_another_started_in_its_place() -> None:
    told = steps({1: 1}, replica(1, failing="not heard from"))
    assert (told.start, told.stop) == ((1,), (("r1", "not heard from"),))


def test_one_whose_node_is_emptied_serves_until_another_is_ready() -> None:
    leaving = replica(1, is_leaving=True)
    assert steps({1: 1}, leaving) == Steps(start=(1,))
    assert steps({1: 1}, leaving, replica(2, is_ready=False)).is_nothing
    assert steps({1: 1}, leaving, replica(2)).drain == ("r1",)


def test_releases_that_nobody_wants_go() -> None:
    told = steps({2: 1}, replica(1, release=1), replica(2, release=2))
    assert told == Steps(drain=("r1",))
