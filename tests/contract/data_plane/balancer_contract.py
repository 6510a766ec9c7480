"""Contract of every balancer, whatever it prefers. Each balancer adds a fixture and an empty subclass."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shoal.serving.balance.balancer import NO_HINTS, Balancer, RoutingHints
from shoal.serving.balance.replica import OTHER_ZONE_FACTOR, LiveReplica, ReleaseTally
from shoal.serving.table import ReplicaConfig


def replica(name: str, *, weight: float = 1.0, cap: int = 4, zone: str = "") -> LiveReplica:
    spec = ReplicaConfig(replica_id=name, address="127.0.0.1:1", release=1, weight=weight, zone=zone)
    return LiveReplica(spec, ReleaseTally(1), cap=cap, zone="here")


def bind(balancer: Balancer, replicas: list[LiveReplica], ask: RoutingHints = NO_HINTS) -> LiveReplica | None:
    replica = balancer.pick(replicas, ask)
    if replica is not None:
        balancer.bound(replica, ask)
        replica.outstanding += 1
    return replica


class BalancerContract:
    def test_no_replica_is_picked_if_there_are_none(self, balancer: Balancer) -> None:
        assert balancer.pick([], NO_HINTS) is None

    def test_replica_never_holds_more_than_its_cap(self, balancer: Balancer) -> None:
        replicas = [replica(name, cap=3) for name in "abc"]
        assert [bind(balancer, replicas) is not None for _ in range(10)] == [True] * 9 + [False]
        assert [replica.outstanding for replica in replicas] == [3, 3, 3]

    def test_slot_that_was_freed_is_the_next_one_taken(self, balancer: Balancer) -> None:
        replicas = [replica(name, cap=2) for name in "abc"]
        while bind(balancer, replicas):
            pass
        replicas[1].outstanding -= 1
        assert balancer.pick(replicas, NO_HINTS) is replicas[1]

    def test_equal_replicas_take_turns(self, balancer: Balancer) -> None:
        replicas = [replica(name) for name in "abcd"]
        seen: Counter[str] = Counter()
        for _ in range(400):
            picked = bind(balancer, replicas)
            assert picked is not None
            seen[picked.spec.replica_id] += 1
            picked.outstanding -= 1
        assert set(seen.values()) == {100}

    def test_requests_spread_over_replicas_before_any_gets_a_second(self, balancer: Balancer) -> None:
        replicas = [replica(name) for name in "abcd"]
        for _ in range(8):
            bind(balancer, replicas)
        assert [replica.outstanding for replica in replicas] == [2, 2, 2, 2]

    def test_twice_the_weight_gets_twice_the_work(self, balancer: Balancer) -> None:
        light, heavy = replica("light", cap=100), replica("heavy", weight=2.0, cap=100)
        for _ in range(90):
            bind(balancer, [light, heavy])
        assert (light.outstanding, heavy.outstanding) == (30, 60)

    def test_replicas_in_other_zones_are_used_when_this_zone_is_busy(self, balancer: Balancer) -> None:
        near, far = replica("near", zone="here", cap=100), replica("far", zone="there", cap=100)
        for _ in range(90):
            bind(balancer, [far, near])
        assert near.outstanding == OTHER_ZONE_FACTOR * far.outstanding

    def test_affinity_key_stays_with_its_replica(self, balancer: Balancer) -> None:
        replicas = [replica(name, cap=1000) for name in "abcdefgh"]
        homes = {n: bind(balancer, replicas, RoutingHints(affinity=b"%d" % n)) for n in range(200)}
        assert len({id(home) for home in homes.values()}) == 8
        gone = replicas.pop(3)
        for n, home in homes.items():
            again = balancer.pick(replicas, RoutingHints(affinity=b"%d" % n))
            assert again is home or home is gone

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("keys", ["%d", "session-%05d", "%032x"])
    def test_keys_are_spread_evenly(self, balancer: Balancer, seed: int, keys: str) -> None:
        source = random.Random(seed)
        replicas = [replica(f"att_{source.getrandbits(64):016x}", cap=10_000) for _ in range(8)]
        for n in range(4000):
            bind(balancer, replicas, RoutingHints(affinity=(keys % n).encode()))
        had = [replica.outstanding for replica in replicas]
        assert 400 < min(had) <= max(had) < 600, "500 are a replica's part"

    def test_twice_the_weight_gets_twice_the_keys(self, balancer: Balancer) -> None:
        light, heavy = replica("light", cap=10_000), replica("heavy", weight=2.0, cap=10_000)
        for n in range(3000):
            bind(balancer, [light, heavy], RoutingHints(affinity=b"session-%04d" % n))
        assert 900 < light.outstanding < 1100

    def test_key_whose_replica_is_full_goes_elsewhere(self, balancer: Balancer) -> None:
        replicas = [replica(name, cap=1) for name in "abc"]
        picked = {id(bind(balancer, replicas, RoutingHints(affinity=b"k"))) for _ in range(3)}
        assert len(picked) == 3
        assert bind(balancer, replicas, RoutingHints(affinity=b"k")) is None
