"""Callers and replicas misbehave at random in every way; afterwards every counter is back at 0."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from shoal.serving.table import Balance, CallerLimits
from tests.support.serving.data_plane_lab import (
    Conversation,
    EmbeddedLab,
    callers,
    reply,
    request_bytes,
    service,
    until,
)


def unruly(source: random.Random) -> object:
    async def behave(seen: Conversation) -> None:
        match source.randrange(8):
            case 0:
                seen.writer.transport.abort()
            case 1:
                await seen.body()
                seen.writer.transport.abort()
            case 2:
                await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf")
                seen.writer.transport.abort()
            case 3:
                await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz")
                seen.writer.transport.abort()
            case 4:
                await seen.send(reply(b"early", "413 No", "connection: close"))
                seen.writer.close()
            case 5:
                await seen.body()
                await seen.send(reply(b"busy", "503 Busy"))
            case _:
                await seen.body()
                await asyncio.sleep(source.random() / 50)
                await seen.send(reply(b"x" * source.choice([0, 10, 100_000])))

    return behave


async def call(lab: EmbeddedLab, source: random.Random) -> None:
    wire = await lab.connect()
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        for _ in range(source.randint(1, 5)):
            token = f"authorization: Bearer token-{source.choice(['ana', 'bo', 'eve'])}"
            body = b"y" * source.choice([0, 5, 100_000])
            raw = request_bytes("/p/s/", token, method=source.choice(["GET", "POST"]), body=body)
            if source.random() < 0.2:
                raw = raw[: source.randrange(len(raw))] + source.choice([b"", b"\r\n\r\nzz", b"\0"])
            await wire.send(raw * source.choice([1, 1, 3]))
            async with asyncio.timeout(source.choice([0.01, 0.1, 1.0])):
                await wire.receive()
    wire.close()


@pytest.mark.parametrize("balance", list(Balance))
@pytest.mark.parametrize("seed", range(2))
async def test_every_counter_is_zero_after_random_failures(
    lab: EmbeddedLab, seed: int, balance: Balance
) -> None:
    source = random.Random(seed)
    replicas = [await lab.add_replica(f"r{n}", unruly(source)) for n in range(3)]  # type: ignore[arg-type]
    limits = CallerLimits(rps=300.0, concurrency=20)
    settings = {"callers": callers("ana", "bo"), "is_public": False, "limits": limits, "balance": balance}
    settings |= {"hedge_s": 0.005, "is_repeatable": bool(seed)}
    lab.serve(service(*replicas, cap=3, queue_count=8, **settings))
    live = lab.plane.services["p", "s"]
    for turn in range(6):
        calls = [asyncio.ensure_future(call(lab, source)) for _ in range(25)]
        if turn == 3:
            lab.serve(service(*replicas[:2], cap=2, queue_count=8, **settings))
        await asyncio.gather(*calls)
    await until(lambda: not lab.plane.clients)
    seen = [*live.replicas.values()]
    await until(lambda: [replica.outstanding for replica in seen] == [0] * len(seen))
    assert [replica.prefill_tokens for replica in seen] == [0] * len(seen)
    assert (live.waiting.count, live.waiting.bytes) == (0, 0)
    assert [(account.admitted, account.bound) for account in live.accounts.values()] == [(0, 0)] * 2
    assert [tally.in_flight for tally in live.tallies.values()] == [0] * len(live.tallies)
    assert sum(tally.requests for tally in live.tallies.values()) > 100
