"""How long a control plane that does not answer keeps a keeper: not for as long as means its end."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.engines.sightings import HEARD_S, LATE_S
from shoal.identity.authority import Pair, make_authority, make_server
from shoal.runtime import desk, keeper
from shoal.runtime.addresses import MAX_KNOWN
from shoal.runtime.desk import DeskClient, Silent
from shoal.wire import Dispatch, DispatchAnswer

TAKEN = msgspec.json.encode(DispatchAnswer(size=7))
TOLD = Dispatch(attempt_id="att_1", epoch=1, node="n1", process="0" * 32, offset=0)


@pytest.fixture(scope="module")
def authority() -> Pair:
    return make_authority("a test's", time.time())


@pytest.fixture
def frozen() -> Iterator[str]:
    """Its kernel takes connections, and nobody comes for them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def a_plane(
    authority: Pair, folder: Path, pause_s: float = 0.0, told: bytes = TAKEN, drop_s: float = 0.0
) -> Iterator[str]:
    """Lets everybody in at once, and answers after a pause, or a byte at a time."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(pause_s)
            with contextlib.suppress(OSError):  # who asked may be gone
                self.send_response(200)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                for drop in told if drop_s else ():
                    time.sleep(drop_s)
                    self.wfile.write(bytes([drop]))
                self.wfile.write(b"" if drop_s else told)

        def log_message(self, format: str, *args: object) -> None:
            pass

    pair = make_server(authority, ["127.0.0.1"], time.time())
    (folder / "server.pem").write_bytes(pair.certificate + pair.key)
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(folder / "server.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.socket = trust.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def client(authority: Pair, *urls: str) -> DeskClient:
    return DeskClient(urls, authority.certificate.decode())


@pytest.mark.parametrize("piece", [b"", b"a line\n"])
def test_a_control_plane_that_is_frozen_keeps_a_keeper_for_a_moment_only(
    authority: Pair, frozen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    monkeypatch.setattr(desk, "ASK_S", 0.3)
    with a_plane(authority, tmp_path) as alive:
        began = time.monotonic()
        assert client(authority, frozen, alive).tell("key", TOLD, piece).size == 7
    assert time.monotonic() - began < 5.0


def test_a_piece_of_the_log_may_take_longer_than_a_sign_of_life(
    authority: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_plane(authority, tmp_path, pause_s=1.0) as slow:
        monkeypatch.setattr(desk, "ASK_S", 0.3)
        assert client(authority, slow).tell("key", TOLD, b"a line\n").size == 7
        with pytest.raises(Silent):
            client(authority, slow).tell("key", TOLD, b"")


def test_an_answer_that_never_ends_takes_no_longer_than_one_may(
    authority: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_plane(authority, tmp_path, told=b" " * 200, drop_s=0.05) as slow:
        monkeypatch.setattr(desk, "ASK_S", 0.5)
        began = time.monotonic()
        with pytest.raises(Silent):
            client(authority, slow).tell("key", TOLD, b"")
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("told", [b"[" * 20_000, b"no words", b'{"size": "seven"}', b"\xff"])
def test_an_answer_that_is_none_is_silence(authority: Pair, tmp_path: Path, told: bytes) -> None:
    with a_plane(authority, tmp_path, told=told) as confused, pytest.raises(Silent, match="that is none"):
        client(authority, confused).tell("key", TOLD, b"")


def test_a_keeper_that_lives_speaks_before_it_is_taken_for_gone() -> None:
    """Also where it asks two control planes in vain before the one that judges it."""
    assert max(keeper.PING_S, keeper.MAX_BACKOFF_S) + 2 * desk.ASK_S <= LATE_S < HEARD_S


def test_a_keeper_finds_the_newest_control_plane_however_many_there_were_before(
    authority: Pair, tmp_path: Path
) -> None:
    """Addresses change: each answer names where the control planes are now."""
    told, gone = client(authority), [f"https://127.0.0.1:{port}" for port in range(1, MAX_KNOWN + 2)]
    for one in gone:
        told.learn((one,))
    with a_plane(authority, tmp_path) as newest:
        told.learn((newest,))
        assert told.tell("key", TOLD, b"").size == 7


def test_who_answered_is_asked_first_and_who_is_not_named_any_more_last(
    authority: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def post_to(url: str, *_: object) -> bytes:
        asked.append(url)
        if url != "https://b" or len(asked) > 2:
            raise Silent("not now")
        return msgspec.json.encode(DispatchAnswer(size=7, control_urls=("https://c", "https://b")))

    told = client(authority, "https://a", "https://b")
    monkeypatch.setattr(told, "_post_to", post_to)
    told.tell("key", TOLD, b"")
    with pytest.raises(Silent):
        told.tell("key", TOLD, b"")
    assert asked[2:] == ["https://b", "https://c", "https://a"]
