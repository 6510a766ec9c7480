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
class ConnectionState:
    name: str
    opening: bytes
    repeated: bytes = b""
    """Sent until the server closes; empty: nothing more is said."""
    every_s: float = 0.0
    """Between two pieces; 0: as fast as the server takes them."""
    reads: bool = True
    half_close: bool = False


def states_of(method: str, path: str) -> list[ConnectionState]:
    """Every state that a request for this route can be in."""
    line = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    whole = line + b"Content-Length: 0\r\n\r\n"
    chunked = line + b"Transfer-Encoding: chunked\r\n\r\n"
    fill = b"a" * PIECE
    return [
        ConnectionState("nothing is said", b""),
        ConnectionState("line ends for ever", b"\r\n", b"\r\n", every_s=0.02),
        ConnectionState("half a request line", line[:9]),
        ConnectionState("head never ends", line),
        ConnectionState("head drips", line, b"X", every_s=0.02),
        ConnectionState("endless header", line + b"X: ", fill),
        ConnectionState("endless headers", line, b"X: y\r\n" * 2000),
        ConnectionState("endless target", f"{method} {path}?".encode(), fill),
        ConnectionState("body never comes", line + b"Content-Length: 1000\r\n\r\n"),
        ConnectionState("body drips", line + b"Content-Length: 1000000\r\n\r\n", b"b", every_s=0.02),
        ConnectionState("body floods", line + b"Content-Length: 1000000000000\r\n\r\n", fill),
        ConnectionState(
            "body awaited with Expect", line + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"
        ),
        ConnectionState("chunks never come", chunked),
        ConnectionState("endless chunk extension", chunked + b"1;a=", fill),
        ConnectionState("chunk extension drips", chunked + b"1;a=", b"e", every_s=0.02),
        ConnectionState("endless chunk size", chunked, b"0" * PIECE),
        ConnectionState("chunks of one byte, slowly", chunked, b"1\r\nx\r\n", every_s=0.02),
        ConnectionState("chunks of one byte, fast", chunked, b"1\r\nx\r\n" * 2000),
        ConnectionState("endless trailer", chunked + b"0\r\nX: ", fill),
        ConnectionState("endless trailers", chunked + b"0\r\n", b"X: y\r\n" * 2000),
        ConnectionState("trailer drips", chunked + b"0\r\nX: ", b"t", every_s=0.02),
        ConnectionState("trailer with a token", chunked + b"0\r\nAuthorization: Bearer x\r\n"),
        ConnectionState("body after the answer", line + b"Content-Length: 10\r\n\r\n", fill),
        ConnectionState("junk behind the request", whole, b"\0" * PIECE),
        ConnectionState("half a request behind the request", whole + b"GET /"),
        ConnectionState("requests behind requests", whole * 100, whole * 100, reads=False),
        ConnectionState("answers are never read", whole * 1000, whole * 100, reads=False),
        ConnectionState("half closed before the head", line, half_close=True),
        ConnectionState("half closed within the body", line + b"Content-Length: 9\r\n\r\n", half_close=True),
        ConnectionState("half closed behind the request", whole, half_close=True),
        ConnectionState(
            "upgrade", line + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"
        ),
        ConnectionState(
            "websocket", line + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b"\x81" * 100
        ),
        ConnectionState(
            "whole address of another host", whole.replace(path.encode(), b"http://evil" + path.encode(), 1)
        ),
        ConnectionState("HTTP/1.0", whole.replace(b"HTTP/1.1", b"HTTP/1.0", 1), fill),
        ConnectionState("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 100),
        ConnectionState("two lengths", line + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"),
        ConnectionState(
            "length and chunks", line + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1"
        ),
        ConnectionState("another coding", line + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"1"),
    ]


@dataclass(frozen=True)
class ConnectionEnd:
    is_closed: bool
    num_sent: int
    received: bytes


def run_state(link: socket.socket, state: ConnectionState, meanwhile: Callable[[], None]) -> ConnectionEnd:
    """Do what the state says until the server closes or the socket's own timeout passes."""
    sent, told = 0, b""
    patience = link.gettimeout() or 0.0
    try:
        link.sendall(state.opening)
        if state.half_close:
            link.shutdown(socket.SHUT_WR)
        meanwhile()
        if not state.repeated:
            return _read_out(link, len(state.opening))
        sent = len(state.opening)
        while True:
            link.settimeout(patience)
            link.sendall(state.repeated)
            sent += len(state.repeated)
            if state.reads:
                link.settimeout(max(state.every_s, 0.001))
                try:
                    piece = link.recv(65536)
                except TimeoutError:
                    continue
                if not piece:
                    return ConnectionEnd(is_closed=True, num_sent=sent, received=told)
                told += piece
    except TimeoutError:
        return ConnectionEnd(is_closed=False, num_sent=sent, received=told)
    except (BrokenPipeError, ConnectionResetError):
        return ConnectionEnd(is_closed=True, num_sent=sent, received=told)


def _read_out(link: socket.socket, sent: int) -> ConnectionEnd:
    told = b""
    try:
        while piece := link.recv(65536):
            told += piece
    except ConnectionResetError:
        pass
    except TimeoutError:
        return ConnectionEnd(is_closed=False, num_sent=sent, received=told)
    return ConnectionEnd(is_closed=True, num_sent=sent, received=told)
