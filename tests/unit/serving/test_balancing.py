"""Replicas fail, fill up, come and go, and no request is lost that can be saved."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic

import pytest

from shoal.serving.balance.balancer import routing_hints
from shoal.serving.housekeeping import check_replica, sweep
from shoal.serving.table import Balance
from tests.support.serving.data_plane_lab import (
    Conversation,
    EmbeddedLab,
    FakeReplica,
    reply,
    request_bytes,
    service,
    until,
)


async def hang_up(seen: Conversation) -> None:
    seen.writer.transport.abort()


async def silence(seen: Conversation) -> None:
    await seen.reader.read()


async def busy(seen: Conversation) -> None:
    await seen.body()
    await seen.send(reply(b"no", "503 Service Unavailable"))


async def test_many_replicas_gone_at_once_cost_no_request(lab: EmbeddedLab) -> None:
    replicas = [await lab.add_replica(f"r{number}") for number in range(12)]
    lab.serve(service(*replicas))
    for gone in replicas[1:]:
        await gone.stop()
    assert (await lab.ask(request_bytes(method="POST", body=b"x"))).body == b"r0"


async def test_every_safe_request_in_a_replica_that_dies_is_sent_again(lab: EmbeddedLab) -> None:
    async def hold(seen: Conversation) -> None:
        await seen.reader.read()  # until the connection ends

    dying = await lab.add_replica("dying", hold)
    lab.serve(service(dying, cap=200))
    requests = [asyncio.ensure_future(lab.ask(request_bytes())) for _ in range(150)]
    await until(lambda: len(dying.requests) == 150)
    lab.serve(service(dying, await lab.add_replica("good"), cap=200))
    await dying.stop()
    assert {answer.body for answer in await asyncio.gather(*requests)} == {b"good"}


async def test_requests_wait_for_the_only_replica_to_return(lab: EmbeddedLab) -> None:
    gone = await lab.add_replica("gone")
    lab.serve(service(gone))
    await gone.stop()
    waiting = asyncio.ensure_future(lab.ask(request_bytes(method="POST", body=b"x")))
    await until(lambda: lab.plane.services["p", "s"].waiting.count)
    back = await FakeReplica("back").start(port=gone.port)
    lab.replicas.append(back)
    assert (await waiting).body == b"back"


async def test_get_waits_for_the_only_replica_although_its_idle_connections_died(
    lab: EmbeddedLab,
) -> None:
    gone = await lab.add_replica("gone")
    lab.serve(service(gone))
    await asyncio.gather(*(lab.ask(request_bytes()) for _ in range(4)))
    live = lab.plane.services["p", "s"].replicas["gone"]
    await until(lambda: len(live.idle) >= 2)
    assert gone._server is not None
    gone._server.close()
    gone.behaviour = hang_up  # each of its connections ends when it is used
    waiting = asyncio.ensure_future(lab.ask(request_bytes()))
    await until(lambda: lab.plane.services["p", "s"].waiting.count)
    lab.replicas.append(await FakeReplica("back").start(port=gone.port))
    assert (await waiting).body == b"back"


async def test_error_of_a_lost_get_does_not_claim_an_effect(lab: EmbeddedLab) -> None:
    lab.serve(service(await lab.add_replica("bad", hang_up)))
    answer = await lab.ask(request_bytes())
    assert (answer.status, b"tried 2 times" in answer.body, b"an effect" in answer.body) == (502, True, False)
    posted = await lab.ask(request_bytes(method="POST", body=b"x"))
    assert (posted.status, b"an effect" in posted.body) == (502, True)


async def test_retries_are_bounded_by_number_and_by_budget(lab: EmbeddedLab) -> None:
    bad = await lab.add_replica("bad", hang_up)
    lab.serve(service(bad, retries=2))
    assert (await lab.ask(request_bytes())).status == 502
    assert len(bad.requests) == 3
    lab.plane.services["p", "s"]._retries = 0.0
    assert (await lab.ask(request_bytes())).status == 502
    assert len(bad.requests) == 4


async def test_replica_that_keeps_answering_503_is_ejected_for_a_while(lab: EmbeddedLab) -> None:
    bad, good = await lab.add_replica("bad", busy), await lab.add_replica("good")
    lab.serve(service(bad, good))
    statuses = Counter([(await lab.ask(request_bytes())).status for _ in range(40)])
    assert statuses == {503: 5, 200: 35}
    sweep(lab.plane, monotonic() + 10.0)
    assert len(lab.plane.services["p", "s"].open) == 2


async def test_all_replicas_are_used_when_most_seem_bad(lab: EmbeddedLab) -> None:
    lab.serve(
        service(
            await lab.add_replica("a", busy),
            await lab.add_replica("b", busy),
            await lab.add_replica("c", busy),
        )
    )
    for _ in range(40):
        assert (await lab.ask(request_bytes())).status == 503
    assert len(lab.plane.services["p", "s"].open) >= 2


async def test_connection_of_a_check_is_never_used_for_a_request(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica()
    lab.serve(service(replica, check="/health"))
    live = lab.plane.services["p", "s"]
    [seen] = live.replicas.values()
    await check_replica(live, seen)
    assert [request.path for request in replica.requests] == ["/health"]
    assert seen.idle == []


async def test_silence_of_a_replica_ends_with_a_504(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica("one", silence)
    lab.serve(service(replica, timeout_s=50.0))
    waiting = asyncio.ensure_future(lab.ask(request_bytes()))
    await until(lambda: replica.requests)
    sweep(lab.plane, monotonic() + 49.0)
    assert not waiting.done()
    sweep(lab.plane, monotonic() + 51.0)
    assert (await waiting).status == 504


async def test_conversation_returns_to_the_replica_that_served_it(lab: EmbeddedLab) -> None:
    replicas = [await lab.add_replica(name) for name in "abcd"]
    lab.serve(service(*replicas, balance=Balance.TOKENS))
    system = b"you are a helpful assistant " * 200

    def turn(text: bytes) -> bytes:
        body = b'{"messages": [{"role": "system", "content": "%b"}]}' % (system + text)
        return request_bytes("/p/s/v1/chat/completions", method="POST", body=body)

    home = (await lab.ask(turn(b""))).body
    assert {(await lab.ask(turn(b"%d" % n))).body for n in range(10)} == {home}
    assert all(live.prefill_tokens == 0 for live in lab.plane.services["p", "s"].replicas.values())


async def test_traffic_split_continues_across_tables(lab: EmbeddedLab) -> None:
    replicas = [await lab.add_replica(name) for name in "abcd"]
    lab.serve(service(*replicas))
    for _ in range(100):
        await lab.ask(request_bytes())
    lab.serve(service(*replicas, cap=7))
    for _ in range(100):
        await lab.ask(request_bytes())
    assert [len(replica.requests) for replica in replicas] == [50, 50, 50, 50]


@pytest.mark.parametrize("body", [b'{"other": ' + b"[" * 100_000, b'{"model": "\xff", "\xff": 1}', b"\xff"])
def test_body_that_is_no_prompt_is_left_for_the_replica_to_refuse(body: bytes) -> None:
    assert routing_hints(b"session", body).affinity == b"session"
