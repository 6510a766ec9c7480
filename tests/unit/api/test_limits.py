"""Buckets and slots: bounded, fair, and given back."""

from __future__ import annotations

import pytest

from shoal.api.limits import MAX_PEERS, Bucket, StreamSlots, peer_of
from shoal.errors import LimitReached


class Ticker:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    clock = Ticker()
    bucket = Bucket(3, 0.5, clock)
    assert [bucket.take("a") for _ in range(4)] == [True, True, True, False]
    assert bucket.take("b")
    clock.now += 2.0
    assert [bucket.take("a") for _ in range(2)] == [True, False]
    clock.now += 1e6
    assert [bucket.take("a") for _ in range(4)] == [True, True, True, False]


def test_a_bucket_remembers_a_bounded_number_of_names() -> None:
    bucket = Bucket(1, 0.0, Ticker())
    for number in range(MAX_PEERS * 3):
        bucket.take(str(number))
    assert len(bucket._left) == MAX_PEERS


def test_slots_are_limited_for_each_and_for_all_and_come_back() -> None:
    slots = StreamSlots(max_total=3, max_per_caller=2)
    with slots.held("a"), slots.held("a"):
        with pytest.raises(LimitReached), slots.held("a"):
            pass
        with slots.held("b"), pytest.raises(LimitReached), slots.held("c"):
            pass
    with slots.held("a"), slots.held("a"), slots.held("c"):
        pass


@pytest.mark.parametrize(
    "client,peer",
    [
        (None, "-"),
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::1", 5), "::1"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5), "fe80::/64"),
    ],
)
def test_a_peer_is_an_address_or_the_network_one_customer_gets(
    client: tuple[str, int] | None, peer: str
) -> None:
    assert peer_of(client) == peer
