"""Memory, slots and connections stay bounded whatever callers do, and other callers are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from time import monotonic

import pytest

from shoal.serving.housekeeping import sweep
from shoal.serving.proxy import downstream
from shoal.serving.proxy import request_head as heads
from shoal.serving.proxy.request_head import too_large
from tests.support.serving.data_plane_lab import (
    Behaviour,
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
HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"


async def test_caller_that_never_finishes_its_head_gets_408(lab: EmbeddedLab) -> None:
    wire = await lab.connect()
    await wire.send(b"GET /p/s/ HTTP/1.1\r\nHost: a\r\n")
    await until(lambda: any(client._buffer for client in lab.plane.clients))
    sweep(lab.plane, monotonic() + 11.0)
    assert (await wire.receive()).status == 408
    assert await wire.is_closed()


async def test_dripping_headers_do_not_extend_the_time_limit(lab: EmbeddedLab) -> None:
    wire = await lab.connect()
    await until(lambda: lab.plane.clients)
    client = next(iter(lab.plane.clients))
    due = client.due
    for _ in range(5):
        await wire.send(b"GET /p/s/ HTTP/1.1\r\nX: y\r\n" if not client._buffer else b"X: y\r\n")
    await until(lambda: client._buffer.count(b"X: y") == 5)
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


async def test_silent_connection_is_closed(lab: EmbeddedLab) -> None:
    lab.serve(service(await lab.add_replica()))
    fresh, used = await lab.connect(), await lab.connect()
    assert (await used.ask(request_bytes())).status == 200
    await until(lambda: len(lab.plane.clients) == 2)
    sweep(lab.plane, monotonic() + 11.0)
    assert await fresh.is_closed()
    sweep(lab.plane, monotonic() + 76.0)
    assert await used.is_closed()


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
    await until(lambda: any(client._is_held for client in lab.plane.clients))
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


async def test_requests_far_ahead_are_not_read(lab: EmbeddedLab) -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(reply())

    lab.serve(service(await lab.add_replica("one", slow)))
    wire = await lab.connect()
    wire.writer.write(request_bytes() * 100_000)
    await until(lambda: any(client._is_held for client in lab.plane.clients))
    assert all(len(client._buffer) <= 512 << 10 for client in lab.plane.clients)
    gate.set()
    for _ in range(100):
        assert (await wire.receive()).status == 200


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


async def test_idle_connections_to_replicas_are_closed_before_they_close_them(lab: EmbeddedLab) -> None:
    replica = await lab.add_replica()
    lab.serve(service(replica))
    assert (await lab.ask(request_bytes())).status == 200
    live = next(iter(lab.plane.services["p", "s"].replicas.values()))
    assert len(live.idle) == 1
    sweep(lab.plane, monotonic() + 3.5)
    assert live.idle == []
    await until(lambda: replica.num_lost)


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


async def test_thousands_of_interim_replies_in_one_piece_are_skipped(lab: EmbeddedLab) -> None:
    async def hints(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 5000 + reply(b"real"))

    lab.serve(service(await lab.add_replica("one", hints)))
    assert (await lab.ask(request_bytes())).body == b"real"


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
        assert len(client._buffer) <= 512 << 10
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


@pytest.mark.parametrize(("head", "failures"), [(EVENTS, 0), (HALF, 1)], ids=["events", "half of a body"])
async def test_only_a_stalled_body_with_a_length_counts_as_the_replicas_failure(
    lab: EmbeddedLab, head: bytes, failures: int
) -> None:
    async def begins(seen: Conversation) -> None:
        await seen.send(head)
        await asyncio.Event().wait()

    lab.serve(service(await lab.add_replica("one", begins), timeout_s=5.0))
    wire = await lab.connect()
    await wire.send(request_bytes())
    await until(lambda: any(client.exchange and client.exchange._has_moved for client in lab.plane.clients))
    sweep(lab.plane, monotonic() + 6.0)  # bytes had come since the last check
    assert len(lab.plane.clients) == 1
    sweep(lab.plane, monotonic() + 12.0)
    assert await wire.is_closed()
    live = lab.plane.services["p", "s"]
    assert live.replicas["one"].failures == failures
    assert (live.tallies[1].requests, live.tallies[1].errors) == (1, failures)


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


@pytest.mark.parametrize("drip", [b"e", b"0"], ids=["extension", "size"])
async def test_chunk_extensions_do_not_count_as_progress_of_a_body(lab: EmbeddedLab, drip: bytes) -> None:
    lab.serve(service(await lab.add_replica()))
    wire = await lab.connect()
    begun = b"1;a=" if drip == b"e" else b"0"
    await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + begun)
    await until(lambda: any(client.exchange for client in lab.plane.clients))
    client = next(iter(lab.plane.clients))
    sent = client._chunks
    assert sent is not None
    await wire.send(drip)
    await until(lambda: sent._held.endswith(begun + drip))
    sweep(lab.plane, monotonic() + downstream.BODY_S + 1)
    assert (await wire.receive()).status == 408
    assert await wire.is_closed()


async def test_dripping_trailer_does_not_count_as_progress(lab: EmbeddedLab) -> None:
    lab.serve(service(await lab.add_replica()))
    wire = await lab.connect()
    await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nX: ")
    await until(lambda: any(client._chunks and client._chunks.is_ending for client in lab.plane.clients))
    sweep(lab.plane, monotonic() + downstream.BODY_S + 1)
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
