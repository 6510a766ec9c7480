"""A caller that has said all it has to say is answered; one that has gone is not worked for."""

from __future__ import annotations

import asyncio
import socket

import pytest

from shoal.serving import downstream
from tests.support.serving import Conversation, Lab, Message, get, read_head, reply, service, until


def half_closed(lab: Lab, raw: bytes) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", lab.port))
    link.sendall(raw)
    link.shutdown(socket.SHUT_WR)
    link.setblocking(False)
    return link


async def answers(link: socket.socket) -> list[Message]:
    """All that come until the other end closes, but interim ones."""
    reader, writer = await asyncio.open_connection(sock=link)
    found = []
    while not reader.at_eof():
        try:
            message = await read_head(reader)
        except asyncio.IncompleteReadError:
            break
        if message.status >= 200:
            message.body = await reader.readexactly(int(message.get("content-length")))
            found.append(message)
    writer.close()
    return found


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_caller_that_sends_no_more_is_answered(lab: Lab, version: str) -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(reply(b"late"))

    replica = await lab.replica("one", slow)
    lab.serve(service(replica))
    link = half_closed(lab, get().replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
    await until(lambda: any(client._is_half for client in lab.plane.clients))
    await asyncio.sleep(0.2)  # looked at more than once
    gate.set()
    if version == "1.0":
        reader, writer = await asyncio.open_connection(sock=link)
        assert (await reader.read()).endswith(b"\r\n\r\nlate")
        writer.close()
    else:
        [answer] = await answers(link)
        assert (answer.status, answer.body, answer.get("connection")) == (200, b"late", "close")
    await until(lambda: not lab.plane.clients)


async def test_requests_sent_ahead_of_it_are_answered_too(lab: Lab) -> None:
    lab.serve(service(await lab.replica()))
    link = half_closed(lab, get() * 5)
    assert [answer.status for answer in await answers(link)] == [200] * 5


async def test_stream_goes_on_for_a_caller_that_sends_no_more(lab: Lab) -> None:
    gate = asyncio.Event()

    async def stream(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nfirst")
        await gate.wait()
        await seen.send(b"-last")

    lab.serve(service(await lab.replica("one", stream)))
    wire = await lab.connect()
    await wire.send(get())
    await until(lambda: any(client.exchange and client.exchange.is_answered for client in lab.plane.clients))
    wire.writer.write_eof()
    await until(lambda: any(client._is_half for client in lab.plane.clients))
    gate.set()
    assert (await wire.receive()).body == b"first-last"
    assert await wire.is_closed()


async def test_caller_that_has_gone_is_not_taken_for_one_that_sends_no_more(lab: Lab) -> None:
    async def never(seen: Conversation) -> None:
        await seen.reader.readexactly(1)

    replica = await lab.replica("one", never)
    lab.serve(service(replica, cap=1))
    link = socket.create_connection(("127.0.0.1", lab.port))
    link.sendall(get())
    await until(lambda: replica.requests)
    link.close()
    await until(lambda: not lab.plane.clients)
    await until(lambda: replica.lost)
    assert lab.in_flight() == 0


@pytest.mark.parametrize("kind", ["text/event-stream", "text/plain"])
async def test_caller_that_leaves_a_quiet_answer_holds_its_slot_no_longer(
    lab: Lab, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "text/plain":
        monkeypatch.setattr(downstream, "QUIET_S", 0.1)

    async def quiet(seen: Conversation) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
        await seen.send(head.encode() + b"3\r\none\r\n")
        await seen.reader.readexactly(1)

    replica = await lab.replica("one", quiet)
    lab.serve(service(replica, cap=1, timeout_s=600.0))
    wire = await lab.connect()
    await wire.send(get())
    await wire.reader.readuntil(b"one\r\n")
    wire.writer.close()
    await until(lambda: not lab.plane.clients)
    await until(lambda: replica.lost)
    assert lab.in_flight() == 0


async def test_caller_of_http10_that_leaves_holds_its_slot_no_longer(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downstream, "QUIET_S", 0.1)

    async def never(seen: Conversation) -> None:
        await seen.reader.readexactly(1)

    replica = await lab.replica("one", never)
    lab.serve(service(replica, cap=1, timeout_s=600.0))
    link = socket.create_connection(("127.0.0.1", lab.port))
    link.sendall(get().replace(b"HTTP/1.1", b"HTTP/1.0"))
    await until(lambda: replica.requests)
    link.close()
    await until(lambda: not lab.plane.clients)
    await until(lambda: replica.lost)
    assert lab.in_flight() == 0


async def test_half_of_a_request_is_not_waited_for_when_no_more_is_sent(lab: Lab) -> None:
    lab.serve(service(await lab.replica()))
    for half in (b"GET /p/s/ HTTP/1.1\r\n", b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nx"):
        link = half_closed(lab, half)
        await until(lambda: not lab.plane.clients)
        link.close()
