"""What a client without a token may do with a connection: states that a server must end by itself.

Each state is what is sent at once, and then again and again, until the server closes. None of them ever ends
its request properly and reads on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

PIECE = 16 << 10


@dataclass(frozen=True)
class State:
    name: str
    first: bytes
    more: bytes = b""
    """Sent until the server closes; empty: nothing more is said."""
    every_s: float = 0.0
    """Between two pieces; 0: as fast as the server takes them."""
    reads: bool = True
    half_close: bool = False


def states_of(method: str, path: str) -> list[State]:
    """Every state that a request for this route can be in."""
    line = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    whole = line + b"Content-Length: 0\r\n\r\n"
    chunked = line + b"Transfer-Encoding: chunked\r\n\r\n"
    fill = b"a" * PIECE
    return [
        State("nothing is said", b""),
        State("line ends for ever", b"\r\n", b"\r\n", every_s=0.02),
        State("half a request line", line[:9]),
        State("head never ends", line),
        State("head drips", line, b"X", every_s=0.02),
        State("endless header", line + b"X: ", fill),
        State("endless headers", line, b"X: y\r\n" * 2000),
        State("endless target", f"{method} {path}?".encode(), fill),
        State("body never comes", line + b"Content-Length: 1000\r\n\r\n"),
        State("body drips", line + b"Content-Length: 1000000\r\n\r\n", b"b", every_s=0.02),
        State("body floods", line + b"Content-Length: 1000000000000\r\n\r\n", fill),
        State("body awaited with Expect", line + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"),
        State("chunks never come", chunked),
        State("endless chunk extension", chunked + b"1;a=", fill),
        State("chunk extension drips", chunked + b"1;a=", b"e", every_s=0.02),
        State("endless chunk size", chunked, b"0" * PIECE),
        State("chunks of one byte, slowly", chunked, b"1\r\nx\r\n", every_s=0.02),
        State("chunks of one byte, fast", chunked, b"1\r\nx\r\n" * 2000),
        State("endless trailer", chunked + b"0\r\nX: ", fill),
        State("endless trailers", chunked + b"0\r\n", b"X: y\r\n" * 2000),
        State("trailer drips", chunked + b"0\r\nX: ", b"t", every_s=0.02),
        State("trailer with a token", chunked + b"0\r\nAuthorization: Bearer x\r\n"),
        State("body after the answer", line + b"Content-Length: 10\r\n\r\n", fill),
        State("junk behind the request", whole, b"\0" * PIECE),
        State("half a request behind the request", whole + b"GET /"),
        State("requests behind requests", whole * 100, whole * 100, reads=False),
        State("answers are never read", whole * 1000, whole * 100, reads=False),
        State("half closed before the head", line, half_close=True),
        State("half closed within the body", line + b"Content-Length: 9\r\n\r\n", half_close=True),
        State("half closed behind the request", whole, half_close=True),
        State("upgrade", line + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"),
        State("websocket", line + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b"\x81" * 100),
        State(
            "whole address of another host", whole.replace(path.encode(), b"http://evil" + path.encode(), 1)
        ),
        State("HTTP/1.0", whole.replace(b"HTTP/1.1", b"HTTP/1.0", 1), fill),
        State("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 100),
        State("two lengths", line + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"),
        State("length and chunks", line + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1"),
        State("another coding", line + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"1"),
    ]


@dataclass(frozen=True)
class Ended:
    is_closed: bool
    num_sent: int
    told: bytes


def try_out(link: socket.socket, state: State, meanwhile: Callable[[], None]) -> Ended:
    """Do what the state says until the server closes or the socket's own timeout passes."""
    sent, told = 0, b""
    patience = link.gettimeout() or 0.0
    try:
        link.sendall(state.first)
        if state.half_close:
            link.shutdown(socket.SHUT_WR)
        meanwhile()
        if not state.more:
            return _read_out(link, len(state.first))
        sent = len(state.first)
        while True:
            link.settimeout(patience)
            link.sendall(state.more)
            sent += len(state.more)
            if state.reads:
                link.settimeout(max(state.every_s, 0.001))
                try:
                    piece = link.recv(65536)
                except TimeoutError:
                    continue
                if not piece:
                    return Ended(is_closed=True, num_sent=sent, told=told)
                told += piece
    except TimeoutError:
        return Ended(is_closed=False, num_sent=sent, told=told)
    except (BrokenPipeError, ConnectionResetError):
        return Ended(is_closed=True, num_sent=sent, told=told)


def _read_out(link: socket.socket, sent: int) -> Ended:
    told = b""
    try:
        while piece := link.recv(65536):
            told += piece
    except ConnectionResetError:
        pass
    except TimeoutError:
        return Ended(is_closed=False, num_sent=sent, told=told)
    return Ended(is_closed=True, num_sent=sent, told=told)
