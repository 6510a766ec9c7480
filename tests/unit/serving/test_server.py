"""A data plane finds the control plane of a home wherever it listens, and gives no other process
its token.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.local_sockets import UnexpectedListener
from shoal.serving.leader_client import LOCK, TABLE, LeaderClient


class Control(ThreadingHTTPServer):
    """A control plane with the endpoints that a data plane uses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str | None]] = []
        self.connections: set[socket.socket] = set()
        self.status = 200
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def announce(self, home: Path, file: str = "server.json") -> None:
        facts = {"url": f"http://127.0.0.1:{self.server_address[1]}", "pid": os.getpid(), "home": str(home)}
        (home / file).write_text(json.dumps(facts))

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Control

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["authorization"]))
        self.server.connections.add(self.connection)
        self.send_response(self.server.status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose lock this process holds."""
    with (tmp_path / LOCK).open("w"):
        yield tmp_path


def test_control_plane_keeps_one_connection_and_is_found_again_when_it_moves(home: Path) -> None:
    first, second = Control(), Control()
    first.announce(home)
    server = LeaderClient("secret", [home / "server.json"])
    for _ in range(3):
        assert server.request("GET", TABLE) == (200, b"{}")
    assert first.seen == [(TABLE, "Bearer secret")] * 3
    assert len(first.connections) == 1
    second.announce(home)
    first.end()
    for connection in first.connections:
        connection.shutdown(socket.SHUT_RDWR)
    assert server.request("GET", TABLE) == (200, b"{}")
    assert second.seen == [(TABLE, "Bearer secret")]
    server.close()
    second.end()


def test_token_goes_only_to_the_process_that_holds_the_home(home: Path, tmp_path: Path) -> None:
    control = Control()
    control.announce(home)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()  # no process holds it
    control.announce(elsewhere)
    with pytest.raises(UnexpectedListener, match="not by the control plane of"):
        LeaderClient("secret", [elsewhere / "server.json"]).request("GET", TABLE)
    assert control.seen == []
    control.end()


def test_the_leader_is_found_from_the_file_it_writes_after_every_failover(home: Path) -> None:
    local, other = Control(), Control()
    local.announce(home)
    local.announce(home, "leader.json")
    server = LeaderClient("secret", [home / "leader.json", home / "server.json"])
    assert server.request("GET", TABLE) == (200, b"{}")
    local.status = 503  # it is on standby from now on, and keeps the connection
    assert server.request("GET", TABLE)[0] == 503
    other.announce(home, "leader.json")
    assert server.request("GET", TABLE) == (200, b"{}")
    assert other.seen == [(TABLE, "Bearer secret")]
    other.end()
    for connection in other.connections:
        connection.shutdown(socket.SHUT_RDWR)
    local.status = 200  # it leads again, before it could write its file
    assert server.request("GET", TABLE) == (200, b"{}")
    server.close()
    local.end()


def test_leader_file_of_a_dead_process_gives_the_token_to_no_other(home: Path, tmp_path: Path) -> None:
    stranger = Control()
    facts = {"url": f"http://127.0.0.1:{stranger.server_address[1]}", "pid": 1, "home": str(home)}
    (home / "leader.json").write_text(json.dumps(facts))
    with pytest.raises(UnexpectedListener, match="not by the control plane of"):
        LeaderClient("secret", [home / "leader.json"]).request("GET", TABLE)
    assert stranger.seen == []
    stranger.end()


HEAD, LONG_BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\n", b"x" * 400


def slowly(*pieces: bytes, every_s: float) -> str:
    """Return the address of a server that answers one request with these pieces, one after the other."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError), listener, listener.accept()[0] as link:
            link.recv(1 << 16)
            for piece in pieces:
                link.sendall(piece)
                time.sleep(every_s)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/"


@pytest.mark.parametrize(
    "pieces",
    [
        [bytes([byte]) for byte in HEAD + LONG_BODY],
        [HEAD, *(bytes([byte]) for byte in LONG_BODY)],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 400,
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b"1\r\n", b"x\r\n"] * 200],
    ],
    ids=["a head byte by byte", "a body byte by byte", "heads without end", "chunk by chunk"],
)
def test_endless_reply_does_not_block_the_data_plane(
    monkeypatch: pytest.MonkeyPatch, pieces: list[bytes]
) -> None:
    monkeypatch.setattr("shoal.serving.leader_client.ANSWER_S", 0.3)
    where, began = slowly(*pieces, every_s=0.02), time.monotonic()
    with pytest.raises((TimeoutError, http.client.HTTPException)):
        LeaderClient("").request("GET", where)
    assert time.monotonic() - began < 2.0


def test_long_table_gets_time_for_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.serving.leader_client.ANSWER_S", 0.3)
    monkeypatch.setattr("shoal.serving.leader_client.LEAST_RATE", 200)
    where, began = slowly(HEAD, *(b"x" * 50 for _ in range(8)), every_s=0.15), time.monotonic()
    server = LeaderClient("")
    assert server.request("GET", where) == (200, LONG_BODY)
    assert time.monotonic() - began > 0.6
    server.close()


def test_reply_is_read_to_its_end_when_the_server_closes_the_connection_after_it() -> None:
    where = slowly(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"to", b" the end", every_s=0.01)
    assert LeaderClient("").request("GET", where) == (200, b"to the end")


def test_missing_control_plane_is_an_error_that_changes_nothing(home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LeaderClient("secret", [home / "server.json"]).request("GET", TABLE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    facts = {"url": f"http://127.0.0.1:{port}", "pid": 1, "home": str(home)}
    (home / "server.json").write_text(json.dumps(facts))
    with pytest.raises(ConnectionRefusedError):
        LeaderClient("secret", [home / "server.json"]).request("GET", TABLE)
