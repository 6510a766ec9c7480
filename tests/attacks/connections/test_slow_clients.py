"""Row 35 and row 5: slow, greedy and malformed clients of a real socket; and where the server may listen at
all.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from shoal.api.http import bodies
from shoal.api.http.protocol import ConnectionLimits
from shoal.api.http.server import check_listen, open_socket
from shoal.errors import SpecError
from shoal.settings import Settings
from tests.support.planes.world import ApiWorld, connect_client, eventually, open_server

START = """
import sys
from pathlib import Path
from shoal.settings import Settings
Settings(home=Path("/x"), host=sys.argv[1])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiWorld, int]]:
    with open_server(tmp_path_factory.mktemp("server")) as opened:
        yield opened


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiWorld, int]]:
    """A server that waits a quarter of a second for a head."""
    limits = ConnectionLimits(head_s=0.25)
    with open_server(tmp_path_factory.mktemp("hasty"), limits) as opened:
        yield opened


def head(world: ApiWorld, method: str, target: str, *more: str) -> bytes:
    token = world.tokens["member"]
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def answer(link: socket.socket) -> bytes:
    """Return everything until the server closes or pauses for long."""
    out = b""
    while piece := link.recv(65536):
        out += piece
        if b"content-length: 0" in out or out.endswith(b"}"):
            break
    return out


def is_healthy(port: int) -> bool:
    """Whether it answers before the socket's own timeout, which is far below what any held
    connection lasts.
    """
    with connect_client(port) as link:
        link.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b'"status":"ok"' in answer(link)


def closes(link: socket.socket) -> bool:
    """Whether the server hangs up within the socket's timeout."""
    try:
        while link.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def drip(link: socket.socket, for_s: float) -> None:
    """Send a request that never gets beyond its first word."""
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        link.sendall(b"G")
        time.sleep(0.05)


def test_unfinished_bodies_of_one_account_hold_a_bounded_memory(server: tuple[ApiWorld, int]) -> None:
    world, port = server
    most = world.plane.settings.limits.max_body_bytes
    begin = head(world, "POST", "/v1/jobs", "Content-Type: application/json", f"Content-Length: {most}")
    with ExitStack() as held:
        links = [held.enter_context(connect_client(port)) for _ in range(bodies.MAX_IN_MEMORY + 1)]
        for link in links:
            with suppress(BrokenPipeError, ConnectionResetError):
                link.sendall(begin + b" " * (most - 50))
        answered, _, _ = select.select(links, [], [], 20)
        assert answered
        assert {answer(link)[:13] for link in answered} == {b"HTTP/1.1 429 "}
        assert world.call("POST", "/v1/tokens", role="lead", data={}).status == 201
    eventually(lambda: world.call("POST", "/v1/tokens", role="member", data={}).status == 201)


def test_a_small_request_is_refused_before_a_large_body_of_it_has_come(server: tuple[ApiWorld, int]) -> None:
    world, port = server
    begin = head(world, "POST", "/v1/tokens", "Content-Type: application/json", f"Content-Length: {4 << 20}")
    with connect_client(port) as link:
        link.sendall(begin + b" " * (bodies.MAX_SMALL + 1))
        assert answer(link).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_says_nothing_is_hung_up_on(hasty: tuple[ApiWorld, int]) -> None:
    with connect_client(hasty[1], 5) as link:
        assert closes(link)


def test_a_head_that_drips_is_hung_up_on_also_on_a_kept_connection(hasty: tuple[ApiWorld, int]) -> None:
    with connect_client(hasty[1], 5) as link:
        link.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in answer(link)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            drip(link, for_s=5)


@pytest.mark.parametrize("begin", [b"\x16\x03\x01\x02\x00\x01\x00", b"\r\n\0", b"get / HTTP/1.1\r\n"])
def test_bytes_that_begin_no_request_get_400_before_their_end(tmp_path: Path, begin: bytes) -> None:
    """A greeting of TLS has no end of a head: a server that waits for it holds a connection for nothing."""
    with (
        open_server(tmp_path, ConnectionLimits(head_s=3600.0)) as (_, port),
        connect_client(port, 20) as link,
    ):
        link.sendall(begin)
        assert link.recv(65536).startswith(b"HTTP/1.1 400 ")
        assert closes(link)


@pytest.mark.parametrize("head", ["one endless header", "endless headers", "an endless line"])
def test_an_endless_head_is_hung_up_on(server: tuple[ApiWorld, int], head: str) -> None:
    flood = {
        "one endless header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20),
        "endless headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 50_000,
        "an endless line": b"GET /" + b"x" * (1 << 20),
    }[head]
    with connect_client(server[1], 5) as link:
        try:
            link.sendall(flood)
        except (BrokenPipeError, ConnectionResetError):
            return
        assert closes(link)


def test_a_body_that_stops_coming_is_answered_408(
    server: tuple[ApiWorld, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_IDLE_S", 0.3)
    world, port = server
    typed = ("Content-Type: application/json", "Content-Length: 100")
    with connect_client(port, 10) as link:
        link.sendall(head(world, "POST", "/v1/jobs", *typed) + b'{"spec"')
        assert b" 408 " in answer(link).split(b"\r\n")[0]


def test_an_upload_that_stops_coming_is_answered_408_and_leaves_nothing(
    server: tuple[ApiWorld, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_IDLE_S", 0.3)
    world, port = server
    typed = ("Content-Type: application/x-tar", "Content-Length: 100000")
    with connect_client(port, 10) as link:
        link.sendall(head(world, "PUT", f"/v1/archives/{'0' * 64}?project=vision", *typed) + b"x" * 1000)
        assert b" 408 " in answer(link).split(b"\r\n")[0]
    assert list((world.plane.settings.home / "archives").glob(".part*")) == []


def test_an_upload_too_large_is_refused_before_it_is_read(server: tuple[ApiWorld, int]) -> None:
    world, port = server
    typed = ("Content-Type: application/x-tar", f"Content-Length: {1 << 40}")
    with connect_client(port, 10) as link:
        link.sendall(head(world, "PUT", f"/v1/archives/{'0' * 64}?project=vision", *typed) + b"x" * 100)
        assert b" 413 " in answer(link).split(b"\r\n")[0]


def test_the_server_stays_well_while_hundreds_hold_on_to_it(server: tuple[ApiWorld, int]) -> None:
    world, port = server
    with ExitStack() as held:
        for number in range(300):
            link = held.enter_context(connect_client(port))
            if number % 3 == 0:
                link.sendall(b"GET / HT")
            elif number % 3 == 1:
                typed = ("Content-Type: application/json", "Content-Length: 1000")
                link.sendall(head(world, "POST", "/v1/jobs", *typed) + b"{")
        assert all(is_healthy(port) for _ in range(10))
    assert is_healthy(port)


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /v1/jobs HTTP/9.9",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"G\x00T / HTTP/1.1",
        b"GET  /  HTTP/1.1",
    ],
)
def test_request_that_is_not_http_gets_400_or_is_closed(
    server: tuple[ApiWorld, int], request_line: bytes
) -> None:
    with connect_client(server[1], 5) as link:
        link.sendall(request_line + b"\r\nHost: localhost\r\n\r\n")
        reply = answer(link)
    assert reply == b"" or reply.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401", b"HTTP/1.1 421"))
    assert is_healthy(server[1])


@pytest.mark.parametrize(
    "smuggled", ["Content-Length: 5\r\nContent-Length: 6", "Content-Length: 5\r\nTransfer-Encoding: chunked"]
)
def test_a_body_of_two_lengths_is_not_read(server: tuple[ApiWorld, int], smuggled: str) -> None:
    world, port = server
    with connect_client(port, 5) as link:
        link.sendall(
            head(world, "POST", "/v1/jobs", "Content-Type: application/json", smuggled) + b"0\r\n\r\n"
        )
        assert b"201" not in answer(link).split(b"\r\n")[0]


def test_a_websocket_handshake_is_refused(server: tuple[ApiWorld, int]) -> None:
    world, port = server
    upgrade = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAA",
    )
    with connect_client(port, 5) as link:
        link.sendall(head(world, "GET", "/v1/events/stream?limit=1", *upgrade))
        assert b" 101 " not in answer(link).split(b"\r\n")[0]


def test_headers_do_not_name_the_server(server: tuple[ApiWorld, int]) -> None:
    with connect_client(server[1], 5) as link:
        link.sendall(b"GET /v1/me HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reply = answer(link).lower()
    assert reply.startswith(b"http/1.1 401")
    assert b"\r\nserver:" not in reply
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["code"] == "unauthenticated"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_it_does_not_start_elsewhere_than_loopback_without_tls_or_a_declared_proxy(
    tmp_path: Path, host: str
) -> None:
    with pytest.raises(SpecError, match="without TLS"):
        Settings(home=tmp_path, host=host)
    done = subprocess.run(
        [sys.executable, "-c", START, host], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert "refusing to listen" in done.stderr


def test_the_server_asks_again_before_it_opens_a_socket(tmp_path: Path) -> None:
    unsafe = Settings(home=tmp_path, port=0)
    object.__setattr__(unsafe, "host", "0.0.0.0")
    for act in (check_listen, open_socket):
        with pytest.raises(SpecError, match="refusing to listen"):
            act(unsafe)
    check_listen(Settings(home=tmp_path, host="0.0.0.0", is_behind_proxy=True))
