"""A data plane finds the control plane of a home wherever it listens, and gives its token to nobody else."""

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

from shoal.loopback import Stranger
from shoal.serving.server import LOCK, TABLE, Server


class Control(ThreadingHTTPServer):
    """A control plane, as far as a data plane sees it."""

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
    """Held by this process."""
    with (tmp_path / LOCK).open("w"):
        yield tmp_path


def test_control_plane_is_asked_on_one_connection_and_found_again_when_it_moved(home: Path) -> None:
    first, second = Control(), Control()
    first.announce(home)
    server = Server("secret", [home / "server.json"])
    for _ in range(3):
        assert server.talk("GET", TABLE) == (200, b"{}")
    assert first.seen == [(TABLE, "Bearer secret")] * 3
    assert len(first.connections) == 1
    second.announce(home)
    first.end()
    for connection in first.connections:
        connection.shutdown(socket.SHUT_RDWR)
    assert server.talk("GET", TABLE) == (200, b"{}")
    assert second.seen == [(TABLE, "Bearer secret")]
    server.close()
    second.end()


def test_token_goes_to_the_process_that_holds_the_home_and_to_no_other(home: Path, tmp_path: Path) -> None:
    control = Control()
    control.announce(home)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()  # nobody holds it
    control.announce(elsewhere)
    with pytest.raises(Stranger, match="not by the control plane of"):
        Server("secret", [elsewhere / "server.json"]).talk("GET", TABLE)
    assert control.seen == []
    control.end()


def test_the_leader_is_found_from_the_file_it_writes_after_every_failover(home: Path) -> None:
    own, other = Control(), Control()
    own.announce(home)
    own.announce(home, "leader.json")
    server = Server("secret", [home / "leader.json", home / "server.json"])
    assert server.talk("GET", TABLE) == (200, b"{}")
    own.status = 503  # it stands by from now on, and keeps the connection
    assert server.talk("GET", TABLE)[0] == 503
    other.announce(home, "leader.json")
    assert server.talk("GET", TABLE) == (200, b"{}")
    assert other.seen == [(TABLE, "Bearer secret")]
    other.end()
    for connection in other.connections:
        connection.shutdown(socket.SHUT_RDWR)
    own.status = 200  # and leads again, before it could say so
    assert server.talk("GET", TABLE) == (200, b"{}")
    server.close()
    own.end()


def test_a_leader_file_of_a_dead_process_gives_the_token_to_no_other(home: Path, tmp_path: Path) -> None:
    stranger = Control()
    facts = {"url": f"http://127.0.0.1:{stranger.server_address[1]}", "pid": 1, "home": str(home)}
    (home / "leader.json").write_text(json.dumps(facts))
    with pytest.raises(Stranger, match="not by the control plane of"):
        Server("secret", [home / "leader.json"]).talk("GET", TABLE)
    assert stranger.seen == []
    stranger.end()


HEAD, LONG_BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\n", b"x" * 400


def slowly(*pieces: bytes, every_s: float) -> str:
    """Where somebody answers one request with these, one after the other."""
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
        [bytes([one]) for one in HEAD + LONG_BODY],
        [HEAD, *(bytes([one]) for one in LONG_BODY)],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 400,
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b"1\r\n", b"x\r\n"] * 200],
    ],
    ids=["a head byte by byte", "a body byte by byte", "heads without end", "chunk by chunk"],
)
def test_who_answers_without_end_holds_nobody(monkeypatch: pytest.MonkeyPatch, pieces: list[bytes]) -> None:
    monkeypatch.setattr("shoal.serving.server.ANSWER_S", 0.3)
    where, began = slowly(*pieces, every_s=0.02), time.monotonic()
    with pytest.raises((TimeoutError, http.client.HTTPException)):
        Server("").talk("GET", where)
    assert time.monotonic() - began < 2.0


def test_a_long_table_may_take_as_long_as_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.serving.server.ANSWER_S", 0.3)
    monkeypatch.setattr("shoal.serving.server.LEAST_RATE", 200)
    where, began = slowly(HEAD, *(b"x" * 50 for _ in range(8)), every_s=0.15), time.monotonic()
    server = Server("")
    assert server.talk("GET", where) == (200, LONG_BODY)
    assert time.monotonic() - began > 0.6
    server.close()


def test_an_answer_is_heard_to_its_end_from_who_closes_the_connection_after_it() -> None:
    where = slowly(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"to", b" the end", every_s=0.01)
    assert Server("").talk("GET", where) == (200, b"to the end")


def test_nobody_there_is_an_error_that_changes_nothing(home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Server("secret", [home / "server.json"]).talk("GET", TABLE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    facts = {"url": f"http://127.0.0.1:{port}", "pid": 1, "home": str(home)}
    (home / "server.json").write_text(json.dumps(facts))
    with pytest.raises(ConnectionRefusedError):
        Server("secret", [home / "server.json"]).talk("GET", TABLE)
