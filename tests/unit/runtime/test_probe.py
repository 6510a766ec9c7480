"""Whether a server can be given requests, and whose port is whose."""

from __future__ import annotations

import http.server
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from shoal import bounded_file
from shoal.clock import SystemClock
from shoal.runtime import probe as probing
from shoal.runtime.confine.firewall import FirewallFailed
from shoal.runtime.listening import CannotListen, OnPort, OnSocket, folder, give_back, make, path_in
from shoal.runtime.ports import hold_port
from shoal.runtime.probe import Prober
from shoal.wire import Credentials, Probe, Serving
from tests.support.shares import an_order

HERE = "127.0.0.1"


class Heard:
    def __init__(self) -> None:
        self.said: list[Serving] = []

    def until(self, is_so: Callable[[Serving], bool]) -> Serving:
        deadline = time.monotonic() + 30
        while not (self.said and is_so(self.said[-1])):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)
        return self.said[-1]


def verdict_of(prober: Prober) -> str:
    return prober.verdict or ""


def server_at(port: int, status: list[int]) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_us = self.headers["x-shoal-secret"] == "s" and self.headers["authorization"] == "Bearer s"
            self.send_response(status[0] if is_us else 403)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer((HERE, port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def test_server_is_ready_from_its_first_good_answer_until_it_fails_in_a_row() -> None:
    heard, status = Heard(), [503]
    probe = Probe(path="/health", interval_s=0.02, timeout_s=5.0, failures=2, dead_after_s=0.2)
    at = OnPort(HERE, None)
    prober = Prober(probe, at, Credentials(replica_secret="s"), SystemClock(), heard.said.append)
    prober.start()
    heard.until(lambda said: "connection refused" in said.because)
    server = server_at(at.port, status)
    try:
        assert not heard.until(lambda said: said.because == "status 503 at /health").is_ready
        status[0] = 204
        ready = heard.until(lambda said: said.is_ready)
        assert ready.address == f"{HERE}:{at.port}"
        assert verdict_of(prober) == ""
        status[0] = 500
        heard.until(lambda said: not said.is_ready)
        deadline = time.monotonic() + 30
        while not verdict_of(prober):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "has not answered at /health" in verdict_of(prober)
        status[0] = 200
        heard.until(lambda said: said.is_ready)
    finally:
        server.shutdown()
        server.server_close()


def test_program_that_listens_elsewhere_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(probing, "LOOK_EVERY_S", 0.0)
    heard, at = Heard(), OnPort(HERE, None)
    prober = Prober(Probe(path="/up", interval_s=0.05), at, Credentials(), SystemClock(), heard.said.append)
    listens = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{listens}\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        port = int(program.stdout.readline())
        prober.start()
        said = heard.until(lambda said: "listens" in said.because)
        assert said.because == (
            f"nothing answers at port {at.port}, path /up: connection refused; the program listens at port "
            f"{port}: have it listen at $PORT, or write `port: {port}`"
        )
        program.stdin.close()
    heard.until(lambda said: said.because.endswith("connection refused"))


class Asked(socketserver.StreamRequestHandler):
    """Keeps the head of what it is asked, and is well."""

    heads: ClassVar[list[bytes]] = []

    def handle(self) -> None:
        self.heads.append(b"".join(iter(self.rfile.readline, b"\r\n")))
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def test_a_replica_whose_port_cannot_be_protected_any_longer_is_as_good_as_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "PROTECT_EVERY_S", 0.02)
    monkeypatch.setattr(probing, "PORT_S", 0.3)

    def protect() -> None:
        raise FirewallFailed("no nftables here")

    heard, at = Heard(), OnPort(HERE, None)
    probe = Probe(path="/health", interval_s=0.02, failures=2, dead_after_s=0.1)
    credentials = Credentials(replica_secret="s")
    prober = Prober(probe, at, credentials, SystemClock(), heard.said.append, protect=protect)
    server = server_at(at.port, [200])
    try:
        prober.start()
        heard.until(lambda _: prober.verdict is not None)
        assert "its port could not be protected: no nftables here" in verdict_of(prober)
        first_bad = next(at for at, said in enumerate(heard.said) if "protected" in said.because)
        assert not any(said.is_ready for said in heard.said[first_bad:])
    finally:
        server.shutdown()
        server.server_close()


def test_server_on_a_socket_is_ready_and_one_of_a_public_service_sees_no_token_of_ours(
    tmp_path: Path,
) -> None:
    heard, path = Heard(), str(tmp_path / "http")
    probe = Probe(is_socket=True, is_public=True, interval_s=0.02)
    credentials = Credentials(replica_secret="s")
    prober = Prober(probe, OnSocket(path), credentials, SystemClock(), heard.said.append)
    prober.start()
    heard.until(lambda said: "no such file or directory" in said.because)
    with socketserver.UnixStreamServer(path, Asked) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert heard.until(lambda said: said.is_ready).address == f"unix:{path}"
        server.shutdown()
    assert b"Host: localhost\r\n" in Asked.heads[-1]
    assert b"x-shoal-secret: s" in Asked.heads[-1]
    assert b"uthorization" not in Asked.heads[-1]


def test_link_to_anothers_socket_is_not_followed(tmp_path: Path) -> None:
    with socketserver.UnixStreamServer(str(tmp_path / "victim"), Asked):
        (tmp_path / "link").symlink_to(tmp_path / "victim")
        (tmp_path / "file").touch()
        for planted in ("link", "file"):
            with pytest.raises(OSError, match="non-socket"):
                OnSocket(str(tmp_path / planted)).connect(1.0)
        OnSocket(str(tmp_path / "victim")).connect(1.0).close()


def test_folder_of_a_socket_is_empty_and_for_its_user_alone(tmp_path: Path) -> None:
    order = an_order(probe=Probe(is_socket=True))
    found = folder(order, str(tmp_path))
    assert found is not None
    for _ in range(2):
        make(order, str(tmp_path), None)
        assert (list(Path(found).iterdir()), stat.S_IMODE(Path(found).stat().st_mode)) == ([], 0o700)
        Path(path_in(found)).touch()
    give_back(order, str(tmp_path))
    assert not Path(found).exists()
    assert folder(an_order(probe=Probe(port=80)), str(tmp_path)) is None


def test_path_too_long_for_a_socket_is_said_before_the_server_fails() -> None:
    with pytest.raises(CannotListen, match="a path of 114 bytes, and 106 is the most"):
        path_in(f"/{'x' * 108}")


def test_port_that_is_held_is_given_to_nobody_else_and_lets_its_server_in() -> None:
    with hold_port(HERE, None) as one, hold_port(HERE, None) as other:
        ports = {held.getsockname()[1] for held in (one, other)}
        assert len(ports) == 2
        for port in ports:
            with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
                stranger.bind((HERE, port))
        with socket.create_server((HERE, one.getsockname()[1])) as server:
            socket.create_connection(server.getsockname()).close()


def test_port_that_a_replica_holds_is_given_to_no_other_that_names_it(tmp_path: Path) -> None:
    """Neither listens yet, and Linux binds two sockets to one port if both set SO_REUSEADDR."""
    first = OnPort(HERE, None, str(tmp_path / "ports"))
    with pytest.raises(OSError, match=f"port {first.port} is taken by another replica"):
        OnPort(HERE, first.port, str(tmp_path / "ports"))
    for _ in range(2):
        first.release()
    OnPort(HERE, first.port, str(tmp_path / "ports")).release()


def test_port_at_which_somebody_listens_at_another_address_is_taken() -> None:
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is taken"):
            hold_port(HERE, port)


def test_a_machine_without_ipv6_has_ports_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    read = bounded_file.read_start

    def without_ipv6(path: str, size: int) -> bytes:
        if path.endswith("tcp6"):
            raise FileNotFoundError(path)
        return read(path, size)

    monkeypatch.setattr(bounded_file, "read_start", without_ipv6)
    with socket.create_server((HERE, 0)) as taken, hold_port(HERE, None):
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is taken"):
            hold_port(HERE, port)


def test_port_that_was_asked_for_and_is_taken_is_said() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is taken"):
            hold_port(HERE, port)
