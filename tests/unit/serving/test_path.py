"""Requests of any shape reach replicas, and their replies come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.serving.report import report
from shoal.serving.table import ServingTable
from tests.support.serving.data_plane_lab import (
    Conversation,
    EmbeddedLab,
    FakeReplica,
    reply,
    request_bytes,
    service,
    until,
)


async def test_replica_on_a_unix_socket_is_reached(lab: EmbeddedLab, tmp_path: Path) -> None:
    replica = await FakeReplica("unix").start(str(tmp_path / "r.sock"))
    lab.replicas.append(replica)
    lab.serve(service(replica))
    assert (await lab.ask(request_bytes())).body == b"unix"


async def test_link_planted_in_place_of_a_replicas_socket_is_not_followed(
    lab: EmbeddedLab, tmp_path: Path
) -> None:
    victim = await FakeReplica("victim").start(str(tmp_path / "victim.sock"))
    lab.replicas.append(victim)
    (tmp_path / "mine.sock").symlink_to(tmp_path / "victim.sock")
    planted = victim.table_entry(replica_id="mine", address=f"unix:{tmp_path / 'mine.sock'}")
    lab.serve(service(planted, await lab.add_replica("other")))
    assert {(await lab.ask(request_bytes())).body for _ in range(6)} == {b"other"}
    assert not victim.num_connections


async def test_hop_by_hop_headers_are_dropped_and_shoal_headers_cannot_be_forged(lab: EmbeddedLab) -> None:
    async def rude(seen: Conversation) -> None:
        await seen.send(
            reply(b"", "200 OK", "connection: x-inner", "x-inner: 1", "keep-alive: 5", "x-kept: 1")
        )

    replica = await lab.add_replica("one", rude)
    lab.serve(service(replica.table_entry(secret="real")))
    answer = await lab.ask(
        request_bytes(
            "/p/s/",
            "Connection: x-private, keep-alive",
            "X-Private: 1",
            "X-Shoal-Secret: forged",
            "x_shoal_secret: forged",
            "X-Forwarded-For: 6.6.6.6",
            "Forwarded: for=6.6.6.6",
            "TE: trailers",
            "X-Kept: yes",
        )
    )
    seen = replica.requests[0]
    assert seen.values("x-shoal-secret") == ["real"]
    assert seen.values("x-forwarded-for") == ["127.0.0.1"]
    assert seen.get("x-kept") == "yes"
    assert not {"x-private", "te", "forwarded", "connection", "x_shoal_secret"} & {
        name for name, _ in seen.headers
    }
    assert answer.get("x-kept") == "1"
    assert not {"x-inner", "keep-alive", "connection"} & {name for name, _ in answer.headers}


async def test_chunks_are_passed_on_as_they_come_without_trailers(lab: EmbeddedLab) -> None:
    gate = asyncio.Event()

    async def stream(seen: Conversation) -> None:
        await seen.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await seen.send(b"9\r\ndata: 1\n\n\r\n")
        await gate.wait()
        await seen.send(b"9\r\ndata: 2\n\n\r\n0\r\nx-trailer: 1\r\n\r\n")

    lab.serve(service(await lab.add_replica("one", stream)))
    wire = await lab.connect()
    await wire.send(request_bytes())
    assert b"data: 1" in await asyncio.wait_for(wire.reader.readuntil(b"\n\n\r\n"), 30)
    gate.set()
    assert await asyncio.wait_for(wire.reader.readexactly(19), 30) == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
    assert (await wire.ask(request_bytes())).status == 200


async def test_reply_without_a_length_closes_the_callers_connection(lab: EmbeddedLab) -> None:
    async def old(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        seen.writer.close()

    lab.serve(service(await lab.add_replica("one", old)))
    wire = await lab.connect()
    answer = await wire.ask(request_bytes())
    assert (answer.body, answer.get("connection")) == (b"until the end", "close")


async def test_caller_of_http_1_0_gets_plain_bytes_and_a_closed_connection(lab: EmbeddedLab) -> None:
    async def stream(seen: Conversation) -> None:
        await seen.send(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )

    lab.serve(service(await lab.add_replica("one", stream)))
    wire = await lab.connect()
    answer = await wire.ask(b"GET /p/s/ HTTP/1.0\r\n\r\n")
    assert (answer.body, answer.get("transfer-encoding")) == (b"abcde", "")


async def test_interim_replies_of_replicas_are_not_passed_on(lab: EmbeddedLab) -> None:
    async def hints(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + reply(b"real"))

    lab.serve(service(await lab.add_replica("one", hints)))
    assert (await lab.ask(request_bytes())).body == b"real"


async def test_chunked_upload_reaches_the_replica_while_it_comes(lab: EmbeddedLab) -> None:
    pieces: list[bytes] = []

    async def collect(seen: Conversation) -> None:
        pieces.append(await seen.reader.readexactly(8))
        pieces.append(await seen.reader.readuntil(b"0\r\n\r\n"))
        await seen.send(reply())

    lab.serve(service(await lab.add_replica("one", collect)))
    wire = await lab.connect()
    await wire.send(b"POST /p/s/ HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await until(lambda: pieces)
    assert (await wire.ask(b"2\r\nde\r\n0\r\nx: 1\r\n\r\n")).status == 200
    assert pieces == [b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n"]


async def test_table_that_is_not_newer_changes_nothing(lab: EmbeddedLab) -> None:
    lab.serve(service(await lab.add_replica()))
    assert not lab.plane.swap(ServingTable(version=1))
    assert (await lab.ask(request_bytes())).status == 200


async def test_table_of_another_epoch_is_taken_although_its_version_is_lower(lab: EmbeddedLab) -> None:
    old, new = await lab.add_replica("old"), await lab.add_replica("new")
    assert lab.plane.swap(ServingTable(version=5000, epoch="a", services=(service(old),)))
    assert not lab.plane.swap(ServingTable(version=100, epoch="a", services=(service(new),)))
    assert (await lab.ask(request_bytes())).body == b"old"
    assert lab.plane.swap(ServingTable(version=100, epoch="b", services=(service(new),)))
    assert (await lab.ask(request_bytes())).body == b"new"
    assert (report(lab.plane).version, report(lab.plane).epoch) == (100, "b")
    assert not lab.plane.swap(ServingTable(version=99, epoch="b"))


async def test_drain_finishes_open_requests_and_accepts_no_new_ones(lab: EmbeddedLab) -> None:
    gate = asyncio.Event()

    async def slow(seen: Conversation) -> None:
        await gate.wait()
        await seen.send(reply())

    replica = await lab.add_replica("one", slow)
    lab.serve(service(replica))
    idle, busy = await lab.connect(), await lab.connect()
    await busy.send(request_bytes())
    await until(lambda: replica.requests)
    draining = asyncio.ensure_future(lab.plane.drain(30.0))
    assert await idle.is_closed()
    gate.set()
    answer = await busy.receive()
    assert (answer.status, answer.get("connection")) == (200, "close")
    await draining
    with pytest.raises(OSError):
        await lab.connect()


async def test_address_as_host_selects_no_service(lab: EmbeddedLab) -> None:
    ours, theirs = await lab.add_replica("ours"), await lab.add_replica("theirs")
    hosts = ("127.0.0.1", "localhost", "chat.example")
    lab.serve(
        service(ours, hosts=("chat.example",)),
        service(theirs, project="q", name="t", hosts=hosts),
    )
    for host, path in (("127.0.0.1", "/p/s/"), ("localhost:80", "/p/s/"), ("chat.example", "/")):
        wire = await lab.connect()
        assert (await wire.ask(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())).status == 200
    assert (len(ours.requests), len(theirs.requests)) == (3, 0)


@pytest.mark.parametrize(
    "path", ["sleep?level=2", "sleep/", "/sleep", "%73leep", "SLEEP", "v1/load_lora_adapter"]
)
async def test_path_that_manages_the_server_is_refused_to_callers(lab: EmbeddedLab, path: str) -> None:
    replica = await lab.add_replica()
    closed = frozenset({"sleep", "v1/load_lora_adapter"})
    lab.serve(service(replica, closed=closed, hosts=("chat.example",)))
    assert (await lab.ask(request_bytes(f"/p/s/{path}", method="POST"))).status == 403
    wire = await lab.connect()
    by_host = f"POST /{path} HTTP/1.1\r\nHost: chat.example\r\ncontent-length: 0\r\n\r\n"
    assert (await wire.ask(by_host.encode())).status == 403
    assert replica.requests == []
    assert (await lab.ask(request_bytes("/p/s/v1/sleep?to=sleep"))).status == 200
