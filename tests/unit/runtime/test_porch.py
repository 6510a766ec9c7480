"""A porch lets data planes through to its server, byte by byte, and nobody else."""

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
from shoal.porch import OPEN, guard, name_of, visitor
from shoal.runtime.logs import LogFile
from shoal.runtime.porch import process
from shoal.runtime.porch.brief import Brief
from shoal.runtime.porch.minder import PorchMinder
from shoal.runtime.porch.process import Porch
from shoal.runtime.rules import LogRules
from shoal.runtime.watch import Watcher
from tests.support.porches import ATTEMPT, OTHER, PATIENCE_S, Cluster, a_porch, all_of, connected

NAME = name_of(ATTEMPT)


class Server:
    """Does `work` with each connection, and remembers how many there were."""

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
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(echo)
    with made.listener:
        yield made


@pytest.fixture(scope="module")
def porch(cluster: Cluster, server: Server) -> Iterator[str]:
    with a_porch(cluster, server.address) as address:
        yield address


def came(cluster: Cluster, address: str) -> ssl.SSLSocket:
    link = connected(address, cluster.visitor(), NAME)
    assert link.recv(1) == OPEN
    return link


def gets_nothing(address: str, context: ssl.SSLContext, name: str = NAME) -> bool:
    """Whether not one byte comes of it. Who comes sees that late: TLS 1.3 tells with the first read."""
    try:
        with connected(address, context, name) as link:
            link.sendall(b"GET / HTTP/1.1\r\n\r\n")
            return link.recv(100) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def test_a_data_plane_is_passed_through(cluster: Cluster, porch: str) -> None:
    with came(cluster, porch) as link:
        link.sendall(b"how do you do")
        assert link.recv(100) == b"how do you do"


def test_who_does_not_ask_for_the_greeting_hears_the_server_alone(cluster: Cluster, porch: str) -> None:
    context = cluster.visitor()
    context.set_alpn_protocols([])
    with connected(porch, context, NAME) as link:
        link.sendall(b"hello")
        assert link.recv(100) == b"hello"


def test_strangers_get_nothing_and_do_not_reach_the_server(cluster: Cluster) -> None:
    """Without a certificate, with one of another authority, with those of a control plane and of a porch."""
    server = Server(echo)  # its own: one that others use may yet take a connection of theirs
    with server.listener, a_porch(cluster, server.address) as porch:
        nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nobody.load_verify_locations(cadata=cluster.authority.certificate.decode())
        assert gets_nothing(porch, nobody)
        forged = Cluster().visitor()
        forged.check_hostname, forged.verify_mode = False, ssl.CERT_NONE
        assert gets_nothing(porch, forged)
        assert gets_nothing(porch, visitor(cluster.control_plane()))
        assert gets_nothing(porch, visitor(cluster.porches.before(ATTEMPT)))
        assert gets_nothing(porch, visitor(cluster.porches.before(OTHER)))
        host, _, port = porch.removeprefix("tls:").rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert not plain.recv(4096).startswith(b"HTTP")
        with came(cluster, porch) as link:
            link.sendall(b"and me?")
            assert link.recv(100) == b"and me?"
        assert server.count == 1, "it takes connections in their order: a stranger's would be there by now"


def test_a_data_plane_does_not_speak_to_another_replicas_porch(cluster: Cluster, server: Server) -> None:
    with a_porch(cluster, server.address, OTHER) as address, pytest.raises(ssl.SSLCertVerificationError):
        connected(address, cluster.visitor(), NAME)


def test_nor_to_anybody_of_another_authority(cluster: Cluster, server: Server) -> None:
    with a_porch(Cluster(), server.address) as address, pytest.raises(ssl.SSLCertVerificationError):
        connected(address, cluster.visitor(), NAME)


def test_a_large_body_passes_both_ways_at_once(cluster: Cluster, porch: str) -> None:
    body = os.urandom(1 << 16) * 400
    with came(cluster, porch) as link:
        link.settimeout(PATIENCE_S)
        heard = bytearray()
        at, view = 0, memoryview(body)
        link.setblocking(False)
        deadline = time.monotonic() + PATIENCE_S
        while len(heard) < len(body):
            assert time.monotonic() < deadline
            with contextlib.suppress(ssl.SSLWantWriteError):
                at += link.send(view[at : at + 16384]) if at < len(body) else 0
            with contextlib.suppress(ssl.SSLWantReadError):
                heard += link.recv(1 << 16)
        assert bytes(heard) == body


def test_who_does_not_read_is_not_read_for(cluster: Cluster) -> None:
    """What a server says to one who does not listen waits with the server, and keeps nobody else waiting."""
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
    with server.listener, a_porch(cluster, server.address) as address, came(cluster, address) as deaf:
        deaf.sendall(b"pour")
        with came(cluster, address) as other:
            other.sendall(b"and me?")
            assert other.recv(100) == b"and me?"
        time.sleep(1.5)
        assert 0 < sent[0] < 64 << 20, "buffers of the kernel, and one piece of ours"


def test_pieces_come_as_they_are_sent(cluster: Cluster) -> None:
    next_one = threading.Semaphore(0)

    def stream(link: socket.socket) -> None:
        for number in range(5):
            next_one.acquire(timeout=PATIENCE_S)
            link.sendall(b"data: %d\n\n" % number)

    server = Server(stream)
    with server.listener, a_porch(cluster, server.address) as address, came(cluster, address) as link:
        for number in range(5):
            next_one.release()
            assert link.recv(100) == b"data: %d\n\n" % number
        assert link.recv(100) == b"", "an end is an end"


def test_an_end_is_passed_on_and_the_answer_still_comes(cluster: Cluster) -> None:
    """As who closes its half after its request."""

    def count(link: socket.socket) -> None:
        told = all_of(link)
        link.sendall(b"%d" % len(told))

    server = Server(count)
    with server.listener, a_porch(cluster, server.address) as address, came(cluster, address) as link:
        link.sendall(b"x" * 100_000)
        link.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):  # our end is told; theirs is awaited by nobody
            link.unwrap()
        link.settimeout(PATIENCE_S)
        assert all_of(link) == b"100000"


def test_a_break_is_no_end(cluster: Cluster) -> None:
    """Else a body that goes on until the end could be cut short, and nobody would notice."""

    def break_off(link: socket.socket) -> None:
        link.recv(100)
        link.sendall(b"half")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    server = Server(break_off)
    with server.listener, a_porch(cluster, server.address) as address, came(cluster, address) as link:
        link.sendall(b"begin")
        with pytest.raises((ssl.SSLEOFError, ConnectionResetError)):
            all_of(link)


def test_who_leaves_without_a_word_is_gone_for_the_server_at_once(cluster: Cluster) -> None:
    gone = threading.Event()

    def wait(link: socket.socket) -> None:
        link.recv(100)
        link.sendall(b".")
        assert link.recv(100) == b""
        gone.set()

    server = Server(wait)
    with server.listener, a_porch(cluster, server.address) as address:
        link = came(cluster, address)
        link.sendall(b"think long")
        assert link.recv(1) == b"."
        link.close()
        assert gone.wait(PATIENCE_S)


def test_a_server_that_is_not_there_is_not_announced(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with a_porch(cluster, address) as porch:
        assert gets_nothing(porch, cluster.visitor())


def test_a_server_on_a_socket(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "http"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    server = Server(echo, listener)
    with server.listener, a_porch(cluster, f"unix:{path}") as address, came(cluster, address) as link:
        link.sendall(b"by its file")
        assert link.recv(100) == b"by its file"


def test_a_server_behind_a_door(cluster: Cluster, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "door"
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(path))
    door.listen()

    def hand_out() -> None:
        link, _ = door.accept()
        with link, socket.socket() as fresh:
            socket.send_fds(link, [server.address.rpartition(":")[2].encode()], [fresh.fileno()])

    threading.Thread(target=hand_out, daemon=True).start()
    with door, a_porch(cluster, f"door:{path}") as address, came(cluster, address) as link:
        link.sendall(b"through it")
        assert link.recv(100) == b"through it"


class Clock:
    """One that is set."""

    def __init__(self) -> None:
        self.at = 100.0

    def monotonic(self) -> float:
        return self.at

    def now(self) -> float:
        return self.at


class Hands:
    """A porch that is turned by hand."""

    def __init__(self, cluster: Cluster, server: str) -> None:
        self.clock = Clock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        brief = Brief(papers=cluster.porches.before(ATTEMPT), server=server, supervisor=0)
        self.porch = Porch(self.listener, brief, self.clock, max_passages=100)

    def stranger(self, local: str = "127.0.0.1") -> socket.socket:
        """One who connects and says nothing."""
        link = socket.create_connection(self.listener.getsockname(), PATIENCE_S, (local, 0))
        self.porch.turn(1.0)
        return link

    def close(self) -> None:
        self.porch.close()
        self.listener.close()


@pytest.fixture
def hands(cluster: Cluster, server: Server) -> Iterator[Hands]:
    made = Hands(cluster, server.address)
    yield made
    made.close()


def is_cut_off(link: socket.socket) -> bool:
    """Now: whoever is, was before this is asked."""
    link.settimeout(0.02)
    try:
        return link.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_who_says_nothing_is_cut_off_after_a_while(hands: Hands) -> None:
    with hands.stranger() as link:
        hands.clock.at += process.SHAKE_S - 1
        hands.porch.turn(0.0)
        assert not is_cut_off(link)
        hands.clock.at += 2
        hands.porch.turn(0.0)
        assert is_cut_off(link)


def test_of_many_strangers_the_oldest_goes_and_a_data_plane_gets_through(
    hands: Hands, cluster: Cluster
) -> None:
    links = [hands.stranger() for _ in range(process.MAX_STRANGERS + 5)]
    assert [is_cut_off(link) for link in links] == [True] * 5 + [False] * process.MAX_STRANGERS
    is_through = threading.Event()

    def come() -> None:
        host, port = hands.listener.getsockname()
        with came(cluster, f"tls:{host}:{port}"):
            is_through.set()

    thread = threading.Thread(target=come)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not is_through.is_set():
        hands.porch.turn(0.1)
        assert time.monotonic() < deadline
    thread.join()
    for link in links:
        link.close()


def test_flood_of_one_address_ends_no_stranger_of_another(hands: Hands) -> None:
    mine = hands.stranger("127.0.0.2")
    links = [hands.stranger() for _ in range(process.MAX_STRANGERS + 5)]
    assert not is_cut_off(mine)
    assert [is_cut_off(link) for link in links].count(True) == 6
    for link in (mine, *links):
        link.close()


def test_the_key_is_on_no_disk_and_a_guard_wants_to_see_papers(cluster: Cluster) -> None:
    context = guard(cluster.porches.before(ATTEMPT))
    assert (context.verify_mode, context.minimum_version) == (ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_3)


def test_a_porch_that_dies_is_started_again_at_the_same_place(
    cluster: Cluster, server: Server, tmp_path: Path
) -> None:
    wake, wake_w = os.pipe2(os.O_NONBLOCK)
    log = LogFile(str(tmp_path / "log"), 1 << 20, SystemClock())
    watcher = Watcher(log, LogRules(()), wake, SystemClock())
    papers = cluster.porches.before(ATTEMPT)
    minder = PorchMinder(papers, "https://127.0.0.1:7464", server.address, watcher, SystemClock())
    assert minder.address == f"tls:127.0.0.1:{minder.port}"
    try:
        minder.look()
        first = minder._process
        assert first is not None
        with came(cluster, minder.address) as link:
            os.kill(first.pid, signal.SIGTERM)
            link.sendall(b"a signal to the whole job ends no porch")
            assert link.recv(6) == b"a sign"
        os.kill(first.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while minder._process is first:
            watcher.turn(0.05)
            minder.look()
            assert time.monotonic() < deadline
        with came(cluster, minder.address) as link:
            link.sendall(b"again")
            assert link.recv(100) == b"again"
    finally:
        assert minder._process is not None
        os.kill(minder._process.pid, signal.SIGKILL)
        while minder._process.status is None:
            watcher.turn(0.05)
        watcher.drain()
        minder._listener.close()
        os.close(wake)
        os.close(wake_w)
