"""Malformed, ambiguous and smuggled messages are refused with a 4xx, and no part of them is passed on."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.faults.http_cases import ACCEPTED, REFUSED, HttpCase, all_cases
from tests.support.serving.data_plane_lab import Conversation, EmbeddedLab, reply, request_bytes, service

CASES = all_cases()


async def echo(seen: Conversation) -> None:
    body = await seen.body()
    await seen.send(reply(b"" if seen.request.start_line.startswith("HEAD") else body or b"ok"))


def test_at_least_two_hundred_cases_have_unique_names() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 200


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_case_is_accepted_or_refused_as_expected(lab: EmbeddedLab, case: HttpCase) -> None:
    replica = await lab.add_replica("one", echo)
    lab.serve(service(replica))
    wire = await lab.connect()
    raw = case.raw.replace(b"{path}", b"/p/s/")
    await wire.send(raw)
    answer = await wire.receive(is_head=raw.startswith(b"HEAD"))
    if case.verdict == ACCEPTED:
        assert answer.status == 200, answer.body
        assert len(replica.requests) == 1
    else:
        assert case.verdict == REFUSED
        assert answer.status in {400, 405, 408, 413, 414, 417, 431, 501}, answer.body
        assert answer.get("content-type") == "application/problem+json"
        assert await wire.is_closed()
        # A body that breaks off has begun at the replica. There it is cut off, not ended.
        assert all(seen.body == b"" for seen in replica.requests)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.verdict == REFUSED], ids=lambda case: case.name
)
async def test_bytes_after_a_refused_message_are_not_read_as_a_request(
    lab: EmbeddedLab, case: HttpCase
) -> None:
    replica = await lab.add_replica("one", echo)
    lab.serve(service(replica))
    wire = await lab.connect()
    await wire.send(case.raw.replace(b"{path}", b"/p/s/") + request_bytes("/p/s/smuggled"))
    await wire.is_closed()
    assert [seen.path for seen in replica.requests if seen.path == "/smuggled"] == []


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.verdict == ACCEPTED], ids=lambda case: case.name
)
async def test_bytes_after_an_accepted_message_are_the_next_request(lab: EmbeddedLab, case: HttpCase) -> None:
    replica = await lab.add_replica("one", echo)
    lab.serve(service(replica))
    wire = await lab.connect()
    raw = case.raw.replace(b"{path}", b"/p/s/")
    if b"HTTP/1.0" in raw:
        return
    await wire.send(raw + request_bytes("/p/s/next"))
    await wire.receive(is_head=raw.startswith(b"HEAD"))
    assert (await wire.receive()).status == 200
    assert [seen.path for seen in replica.requests][1:] == ["/next"]


BAD_ANSWERS = {
    "length beside chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "length with a sign": b"HTTP/1.1 200 OK\r\ncontent-length: +3\r\n\r\nabc",
    "another coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nabc",
    "bare line feeds": b"HTTP/1.1 200 OK\ncontent-length: 3\n\nabc\r\n\r\n",
    "folded header": b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "status of two digits": b"HTTP/1.1 20 OK\r\ncontent-length: 0\r\n\r\n",
    "status 999": b"HTTP/1.1 999 OK\r\ncontent-length: 0\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
    "more than it says": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nabc",
    "control in a header": b"HTTP/1.1 200 OK\r\nx: a\x01\r\ncontent-length: 0\r\n\r\n",
    "version 2": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000,
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_ambiguous_reply_is_not_passed_on(lab: EmbeddedLab, name: str) -> None:
    async def rude(seen: Conversation) -> None:
        await seen.send(BAD_ANSWERS[name])

    lab.serve(service(await lab.add_replica("one", rude), retries=0))
    answer = await lab.ask(request_bytes())
    assert (answer.status, b"replica.lost" in answer.body) == (502, True)


async def test_bad_chunk_in_a_reply_aborts_the_connection_instead_of_ending_the_reply(
    lab: EmbeddedLab,
) -> None:
    async def rude(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await asyncio.sleep(0)
        await seen.send(b"zz\r\n")

    lab.serve(service(await lab.add_replica("one", rude)))
    wire = await lab.connect()
    await wire.send(request_bytes())
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await wire.receive()
