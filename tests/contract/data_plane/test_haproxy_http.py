"""Messages at the edge of HTTP, to HAProxy: what it accepts and the embedded plane refuses is rewritten."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.support.faults.http_cases import ACCEPTED, REFUSED, all_cases, verdict_of
from tests.support.serving.data_plane_lab import Conversation, DataPlaneLab, reply, service
from tests.support.serving.haproxy import needs_haproxy, running_haproxy

pytestmark = needs_haproxy
WAIT_S = 12.0
WRITTEN_ANEW = frozenset(
    {
        "line: double space",
        "line: tab for space",
        "line: unknown method",
        "ends: bare line feeds",
        "ends: line feed after the request line",
        "ends: line feed after a header",
        "ends: line feed for the empty line",
        "ends: folded header",
        "ends: folded with a tab",
        "host: twice the same",
        "length: twice the same",
        "length: beside chunks",
        "length: '3,3'",
        "length: '3, 3'",
        "coding: in version 1.0",
        "coding: folded",
        "coding: 'chunked,'",
        "chunk: shorter than it says",
        "chunk: line feed after the size",
        "chunk: line feed after the data",
        "chunk: space after the size",
        "chunk: control in an extension",
        "chunk: endless extension",
        "chunk: folded trailer",
        "chunk: line feed after a trailer",
        "chunk: trailer with a space before the colon",
    }
)
"""Refused by the embedded data plane. HAProxy reads one meaning into each, and writes that to the replica."""
LOOSE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


async def echo(seen: Conversation) -> None:
    await seen.body()
    await seen.send(reply(b"" if seen.request.start_line.startswith("HEAD") else b"ok"))


async def verdict(lab: DataPlaneLab, raw: bytes) -> str:
    return await verdict_of(await lab.connect(), raw, WAIT_S)


async def test_haproxy_refuses_what_the_embedded_plane_refuses_or_rewrites_it(tmp_path: Path) -> None:
    cases = {case.name: case for case in all_cases()}
    async with running_haproxy(tmp_path) as lab:
        replica = await lab.add_replica("one", echo)
        lab.serve(service(replica, cap=1000))
        verdicts = [verdict(lab, case.raw.replace(b"{path}", b"/p/s/")) for case in cases.values()]
        seen = dict(zip(cases, await asyncio.gather(*verdicts), strict=True))
    looser = {name for name, case in cases.items() if case.verdict == REFUSED and seen[name] == ACCEPTED}
    stricter = {name for name, case in cases.items() if case.verdict == ACCEPTED and seen[name] == REFUSED}
    assert (looser - WRITTEN_ANEW, stricter) == (set(), set())
    assert len(replica.requests) > 50
    for request in replica.requests:
        assert LOOSE.search(request.raw_head) is None
        assert len(request.values("host")) <= 1
        assert len(request.values("content-length")) + len(request.values("transfer-encoding")) <= 1
