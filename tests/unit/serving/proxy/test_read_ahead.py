"""Heads and requests read ahead are held up to a limit, and none of them is read again and again."""

from __future__ import annotations

import asyncio
import socket
from time import monotonic

import pytest

from shoal.serving.housekeeping import sweep
from shoal.serving.proxy import request_head as heads
from shoal.serving.proxy.request_head import too_large
from tests.support.serving.data_plane_lab import (
    ClientConnection,
    Conversation,
    EmbeddedLab,
    reply,
    request_bytes,
    running_lab,
    service,
    until,
)


async def test_caller_that_never_finishes_its_head_gets_408(lab: EmbeddedLab) -> None:
    wire = await lab.connect()
    await wire.send(b"GET /p/s/ HTTP/1.1\r\nHost: a\r\n")
    await until(lambda: any(client._buffer.data for client in lab.plane.clients))
    sweep(lab.plane, monotonic() + 11.0)
    assert (await wire.receive()).status == 408
    assert await wire.is_closed()


async def test_dripping_headers_do_not_extend_the_time_limit(lab: EmbeddedLab) -> None:
    wire = await lab.connect()
    await until(lambda: lab.plane.clients)
    client = next(iter(lab.plane.clients))
    due = client.due
    for _ in range(5):
        await wire.send(b"GET /p/s/ HTTP/1.1\r\nX: y\r\n" if not client._buffer.data else b"X: y\r\n")
    await until(lambda: client._buffer.data.count(b"X: y") == 5)
    assert client.due <= due


async def test_unfinished_heads_are_held_and_bounded() -> None:
    async with running_lab(max_held_bytes=50_000) as lab:
        lab.serve(service(await lab.add_replica()))
        wires = [await lab.connect() for _ in range(4)]
        for wire in wires:
            await wire.send(b"GET /p/s/ HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 15_000)
        await until(lambda: sum(lab.plane.refusals.values()) == 1)
        assert lab.plane.refusals == {(503, "plane.full"): 1}
        assert 45_000 < lab.plane.held.bytes <= 50_000
        await wires[0].send(b"\r\n\r\n")
        await wires[1].send(b"\r\n\r\n")
        assert {(await wire.receive()).status for wire in wires[:2]} <= {200, 503}
        for wire in wires:
            wire.close()
        await until(lambda: not lab.plane.clients)
        assert lab.plane.held.bytes == 0


async def test_requests_read_ahead_are_held_and_bounded() -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await seen.body()
        await gate.wait()
        await seen.send(reply())

    async with running_lab(max_held_bytes=10_000) as lab:
        lab.serve(service(await lab.add_replica("one", slow)))
        few, many = await lab.connect(), await lab.connect()
        await few.send(request_bytes() * 3)
        await until(lambda: lab.plane.held.bytes == 2 * len(request_bytes()))
        await many.send(request_bytes() + request_bytes("/p/s/", "x: " + "y" * 12_000))
        await until(lambda: any(client.is_last for client in lab.plane.clients))
        assert lab.plane.held.bytes <= 10_000
        gate.set()
        assert [(await few.receive()).status for _ in range(3)] == [200] * 3
        answer = await many.receive()
        assert (answer.status, answer.get("connection")) == (200, "close"), "who sent more sends it again"
        assert await many.is_closed()
        assert lab.plane.held.bytes == 0


async def test_rest_of_a_refused_request_is_held_and_bounded() -> None:
    async with running_lab(max_held_bytes=10_000) as lab:
        wire = await lab.connect()
        await wire.send(request_bytes("/no/such") + request_bytes("/no/such", "x: " + "y" * 12_000))
        answer = await wire.receive()
        assert (answer.status, answer.get("connection")) == (401, "close")
        assert await wire.is_closed()
        assert lab.plane.held.bytes == 0


async def test_requests_far_ahead_are_not_read(lab: EmbeddedLab) -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(reply())

    lab.serve(service(await lab.add_replica("one", slow)))
    wire = await lab.connect()
    wire.writer.write(request_bytes() * 100_000)
    await until(lambda: any(client._flow.is_held for client in lab.plane.clients))
    assert all(len(client._buffer.data) <= 512 << 10 for client in lab.plane.clients)
    gate.set()
    for _ in range(100):
        assert (await wire.receive()).status == 200


@pytest.mark.parametrize("count", [5000])
async def test_heads_remembered_are_bounded(lab: EmbeddedLab, count: int) -> None:
    lab.serve(service(await lab.add_replica()))
    wire = await lab.connect()
    for n in range(count):
        await wire.send(request_bytes(f"/p/s/{n}"))
        await wire.receive()
    assert len(lab.plane.routes._remembered) <= 4096


async def test_thousands_of_refused_requests_in_one_piece_are_each_answered(lab: EmbeddedLab) -> None:
    wire = await lab.connect()
    await wire.send(request_bytes("/no/such") * 2000)
    statuses = [(await wire.receive()).status for _ in range(2000)]
    assert (statuses.count(401), statuses.count(429)) == (100, 1900)
    lab.serve(service(queue_count=0))
    await wire.send(request_bytes() * 2000)
    assert {(await wire.receive()).status for _ in range(2000)} == {503}


async def test_requests_that_are_refused_far_ahead_are_not_read(lab: EmbeddedLab) -> None:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", lab.port))
    # Far more than the kernel buffers on either side, to a caller that reads nothing.
    sending = asyncio.ensure_future(loop.sock_sendall(raw, request_bytes("/no/such") * 1_000_000))
    await until(lambda: any(client.is_stalled for client in lab.plane.clients))
    client = next(iter(lab.plane.clients))
    for _ in range(100):
        assert len(client._buffer.data) <= 512 << 10
        assert client._transport.get_write_buffer_size() <= 512 << 10
        await asyncio.sleep(0.01)
    assert not sending.done()
    sending.cancel()
    raw.close()


async def test_no_further_replies_are_made_for_a_caller_that_reads_none(lab: EmbeddedLab) -> None:
    async def large(seen: Conversation) -> None:
        await seen.send(reply(b"x" * 100_000))

    replica = await lab.add_replica("one", large)
    lab.serve(service(replica))
    raw = socket.create_connection(("127.0.0.1", lab.port))
    raw.sendall(request_bytes() * 1000)
    await until(lambda: any(client.is_stalled and not client.exchange for client in lab.plane.clients))
    client = next(iter(lab.plane.clients))
    due = client.due
    count = len(replica.requests)
    for _ in range(50):
        await asyncio.sleep(0.01)
    assert client._transport.get_write_buffer_size() <= 512 << 10
    assert len(replica.requests) < count + 50, "what the kernel took on the way, and no more"
    assert client.due >= due
    raw.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=raw)
    lab.connections.append(wire := ClientConnection(reader, writer))
    for _ in range(1000):
        assert len((await wire.receive()).body) == 100_000


def test_head_that_comes_byte_by_byte_is_checked_as_a_whole_one() -> None:
    bad = b"GET / HTTP/1.1\r\nHost: a\r\nX: y%bz"
    for loose in (b"\n", b"\r\n folded", b"\rx", b"\x00", b"\r\r\n"):
        head = bad % loose
        refusals = [too_large(head[:end], end - 1) for end in range(1, len(head) + 1)]
        assert [refusal.code for refusal in refusals if refusal is not None][:1] == ["request.malformed"], (
            loose
        )
    fine = bad % b"\r\nfine: "
    assert not any(too_large(fine[:end], end - 1) for end in range(1, len(fine) + 1))


def test_head_that_comes_byte_by_byte_is_not_searched_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    class Counting:
        def search(self, seen: bytes, start: int = 0) -> None:
            nonlocal looked
            looked += len(seen) - start

    monkeypatch.setattr(heads, "LOOSE_SO_FAR", Counting())
    data = b"a" * 10_000
    for end in range(1, len(data) + 1):
        too_large(data[:end], end - 1)
    assert looked <= 3 * len(data)
