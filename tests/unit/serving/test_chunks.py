"""Where chunks end: one that comes alone is seen sooner, and means the same as one in pieces."""

from __future__ import annotations

import pytest

from shoal.serving.chunks import MAX_ALONE, BadChunk, Chunks

EDGES = (*range(1, 40), *range(240, 275), 1000, *range(MAX_ALONE - 12, MAX_ALONE + 5), 4090, 4096, 70000)
LENGTHS = sorted(set(EDGES))


def in_pieces(data: bytes) -> tuple[bytes, int]:
    chunks = Chunks()
    passed = b"".join(chunks.feed(data[at : at + 1])[0] for at in range(len(data)))
    return passed, chunks.count


@pytest.mark.parametrize("length", LENGTHS)
def test_a_chunk_alone_goes_on_as_it_came_and_is_one(length: int) -> None:
    data = b"%x\r\n%b\r\n" % (length, b"e" * length)
    chunks = Chunks()
    assert chunks.feed(data) == (data, None)
    assert chunks.count == 1
    assert in_pieces(data) == (data, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_chunk_that_does_not_end_where_it_says_is_refused(length: int) -> None:
    with pytest.raises(BadChunk):
        Chunks().feed(b"%x\r\n%b" % (length, b"e" * (length + 2)))


@pytest.mark.parametrize("size", [b"0A", b"A", b"a;name=value", b"00000a"])
def test_sizes_in_other_words_are_read_all_the_same(size: bytes) -> None:
    data = size + b"\r\n" + b"e" * 10 + b"\r\n"
    assert Chunks().feed(data) == (data, None)


def test_what_looks_like_a_chunk_inside_of_another_is_not_counted() -> None:
    inner = b"3\r\nabc\r\n"
    chunks = Chunks()
    assert chunks.feed(b"%x\r\n" % len(inner)) == (b"%x\r\n" % len(inner), None)
    assert chunks.feed(inner) == (inner, None)
    assert chunks.feed(b"\r\n") == (b"\r\n", None)
    assert chunks.count == 1


def test_the_last_chunk_is_never_one_alone() -> None:
    assert Chunks().feed(b"0\r\n\r\n") == (b"", b"")
    assert Chunks().feed(b"0\r\n\r\nGET") == (b"", b"GET")
