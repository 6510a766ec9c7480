"""A caller that closes its sending side still gets its reply; for a caller that is gone, work stops."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shoal.serving.proxy import half_closed as watch
from tests.support.serving.data_plane_lab import (
    Conversation,
    EmbeddedLab,
    HttpMessage,
    read_head,
    reply,
    request_bytes,
    service,
    until,
)


def half_closed(lab: EmbeddedLab, raw: bytes) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", lab.port))
    link.sendall(raw)
    link.shutdown(socket.SHUT_WR)
    link.setblocking(False)
    return link


async def answers(link: socket.socket) -> list[HttpMessage]:
    """Read all replies until the other end closes, without interim ones."""
    reader, writer = await asyncio.open_connection(sock=link)
    messages = []
    while not reader.at_eof():
        try:
            message = await read_head(reader)
        except asyncio.IncompleteReadError:
            break
        if message.status >= 200:
            message.body = await reader.readexactly(int(message.get("content-length")))
            messages.append(message)
    writer.close()
    return messages


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_caller_that_closes_its_sending_side_gets_its_reply(
    lab: EmbeddedLab, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, looks = asyncio.Event(), list[bool]()
    is_reset = watch.HalfClosed._is_reset

    def look(caller: watch.HalfClosed) -> bool:
        looks.append(is_reset(caller))
        return looks[-1]

    monkeypatch.setattr(watch.HalfClosed, "_is_reset", look)

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(reply(b"late"))

    replica = await lab.add_replica("one", slow)
    lab.serve(service(replica))
    link = half_closed(lab, request_bytes().replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
    await until(lambda: len(looks) >= 3)
    assert not any(looks)
    gate.set()
    if version == "1.0":
        reader, writer = await asyncio.open_connection(sock=link)
        assert (await reader.read()).endswith(b"\r\n\r\nlate")
        writer.close()
    else:
        [answer] = await answers(link)
        assert (answer.status, answer.body, answer.get("connection")) == (200, b"late", "close")
    await until(lambda: not lab.plane.clients)


async def test_requests_sent_ahead_of_a_half_close_are_answered(lab: EmbeddedLab) -> None:
    lab.serve(service(await lab.add_replica()))
    link = half_closed(lab, request_bytes() * 5)
    assert [answer.status for answer in await answers(link)] == [200] * 5


async def test_stream_continues_after_a_half_close(lab: EmbeddedLab) -> None:
    gate = asyncio.Event()

    async def stream(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nfirst")
        await gate.wait()
        await seen.send(b"-last")

    lab.serve(service(await lab.add_replica("one", stream)))
    wire = await lab.connect()
    await wire.send(request_bytes())
    await until(lambda: any(client.exchange and client.exchange.is_answered for client in lab.plane.clients))
    wire.writer.write_eof()
    await until(lambda: any(client._half_closed for client in lab.plane.clients))
    gate.set()
    assert (await wire.receive()).body == b"first-last"
    assert await wire.is_closed()


async def test_caller_that_is_gone_is_not_mistaken_for_a_half_close(lab: EmbeddedLab) -> None:
    async def never(seen: Conversation) -> None:
        await seen.reader.readexactly(1)

    replica = await lab.add_replica("one", never)
    lab.serve(service(replica, cap=1))
    link = socket.create_connection(("127.0.0.1", lab.port))
    link.sendall(request_bytes())
    await until(lambda: replica.requests)
    link.close()
    await until(lambda: not lab.plane.clients)
    await until(lambda: replica.num_lost)
    assert lab.in_flight() == 0


@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain"])
async def test_caller_that_leaves_a_quiet_reply_frees_its_slot(
    lab: EmbeddedLab, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "text/plain":
        monkeypatch.setattr(watch, "QUIET_S", 0.1)

    async def quiet(seen: Conversation) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
        await seen.send(head.encode() + b"3\r\none\r\n")
        await seen.reader.readexactly(1)

    replica = await lab.add_replica("one", quiet)
    lab.serve(service(replica, cap=1, timeout_s=600.0))
    wire = await lab.connect()
    await wire.send(request_bytes())
    await wire.reader.readuntil(b"one\r\n")
    wire.writer.close()
    await until(lambda: not lab.plane.clients)
    await until(lambda: replica.num_lost)
    assert lab.in_flight() == 0


async def test_http10_caller_that_leaves_frees_its_slot(
    lab: EmbeddedLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "QUIET_S", 0.1)

    async def never(seen: Conversation) -> None:
        await seen.reader.readexactly(1)

    replica = await lab.add_replica("one", never)
    lab.serve(service(replica, cap=1, timeout_s=600.0))
    link = socket.create_connection(("127.0.0.1", lab.port))
    link.sendall(request_bytes().replace(b"HTTP/1.1", b"HTTP/1.0"))
    await until(lambda: replica.requests)
    link.close()
    await until(lambda: not lab.plane.clients)
    await until(lambda: replica.num_lost)
    assert lab.in_flight() == 0


async def test_half_closed_connection_with_half_a_request_is_ended(lab: EmbeddedLab) -> None:
    lab.serve(service(await lab.add_replica()))
    for half in (b"GET /p/s/ HTTP/1.1\r\n", b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nx"):
        link = half_closed(lab, half)
        await until(lambda: not lab.plane.clients)
        link.close()
