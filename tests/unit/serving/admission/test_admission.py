"""Which callers are admitted, how many requests at once, and how long requests wait."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from time import monotonic

from shoal.serving.admission.accounts import CallerAccount, FairQueue
from shoal.serving.housekeeping import sweep
from tests.support.serving.data_plane_lab import (
    ClientConnection,
    Conversation,
    EmbeddedLab,
    callers,
    private_service,
    reply,
    request_as,
    request_bytes,
    service,
    until,
)


async def test_replica_gets_its_own_key_in_place_of_the_callers_token(lab: EmbeddedLab) -> None:
    first, other = await lab.add_replica("one"), await lab.add_replica("other")
    replicas = (first.table_entry(secret="key-of-one"), other.table_entry(secret="key-of-other"))
    lab.serve(service(*replicas, callers=callers("ana"), is_public=False))
    for _ in range(2):
        forged = ("connection: authorization", "x-shoal-secret: forged")
        await lab.ask(request_bytes("/p/s/", "authorization: Bearer token-ana", *forged))
    for replica in (first, other):
        [seen] = replica.requests
        key = f"key-of-{replica.name}"
        assert (seen.values("authorization"), seen.values("x-shoal-secret")) == ([f"Bearer {key}"], [key])


async def test_greedy_caller_waits_behind_its_own_requests_and_others_do_not(lab: EmbeddedLab) -> None:
    order: list[str] = []
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        order.append(seen.request.get("x-shoal-caller"))
        await seen.send(reply())

    lab.serve(private_service(await lab.add_replica("one", slow), cap=1))
    live = lab.plane.services["p", "s"]
    requests = [asyncio.ensure_future(lab.ask(request_as("ana"))) for _ in range(30)]
    await until(lambda: live.waiting.count == 29)
    requests += [asyncio.ensure_future(lab.ask(request_as("bo"))) for _ in range(3)]
    await until(lambda: live.waiting.count == 32)
    gate.set()
    assert {(await request).status for request in requests} == {200}
    assert max(at for at, name in enumerate(order) if name == "bo") <= 6


async def test_full_queue_drops_the_newest_request_of_the_caller_with_most(lab: EmbeddedLab) -> None:
    lab.serve(private_service(queue_count=4))
    live = lab.plane.services["p", "s"]
    greedy = [asyncio.ensure_future(lab.ask(request_as("ana"))) for _ in range(4)]
    await until(lambda: live.waiting.count == 4)
    modest = asyncio.ensure_future(lab.ask(request_as("bo")))
    done, _ = await asyncio.wait(greedy, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    dropped = [task.result() for task in done]
    assert [(answer.status, answer.get("retry-after")) for answer in dropped] == [(503, "2")]
    assert live.waiting.count == 4
    lab.serve(private_service(await lab.add_replica(), queue_count=4))
    assert (await modest).status == 200


async def test_queue_is_bounded_by_bytes(lab: EmbeddedLab) -> None:
    lab.serve(service(queue_bytes=100_000))
    live = lab.plane.services["p", "s"]
    first = asyncio.ensure_future(lab.ask(request_bytes(method="POST", body=b"x" * 60_000)))
    await until(lambda: live.waiting.count)
    assert (await lab.ask(request_bytes(method="POST", body=b"x" * 60_000))).status == 503
    assert not first.done()
    lab.serve(service(await lab.add_replica(), queue_bytes=100_000))
    assert (await first).status == 200
    assert (live.waiting.count, live.waiting.bytes) == (0, 0)


async def test_request_at_zero_replicas_waits_for_one_for_a_limited_time(lab: EmbeddedLab) -> None:
    lab.serve(service(queue_s=50.0))
    live = lab.plane.services["p", "s"]
    old = asyncio.ensure_future(lab.ask(request_bytes()))
    await until(lambda: live.waiting.count)
    sweep(lab.plane, monotonic() + 49.0)
    assert not old.done()
    sweep(lab.plane, monotonic() + 51.0)
    assert (await old).status == 503
    new = asyncio.ensure_future(lab.ask(request_bytes()))
    await until(lambda: live.waiting.count)
    lab.serve(service(await lab.add_replica()))
    assert (await new).status == 200


async def test_request_waits_for_a_cold_start_and_is_not_dropped_when_it_ends(lab: EmbeddedLab) -> None:
    lab.serve(service(queue_s=50.0, start_s=600.0))
    live = lab.plane.services["p", "s"]
    first, second = (asyncio.ensure_future(lab.ask(request_bytes())) for _ in range(2))
    await until(lambda: live.waiting.count == 2)
    sweep(lab.plane, monotonic() + 590.0)
    assert not first.done()
    answered = asyncio.Event()

    async def answer_late(seen: Conversation) -> None:
        await answered.wait()
        await seen.send(reply(b"late"))

    slow = await lab.add_replica(behaviour=answer_late)
    lab.serve(service(slow, queue_s=50.0, start_s=600.0, cap=1))
    await until(lambda: live.waiting.count == 1)
    sweep(lab.plane, monotonic() + 60.0)
    answered.set()
    assert [reply.status for reply in await asyncio.gather(first, second)] == [200, 200]


async def test_request_does_not_wait_for_a_cold_start_that_keeps_failing(lab: EmbeddedLab) -> None:
    lab.serve(service(queue_s=50.0, start_s=600.0))
    live = lab.plane.services["p", "s"]
    early = asyncio.ensure_future(lab.ask(request_bytes()))
    await until(lambda: live.waiting.count)
    sweep(lab.plane, monotonic() + 60.0)
    assert not early.done()
    lab.serve(service(queue_s=50.0, start_s=600.0, is_failing=True))
    sweep(lab.plane, monotonic() + 90.0)
    refused = await early
    assert (refused.status, json.loads(refused.body)["code"]) == (503, "service.failing")
    assert refused.get("retry-after") == "30"
    lab.serve(service(await lab.add_replica(), queue_s=50.0, start_s=600.0, is_failing=True))
    assert (await lab.ask(request_bytes())).status == 200, "one that is ready serves, whatever failed before"


async def test_wait_for_a_slot_is_not_extended_by_a_cold_start_elsewhere(lab: EmbeddedLab) -> None:
    is_asked = asyncio.Event()

    async def keep(_: Conversation) -> None:
        is_asked.set()
        await asyncio.Event().wait()

    lab.serve(service(await lab.add_replica(behaviour=keep), queue_s=50.0, start_s=600.0, cap=1))
    live = lab.plane.services["p", "s"]
    busy = asyncio.ensure_future(lab.ask(request_bytes()))
    await is_asked.wait()
    late = asyncio.ensure_future(lab.ask(request_bytes()))
    await until(lambda: live.waiting.count)
    sweep(lab.plane, monotonic() + 51.0)
    assert (await late).status == 503
    busy.cancel()


async def test_removed_service_refuses_its_waiting_requests(lab: EmbeddedLab) -> None:
    lab.serve(service())
    waiting = asyncio.ensure_future(lab.ask(request_bytes()))
    await until(lambda: lab.plane.services["p", "s"].waiting.count)
    lab.serve()
    assert (await waiting).status == 503


async def warmed(lab: EmbeddedLab) -> ClientConnection:
    """A caller that waits for a stream and has received a heartbeat."""
    lab.serve(service())
    wire = await lab.connect()
    await wire.send(request_bytes("/p/s/v1/chat/completions", method="POST", body=b'{"stream": true}'))
    await until(lambda: lab.plane.services["p", "s"].waiting.count)
    sweep(lab.plane, monotonic() + 15.0)
    head = await wire.reader.readuntil(b": warming\n\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    return wire


async def test_caller_that_waits_for_a_stream_gets_heartbeats_and_then_the_stream(lab: EmbeddedLab) -> None:
    async def stream(seen: Conversation) -> None:
        await seen.body()
        await seen.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await seen.send(b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    wire = await warmed(lab)
    lab.serve(service(await lab.add_replica("one", stream)))
    rest = await wire.reader.readuntil(b"0\r\n\r\n")
    assert b"data: 1\n\ndata: 2\n\n" in rest
    assert (await wire.ask(request_bytes(method="POST", body=b"x"))).status == 200


async def test_warming_stream_ends_with_an_error_event_when_it_fails(lab: EmbeddedLab) -> None:
    async def broken(seen: Conversation) -> None:
        await seen.body()
        await seen.send(reply(b'{"error": "no such model"}', "404 Not Found"))

    wire = await warmed(lab)
    lab.serve(service(await lab.add_replica("one", broken)))
    assert b'event: error\ndata: {"error": "no such model"}\n\n' in await wire.reader.readuntil(b"0\r\n\r\n")


async def test_warming_stream_ends_with_an_error_event_after_its_time_limit(lab: EmbeddedLab) -> None:
    wire = await warmed(lab)
    sweep(lab.plane, monotonic() + 100.0)
    last = await wire.reader.readuntil(b"0\r\n\r\n")
    assert b"event: error" in last
    assert b"service.busy" in last


@dataclass
class Waiting:
    account: CallerAccount
    weight_bytes: int = 1


def test_next_slot_goes_to_the_caller_with_fewest_running() -> None:
    greedy, modest = CallerAccount("ana"), CallerAccount("bo")
    greedy.bound = 3
    queue = FairQueue()
    for account in (greedy, modest):
        queue.push(Waiting(account), max_count=10, max_bytes=10)
    assert queue.first().account is modest
