"""Connections are limited, and the limit is shared: no caller locks out the others."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

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
    running_lab,
    service,
    until,
)

EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n3\r\n:\n\n\r\n"
)


async def test_silent_connection_is_closed(lab: EmbeddedLab) -> None:
    lab.serve(service(await lab.add_replica()))
    fresh, used = await lab.connect(), await lab.connect()
    assert (await used.ask(request_bytes())).status == 200
    await until(lambda: len(lab.plane.clients) == 2)
    sweep(lab.plane, monotonic() + 11.0)
    assert await fresh.is_closed()
    sweep(lab.plane, monotonic() + 76.0)
    assert await used.is_closed()


async def idle_wires(
    lab: EmbeddedLab, count: int, request: bytes, *, local: str = "127.0.0.1"
) -> list[ClientConnection]:
    """Open connections that were each answered once and stay open."""
    wires = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", lab.port, local_addr=(local, 0))
        lab.connections.append(wire := ClientConnection(reader, writer))
        assert (await wire.ask(request)).status == 200
        wires.append(wire)
    return wires


@pytest.mark.parametrize(
    "request_of_many", [request_bytes("/p/open/"), request_as("ana")], ids=["public", "token"]
)
async def test_idle_connections_of_one_caller_do_not_lock_out_others(request_of_many: bytes) -> None:
    async with running_lab(max_clients=80) as lab:  # 60 places for callers, 20 for each
        replica = await lab.add_replica()
        lab.serve(private_service(replica), service(replica, name="open"))
        few = await idle_wires(lab, 2, request_as("bo"))
        many = await idle_wires(lab, 100, request_of_many, local="127.0.0.6")
        # The first 15 places do not tell users of an address apart, so an address may have 35 here.
        await until(lambda: len(lab.plane.clients) <= 37)
        assert (await few[0].ask(request_as("bo"))).status == 200
        assert (await lab.ask(request_bytes("/p/open/"))).status == 200
        assert (await many[-1].ask(request_of_many)).status == 200


async def test_when_all_connections_are_used_the_largest_caller_loses_its_longest_idle_one() -> None:
    async with running_lab(max_clients=80) as lab:
        replica = await lab.add_replica()
        lab.serve(private_service(replica), service(replica, name="open"))
        small = await idle_wires(lab, 2, request_bytes("/p/open/"), local="127.0.0.9")
        large = [
            await idle_wires(lab, count, request_bytes("/p/open/"), local=f"127.0.0.{count}")
            for count in (19, 20, 18)
        ]
        await until(lambda: len(lab.plane.clients) == 59)
        await idle_wires(lab, 2, request_as("ana"))
        assert await large[1][0].is_closed()
        await until(lambda: len(lab.plane.clients) == 60)
        for wire in (*small, large[0][0], large[1][1], large[2][0]):
            assert (await wire.ask(request_bytes("/p/open/"))).status == 200


async def test_endless_requests_of_few_callers_do_not_lock_out_others() -> None:
    async def streams(seen: Conversation) -> None:
        if seen.request.path == "/short":
            await seen.send(reply())
            return
        await seen.send(EVENTS)
        await asyncio.Event().wait()

    async with running_lab(max_clients=80) as lab:
        lab.serve(
            private_service(await lab.add_replica("one", streams), callers=callers("ana", "bo", "cy", "di"))
        )
        for name in ("ana", "bo", "cy"):
            for _ in range(20):
                wire = await lab.connect()
                await wire.send(request_as(name))
                await until(lambda: wire.reader._buffer)  # type: ignore[attr-defined]  # noqa: B023
        assert len(lab.plane.clients) == 60
        assert (await lab.ask(request_as("di", "/p/s/short"))).status == 200
        await until(lambda: len(lab.plane.clients) <= 60)


async def test_busy_connections_are_kept_and_a_caller_with_too_many_gets_503() -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(reply())

    async with running_lab(max_clients=80) as lab:
        lab.serve(private_service(await lab.add_replica("one", slow)))
        busy = [await lab.connect() for _ in range(20)]
        for wire in busy:
            await wire.send(request_as("ana"))
        await until(lambda: lab.in_flight() == 20)
        refused = await lab.ask(request_as("ana"))
        assert (refused.status, b"plane.full" in refused.body) == (503, True)
        other = await lab.connect()
        await other.send(request_as("bo"))
        await until(lambda: lab.in_flight() == 21)
        gate.set()
        assert [(await wire.receive()).status for wire in (*busy, other)] == [200] * 21


async def test_silent_connections_end_for_newcomers_before_served_ones() -> None:
    async with running_lab(max_clients=80) as lab:  # and 20 that have not been served
        lab.serve(service(await lab.add_replica()))
        served = await lab.connect()
        assert (await served.ask(request_bytes())).status == 200
        silent = [await lab.connect() for _ in range(20)]
        await until(lambda: len(lab.plane.clients) == 21)
        newcomer = await lab.connect()
        assert (await newcomer.ask(request_bytes())).status == 200
        await until(lambda: [wire.reader.at_eof() for wire in silent].count(True) == 1)
        assert (await served.ask(request_bytes())).status == 200
        assert len(lab.plane.clients) == 21


async def test_idle_connections_to_replicas_are_closed_before_they_close_them(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica()
    lab.serve(service(replica))
    assert (await lab.ask(request_bytes())).status == 200
    live = next(iter(lab.plane.services["p", "s"].replicas.values()))
    assert len(live.idle) == 1
    sweep(lab.plane, monotonic() + 3.5)
    assert live.idle == []
    await until(lambda: replica.num_lost)
