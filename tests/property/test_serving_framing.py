"""However a stream of bytes is split, it yields the same requests, or the same refusal."""

from __future__ import annotations

import asyncio
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from shoal.serving.proxy.chunks import LAST_CHUNK, BadChunk, Chunks
from shoal.serving.proxy.local_reply import ProxyRefusal
from shoal.serving.proxy.request_head import parse_head, too_large
from tests.support.faults.http_cases import ACCEPTED, all_cases
from tests.support.serving.data_plane_lab import request_bytes
from tests.support.serving.framing import parse_requests, split_at

CASES = all_cases()
RAW = {case.name: case.raw.replace(b"{path}", b"/p/s/") for case in CASES}


CUTS = st.lists(st.integers(min_value=0, max_value=1 << 16), max_size=20)


@given(st.lists(st.sampled_from([case.name for case in CASES]), min_size=1, max_size=4), CUTS)
def test_splits_change_nothing(names: list[str], cuts: list[int]) -> None:
    raw = b"".join(RAW[name] for name in names)
    whole, cut = asyncio.run(parse_requests([raw])), asyncio.run(parse_requests(split_at(raw, cuts)))
    done = [request for request in whole[0] if request[2]]
    assert [request for request in cut[0] if request[2]] == done
    # Which of two faults is found first may depend on the splits, but that one is found does not.
    assert cut[1][:10] == whole[1][:10]


def test_pipelined_request_behind_a_refused_one_ends_at_the_right_byte() -> None:
    raw = b"".join(request_bytes(path) for path in ("/p/s/a", "/p/none", "/p/s/b", "/p/s/c"))
    at = len(raw) - 10
    whole, cut = asyncio.run(parse_requests([raw])), asyncio.run(parse_requests([raw[:at], raw[at:]]))
    assert [head[:7] for head, _, _ in whole[0]] == [b"GET /a ", b"GET /b ", b"GET /c "]
    assert cut == whole


@given(st.lists(st.binary(max_size=40), max_size=8), CUTS)
def test_chunked_body_ends_at_the_same_byte_however_it_is_split(
    contents: list[bytes], cuts: list[int]
) -> None:
    contents = [content for content in contents if content]
    body = b"".join(b"%x\r\n%b\r\n" % (len(content), content) for content in contents)
    raw = body + LAST_CHUNK + b"next"
    chunks, sent, rest, decoded = Chunks(), b"", None, cast("list[bytes]", [])
    for piece in split_at(raw, cuts):
        if rest is None:
            ready, rest = chunks.feed(piece, decoded)
            sent += ready
        else:
            rest += piece
    assert (sent, rest) == (body, b"next")
    assert b"".join(decoded) == b"".join(contents)


def read_chunks(parts: list[bytes]) -> tuple[bytes, bytes | None] | None:
    chunks, sent, rest = Chunks(), b"", None
    try:
        for piece in parts:
            if rest is None:
                ready, rest = chunks.feed(piece)
                sent += ready
            else:
                rest += piece
    except BadChunk:
        return None
    return sent, rest


CHUNKY = st.lists(
    st.sampled_from(
        [b"0", b"1", b"a", b"\r\n", b"\r", b"\n", b";x=1", b" ", b"X: y", b"\r\n\r\n", b"-", b"x"]
    ),
    max_size=12,
).map(b"".join)


@given(CHUNKY, CUTS)
def test_chunked_bytes_are_read_the_same_however_they_are_split(raw: bytes, cuts: list[int]) -> None:
    whole, cut = read_chunks([raw]), read_chunks(split_at(raw, cuts))
    if whole is None or cut is None:
        assert whole == cut
    else:
        assert whole[1] == cut[1]


@given(st.binary(max_size=200))
def test_any_bytes_for_a_head_are_read_or_refused(noise: bytes) -> None:
    raw = request_bytes().removesuffix(b"\r\n") + noise + b"\r\n\r\n"
    try:
        head = parse_head(raw[: raw.find(b"\r\n\r\n") + 4])
        seen = 200 if head.method == b"GET" else 0
    except ProxyRefusal as refused:
        seen = refused.status
    assert seen in {200, 400, 405, 413, 414, 417, 431, 501}


@given(st.sampled_from([case.name for case in CASES if case.verdict == ACCEPTED]), st.integers(0, 1 << 16))
def test_incomplete_valid_head_is_not_refused(name: str, cut: int) -> None:
    raw = RAW[name].lstrip(b"\r\n")
    head = raw[: raw.find(b"\r\n\r\n") + 3]
    assert too_large(head[: cut % len(head)]) is None
