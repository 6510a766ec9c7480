"""Chunk framing: a piece that is one chunk takes a fast path, and means the same as one in several pieces."""

from __future__ import annotations

import pytest

from shoal.serving.proxy.chunks import MAX_SINGLE_CHUNK, BadChunk, Chunks

EDGES = (
    *range(1, 40),
    *range(240, 275),
    1000,
    *range(MAX_SINGLE_CHUNK - 12, MAX_SINGLE_CHUNK + 5),
    4090,
    4096,
    70000,
)
LENGTHS = sorted(set(EDGES))


def in_pieces(data: bytes) -> tuple[bytes, int]:
    chunks = Chunks()
    passed = b"".join(chunks.feed(data[at : at + 1])[0] for at in range(len(data)))
    return passed, chunks.count


@pytest.mark.parametrize("length", LENGTHS)
def test_piece_that_is_one_chunk_is_passed_on_as_it_came(length: int) -> None:
    data = b"%x\r\n%b\r\n" % (length, b"e" * length)
    chunks = Chunks()
    assert chunks.feed(data) == (data, None)
    assert chunks.count == 1
    assert in_pieces(data) == (data, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunk_that_does_not_end_where_its_size_says_is_refused(length: int) -> None:
    with pytest.raises(BadChunk):
        Chunks().feed(b"%x\r\n%b" % (length, b"e" * (length + 2)))


@pytest.mark.parametrize("size", [b"0A", b"A", b"a;name=value", b"00000a"])
def test_unusual_spellings_of_a_chunk_size_are_read(size: bytes) -> None:
    data = size + b"\r\n" + b"e" * 10 + b"\r\n"
    assert Chunks().feed(data) == (data, None)


def test_data_that_looks_like_a_chunk_inside_a_chunk_is_not_counted() -> None:
    inner = b"3\r\nabc\r\n"
    chunks = Chunks()
    assert chunks.feed(b"%x\r\n" % len(inner)) == (b"%x\r\n" % len(inner), None)
    assert chunks.feed(inner) == (inner, None)
    assert chunks.feed(b"\r\n") == (b"\r\n", None)
    assert chunks.count == 1


def test_last_chunk_never_takes_the_single_chunk_path() -> None:
    assert Chunks().feed(b"0\r\n\r\n") == (b"", b"")
    assert Chunks().feed(b"0\r\n\r\nGET") == (b"", b"GET")
