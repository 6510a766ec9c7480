"""What is sent a second time when a replica is lost or late, and what never is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.serving.head import parse_head
from shoal.serving.repeating import HOLD_BYTES, hedge_bytes, hold_bytes, may_repeat
from shoal.serving.report import metrics
from shoal.serving.table import Balance, Service
from tests.support.serving import Behaviour, Conversation, FakeReplica, Lab, answer_ok, get, reply, service
from tests.support.serving import until as until_true

KEY = "idempotency-key: 7"


def told(**changes: Any) -> Service:
    return Service(project="p", name="s", **changes)


def post(path: str = "/p/s/v1/x", *headers: str, body: bytes = b"{}") -> bytes:
    return get(path, *headers, method="POST", body=body)


@pytest.mark.parametrize(
    "raw,changes,is_repeated",
    [
        (get(), {}, True),
        (get(method="HEAD"), {}, True),
        (get(method="DELETE"), {}, False),
        (post(), {}, False),
        (post("/p/s/", KEY), {}, True),
        (post(), {"is_repeatable": True}, True),
        (post("/p/s/v1/chat/completions"), {}, False),
        (post("/p/s/v1/chat/completions"), {"balance": Balance.TOKENS}, True),
        (post("/p/s/v1/completions?x=1"), {"balance": Balance.TOKENS}, True),
        (post("/p/s/v1/embeddings"), {"balance": Balance.TOKENS}, True),
        (post("/p/s/v1/files?x=/completions"), {"balance": Balance.TOKENS}, False),
        (get("/p/s/v1/completions", method="DELETE"), {"balance": Balance.TOKENS}, False),
    ],
)
def test_only_what_does_no_harm_is_repeated(raw: bytes, changes: dict[str, Any], is_repeated: bool) -> None:
    head = parse_head(raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    assert may_repeat(head, told(**changes)) is is_repeated


@pytest.mark.parametrize(
    "raw,is_hedged",
    [
        (get(), True),
        (get(method="HEAD"), True),
        (post(), False),
        (post("/p/s/v1/completions"), False),
        (post("/p/s/", KEY), True),
        (post("/p/s/", KEY, body=b"x" * (HOLD_BYTES + 1)), False),
        (get("/p/s/", "transfer-encoding: chunked", KEY, method="PATCH"), False),
        (get("/p/s/", "connection: upgrade", "upgrade: websocket"), False),
    ],
)
def test_only_what_is_small_and_harmless_by_its_own_word_is_asked_twice(raw: bytes, is_hedged: bool) -> None:
    head = parse_head(raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    asked = told(hedge_s=0.2, is_repeatable=True, balance=Balance.TOKENS)
    assert (0 <= head.length <= hedge_bytes(head, asked)) == is_hedged
    assert hedge_bytes(head, told()) == -1


def test_body_of_what_may_be_repeated_is_kept_up_to_a_bound() -> None:
    chunked = parse_head(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    assert hold_bytes(chunked, told()) == 0
    assert hold_bytes(chunked, told(is_repeatable=True)) == 1 << 20


async def never(seen: Conversation) -> None:
    """Waits for the end of the connection, which is what being cut off looks like."""
    await seen.reader.readexactly(1)


def dies_with(count: int) -> Behaviour:
    """Takes so many requests whole and is gone with the last of them."""

    async def behave(seen: Conversation) -> None:
        await seen.body()
        if len(seen.replica.requests) == count:
            await seen.replica.stop()
        await never(seen)

    return behave


async def test_posts_in_a_replica_that_dies_are_answered_by_another_where_the_service_says_so(
    lab: Lab,
) -> None:
    dead = await lab.replica("dead", dies_with(30))
    lab.serve(service(dead, is_repeatable=True, cap=30))
    asking = [asyncio.ensure_future(lab.ask(post(body=b"%d" % n))) for n in range(30)]
    await until_true(lambda: dead.lost)
    good = await lab.replica("good")
    lab.serve(service(good, is_repeatable=True, cap=30))
    answers = await asyncio.gather(*asking)
    assert [(one.status, one.body) for one in answers] == [(200, b"good")] * 30
    assert sorted(int(one.body) for one in good.requests) == list(range(30))


async def test_post_in_a_replica_that_dies_is_given_up_where_nobody_says_that_it_is_harmless(
    lab: Lab,
) -> None:
    dead, good = await lab.replica("dead", dies_with(1)), await lab.replica("good")
    lab.serve(service(dead, good, balance=Balance.TOKENS))
    answers = [await lab.ask(post("/p/s/v1/files")) for _ in range(2)]
    assert sorted(one.status for one in answers) == [200, 502]
    assert (len(dead.requests), len(good.requests)) == (1, 1)


async def test_completion_that_has_begun_is_never_begun_again(lab: Lab) -> None:
    async def half(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf")
        seen.writer.transport.abort()

    replica = await lab.replica("one", half)
    lab.serve(service(replica, await lab.replica("two", half), balance=Balance.TOKENS))
    wire = await lab.connect()
    with pytest.raises(asyncio.IncompleteReadError):
        await wire.ask(post("/p/s/v1/completions"))
    assert sum(len(one.requests) for one in lab.replicas) == 1


async def pair(lab: Lab, first: Behaviour, second: Behaviour) -> tuple[FakeReplica, FakeReplica]:
    """Two replicas of which the first to be asked is `first`, whichever that is."""

    async def behave(seen: Conversation) -> None:
        is_first = sum(len(one.requests) for one in lab.replicas) == 1
        await (first if is_first else second)(seen)

    one, two = await lab.replica("one", behave), await lab.replica("two", behave)
    lab.serve(service(one, two, hedge_s=0.01))
    return one, two


def nothing_is_counted(lab: Lab) -> bool:
    live = lab.plane.services["p", "s"]
    outstanding = [one.outstanding for one in live.replicas.values()]
    bound = [account.bound for account in live.accounts.values()]
    in_flight = [tally.in_flight for tally in live.tallies.values()]
    return not any((*outstanding, *bound, *in_flight))


async def test_late_request_is_answered_by_a_second_replica_and_the_first_is_cut_off(lab: Lab) -> None:
    one, two = await pair(lab, never, answer_ok)
    answer = await lab.ask(post("/p/s/", KEY))
    [late] = [replica for replica in (one, two) if replica.name != answer.body.decode()]
    await until_true(lambda: late.lost)
    ids = {seen.get("x-request-id") for replica in (one, two) for seen in replica.requests}
    assert (answer.status, len(ids)) == (200, 1)
    assert nothing_is_counted(lab)
    assert 'shoal_serving_repeated_total{project="p",service="s"} 1' in metrics(lab.plane)


async def test_second_replica_is_cut_off_when_the_first_answers_after_all(lab: Lab) -> None:
    is_asked_twice = asyncio.Event()

    async def first(seen: Conversation) -> None:
        await is_asked_twice.wait()
        await answer_ok(seen)

    async def second(seen: Conversation) -> None:
        is_asked_twice.set()
        await never(seen)

    one, two = await pair(lab, first, second)
    answer = await lab.ask(get())
    [other] = [replica for replica in (one, two) if replica.name != answer.body.decode()]
    await until_true(lambda: other.lost)
    assert len(other.requests) == 1
    assert nothing_is_counted(lab)


async def test_second_replica_has_the_request_when_the_first_is_lost(lab: Lab) -> None:
    is_lost = asyncio.Event()

    async def first(seen: Conversation) -> None:
        await until_true(lambda: sum(len(one.requests) for one in lab.replicas) == 2)
        seen.writer.transport.abort()
        is_lost.set()

    async def second(seen: Conversation) -> None:
        await is_lost.wait()
        await until_true(lambda: sorted(one.outstanding for one in live.replicas.values()) == [0, 1])
        await answer_ok(seen)

    await pair(lab, first, second)
    live = lab.plane.services["p", "s"]
    assert (await lab.ask(get())).status == 200
    assert sum(len(one.requests) for one in lab.replicas) == 2
    assert nothing_is_counted(lab)


async def test_error_of_the_second_replica_does_not_count_while_the_first_is_at_it(lab: Lab) -> None:
    has_failed = asyncio.Event()

    async def first(seen: Conversation) -> None:
        await has_failed.wait()
        await answer_ok(seen)

    async def second(seen: Conversation) -> None:
        await seen.send(reply(b"busy", "503 Busy"))
        has_failed.set()

    await pair(lab, first, second)
    assert (await lab.ask(get())).status == 200
    assert nothing_is_counted(lab)


async def test_nobody_is_asked_twice_while_others_wait_or_nobody_else_is_there(lab: Lab) -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await answer_ok(seen)

    replica = await lab.replica("one", slow)
    lab.serve(service(replica, hedge_s=0.001, cap=1))
    asking = [asyncio.ensure_future(lab.ask(get())) for _ in range(3)]
    await until_true(lambda: lab.plane.services["p", "s"].waiting.count == 2)
    gate.set()
    assert [one.status for one in await asyncio.gather(*asking)] == [200] * 3
    assert len(replica.requests) == 3
