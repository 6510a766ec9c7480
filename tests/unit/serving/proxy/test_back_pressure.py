"""A side that does not read stops the other side from sending, and is cut off if it reads nothing at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from time import monotonic

from shoal.serving.housekeeping import sweep
from tests.support.serving.data_plane_lab import (
    Behaviour,
    Conversation,
    EmbeddedLab,
    reply,
    request_bytes,
    service,
    until,
)


async def test_replica_that_does_not_read_stops_the_caller_from_sending(lab: EmbeddedLab) -> None:
    go_on = asyncio.Event()

    async def deaf(seen: Conversation) -> None:
        seen.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await go_on.wait()
        seen.reader._transport.resume_reading()  # type: ignore[attr-defined]
        body = await seen.body()
        await seen.send(reply(str(len(body)).encode()))

    replica = await lab.add_replica("one", deaf)
    lab.serve(service(replica))
    size = 32 << 20
    wire = await lab.connect()
    sending = asyncio.ensure_future(wire.send(request_bytes(method="POST", body=b"x" * size)))
    await until(lambda: any(client._flow.is_held for client in lab.plane.clients))
    exchange = next(client.exchange for client in lab.plane.clients if client.exchange)
    assert exchange.up is not None
    assert exchange.up.transport.get_write_buffer_size() < 2 << 20
    go_on.set()
    await sending
    assert (await wire.receive()).body == str(size).encode()


async def test_caller_that_does_not_read_stops_the_replica_from_sending(lab: EmbeddedLab) -> None:
    size = 64 << 20

    async def flood(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            await seen.send(b"x" * (1 << 16))

    lab.serve(service(await lab.add_replica("one", flood)))
    raw = socket.create_connection(("127.0.0.1", lab.port))
    raw.sendall(request_bytes())
    await until(lambda: any(client.is_stalled for client in lab.plane.clients))
    client = next(iter(lab.plane.clients))
    assert client._transport.get_write_buffer_size() < 2 << 20
    await _swept_until_gone(lab)
    assert [live.outstanding for live in lab.plane.services["p", "s"].replicas.values()] == [0]
    raw.close()


async def _swept_until_gone(lab: EmbeddedLab) -> None:
    """Sweep more than once, because bytes that the kernels still take count as read."""
    now = monotonic()
    for turn in range(1, 1000):
        sweep(lab.plane, now + 61.0 * turn)
        await asyncio.sleep(0.01)
        if not lab.plane.clients:
            return
    raise AssertionError("a caller that reads nothing is kept for ever")


async def test_slow_reader_gets_the_whole_reply(lab: EmbeddedLab) -> None:
    size = 16 << 20

    async def flood(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"y" * size)

    replica = await lab.add_replica("one", flood)
    lab.serve(service(replica))
    wire = await lab.connect()
    await wire.send(request_bytes())
    await until(lambda: any(client.is_stalled for client in lab.plane.clients))
    assert len((await wire.receive()).body) == size
    assert len((await wire.ask(request_bytes())).body) == size
    assert replica.num_connections == 1


async def test_slow_reader_gets_the_whole_last_reply_of_a_connection(lab: EmbeddedLab) -> None:
    size = 16 << 20
    lab.serve(service(await lab.add_replica("one", _answer_of(size))))
    wire = await lab.connect()
    wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await wire.send(request_bytes("/p/s/", "connection: close"))
    await until(lambda: any(client.is_stalled for client in lab.plane.clients))
    client = next(iter(lab.plane.clients))
    client._transport.set_write_buffer_limits(high=size * 2)  # the whole reply at once
    client.resume_writing()
    await until(lambda: client.is_last and not client.exchange)
    assert client._transport.get_write_buffer_size() > 0
    sweep(lab.plane, monotonic() + 6.0)
    wire.reader._transport.resume_reading()  # type: ignore[attr-defined]
    assert len((await wire.receive()).body) == size


async def test_caller_that_does_not_read_the_last_reply_is_cut_off(lab: EmbeddedLab) -> None:
    lab.serve(service(await lab.add_replica("one", _answer_of(16 << 20))))
    raw = socket.create_connection(("127.0.0.1", lab.port))
    raw.sendall(request_bytes("/p/s/", "connection: close"))
    await until(lambda: any(client.is_stalled for client in lab.plane.clients))
    await _swept_until_gone(lab)
    raw.close()


def _answer_of(size: int) -> Behaviour:
    async def answer(seen: Conversation) -> None:
        await seen.send(reply(b"z" * size))

    return answer


async def test_end_of_a_reply_does_not_pause_the_connections_next_request(lab: EmbeddedLab) -> None:
    gate = asyncio.Event()

    async def in_chunks(seen: Conversation) -> None:
        if seen.request.path == "/small":
            await seen.send(reply(b"small"))
            return
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await seen.send(b"%x\r\n%b\r\n" % (16 << 20, b"x" * (16 << 20)))
        await gate.wait()
        await seen.send(b"0\r\n\r\n")

    replica = await lab.add_replica("one", in_chunks)
    lab.serve(service(replica))
    raw = socket.create_connection(("127.0.0.1", lab.port))
    await until(lambda: lab.plane.clients)
    client = next(iter(lab.plane.clients))
    client._transport.set_write_buffer_limits(high=64 << 20)
    raw.sendall(request_bytes("/p/s/big"))
    await until(lambda: client._transport.get_write_buffer_size() > 1 << 20)
    await _settled(client._transport.get_write_buffer_size)
    client._transport.set_write_buffer_limits(high=client._transport.get_write_buffer_size() + 2)
    gate.set()
    await until(lambda: client.is_stalled)
    assert (await lab.ask(request_bytes("/p/s/small"))).body == b"small"
    assert replica.num_connections == 1
    raw.close()


async def _settled(value: Callable[[], int]) -> None:
    """Wait until the value has been the same for half a second."""
    before, since = value(), monotonic()
    while monotonic() - since < 0.5:
        await asyncio.sleep(0.01)
        if (now := value()) != before:
            before, since = now, monotonic()
