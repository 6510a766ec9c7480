"""Row 53: whatever a client without a token leaves undone on a connection, the server ends it by itself.

Made from the list of open routes and of states, so that a new open route is tried without an edit.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.types import Scope

from shoal.api.http.connections import ConnectionSlots
from shoal.api.http.guard import OPEN, Guard
from shoal.api.http.protocol import ConnectionLimits
from tests.support.faults.connection_states import ConnectionState, run_state, states_of
from tests.support.planes.world import ApiWorld, connect_client, open_server

HASTY = ConnectionLimits(head_s=0.2, drain_s=0.2, unread_s=0.3)
KERNEL_BYTES = 12 << 20
"""The most that the kernel's buffers hold for one connection over loopback, whatever the server reads."""
ROUTES = [*sorted(OPEN), ("GET", "/v1/me"), ("POST", "/v1/jobs")]
"""Routes that need a token are refused by another path than open ones."""
CASES = [(f"{method} {path}", state) for method, path in ROUTES for state in states_of(method, path)]


HALF_DONE = (
    b"",
    b"GET / HT",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiWorld, int]]:
    with open_server(tmp_path_factory.mktemp("server"), HASTY, keep_alive_s=0.3) as opened:
        yield opened


def test_held_connections_keep_no_client_out(tmp_path: Path) -> None:
    """Not even if the held connections are more than the places."""
    with open_server(tmp_path, slots=ConnectionSlots(40)) as (world, port), ExitStack() as held:
        kept = held.enter_context(connect_client(port, 5))
        token = world.tokens["member"]
        signed = f"GET /v1/me HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
        kept.sendall(signed.encode())
        assert b" 200 " in one_answer(kept)
        for number in range(60):
            link = held.enter_context(connect_client(port, 5))
            link.sendall(HALF_DONE[number % len(HALF_DONE)])
            if number % 10 == 0:
                ask_health(port)
        kept.sendall(signed.encode())
        assert b" 200 " in one_answer(kept)


def test_caller_with_too_many_connections_gets_an_error(tmp_path: Path) -> None:
    with open_server(tmp_path, slots=ConnectionSlots(40)) as (world, port), ExitStack() as held:
        statuses = []
        for role in ["member"] * 12 + ["viewer"]:
            link = held.enter_context(connect_client(port, 5))
            head = f"GET /v1/me HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {world.tokens[role]}"
            link.sendall(f"{head}\r\n\r\n".encode())
            statuses.append(one_answer(link).split(b" ")[1])
    assert statuses == [b"200"] * 10 + [b"503"] * 2 + [b"200"]


def one_answer(link: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"}"):
        received += link.recv(65536)
    return received


def ask_health(port: int) -> None:
    with connect_client(port, 5) as link:
        link.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        received = b""
        while piece := link.recv(65536):
            received += piece
    assert b'"status":"ok"' in received


@pytest.mark.parametrize(
    "title,state", CASES, ids=[f"{title}: {state.name}".replace(" ", "-") for title, state in CASES]
)
def test_a_connection_in_any_state_is_closed_while_others_are_answered(
    server: tuple[ApiWorld, int], title: str, state: ConnectionState
) -> None:
    with connect_client(server[1], 5, receive_bytes=None if state.reads else 4096) as link:
        ended = run_state(link, state, lambda: ask_health(server[1]))
    assert ended.is_closed, f"{title} is held: {ended.num_sent} bytes were taken"
    assert ended.num_sent < KERNEL_BYTES


@pytest.mark.parametrize("name", ["Authorization: Bearer {}", "Host: localhost"])
@pytest.mark.parametrize("method,path,body", [("GET", "/v1/me", b""), ("POST", "/v1/jobs", b"2\r\n{}\r\n")])
def test_nothing_is_read_from_a_trailer(
    server: tuple[ApiWorld, int], name: str, method: str, path: str, body: bytes
) -> None:
    world, port = server
    trailer = name.format(world.tokens["admin"])
    head = [f"{method} {path} HTTP/1.1", "Transfer-Encoding: chunked", "Content-Type: application/json"]
    head += ["Host: localhost"] if "Host" not in name else [f"Authorization: Bearer {world.tokens['admin']}"]
    raw = "\r\n".join(head).encode() + b"\r\n\r\n" + body + b"0\r\n" + trailer.encode() + b"\r\n\r\n"
    with connect_client(port, 5) as link:
        ended = run_state(link, ConnectionState("trailer", raw), lambda: None)
    assert ended.received.split(b" ")[1] in (b"400", b"401", b"421")


def test_the_target_may_name_the_same_host_and_no_other(server: tuple[ApiWorld, int]) -> None:
    world, port = server
    token = world.tokens["member"]
    for target, status in (("http://localhost/v1/me", b"200"), ("http://evil/v1/me", b"400")):
        raw = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
        with connect_client(port, 5) as link:
            ended = run_state(link, ConnectionState("absolute", raw.encode()), lambda: None)
        assert ended.received.split(b" ")[1] == status, target


@pytest.mark.parametrize(
    "target",
    ["/healthz?" + "a=b&" * 15000, "/healthz?a=b", "/" + "%25" * 20000, "http://localhost/" + "a" * 20000],
)
def test_long_target_or_query_is_refused_before_it_is_parsed(
    server: tuple[ApiWorld, int], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A caller without a token could occupy the event loop with it for 60 ms."""
    parsed: list[object] = []
    monkeypatch.setattr(FastAPI, "__call__", lambda _, scope, *__: parsed.append(scope))
    with connect_client(server[1], 5) as link:
        raw = f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        ended = run_state(link, ConnectionState("long target", raw.encode()), lambda: None)
    assert ended.received.split(b" ")[1] == b"400"
    assert parsed == []


def test_cookies_are_not_handed_on(server: tuple[ApiWorld, int], monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[bytes] = set()
    admit = Guard._admit

    async def look(guard: Guard, scope: Scope, request_id: str, *, has_body: bool) -> None:
        names.update(name for name, _ in scope["headers"])
        await admit(guard, scope, request_id, has_body=has_body)

    monkeypatch.setattr(Guard, "_admit", look)
    raw = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nCookie: " + b"a=b;" * 15000 + b"\r\n\r\n"
    with connect_client(server[1], 5) as link:
        ended = run_state(link, ConnectionState("cookies", raw), lambda: None)
    assert ended.received.split(b" ")[1] == b"200"
    assert names == {b"host"}


def test_pipelined_requests_are_answered_in_order(server: tuple[ApiWorld, int]) -> None:
    """In whatever pieces they arrive."""
    paths = ["/healthz", "/v1/me", "/healthz", "/v1/me"]
    raw = b"".join(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths)
    for size in (len(raw), 7):
        with connect_client(server[1], 5) as link:
            for start in range(0, len(raw), size):
                link.sendall(raw[start : start + size])
            received = b""
            while piece := link.recv(65536):
                received += piece
        assert re.findall(rb"HTTP/1.1 (\d+) ", received) == [b"200", b"401", b"200", b"401"]
