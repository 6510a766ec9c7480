"""Upgraded connections: HTTP until the replica agrees, then the caller's own protocol."""

from __future__ import annotations

import asyncio
from time import monotonic

from shoal.serving.housekeeping import sweep
from tests.support.serving.data_plane_lab import (
    Conversation,
    EmbeddedLab,
    callers,
    reply,
    request_bytes,
    service,
    until,
)

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"


def upgrade(*headers: str) -> bytes:
    return request_bytes("/p/s/ws", "connection: upgrade", "upgrade: websocket", *headers)


async def test_bytes_after_a_declined_upgrade_are_an_ordinary_request(lab: EmbeddedLab) -> None:
    gate = asyncio.Event()

    async def declines(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(reply(f"{seen.request.path} {seen.request.get('x-shoal-caller')}".encode()))

    replica = await lab.add_replica("one", declines)
    lab.serve(service(replica, is_public=False, callers=callers("eve", "ada")))
    eve = await lab.connect()
    await eve.send(upgrade("authorization: Bearer token-eve"))
    await until(lambda: replica.requests)
    await eve.send(b"GET /stolen HTTP/1.1\r\nhost: a\r\nx-shoal-caller: admin\r\n\r\n")
    await until(lambda: any(client._buffer.data for client in lab.plane.clients))
    gate.set()
    assert (await eve.receive()).body == b"/ws eve"
    assert (await eve.receive()).status == 401
    answer = await lab.ask(request_bytes("/p/s/own", "authorization: Bearer token-ada"))
    assert answer.body == b"/own ada"
    assert [request.path for request in replica.requests] == ["/ws", "/own"]
    assert replica.num_connections == 2, (
        "a connection on which an upgrade was asked for is used for nothing else"
    )


async def test_bytes_sent_before_the_replica_accepts_an_upgrade_reach_it_afterwards(lab: EmbeddedLab) -> None:
    gate = asyncio.Event()

    async def echo(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(SWITCHED)
        while data := await seen.reader.read(1 << 16):
            await seen.send(data)

    lab.serve(service(await lab.add_replica("one", echo)))
    wire = await lab.connect()
    early = b"x" * (1 << 20)
    sending = asyncio.ensure_future(wire.send(upgrade() + early))
    await until(lambda: any(client._flow.is_held for client in lab.plane.clients))
    assert all(len(client._buffer.data) <= 512 << 10 for client in lab.plane.clients)
    gate.set()
    assert (await wire.receive()).status == 101
    assert await wire.reader.readexactly(len(early)) == early
    await sending


async def test_http_1_0_caller_cannot_upgrade(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica()
    lab.serve(service(replica))
    request = upgrade().replace(b"HTTP/1.1", b"HTTP/1.0")
    assert (await lab.ask(request)).status == 200
    assert replica.requests[0].get("upgrade") == ""


async def test_traffic_from_either_side_keeps_a_tunnel_open_and_its_end_is_no_failure(
    lab: EmbeddedLab,
) -> None:
    received: list[bytes] = []

    async def listens(seen: Conversation) -> None:
        await seen.send(SWITCHED)
        while data := await seen.reader.read(100):
            received.append(data)

    replica = await lab.add_replica("one", listens)
    lab.serve(service(replica, timeout_s=600.0))
    live = lab.plane.services["p", "s"]
    wires = [await lab.connect() for _ in range(6)]
    for wire in wires:
        assert (await wire.ask(upgrade())).status == 101
        await wire.send(b"word")
    await until(lambda: b"".join(received) == b"word" * 6)
    now = monotonic()
    sweep(lab.plane, now + 601.0)
    assert len(lab.plane.clients) == 6, "who speaks is not idle"
    sweep(lab.plane, now + 1202.0)
    await until(lambda: not lab.plane.clients)
    live_replica = live.replicas["one"]
    assert (
        live_replica.failures,
        live_replica.ejections,
        live_replica.outstanding,
        live.tallies[1].errors,
    ) == (0, 0, 0, 0)
