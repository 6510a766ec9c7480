"""Callers and replicas that do everything wrong at random: afterwards nothing is counted any more."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from shoal.serving.table import Balance, Limits
from tests.support.serving import Conversation, Lab, callers, get, reply, service, until


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


async def call(lab: Lab, source: random.Random) -> None:
    wire = await lab.connect()
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        for _ in range(source.randint(1, 5)):
            token = f"authorization: Bearer token-{source.choice(['ana', 'bo', 'eve'])}"
            body = b"y" * source.choice([0, 5, 100_000])
            raw = get("/p/s/", token, method=source.choice(["GET", "POST"]), body=body)
            if source.random() < 0.2:
                raw = raw[: source.randrange(len(raw))] + source.choice([b"", b"\r\n\r\nzz", b"\0"])
            await wire.send(raw * source.choice([1, 1, 3]))
            async with asyncio.timeout(source.choice([0.01, 0.1, 1.0])):
                await wire.receive()
    wire.close()


@pytest.mark.parametrize("balance", list(Balance))
@pytest.mark.parametrize("seed", range(2))
async def test_nothing_stays_counted_when_everybody_has_gone(lab: Lab, seed: int, balance: Balance) -> None:
    source = random.Random(seed)
    replicas = [await lab.replica(f"r{n}", unruly(source)) for n in range(3)]  # type: ignore[arg-type]
    limits = Limits(rps=300.0, concurrency=20)
    known = {"callers": callers("ana", "bo"), "is_public": False, "limits": limits, "balance": balance}
    known |= {"hedge_s": 0.005, "is_repeatable": bool(seed)}
    lab.serve(service(*replicas, cap=3, queue_count=8, **known))
    live = lab.plane.services["p", "s"]
    for turn in range(6):
        calls = [asyncio.ensure_future(call(lab, source)) for _ in range(25)]
        if turn == 3:
            lab.serve(service(*replicas[:2], cap=2, queue_count=8, **known))
        await asyncio.gather(*calls)
    await until(lambda: not lab.plane.clients)
    seen = [*live.replicas.values()]
    await until(lambda: [one.outstanding for one in seen] == [0] * len(seen))
    assert [one.prefill_tokens for one in seen] == [0] * len(seen)
    assert (live.waiting.count, live.waiting.bytes) == (0, 0)
    assert [(account.admitted, account.bound) for account in live.accounts.values()] == [(0, 0)] * 2
    assert [tally.in_flight for tally in live.tallies.values()] == [0] * len(live.tallies)
    assert sum(tally.requests for tally in live.tallies.values()) > 100
