"""The balancers keep their contract, and each prefers what it is for."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from shoal.serving.balancer import Balancer, Least, LeastTimeToFirstToken, Shares
from shoal.serving.prompt import ask_of
from tests.contract.balancer_contract import BalancerContract, bind, replica


class TestLeast(BalancerContract):
    @pytest.fixture
    def balancer(self) -> Balancer:
        return Least()


class TestLeastTimeToFirstToken(BalancerContract):
    @pytest.fixture
    def balancer(self) -> Balancer:
        return LeastTimeToFirstToken()


def talk(*turns: str) -> bytes:
    messages = [{"role": "user", "content": turn} for turn in turns]
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_conversation_returns_to_the_replica_that_has_read_it() -> None:
    balancer = LeastTimeToFirstToken()
    replicas = [replica(name, cap=100) for name in "abcd"]
    first = bind(balancer, replicas, ask_of(b"", talk("x" * 8000)))
    assert first is not None
    first.prefill_tokens = 0
    for _ in range(3):
        assert bind(balancer, replicas, ask_of(b"", talk("y" * 4000))) is not None
    longer = ask_of(b"", talk("x" * 8000, "an answer", "and a further question"))
    assert first.matched(longer.chain) > 10
    assert balancer.pick(replicas, longer) is first


def test_cached_prefix_is_given_up_when_its_replica_has_too_much_to_read() -> None:
    balancer = LeastTimeToFirstToken()
    replicas = [replica(name, cap=100) for name in "ab"]
    ask = ask_of(b"", talk("x" * 8000))
    home = bind(balancer, replicas, ask)
    assert home is not None
    home.prefill_tokens = 100_000
    assert balancer.pick(replicas, ask) is not home


def test_first_message_alone_does_not_decide_where_a_conversation_goes() -> None:
    one = ask_of(b"", talk("the same system prompt" * 50, "a" * 3000))
    other = ask_of(b"", talk("the same system prompt" * 50, "b" * 3000))
    common = [a == b for a, b in zip(one.chain, other.chain, strict=False)]
    assert common[0]
    assert not common[-1]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"nonsense", b'{"messages": 5}', b'{"prompt": [1, 2]}', b"\xff"]
)
def test_body_that_makes_no_sense_is_balanced_all_the_same(body: bytes) -> None:
    balancer = LeastTimeToFirstToken()
    assert bind(balancer, [replica("a")], ask_of(b"", body)) is not None


def test_shares_are_exact_and_evenly_spread() -> None:
    shares = Shares({1: 0.9, 2: 0.1})
    taken = []
    for _ in range(1000):
        release = shares.order()[0]
        shares.taken(release)
        taken.append(release)
    assert Counter(taken) == {1: 900, 2: 100}
    assert all(taken[at : at + 10].count(2) == 1 for at in range(0, 1000, 10))


def test_caller_with_a_key_stays_with_one_release() -> None:
    shares = Shares({1: 0.5, 2: 0.5})
    drawn = Counter(shares.order(b"%d" % n)[0] for n in range(1000))
    assert shares.order(b"k") == shares.order(b"k")
    assert 400 < drawn[1] < 600
