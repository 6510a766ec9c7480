"""Which requests are sent a second time when a replica is lost or late, and which never are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.serving.admission.request_policy import HOLD_BYTES, hedge_bytes, hold_bytes, may_repeat
from shoal.serving.proxy.request_head import parse_head
from shoal.serving.report import metrics
from shoal.serving.table import Balance, ServiceConfig
from tests.support.serving.data_plane_lab import (
    Behaviour,
    Conversation,
    EmbeddedLab,
    FakeReplica,
    answer_ok,
    reply,
    request_bytes,
    service,
)
from tests.support.serving.data_plane_lab import until as until_true

KEY = "idempotency-key: 7"


def service_config(**changes: Any) -> ServiceConfig:
    return ServiceConfig(project="p", name="s", **changes)


def post(path: str = "/p/s/v1/x", *headers: str, body: bytes = b"{}") -> bytes:
    return request_bytes(path, *headers, method="POST", body=body)


@pytest.mark.parametrize(
    "raw,changes,is_repeated",
    [
        (request_bytes(), {}, True),
        (request_bytes(method="HEAD"), {}, True),
        (request_bytes(method="DELETE"), {}, False),
        (post(), {}, False),
        (post("/p/s/", KEY), {}, True),
        (post(), {"is_repeatable": True}, True),
        (post("/p/s/v1/chat/completions"), {}, False),
        (post("/p/s/v1/chat/completions"), {"balance": Balance.TOKENS}, True),
        (post("/p/s/v1/completions?x=1"), {"balance": Balance.TOKENS}, True),
        (post("/p/s/v1/embeddings"), {"balance": Balance.TOKENS}, True),
        (post("/p/s/v1/files?x=/completions"), {"balance": Balance.TOKENS}, False),
        (request_bytes("/p/s/v1/completions", method="DELETE"), {"balance": Balance.TOKENS}, False),
    ],
)
def test_only_harmless_requests_are_repeated(raw: bytes, changes: dict[str, Any], is_repeated: bool) -> None:
    head = parse_head(raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    assert may_repeat(head, service_config(**changes)) is is_repeated


@pytest.mark.parametrize(
    "raw,is_hedged",
    [
        (request_bytes(), True),
        (request_bytes(method="HEAD"), True),
        (post(), False),
        (post("/p/s/v1/completions"), False),
        (post("/p/s/", KEY), True),
        (post("/p/s/", KEY, body=b"x" * (HOLD_BYTES + 1)), False),
        (request_bytes("/p/s/", "transfer-encoding: chunked", KEY, method="PATCH"), False),
        (request_bytes("/p/s/", "connection: upgrade", "upgrade: websocket"), False),
    ],
)
def test_only_small_requests_marked_harmless_are_hedged(raw: bytes, is_hedged: bool) -> None:
    head = parse_head(raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    config = service_config(hedge_s=0.2, is_repeatable=True, balance=Balance.TOKENS)
    assert (0 <= head.length <= hedge_bytes(head, config)) == is_hedged
    assert hedge_bytes(head, service_config()) == -1


def test_body_of_a_repeatable_request_is_held_up_to_a_limit() -> None:
    chunked = parse_head(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    assert hold_bytes(chunked, service_config()) == 0
    assert hold_bytes(chunked, service_config(is_repeatable=True)) == 1 << 20


async def never(seen: Conversation) -> None:
    """Wait for the end of the connection, which is how a replica sees that it is cut off."""
    await seen.reader.readexactly(1)


def dies_with(count: int) -> Behaviour:
    """Accept this many requests, then close all connections with the last of them."""

    async def behave(seen: Conversation) -> None:
        await seen.body()
        if len(seen.replica.requests) == count:
            await seen.replica.stop()
        await never(seen)

    return behave


async def test_posts_in_a_dying_replica_of_a_repeatable_service_are_answered_by_another(
    lab: EmbeddedLab,
) -> None:
    dead = await lab.add_replica("dead", dies_with(30))
    lab.serve(service(dead, is_repeatable=True, cap=30))
    asking = [asyncio.ensure_future(lab.ask(post(body=b"%d" % n))) for n in range(30)]
    await until_true(lambda: dead.num_lost)
    good = await lab.add_replica("good")
    lab.serve(service(good, is_repeatable=True, cap=30))
    answers = await asyncio.gather(*asking)
    assert [(message.status, message.body) for message in answers] == [(200, b"good")] * 30
    assert sorted(int(message.body) for message in good.requests) == list(range(30))


async def test_post_in_a_dying_replica_is_not_repeated_unless_marked_harmless(
    lab: EmbeddedLab,
) -> None:
    dead, good = await lab.add_replica("dead", dies_with(1)), await lab.add_replica("good")
    lab.serve(service(dead, good, balance=Balance.TOKENS))
    answers = [await lab.ask(post("/p/s/v1/files")) for _ in range(2)]
    assert sorted(answer.status for answer in answers) == [200, 502]
    assert (len(dead.requests), len(good.requests)) == (1, 1)


async def test_completion_whose_reply_began_is_never_repeated(lab: EmbeddedLab) -> None:
    async def half(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf")
        seen.writer.transport.abort()

    replica = await lab.add_replica("one", half)
    lab.serve(service(replica, await lab.add_replica("two", half), balance=Balance.TOKENS))
    wire = await lab.connect()
    with pytest.raises(asyncio.IncompleteReadError):
        await wire.ask(post("/p/s/v1/completions"))
    assert sum(len(other.requests) for other in lab.replicas) == 1


async def pair(lab: EmbeddedLab, first: Behaviour, second: Behaviour) -> tuple[FakeReplica, FakeReplica]:
    """Add two replicas; the one that gets the first request behaves as `first`, the other as `second`."""

    async def behave(seen: Conversation) -> None:
        is_first = sum(len(replica.requests) for replica in lab.replicas) == 1
        await (first if is_first else second)(seen)

    replicas = await lab.add_replica("one", behave), await lab.add_replica("two", behave)
    lab.serve(service(*replicas, hedge_s=0.01))
    return replicas


def nothing_is_counted(lab: EmbeddedLab) -> bool:
    live = lab.plane.services["p", "s"]
    outstanding = [replica.outstanding for replica in live.replicas.values()]
    bound = [account.bound for account in live.accounts.values()]
    in_flight = [tally.in_flight for tally in live.tallies.values()]
    return not any((*outstanding, *bound, *in_flight))


async def test_late_request_is_answered_by_the_hedge_and_the_first_replica_is_cut_off(
    lab: EmbeddedLab,
) -> None:
    first, second = await pair(lab, never, answer_ok)
    answer = await lab.ask(post("/p/s/", KEY))
    [late] = [replica for replica in (first, second) if replica.name != answer.body.decode()]
    await until_true(lambda: late.num_lost)
    ids = {seen.get("x-request-id") for replica in (first, second) for seen in replica.requests}
    assert (answer.status, len(ids)) == (200, 1)
    assert nothing_is_counted(lab)
    assert 'shoal_serving_repeated_total{project="p",service="s"} 1' in metrics(lab.plane)


async def test_hedge_is_cut_off_when_the_first_replica_answers(lab: EmbeddedLab) -> None:
    is_asked_twice = asyncio.Event()

    async def first(seen: Conversation) -> None:
        await is_asked_twice.wait()
        await answer_ok(seen)

    async def second(seen: Conversation) -> None:
        is_asked_twice.set()
        await never(seen)

    replica_a, replica_b = await pair(lab, first, second)
    answer = await lab.ask(request_bytes())
    [other] = [replica for replica in (replica_a, replica_b) if replica.name != answer.body.decode()]
    await until_true(lambda: other.num_lost)
    assert len(other.requests) == 1
    assert nothing_is_counted(lab)


async def test_hedge_takes_over_when_the_first_replica_is_lost(lab: EmbeddedLab) -> None:
    is_lost = asyncio.Event()

    async def first(seen: Conversation) -> None:
        await until_true(lambda: sum(len(replica.requests) for replica in lab.replicas) == 2)
        seen.writer.transport.abort()
        is_lost.set()

    async def second(seen: Conversation) -> None:
        await is_lost.wait()
        await until_true(lambda: sorted(replica.outstanding for replica in live.replicas.values()) == [0, 1])
        await answer_ok(seen)

    await pair(lab, first, second)
    live = lab.plane.services["p", "s"]
    assert (await lab.ask(request_bytes())).status == 200
    assert sum(len(replica.requests) for replica in lab.replicas) == 2
    assert nothing_is_counted(lab)


async def test_gateway_error_of_the_hedge_is_ignored_while_the_first_replica_works(lab: EmbeddedLab) -> None:
    has_failed = asyncio.Event()

    async def first(seen: Conversation) -> None:
        await has_failed.wait()
        await answer_ok(seen)

    async def second(seen: Conversation) -> None:
        await seen.send(reply(b"busy", "503 Busy"))
        has_failed.set()

    await pair(lab, first, second)
    assert (await lab.ask(request_bytes())).status == 200
    assert nothing_is_counted(lab)


async def test_no_hedge_while_requests_wait_or_without_another_replica(lab: EmbeddedLab) -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await answer_ok(seen)

    replica = await lab.add_replica("one", slow)
    lab.serve(service(replica, hedge_s=0.001, cap=1))
    asking = [asyncio.ensure_future(lab.ask(request_bytes())) for _ in range(3)]
    await until_true(lambda: lab.plane.services["p", "s"].waiting.count == 2)
    gate.set()
    assert [answer.status for answer in await asyncio.gather(*asking)] == [200] * 3
    assert len(replica.requests) == 3
