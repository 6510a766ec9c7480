"""A closed loop of HTTP/1.1 requests over keep-alive connections, cheap enough to share cores with a server.

One thread, prepared requests, no parsing beyond the status and Content-Length. It does not follow
redirects, retry or decode: an answer that is not the expected status is an error.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.processes import BenchmarkError

Render = Callable[[int], bytes]
"""The whole request for one index, head and body."""


@dataclass
class Load:
    """What was received: seconds in all, seconds for each request, and the bodies of the answers."""

    wall_s: float = 0.0
    each_s: list[float] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.each_s) / self.wall_s


@dataclass
class _Line:
    """One connection: what it waits for, and since when."""

    socket: socket.socket
    began: float = 0.0
    received: bytearray = field(default_factory=bytearray)
    head: bytes = b""
    size: int = 0
    """The size of the whole answer, once its head has arrived."""


def request(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """Return a request as it is sent over the wire."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def run(
    port: int, render: Render, count: int, *, connections: int, expect: int = 200, timeout_s: float = 120
) -> Load:
    """Send `count` requests, the next on each connection as soon as the last was answered."""
    load = Load()
    waiting = iter(range(count))
    began = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for _ in range(min(connections, count)):
            line = _Line(socket.create_connection(("127.0.0.1", port), timeout=timeout_s))
            line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(line.socket, selectors.EVENT_READ, line)
            _send(line, render, next(waiting))
        try:
            while len(load.each_s) < count:
                ready = selector.select(timeout_s)
                if not ready:
                    raise BenchmarkError(
                        f"no answer within {timeout_s:g} s after {len(load.each_s)} requests"
                    )
                for key, _ in ready:
                    if _receive(key.data, load, expect) and (index := next(waiting, None)) is not None:
                        _send(key.data, render, index)
        finally:
            for key in list(selector.get_map().values()):
                key.data.socket.close()
    load.wall_s = time.perf_counter() - began
    return load


def _send(line: _Line, render: Render, index: int) -> None:
    line.began = time.perf_counter()
    line.socket.sendall(render(index))


def _receive(line: _Line, load: Load, expect: int) -> bool:
    """Read what has arrived. Return True once the answer is complete."""
    data = line.socket.recv(1 << 18)
    if not data:
        raise BenchmarkError(f"the server closed a connection: {bytes(line.received[:300])!r}")
    line.received += data
    if not line.size and (end := line.received.find(b"\r\n\r\n")) >= 0:
        line.head = bytes(line.received[: end + 4])
        line.size = len(line.head) + _content_length(line.head)
    if not line.size or len(line.received) < line.size:
        return False
    load.each_s.append(time.perf_counter() - line.began)
    body = bytes(line.received[len(line.head) :])
    status = int(line.head[9:12])
    if status != expect:
        raise BenchmarkError(f"answered {status}, not {expect}: {body[:500]!r}")
    load.bodies.append(body)
    line.received.clear()
    line.size = 0
    return True


def _content_length(head: bytes) -> int:
    for name, _, value in (row.partition(b":") for row in head.split(b"\r\n")[1:]):
        if name.lower() == b"content-length":
            return int(value)
    raise BenchmarkError(f"an answer without Content-Length: {head[:300]!r}")
