"""A data plane finds the control plane of a home wherever it listens, and gives no other process
its token.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.local_sockets import UnexpectedListener
from shoal.serving.leader_client import ANSWER_S, LOCK, TABLE, LeaderClient
from tests.support.serving.data_plane_lab import PATIENCE_S


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


class PacedServer:
    """A server that answers one request in pieces, and the time of its client: every time that the client
    looks at the clock, the server sends one more piece, and `every_s` have passed. No test waits for them.
    """

    def __init__(self, *pieces: bytes, every_s: float) -> None:
        self.num_looks = 0
        self._every_s = every_s
        self._looks = threading.Semaphore(0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.where = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        threading.Thread(target=self._answer, args=(pieces,), daemon=True).start()

    def monotonic(self) -> float:
        self.num_looks += 1
        self._looks.release()
        return self.num_looks * self._every_s

    def _answer(self, pieces: tuple[bytes, ...]) -> None:
        with contextlib.suppress(OSError), self._listener, self._listener.accept()[0] as link:
            link.recv(1 << 16)
            for piece in pieces:
                self._looks.acquire(timeout=PATIENCE_S)
                link.sendall(piece)


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
    server = PacedServer(*pieces, every_s=ANSWER_S / 10)
    monkeypatch.setattr("shoal.serving.leader_client.monotonic", server.monotonic)
    with pytest.raises(TimeoutError, match="the time for the answer is over"):
        LeaderClient("").request("GET", server.where)
    assert server.num_looks < 30


def test_long_table_gets_time_for_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.serving.leader_client.LEAST_RATE", 50.0 / ANSWER_S)
    server = PacedServer(HEAD, *(b"x" * 50 for _ in range(8)), every_s=ANSWER_S / 2)
    monkeypatch.setattr("shoal.serving.leader_client.monotonic", server.monotonic)
    client = LeaderClient("")
    assert client.request("GET", server.where) == (200, LONG_BODY)
    assert server.num_looks > 4, "it took longer than a short answer may"
    client.close()


def test_reply_is_read_to_its_end_when_the_server_closes_the_connection_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = PacedServer(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"to", b" the end", every_s=0.0)
    monkeypatch.setattr("shoal.serving.leader_client.monotonic", server.monotonic)
    assert LeaderClient("").request("GET", server.where) == (200, b"to the end")


def test_missing_control_plane_is_an_error_that_changes_nothing(home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LeaderClient("secret", [home / "server.json"]).request("GET", TABLE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    facts = {"url": f"http://127.0.0.1:{port}", "pid": 1, "home": str(home)}
    (home / "server.json").write_text(json.dumps(facts))
    with pytest.raises(ConnectionRefusedError):
        LeaderClient("secret", [home / "server.json"]).request("GET", TABLE)
