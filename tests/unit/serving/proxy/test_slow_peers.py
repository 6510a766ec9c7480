"""A slow caller takes no slot and makes no replica late, and a replica that stops is given up."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic

import pytest

from shoal.serving.housekeeping import sweep
from shoal.serving.proxy.body_reader import BODY_S
from tests.support.serving.data_plane_lab import (
    Conversation,
    EmbeddedLab,
    reply,
    request_bytes,
    service,
    until,
)

EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n3\r\n:\n\n\r\n"
)
HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"


async def test_slow_upload_takes_no_slot_and_is_cut_off(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica()
    lab.serve(service(replica, cap=1))
    slow = await lab.connect()
    await slow.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nx")
    await until(lambda: any(client.exchange for client in lab.plane.clients))
    assert (await lab.ask(request_bytes())).status == 200
    sweep(lab.plane, monotonic() + 21.0)
    assert (await slow.receive()).status == 408
    assert len(replica.requests) == 1


async def test_early_reply_reaches_a_caller_that_still_sends(lab: EmbeddedLab) -> None:
    async def impatient(seen: Conversation) -> None:
        await seen.send(reply(b"too large", "413 Content Too Large"))
        await seen.reader.read()

    lab.serve(service(await lab.add_replica("one", impatient)))
    wire = await lab.connect()
    await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ncontent-length: 500000\r\n\r\n" + b"x" * 100_000)
    answer = await wire.receive()
    assert (answer.status, answer.body) == (413, b"too large")
    await wire.send(b"x" * 100_000)
    assert await wire.is_closed()


async def test_slow_sender_does_not_make_a_replica_late(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica()
    lab.serve(service(replica, timeout_s=5.0))
    wires = [await lab.connect() for _ in range(6)]
    for wire in wires:
        await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
    await until(lambda: len(replica.requests) == 6)
    sweep(lab.plane, monotonic() + 15.0)
    replica_state = lab.plane.services["p", "s"].replicas["one"]
    assert (replica_state.failures, replica_state.ejections) == (0, 0)
    for wire in wires:
        assert (await wire.ask(b"0\r\n\r\n")).status == 200


async def test_replica_that_reads_no_body_is_late(lab: EmbeddedLab) -> None:
    async def deaf(seen: Conversation) -> None:
        seen.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    lab.serve(service(await lab.add_replica("one", deaf), timeout_s=600.0))
    wire = await lab.connect()
    sending = asyncio.ensure_future(wire.send(request_bytes(method="POST", body=b"x" * (32 << 20))))
    answer = asyncio.ensure_future(wire.receive())
    while not answer.done():
        await asyncio.sleep(0.01)
        sweep(lab.plane, monotonic() + 601.0)  # the replica is not late before it has stopped reading
    with contextlib.suppress(ConnectionResetError):  # a caller that still sends may lose this reply
        assert (await answer).status == 504
    assert lab.plane.services["p", "s"].replicas["one"].failures == 1
    sending.cancel()


@pytest.mark.parametrize(("head", "failures"), [(EVENTS, 0), (HALF, 1)], ids=["events", "half of a body"])
async def test_only_a_stalled_body_with_a_length_counts_as_the_replicas_failure(
    lab: EmbeddedLab, head: bytes, failures: int
) -> None:
    async def begins(seen: Conversation) -> None:
        await seen.send(head)
        await asyncio.Event().wait()

    lab.serve(service(await lab.add_replica("one", begins), timeout_s=600.0))
    wire = await lab.connect()
    await wire.send(request_bytes())
    await until(
        lambda: any(client.exchange and client.exchange.relay.has_moved for client in lab.plane.clients)
    )
    sweep(lab.plane, monotonic() + 601.0)  # bytes had come since the last check
    assert len(lab.plane.clients) == 1
    sweep(lab.plane, monotonic() + 1202.0)
    assert await wire.is_closed()
    live = lab.plane.services["p", "s"]
    assert live.replicas["one"].failures == failures
    assert (live.tallies[1].requests, live.tallies[1].errors) == (1, failures)


@pytest.mark.parametrize("drip", [b"e", b"0"], ids=["extension", "size"])
async def test_chunk_extensions_do_not_count_as_progress_of_a_body(lab: EmbeddedLab, drip: bytes) -> None:
    lab.serve(service(await lab.add_replica()))
    wire = await lab.connect()
    begun = b"1;a=" if drip == b"e" else b"0"
    await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + begun)
    await until(lambda: any(client.exchange for client in lab.plane.clients))
    client = next(iter(lab.plane.clients))
    sent = client._body._chunks
    assert sent is not None
    await wire.send(drip)
    await until(lambda: sent._held.endswith(begun + drip))
    sweep(lab.plane, monotonic() + BODY_S + 1)
    assert (await wire.receive()).status == 408
    assert await wire.is_closed()


async def test_dripping_trailer_does_not_count_as_progress(lab: EmbeddedLab) -> None:
    lab.serve(service(await lab.add_replica()))
    wire = await lab.connect()
    await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nX: ")
    await until(
        lambda: any(client._body._chunks and client._body._chunks.is_ending for client in lab.plane.clients)
    )
    sweep(lab.plane, monotonic() + BODY_S + 1)
    assert (await wire.receive()).status == 408


async def test_body_behind_a_refusal_is_read_for_at_most_64_kib(lab: EmbeddedLab) -> None:
    wire = await lab.connect()
    await wire.send(b"POST /no/such/ HTTP/1.1\r\nhost: a\r\ncontent-length: 900000000\r\n\r\n")
    assert (await wire.receive()).status == 401
    sent = 0
    try:
        while sent < 64 << 20:
            await wire.send(b"x" * 65536)
            sent += 65536
    except ConnectionError:
        assert sent < 16 << 20
    else:
        pytest.fail(f"{sent} bytes were taken")


async def test_thousands_of_interim_replies_in_one_piece_are_skipped(lab: EmbeddedLab) -> None:
    async def hints(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 5000 + reply(b"real"))

    lab.serve(service(await lab.add_replica("one", hints)))
    assert (await lab.ask(request_bytes())).body == b"real"
