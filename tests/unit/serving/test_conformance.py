"""Malformed, ambiguous and smuggled messages: refused with 400 or its like, and nothing of them goes on."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.http_cases import REFUSED, TAKEN, Case, all_cases
from tests.support.serving import Conversation, Lab, get, reply, service

CASES = all_cases()


async def echo(seen: Conversation) -> None:
    body = await seen.body()
    await seen.send(reply(b"" if seen.request.first.startswith("HEAD") else body or b"ok"))


def test_there_are_at_least_two_hundred_cases_each_with_its_own_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 200


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_case_is_taken_or_refused_as_it_should_be(lab: Lab, case: Case) -> None:
    replica = await lab.replica("one", echo)
    lab.serve(service(replica))
    wire = await lab.connect()
    raw = case.raw.replace(b"{path}", b"/p/s/")
    await wire.send(raw)
    answer = await wire.receive(is_head=raw.startswith(b"HEAD"))
    if case.verdict == TAKEN:
        assert answer.status == 200, answer.body
        assert len(replica.requests) == 1
    else:
        assert case.verdict == REFUSED
        assert answer.status in {400, 405, 408, 413, 414, 417, 431, 501}, answer.body
        assert answer.get("content-type") == "application/problem+json"
        assert await wire.is_closed()
        # A body that breaks off has begun at the replica; it is cut off there, not ended.
        assert all(seen.body == b"" for seen in replica.requests)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.verdict == REFUSED], ids=lambda case: case.name
)
async def test_what_follows_a_refused_message_is_no_request(lab: Lab, case: Case) -> None:
    replica = await lab.replica("one", echo)
    lab.serve(service(replica))
    wire = await lab.connect()
    await wire.send(case.raw.replace(b"{path}", b"/p/s/") + get("/p/s/smuggled"))
    await wire.is_closed()
    assert [seen.path for seen in replica.requests if seen.path == "/smuggled"] == []


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.verdict == TAKEN], ids=lambda case: case.name
)
async def test_what_follows_a_taken_message_is_the_next_request(lab: Lab, case: Case) -> None:
    replica = await lab.replica("one", echo)
    lab.serve(service(replica))
    wire = await lab.connect()
    raw = case.raw.replace(b"{path}", b"/p/s/")
    if b"HTTP/1.0" in raw:
        return
    await wire.send(raw + get("/p/s/next"))
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
async def test_answer_that_could_be_read_in_two_ways_is_not_passed_on(lab: Lab, name: str) -> None:
    async def rude(seen: Conversation) -> None:
        await seen.send(BAD_ANSWERS[name])

    lab.serve(service(await lab.replica("one", rude), retries=0))
    answer = await lab.ask(get())
    assert (answer.status, b"replica.lost" in answer.body) == (502, True)


async def test_bad_chunk_in_an_answer_cuts_the_caller_off_instead_of_ending_it(lab: Lab) -> None:
    async def rude(seen: Conversation) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await asyncio.sleep(0)
        await seen.send(b"zz\r\n")

    lab.serve(service(await lab.replica("one", rude)))
    wire = await lab.connect()
    await wire.send(get())
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await wire.receive()
