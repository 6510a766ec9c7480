"""A token that is revoked or has expired also ends the requests begun with it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shoal.clock import SystemClock
from shoal.serving.exchange.exchange import Exchange
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.table import ServiceConfig, ServingTable
from tests.support.serving.data_plane_lab import (
    ClientConnection,
    Conversation,
    EmbeddedLab,
    callers,
    reply,
    request_bytes,
    running_lab,
    service,
    until,
)

ANA, BO = "authorization: Bearer token-ana", "authorization: Bearer token-bo"
UPGRADE = ("connection: Upgrade", "upgrade: websocket", "sec-websocket-key: x")


async def behave(seen: Conversation) -> None:
    """Echo on a WebSocket, send a stream that does not end, or never answer."""
    if seen.request.get("upgrade"):
        await seen.send(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
        )
        while data := await seen.reader.read(100):
            await seen.send(data)
    elif seen.request.path == "/quick":
        await seen.send(reply())
    else:
        if seen.request.path == "/stream":
            await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await asyncio.Event().wait()


async def begun(lab: EmbeddedLab, caller: str) -> list[ClientConnection]:
    """Open a WebSocket, a stream and an unanswered request of that caller, all with the replica."""
    socket, stream, slow = [await lab.connect() for _ in range(3)]
    assert (await socket.ask(request_bytes("/p/s/ws", caller, *UPGRADE))).status == 101
    await stream.send(request_bytes("/p/s/stream", caller))
    await stream.reader.readuntil(b"one")
    there = len(lab.replicas[0].requests)
    await slow.send(request_bytes("/p/s/slow", caller))
    await until(lambda: len(lab.replicas[0].requests) > there)
    return [socket, stream, slow]


async def assert_ended(socket: ClientConnection, stream: ClientConnection, slow: ClientConnection) -> None:
    assert await socket.is_closed()
    assert await stream.is_closed()
    answer = await slow.receive()
    assert (answer.status, answer.get("content-type")) == (401, "application/problem+json")


async def assert_speaks(socket: ClientConnection) -> None:
    await socket.send(b"hello")
    async with asyncio.timeout(30):
        assert await socket.reader.readexactly(5) == b"hello"


async def test_revoked_token_ends_its_open_requests_and_no_others(lab: EmbeddedLab) -> None:
    allowed = callers("ana", "bo")
    spec = service(await lab.add_replica("one", behave), is_public=False, callers=allowed)
    lab.serve(spec)
    of_ana, of_bo = await begun(lab, ANA), await begun(lab, BO)
    lab.serve(msgspec.structs.replace(spec, callers=allowed[1:]))
    await assert_ended(*of_ana)
    await assert_speaks(of_bo[0])
    live = lab.plane.services["p", "s"]
    await until(lambda: live.replicas["one"].outstanding == 3)
    assert live.tallies[1].errors == 0
    assert (await lab.ask(request_bytes("/p/s/quick", ANA))).status == 401
    assert (await lab.ask(request_bytes("/p/s/quick", BO))).status == 200


async def test_waiting_request_of_a_revoked_token_reaches_no_replica(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica("one", behave)
    spec = service(replica, is_public=False, callers=callers("ana", "bo"), cap=1)
    lab.serve(spec)
    first, second = await lab.connect(), await lab.connect()
    await first.send(request_bytes("/p/s/slow", ANA))
    await until(lambda: len(replica.requests) == 1)
    await second.send(request_bytes("/p/s/slow", ANA))
    await until(lambda: lab.plane.services["p", "s"].waiting.count == 1)
    lab.serve(msgspec.structs.replace(spec, callers=callers("bo")))
    assert (await first.receive()).status == 401
    assert (await second.receive()).status == 401
    assert (await lab.ask(request_bytes("/p/s/quick", BO))).status == 200
    assert [seen.path for seen in replica.requests] == ["/slow", "/quick"]


async def test_requests_of_a_revoked_token_end_even_if_refusing_one_fails(
    lab: EmbeddedLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await lab.add_replica("one", behave)
    spec = service(replica, is_public=False, callers=callers("ana", "bo"))
    lab.serve(spec)
    wires = [await lab.connect() for _ in range(3)]
    for number, wire in enumerate(wires, 1):
        await wire.send(request_bytes("/p/s/slow", ANA))
        await until(lambda there=number: len(replica.requests) == there)  # type: ignore[misc]
    refuse = Exchange.refuse
    failed: list[Exchange] = []

    def broken(exchange: Exchange, refused: ProxyRefusal) -> None:
        if not failed:
            failed.append(exchange)
            raise RuntimeError("of this one")
        refuse(exchange, refused)

    monkeypatch.setattr(Exchange, "refuse", broken)
    lab.serve(msgspec.structs.replace(spec, callers=callers("bo")))
    assert lab.plane.version == 2
    answers = await asyncio.gather(*(wire.receive() for wire in wires), return_exceptions=True)
    assert sorted(isinstance(answer, Exception) or answer.status for answer in answers) == [True, 401, 401]  # type: ignore[union-attr]
    assert lab.in_flight() == 0


class Clock(SystemClock):
    date = 1000.0

    def now(self) -> float:
        return self.date


def until_2000(spec: ServiceConfig) -> ServiceConfig:
    """Ana's token expires then; Bo's does not."""
    ana, bo = callers("ana", "bo")
    return msgspec.structs.replace(spec, callers=(msgspec.structs.replace(ana, expires_at=2000.0), bo))


async def test_token_expires_without_a_newer_table() -> None:
    clock = Clock()
    async with running_lab(clock=clock) as lab:
        lab.serve(until_2000(service(await lab.add_replica("one", behave), is_public=False)))
        of_ana, of_bo = await begun(lab, ANA), await begun(lab, BO)
        kept = await lab.connect()
        assert (await kept.ask(request_bytes("/p/s/quick", ANA))).status == 200
        clock.date = 2000.0
        await assert_ended(*of_ana)
        assert (await kept.ask(request_bytes("/p/s/quick", ANA))).status == 401
        await assert_speaks(of_bo[0])


@pytest.mark.parametrize(("date", "status"), [(1999.0, 200), (2000.0, 401)])
async def test_token_in_an_old_table_is_valid_until_it_expires(date: float, status: int) -> None:
    clock = Clock()
    clock.date = date
    async with running_lab(clock=clock) as lab:
        spec = until_2000(service(await lab.add_replica("one", behave), is_public=False))
        lab.plane.swap(
            msgspec.json.decode(
                msgspec.json.encode(ServingTable(version=7, services=(spec,))), type=ServingTable
            )
        )
        assert (await lab.ask(request_bytes("/p/s/quick", ANA))).status == status


async def test_service_that_stops_being_public_ends_requests_without_a_token(lab: EmbeddedLab) -> None:
    spec = service(await lab.add_replica("one", behave))
    lab.serve(spec)
    of_stranger = await begun(lab, "x-none: x")
    lab.serve(msgspec.structs.replace(spec, is_public=False, callers=callers("bo")))
    await assert_ended(*of_stranger)
