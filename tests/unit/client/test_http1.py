"""Replies are read as the standard library reads them, and noise is never taken for a reply."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.client.http1 import MAX_BODY_LINE, MAX_HEADERS, MAX_LINE, BadHttpReply, HttpConnection, HttpReply

OK = b"HTTP/1.1 200 OK\r\n"


class Wire:
    """A socket that has received all it will ever receive."""

    def __init__(self, received: bytes) -> None:
        self.received = received
        self.sent = b""

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(io.BytesIO(self.received))

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        pass


def answer(received: bytes) -> HttpReply:
    return HttpConnection(Wire(received), "host").read_reply()  # type: ignore[arg-type]


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def by_the_library(received: bytes) -> tuple[int, bytes, bool]:
    response = http.client.HTTPResponse(Wire(received))  # type: ignore[arg-type]
    response.begin()
    status, is_last = response.status, response.will_close
    return status, response.read(), is_last


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Draw any valid reply of a server, framed in one of the three ways."""
    version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.0"]))
    status = draw(
        st.sampled_from([b"200 OK", b"201 Created", b"204 No Content", b"422 ", b"503 Busy", b"500"])
    )
    headers = [b"Content-Type: application/json", b"X-Empty:", b"x-odd: a: b"]
    if draw(st.booleans()):
        headers.append(draw(st.sampled_from([b"Connection: close", b"connection: keep-alive"])))
    blocks = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=4))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    body = b"".join(blocks)
    if status.startswith(b"204"):
        body, framing = b"", "length"
    if framing == "length":
        headers.append(b"content-length: %d" % len(body))
    elif framing == "chunked" and version == b"HTTP/1.1":
        headers.append(b"Transfer-Encoding: chunked")
        chunks = [b"%x;ext=1\r\n%s\r\n" % (len(block), block) for block in blocks]
        body = b"".join(chunks) + b"0\r\nTrailer: x\r\n\r\n"
    early = CONTINUE if draw(st.booleans()) else b""
    return early + version + b" " + status + b"\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + body


@settings(max_examples=300)
@given(answers())
def test_valid_reply_is_read_as_the_standard_library_reads_it(received: bytes) -> None:
    ours = answer(received)
    status, body, is_last = by_the_library(received)
    assert (ours.status, ours.read()) == (status, body)
    if b"HTTP/1.0" not in received:
        assert ours.is_last == is_last
    assert ours.is_last or not is_last, "a connection the server closes must not be used again"


@settings(max_examples=300)
@given(answers(), st.integers(0, 400))
def test_reply_cut_off_is_an_error_unless_nothing_is_missing(received: bytes, at: int) -> None:
    whole = answer(received)
    head = received.removeprefix(CONTINUE).partition(b"\r\n\r\n")[0]
    is_closed_by_end = b"content-length" not in head and b"chunked" not in head
    try:
        cut = answer(received[:at])
        result = (cut.status, cut.read())
    except BadHttpReply:
        return
    assert is_closed_by_end or result == (whole.status, whole.read())


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([b"", OK, OK + b"Transfer-Encoding: chunked\r\n\r\n"]))
def test_noise_is_a_reply_or_a_bad_reply_error_and_nothing_else(noise: bytes, before: bytes) -> None:
    with contextlib.suppress(BadHttpReply):
        answer(before + noise).read()


@pytest.mark.parametrize(
    "received",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n"[:13] + b"x" * MAX_LINE,
        b"HTTP/1.1 abc\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1_0\r\n\r\n" + b"x" * 10,
        OK + b"Content-Length: 5\r\n\r\nabc",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        OK + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
    ],
)
def test_malformed_reply_is_refused(received: bytes) -> None:
    with pytest.raises(BadHttpReply):
        answer(received).read()


def test_lines_are_whole_whatever_pieces_they_arrive_in() -> None:
    pieces = [b"one\ntw", b"o\n", b"\nthr", b"ee"]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    streamed = answer(OK + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert list(streamed.lines()) == [b"one", b"two", b"", b"three"]


def test_endless_line_is_refused() -> None:
    endless = answer(OK + b"\r\n" + b"x" * (MAX_BODY_LINE + (1 << 20)))
    with pytest.raises(BadHttpReply, match="line"):
        list(endless.lines())


def test_a_line_break_cannot_become_another_header() -> None:
    wire = Wire(b"")
    with pytest.raises(ValueError, match="line break"):
        HttpConnection(wire, "host").request("GET", "/", {"Authorization": "Bearer x\r\nX-Evil: 1"})  # type: ignore[arg-type]
    assert wire.sent == b""


@pytest.fixture
def pair() -> Iterator[tuple[HttpConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = HttpConnection(ours, "127.0.0.1:7462")
        yield connection, theirs
        connection.close()


def test_two_replies_on_one_connection_are_read_separately(
    pair: tuple[HttpConnection, socket.socket],
) -> None:
    connection, server = pair
    server.sendall(b"".join(OK + b"Content-Length: 2\r\n\r\n" + body for body in (b"{}", b"[]")))
    for body in (b"{}", b"[]"):
        connection.request("POST", "/v1/x", {"A": "b"}, b"data")
        reply = connection.read_reply()
        assert (reply.read(), reply.is_last) == (body, False)
    sent = server.recv(1 << 16)
    assert sent.count(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:7462\r\n") == 2
    assert sent.endswith(b"A: b\r\nContent-Length: 4\r\n\r\ndata")


def test_a_file_is_sent_whole(pair: tuple[HttpConnection, socket.socket]) -> None:
    connection, server = pair
    content = bytes(range(256)) * 1000
    received = b""

    def receive() -> None:
        nonlocal received
        while not received.endswith(content[-1000:]) or len(received) < len(content):
            received += server.recv(1 << 16)

    reader = threading.Thread(target=receive)
    reader.start()
    connection.request("PUT", "/v1/a", {"Content-Length": str(len(content))}, io.BytesIO(content))
    reader.join(10)
    assert received.partition(b"\r\n\r\n")[2] == content
    assert received.lower().count(b"content-length") == 1
