"""The balancers keep their contract, and each has its own preference."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from shoal.serving.balance.balancer import (
    Balancer,
    LeastOutstanding,
    LeastTimeToFirstToken,
    TrafficSplit,
    routing_hints,
)
from tests.contract.data_plane.balancer_contract import BalancerContract, bind, replica


class TestLeast(BalancerContract):
    @pytest.fixture
    def balancer(self) -> Balancer:
        return LeastOutstanding()


class TestLeastTimeToFirstToken(BalancerContract):
    @pytest.fixture
    def balancer(self) -> Balancer:
        return LeastTimeToFirstToken()


def talk(*turns: str) -> bytes:
    messages = [{"role": "user", "content": turn} for turn in turns]
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_conversation_returns_to_the_replica_that_has_its_prefix() -> None:
    balancer = LeastTimeToFirstToken()
    replicas = [replica(name, cap=100) for name in "abcd"]
    first = bind(balancer, replicas, routing_hints(b"", talk("x" * 8000)))
    assert first is not None
    first.prefill_tokens = 0
    for _ in range(3):
        assert bind(balancer, replicas, routing_hints(b"", talk("y" * 4000))) is not None
    longer = routing_hints(b"", talk("x" * 8000, "an answer", "and a further question"))
    assert first.num_matched_blocks(longer.chain) > 10
    assert balancer.pick(replicas, longer) is first


def test_cached_prefix_is_ignored_when_its_replica_is_too_busy() -> None:
    balancer = LeastTimeToFirstToken()
    replicas = [replica(name, cap=100) for name in "ab"]
    ask = routing_hints(b"", talk("x" * 8000))
    home = bind(balancer, replicas, ask)
    assert home is not None
    home.prefill_tokens = 100_000
    assert balancer.pick(replicas, ask) is not home


def test_conversations_with_the_same_first_message_have_different_hashes() -> None:
    first = routing_hints(b"", talk("the same system prompt" * 50, "a" * 3000))
    other = routing_hints(b"", talk("the same system prompt" * 50, "b" * 3000))
    common = [a == b for a, b in zip(first.chain, other.chain, strict=False)]
    assert common[0]
    assert not common[-1]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"nonsense", b'{"messages": 5}', b'{"prompt": [1, 2]}', b"\xff"]
)
def test_malformed_body_is_still_balanced(body: bytes) -> None:
    balancer = LeastTimeToFirstToken()
    assert bind(balancer, [replica("a")], routing_hints(b"", body)) is not None


def test_shares_are_exact_and_evenly_spread() -> None:
    shares = TrafficSplit({1: 0.9, 2: 0.1})
    taken = []
    for _ in range(1000):
        release = shares.order()[0]
        shares.record(release)
        taken.append(release)
    assert Counter(taken) == {1: 900, 2: 100}
    assert all(taken[at : at + 10].count(2) == 1 for at in range(0, 1000, 10))


def test_caller_with_a_key_stays_with_one_release() -> None:
    shares = TrafficSplit({1: 0.5, 2: 0.5})
    drawn = Counter(shares.order(b"%d" % n)[0] for n in range(1000))
    assert shares.order(b"k") == shares.order(b"k")
    assert 400 < drawn[1] < 600
