"""What every balancer must do, whatever it prefers. One adds a fixture and an empty subclass."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shoal.serving.balancer import ANY, Ask, Balancer
from shoal.serving.replica import FOREIGN, LiveReplica, Tally
from shoal.serving.table import Replica


def replica(name: str, *, weight: float = 1.0, cap: int = 4, zone: str = "") -> LiveReplica:
    spec = Replica(replica_id=name, address="127.0.0.1:1", release=1, weight=weight, zone=zone)
    return LiveReplica(spec, Tally(1), cap=cap, zone="here")


def bind(balancer: Balancer, replicas: list[LiveReplica], ask: Ask = ANY) -> LiveReplica | None:
    found = balancer.pick(replicas, ask)
    if found is not None:
        balancer.bound(found, ask)
        found.outstanding += 1
    return found


class BalancerContract:
    def test_without_replicas_there_is_nothing_to_pick(self, balancer: Balancer) -> None:
        assert balancer.pick([], ANY) is None

    def test_replica_never_holds_more_than_its_cap(self, balancer: Balancer) -> None:
        replicas = [replica(name, cap=3) for name in "abc"]
        assert [bind(balancer, replicas) is not None for _ in range(10)] == [True] * 9 + [False]
        assert [one.outstanding for one in replicas] == [3, 3, 3]

    def test_slot_that_was_freed_is_the_next_one_taken(self, balancer: Balancer) -> None:
        replicas = [replica(name, cap=2) for name in "abc"]
        while bind(balancer, replicas):
            pass
        replicas[1].outstanding -= 1
        assert balancer.pick(replicas, ANY) is replicas[1]

    def test_equals_take_turns(self, balancer: Balancer) -> None:
        replicas = [replica(name) for name in "abcd"]
        seen: Counter[str] = Counter()
        for _ in range(400):
            found = bind(balancer, replicas)
            assert found is not None
            seen[found.spec.replica_id] += 1
            found.outstanding -= 1
        assert set(seen.values()) == {100}

    def test_requests_spread_over_replicas_before_they_pile_up(self, balancer: Balancer) -> None:
        replicas = [replica(name) for name in "abcd"]
        for _ in range(8):
            bind(balancer, replicas)
        assert [one.outstanding for one in replicas] == [2, 2, 2, 2]

    def test_twice_the_weight_gets_twice_the_work(self, balancer: Balancer) -> None:
        light, heavy = replica("light", cap=100), replica("heavy", weight=2.0, cap=100)
        for _ in range(90):
            bind(balancer, [light, heavy])
        assert (light.outstanding, heavy.outstanding) == (30, 60)

    def test_other_zones_are_for_when_this_one_is_busy(self, balancer: Balancer) -> None:
        near, far = replica("near", zone="here", cap=100), replica("far", zone="there", cap=100)
        for _ in range(90):
            bind(balancer, [far, near])
        assert near.outstanding == FOREIGN * far.outstanding

    def test_key_stays_where_it_was_while_it_can(self, balancer: Balancer) -> None:
        replicas = [replica(name, cap=1000) for name in "abcdefgh"]
        homes = {n: bind(balancer, replicas, Ask(affinity=b"%d" % n)) for n in range(200)}
        assert len({id(home) for home in homes.values()}) == 8
        gone = replicas.pop(3)
        for n, home in homes.items():
            again = balancer.pick(replicas, Ask(affinity=b"%d" % n))
            assert again is home or home is gone

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("keys", ["%d", "session-%05d", "%032x"])
    def test_keys_are_spread_evenly(self, balancer: Balancer, seed: int, keys: str) -> None:
        source = random.Random(seed)
        replicas = [replica(f"att_{source.getrandbits(64):016x}", cap=10_000) for _ in range(8)]
        for n in range(4000):
            bind(balancer, replicas, Ask(affinity=(keys % n).encode()))
        had = [one.outstanding for one in replicas]
        assert 400 < min(had) <= max(had) < 600, "500 are a replica's part"

    def test_twice_the_weight_has_twice_the_keys(self, balancer: Balancer) -> None:
        light, heavy = replica("light", cap=10_000), replica("heavy", weight=2.0, cap=10_000)
        for n in range(3000):
            bind(balancer, [light, heavy], Ask(affinity=b"session-%04d" % n))
        assert 900 < light.outstanding < 1100

    def test_key_whose_replica_is_full_goes_elsewhere(self, balancer: Balancer) -> None:
        replicas = [replica(name, cap=1) for name in "abc"]
        found = {id(bind(balancer, replicas, Ask(affinity=b"k"))) for _ in range(3)}
        assert len(found) == 3
        assert bind(balancer, replicas, Ask(affinity=b"k")) is None
