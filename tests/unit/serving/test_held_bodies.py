"""Request bodies that a process holds are counted in one place, bounded, and given back."""

from __future__ import annotations

import asyncio

from shoal.serving.table import Balance
from tests.support.serving.data_plane_lab import (
    Conversation,
    reply,
    request_bytes,
    running_lab,
    service,
    until,
)

PROMPT = b"POST /p/s/v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"


async def test_prompts_beyond_the_limit_of_held_bytes_are_refused() -> None:
    async with running_lab(max_held_bytes=1 << 20) as lab:
        lab.serve(service(await lab.add_replica(), balance=Balance.TOKENS))
        held = lab.plane.held
        wires = [await lab.connect() for _ in range(5)]
        for wire in wires:
            await wire.send(PROMPT + b"x" * 200_000)
        await until(lambda: held.bytes == 1_000_000)
        late = await lab.connect()
        await late.send(PROMPT + b"x" * 200_000)
        refused = await late.receive()
        assert (refused.status, refused.get("retry-after")) == (503, "2")
        assert held.bytes <= 1 << 20
        assert (await lab.ask(request_bytes())).status == 200, "what holds nothing is served"
        for wire in wires:
            wire.close()
        await until(lambda: held.bytes == 0)
        assert (await lab.ask(request_bytes(method="POST", body=b"x" * 1000))).status == 200


async def test_copy_for_a_retry_is_held_until_the_reply_begins() -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await seen.body()
        await gate.wait()
        await seen.send(reply())

    async with running_lab() as lab:
        replica = await lab.add_replica("one", slow)
        lab.serve(service(replica))
        wire = await lab.connect()
        await wire.send(request_bytes(method="POST", body=b"x" * 1000))
        await until(lambda: replica.requests)
        assert lab.plane.held.bytes == 1000
        gate.set()
        assert (await wire.receive()).status == 200
        assert lab.plane.held.bytes == 0


async def test_waiting_request_is_refused_when_the_service_is_scaled_to_zero() -> None:
    async with running_lab() as lab:
        lab.serve(service())
        wire = await lab.connect()
        await wire.send(request_bytes())
        queue = lab.plane.services["p", "s"].waiting
        await until(lambda: queue.count == 1)
        lab.serve(service(is_off=True))
        assert (await wire.receive()).status == 503
        assert queue.count == 0
        lab.serve(service(await lab.add_replica()))
        assert (await wire.ask(request_bytes())).status == 200


async def test_body_that_grows_in_the_queue_is_bounded_by_the_queues_limit() -> None:
    async with running_lab() as lab:
        lab.serve(service(queue_bytes=50_000))
        wire = await lab.connect()
        await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        queue = lab.plane.services["p", "s"].waiting
        await until(lambda: queue.count == 1)
        await wire.send((b"7530\r\n" + b"x" * 30_000 + b"\r\n") * 4)
        assert (await wire.receive()).status == 503
        await until(lambda: (queue.count, queue.bytes, lab.plane.held.bytes) == (0, 0, 0))
