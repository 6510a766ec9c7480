"""A sidecar passes bytes between data planes and its server, and lets no other client in."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.clock import SystemClock
from shoal.runtime.process.log import LogFile
from shoal.runtime.process.log_rules import LogRules
from shoal.runtime.process.watcher import Watcher
from shoal.runtime.replica import sidecar_process
from shoal.runtime.replica.sidecar_config import SidecarConfig
from shoal.runtime.replica.sidecar_monitor import SidecarMonitor
from shoal.runtime.replica.sidecar_process import Sidecar
from shoal.sidecar_tls import READY_BYTE, client_context, sidecar_context, sidecar_name
from tests.support.serving.sidecars import (
    ATTEMPT,
    OTHER_ATTEMPT,
    PATIENCE_S,
    SidecarAuthority,
    connect_tls,
    read_all,
    running_sidecar,
)

NAME = sidecar_name(ATTEMPT)


class Server:
    """Runs `work` with each connection, and counts connections."""

    def __init__(self, work: Callable[[socket.socket], None], listener: socket.socket | None = None) -> None:
        self._work = work
        self.listener = listener or socket.create_server(("127.0.0.1", 0))
        self.count = 0
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def _run(self) -> None:
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                return
            self.count += 1
            link.settimeout(PATIENCE_S)
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            self._work(link)


def echo(link: socket.socket) -> None:
    while piece := link.recv(1 << 16):
        link.sendall(piece)


@pytest.fixture(scope="module")
def cluster() -> SidecarAuthority:
    return SidecarAuthority()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    new = Server(echo)
    with new.listener:
        yield new


@pytest.fixture(scope="module")
def sidecar(cluster: SidecarAuthority, server: Server) -> Iterator[str]:
    with running_sidecar(cluster, server.address) as address:
        yield address


def came(cluster: SidecarAuthority, address: str) -> ssl.SSLSocket:
    link = connect_tls(address, cluster.client_context(), NAME)
    assert link.recv(1) == READY_BYTE
    return link


def gets_nothing(address: str, context: ssl.SSLContext, name: str = NAME) -> bool:
    """Whether no byte comes. With TLS 1.3 a client notices a refusal only with its first read."""
    try:
        with connect_tls(address, context, name) as link:
            link.sendall(b"GET / HTTP/1.1\r\n\r\n")
            return link.recv(100) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def test_data_plane_reaches_the_server(cluster: SidecarAuthority, sidecar: str) -> None:
    with came(cluster, sidecar) as link:
        link.sendall(b"how do you do")
        assert link.recv(100) == b"how do you do"


def test_client_without_the_greeting_gets_only_the_servers_bytes(
    cluster: SidecarAuthority, sidecar: str
) -> None:
    context = cluster.client_context()
    context.set_alpn_protocols([])
    with connect_tls(sidecar, context, NAME) as link:
        link.sendall(b"hello")
        assert link.recv(100) == b"hello"


def test_other_clients_get_nothing_and_do_not_reach_the_server(cluster: SidecarAuthority) -> None:
    """Without a certificate, with one of another authority, with those of a control plane and of a
    sidecar.
    """
    server = Server(echo)  # a server of its own, because others may still take a connection of their tests
    with server.listener, running_sidecar(cluster, server.address) as sidecar:
        without_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        without_certificate.load_verify_locations(cadata=cluster.authority.certificate.decode())
        assert gets_nothing(sidecar, without_certificate)
        forged = SidecarAuthority().client_context()
        forged.check_hostname, forged.verify_mode = False, ssl.CERT_NONE
        assert gets_nothing(sidecar, forged)
        assert gets_nothing(sidecar, client_context(cluster.control_plane_identity()))
        assert gets_nothing(sidecar, client_context(cluster.identities.for_sidecar(ATTEMPT)))
        assert gets_nothing(sidecar, client_context(cluster.identities.for_sidecar(OTHER_ATTEMPT)))
        host, _, port = sidecar.removeprefix("tls:").rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert not plain.recv(4096).startswith(b"HTTP")
        with came(cluster, sidecar) as link:
            link.sendall(b"and me?")
            assert link.recv(100) == b"and me?"
        assert server.count == 1, "it takes connections in order, so a refused client would be there by now"


def test_data_plane_refuses_another_replicas_sidecar(cluster: SidecarAuthority, server: Server) -> None:
    with (
        running_sidecar(cluster, server.address, OTHER_ATTEMPT) as address,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        connect_tls(address, cluster.client_context(), NAME)


def test_data_plane_refuses_a_sidecar_of_another_authority(cluster: SidecarAuthority, server: Server) -> None:
    with (
        running_sidecar(SidecarAuthority(), server.address) as address,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        connect_tls(address, cluster.client_context(), NAME)


def test_large_body_passes_both_ways_at_once(cluster: SidecarAuthority, sidecar: str) -> None:
    body = os.urandom(1 << 16) * 400
    with came(cluster, sidecar) as link:
        link.settimeout(PATIENCE_S)
        received = bytearray()
        at, view = 0, memoryview(body)
        link.setblocking(False)
        deadline = time.monotonic() + PATIENCE_S
        while len(received) < len(body):
            assert time.monotonic() < deadline
            with contextlib.suppress(ssl.SSLWantWriteError):
                at += link.send(view[at : at + 16384]) if at < len(body) else 0
            with contextlib.suppress(ssl.SSLWantReadError):
                received += link.recv(1 << 16)
        assert bytes(received) == body


def test_bytes_for_a_client_that_does_not_read_are_not_buffered(cluster: SidecarAuthority) -> None:
    """Bytes for a client that does not read stay with the server, and delay no other client."""
    sent = [0]

    def pour(link: socket.socket) -> None:
        first = link.recv(100)
        if first != b"pour":
            link.sendall(first)
            return
        link.settimeout(1.0)
        try:
            while True:
                sent[0] += link.send(bytes(1 << 16))
        except OSError:
            return

    server = Server(pour)
    with server.listener, running_sidecar(cluster, server.address) as address, came(cluster, address) as deaf:
        deaf.sendall(b"pour")
        with came(cluster, address) as other:
            other.sendall(b"and me?")
            assert other.recv(100) == b"and me?"
        time.sleep(1.5)
        assert 0 < sent[0] < 64 << 20, "buffers of the kernel, and one chunk of the sidecar"


def test_chunks_arrive_as_they_are_sent(cluster: SidecarAuthority) -> None:
    next_one = threading.Semaphore(0)

    def stream(link: socket.socket) -> None:
        for number in range(5):
            next_one.acquire(timeout=PATIENCE_S)
            link.sendall(b"data: %d\n\n" % number)

    server = Server(stream)
    with server.listener, running_sidecar(cluster, server.address) as address, came(cluster, address) as link:
        for number in range(5):
            next_one.release()
            assert link.recv(100) == b"data: %d\n\n" % number
        assert link.recv(100) == b"", "an orderly end"


def test_end_of_the_request_is_passed_on_and_the_reply_still_comes(cluster: SidecarAuthority) -> None:
    """For a client that closes its half after its request."""

    def count(link: socket.socket) -> None:
        data = read_all(link)
        link.sendall(b"%d" % len(data))

    server = Server(count)
    with server.listener, running_sidecar(cluster, server.address) as address, came(cluster, address) as link:
        link.sendall(b"x" * 100_000)
        link.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):  # our end was sent, and nothing waits for theirs
            link.unwrap()
        link.settimeout(PATIENCE_S)
        assert read_all(link) == b"100000"


def test_broken_connection_is_not_passed_on_as_an_end(cluster: SidecarAuthority) -> None:
    """Otherwise a body that runs until the end could be cut short without notice."""

    def break_off(link: socket.socket) -> None:
        link.recv(100)
        link.sendall(b"half")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    server = Server(break_off)
    with server.listener, running_sidecar(cluster, server.address) as address, came(cluster, address) as link:
        link.sendall(b"begin")
        with pytest.raises((ssl.SSLEOFError, ConnectionResetError)):
            read_all(link)


def test_client_that_disconnects_is_gone_for_the_server_at_once(cluster: SidecarAuthority) -> None:
    gone = threading.Event()

    def wait(link: socket.socket) -> None:
        link.recv(100)
        link.sendall(b".")
        assert link.recv(100) == b""
        gone.set()

    server = Server(wait)
    with server.listener, running_sidecar(cluster, server.address) as address:
        link = came(cluster, address)
        link.sendall(b"think long")
        assert link.recv(1) == b"."
        link.close()
        assert gone.wait(PATIENCE_S)


def test_missing_server_is_not_greeted(cluster: SidecarAuthority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with running_sidecar(cluster, address) as sidecar:
        assert gets_nothing(sidecar, cluster.client_context())


def test_server_on_a_socket_is_reached(cluster: SidecarAuthority, tmp_path: Path) -> None:
    path = tmp_path / "http"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    server = Server(echo, listener)
    with server.listener, running_sidecar(cluster, f"unix:{path}") as address, came(cluster, address) as link:
        link.sendall(b"by its file")
        assert link.recv(100) == b"by its file"


def test_server_behind_a_socket_broker_is_reached(
    cluster: SidecarAuthority, server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "broker"
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(path))
    door.listen()

    def hand_out() -> None:
        link, _ = door.accept()
        with link, socket.socket() as fresh:
            socket.send_fds(link, [server.address.rpartition(":")[2].encode()], [fresh.fileno()])

    threading.Thread(target=hand_out, daemon=True).start()
    with door, running_sidecar(cluster, f"broker:{path}") as address, came(cluster, address) as link:
        link.sendall(b"through it")
        assert link.recv(100) == b"through it"


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.at = 100.0

    def monotonic(self) -> float:
        return self.at

    def now(self) -> float:
        return self.at


class ManualSidecar:
    """A sidecar whose loop the test runs by hand."""

    def __init__(self, cluster: SidecarAuthority, server: str) -> None:
        self.clock = Clock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        brief = SidecarConfig(
            tls_identity=cluster.identities.for_sidecar(ATTEMPT), server=server, supervisor_pid=0
        )
        self.sidecar = Sidecar(self.listener, brief, self.clock, max_tunnels=100)

    def stranger(self, local: str = "127.0.0.1") -> socket.socket:
        """A client that connects and sends nothing."""
        link = socket.create_connection(self.listener.getsockname(), PATIENCE_S, (local, 0))
        self.sidecar.poll(1.0)
        return link

    def close(self) -> None:
        self.sidecar.close()
        self.listener.close()


@pytest.fixture
def manual(cluster: SidecarAuthority, server: Server) -> Iterator[ManualSidecar]:
    new = ManualSidecar(cluster, server.address)
    yield new
    new.close()


def is_cut_off(link: socket.socket) -> bool:
    """Whether the connection is closed now, which may have happened before."""
    link.settimeout(0.02)
    try:
        return link.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_silent_client_is_cut_off_after_the_handshake_timeout(manual: ManualSidecar) -> None:
    with manual.stranger() as link:
        manual.clock.at += sidecar_process.HANDSHAKE_S - 1
        manual.sidecar.poll(0.0)
        assert not is_cut_off(link)
        manual.clock.at += 2
        manual.sidecar.poll(0.0)
        assert is_cut_off(link)


def test_flood_of_silent_clients_does_not_keep_a_data_plane_out(
    manual: ManualSidecar, cluster: SidecarAuthority
) -> None:
    links = [manual.stranger() for _ in range(sidecar_process.MAX_STRANGERS + 5)]
    assert [is_cut_off(link) for link in links] == [True] * 5 + [False] * sidecar_process.MAX_STRANGERS
    is_through = threading.Event()

    def come() -> None:
        host, port = manual.listener.getsockname()
        with came(cluster, f"tls:{host}:{port}"):
            is_through.set()

    thread = threading.Thread(target=come)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not is_through.is_set():
        manual.sidecar.poll(0.1)
        assert time.monotonic() < deadline
    thread.join()
    for link in links:
        link.close()


def test_flood_from_one_address_ends_no_connection_of_another(manual: ManualSidecar) -> None:
    mine = manual.stranger("127.0.0.2")
    links = [manual.stranger() for _ in range(sidecar_process.MAX_STRANGERS + 5)]
    assert not is_cut_off(mine)
    assert [is_cut_off(link) for link in links].count(True) == 6
    for link in (mine, *links):
        link.close()


def test_sidecar_requires_a_client_certificate_over_tls_1_3(cluster: SidecarAuthority) -> None:
    context = sidecar_context(cluster.identities.for_sidecar(ATTEMPT))
    assert (context.verify_mode, context.minimum_version) == (ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_3)


def test_dead_sidecar_is_started_again_at_the_same_address(
    cluster: SidecarAuthority, server: Server, tmp_path: Path
) -> None:
    wake, wake_w = os.pipe2(os.O_NONBLOCK)
    log = LogFile(str(tmp_path / "log"), 1 << 20, SystemClock())
    watcher = Watcher(log, LogRules(()), wake, SystemClock())
    papers = cluster.identities.for_sidecar(ATTEMPT)
    minder = SidecarMonitor(papers, "https://127.0.0.1:7464", server.address, watcher, SystemClock())
    assert minder.address == f"tls:127.0.0.1:{minder.port}"
    try:
        minder.check()
        first = minder._process
        assert first is not None
        with came(cluster, minder.address) as link:
            os.kill(first.pid, signal.SIGTERM)
            link.sendall(b"a signal to the whole job ends no sidecar")
            assert link.recv(6) == b"a sign"
        os.kill(first.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while minder._process is first:
            watcher.poll(0.05)
            minder.check()
            assert time.monotonic() < deadline
        with came(cluster, minder.address) as link:
            link.sendall(b"again")
            assert link.recv(100) == b"again"
    finally:
        assert minder._process is not None
        os.kill(minder._process.pid, signal.SIGKILL)
        while minder._process.status is None:
            watcher.poll(0.05)
        watcher.drain()
        minder._listener.close()
        os.close(wake)
        os.close(wake_w)
