"""Whether a server can take requests, and which port belongs to which replica."""

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
from shoal.runtime.confine.firewall import FirewallFailed
from shoal.runtime.process.network import hold_port
from shoal.runtime.replica import probe as probing
from shoal.runtime.replica.listeners import (
    CannotListen,
    PortListener,
    SocketListener,
    make_socket_folder,
    remove_socket_folder,
    socket_folder,
    socket_path,
)
from shoal.runtime.replica.probe import ServerProber
from shoal.wire import ProbeSpec, ReplicaStatus, TaskCredentials
from tests.support.runtime.tasks import a_task_spec

HERE = "127.0.0.1"


class RecordedStatuses:
    def __init__(self) -> None:
        self.all: list[ReplicaStatus] = []

    def until(self, is_so: Callable[[ReplicaStatus], bool]) -> ReplicaStatus:
        deadline = time.monotonic() + 30
        while not (self.all and is_so(self.all[-1])):
            assert time.monotonic() < deadline, self.all
            time.sleep(0.01)
        return self.all[-1]


def verdict_of(prober: ServerProber) -> str:
    return prober.verdict or ""


def server_at(port: int, status: list[int]) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_us = self.headers["x-shoal-secret"] == "s" and self.headers["authorization"] == "Bearer s"
            self.send_response(status[0] if is_us else 403)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = http.server.ThreadingHTTPServer((HERE, port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def test_server_is_ready_from_its_first_good_reply_until_several_fail() -> None:
    statuses, status = RecordedStatuses(), [503]
    probe = ProbeSpec(path="/health", interval_s=0.02, timeout_s=5.0, failures=2, dead_after_s=0.2)
    at = PortListener(HERE, None)
    prober = ServerProber(probe, at, TaskCredentials(replica_secret="s"), SystemClock(), statuses.all.append)
    prober.start()
    statuses.until(lambda reported: "connection refused" in reported.because)
    server = server_at(at.port, status)
    try:
        assert not statuses.until(lambda reported: reported.because == "status 503 at /health").is_ready
        status[0] = 204
        ready = statuses.until(lambda reported: reported.is_ready)
        assert ready.address == f"{HERE}:{at.port}"
        assert verdict_of(prober) == ""
        status[0] = 500
        statuses.until(lambda reported: not reported.is_ready)
        deadline = time.monotonic() + 30
        while not verdict_of(prober):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "has not answered at /health" in verdict_of(prober)
        status[0] = 200
        statuses.until(lambda reported: reported.is_ready)
    finally:
        server.shutdown()
        server.server_close()


def test_message_names_the_port_at_which_the_program_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(probing, "LOOK_EVERY_S", 0.0)
    statuses, at = RecordedStatuses(), PortListener(HERE, None)
    prober = ServerProber(
        ProbeSpec(path="/up", interval_s=0.05), at, TaskCredentials(), SystemClock(), statuses.all.append
    )
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
        reported = statuses.until(lambda reported: "listens" in reported.because)
        assert reported.because == (
            f"nothing answers at port {at.port}, path /up: connection refused; the program listens at port "
            f"{port}: have it listen at $PORT, or write `port: {port}`"
        )
        program.stdin.close()
    statuses.until(lambda reported: reported.because.endswith("connection refused"))


class RecordingHandler(socketserver.StreamRequestHandler):
    """Keeps the head of each request, and answers well."""

    heads: ClassVar[list[bytes]] = []

    def handle(self) -> None:
        self.heads.append(b"".join(iter(self.rfile.readline, b"\r\n")))
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def test_replica_whose_port_is_no_longer_protected_counts_as_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "PROTECT_EVERY_S", 0.02)
    monkeypatch.setattr(probing, "PORT_S", 0.3)

    def protect() -> None:
        raise FirewallFailed("no nftables here")

    statuses, at = RecordedStatuses(), PortListener(HERE, None)
    probe = ProbeSpec(path="/health", interval_s=0.02, failures=2, dead_after_s=0.1)
    credentials = TaskCredentials(replica_secret="s")
    prober = ServerProber(probe, at, credentials, SystemClock(), statuses.all.append, protect=protect)
    server = server_at(at.port, [200])
    try:
        prober.start()
        statuses.until(lambda _: prober.verdict is not None)
        assert "its port could not be protected: no nftables here" in verdict_of(prober)
        first_bad = next(at for at, reported in enumerate(statuses.all) if "protected" in reported.because)
        assert not any(reported.is_ready for reported in statuses.all[first_bad:])
    finally:
        server.shutdown()
        server.server_close()


def test_server_on_a_socket_is_ready_and_a_public_one_gets_no_token(
    tmp_path: Path,
) -> None:
    statuses, path = RecordedStatuses(), str(tmp_path / "http")
    probe = ProbeSpec(is_socket=True, is_public=True, interval_s=0.02)
    credentials = TaskCredentials(replica_secret="s")
    prober = ServerProber(probe, SocketListener(path), credentials, SystemClock(), statuses.all.append)
    prober.start()
    statuses.until(lambda reported: "no such file or directory" in reported.because)
    with socketserver.UnixStreamServer(path, RecordingHandler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert statuses.until(lambda reported: reported.is_ready).address == f"unix:{path}"
        server.shutdown()
    assert b"Host: localhost\r\n" in RecordingHandler.heads[-1]
    assert b"x-shoal-secret: s" in RecordingHandler.heads[-1]
    assert b"uthorization" not in RecordingHandler.heads[-1]


def test_link_to_another_socket_is_not_followed(tmp_path: Path) -> None:
    with socketserver.UnixStreamServer(str(tmp_path / "victim"), RecordingHandler):
        (tmp_path / "link").symlink_to(tmp_path / "victim")
        (tmp_path / "file").touch()
        for planted in ("link", "file"):
            with pytest.raises(OSError, match="non-socket"):
                SocketListener(str(tmp_path / planted)).connect(1.0)
        SocketListener(str(tmp_path / "victim")).connect(1.0).close()


def test_folder_of_a_socket_is_empty_and_private(tmp_path: Path) -> None:
    task_spec = a_task_spec(probe=ProbeSpec(is_socket=True))
    folder = socket_folder(task_spec, str(tmp_path))
    assert folder is not None
    for _ in range(2):
        make_socket_folder(task_spec, str(tmp_path), None)
        assert (list(Path(folder).iterdir()), stat.S_IMODE(Path(folder).stat().st_mode)) == ([], 0o700)
        Path(socket_path(folder)).touch()
    remove_socket_folder(task_spec, str(tmp_path))
    assert not Path(folder).exists()
    assert socket_folder(a_task_spec(probe=ProbeSpec(port=80)), str(tmp_path)) is None


def test_path_too_long_for_a_socket_is_refused_before_the_start() -> None:
    with pytest.raises(CannotListen, match="a path of 114 bytes, and 106 is the most"):
        socket_path(f"/{'x' * 108}")


def test_held_port_goes_to_no_other_replica_and_lets_its_server_in() -> None:
    with hold_port(HERE, None) as first, hold_port(HERE, None) as other:
        ports = {held.getsockname()[1] for held in (first, other)}
        assert len(ports) == 2
        for port in ports:
            with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
                stranger.bind((HERE, port))
        with socket.create_server((HERE, first.getsockname()[1])) as server:
            socket.create_connection(server.getsockname()).close()


def test_port_held_by_a_replica_is_refused_to_another_that_names_it(tmp_path: Path) -> None:
    """Neither listens yet, and Linux binds two sockets to one port if both set SO_REUSEADDR."""
    first = PortListener(HERE, None, str(tmp_path / "ports"))
    with pytest.raises(OSError, match=f"port {first.port} is taken by another replica"):
        PortListener(HERE, first.port, str(tmp_path / "ports"))
    for _ in range(2):
        first.release()
    PortListener(HERE, first.port, str(tmp_path / "ports")).release()


def test_port_in_use_at_another_address_is_taken() -> None:
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is taken"):
            hold_port(HERE, port)


def test_machine_without_ipv6_can_hold_ports(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_requested_port_that_is_taken_is_named() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is taken"):
            hold_port(HERE, port)
