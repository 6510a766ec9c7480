"""How long a control plane that does not answer blocks a node agent."""

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

from shoal.engines.remote.task_observer import HEARD_S, LATE_S
from shoal.identity.authority import CertifiedKey, make_authority, make_server
from shoal.runtime.agent import control_plane_client, node_agent
from shoal.runtime.agent.control_plane_client import ControlPlaneClient, ControlPlaneUnreachable
from shoal.runtime.lease.addresses import MAX_ADDRESSES
from shoal.wire import StatusReply, StatusReport

TAKEN = msgspec.json.encode(StatusReply(size=7))
TOLD = StatusReport(attempt_id="att_1", epoch=1, node="n1", process="0" * 32, offset=0)


@pytest.fixture(scope="module")
def authority() -> CertifiedKey:
    return make_authority("a test's", time.time())


@pytest.fixture
def frozen() -> Iterator[str]:
    """A server whose kernel accepts connections, but which never handles them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def a_plane(
    authority: CertifiedKey, folder: Path, pause_s: float = 0.0, reply: bytes = TAKEN, drop_s: float = 0.0
) -> Iterator[str]:
    """A control plane that accepts every request and replies after a pause, or one byte at a time."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(pause_s)
            with contextlib.suppress(OSError):  # the client may be gone
                self.send_response(200)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                for drop in reply if drop_s else ():
                    time.sleep(drop_s)
                    self.wfile.write(bytes([drop]))
                self.wfile.write(b"" if drop_s else reply)

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


def client(authority: CertifiedKey, *urls: str) -> ControlPlaneClient:
    return ControlPlaneClient(urls, authority.certificate.decode())


@pytest.mark.parametrize("piece", [b"", b"a line\n"])
def test_frozen_control_plane_blocks_a_node_agent_only_for_a_moment(
    authority: CertifiedKey, frozen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    monkeypatch.setattr(control_plane_client, "SHORT_TIMEOUT_S", 0.3)
    with a_plane(authority, tmp_path) as alive:
        began = time.monotonic()
        assert client(authority, frozen, alive).send_report("key", TOLD, piece).size == 7
    assert time.monotonic() - began < 5.0


def test_report_with_a_log_chunk_may_take_longer_than_a_heartbeat(
    authority: CertifiedKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_plane(authority, tmp_path, pause_s=1.0) as slow:
        monkeypatch.setattr(control_plane_client, "SHORT_TIMEOUT_S", 0.3)
        assert client(authority, slow).send_report("key", TOLD, b"a line\n").size == 7
        with pytest.raises(ControlPlaneUnreachable):
            client(authority, slow).send_report("key", TOLD, b"")


def test_endless_reply_is_cut_at_the_timeout(
    authority: CertifiedKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_plane(authority, tmp_path, reply=b" " * 200, drop_s=0.05) as slow:
        monkeypatch.setattr(control_plane_client, "SHORT_TIMEOUT_S", 0.5)
        began = time.monotonic()
        with pytest.raises(ControlPlaneUnreachable):
            client(authority, slow).send_report("key", TOLD, b"")
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("reply", [b"[" * 20_000, b"no words", b'{"size": "seven"}', b"\xff"])
def test_malformed_reply_is_silence(authority: CertifiedKey, tmp_path: Path, reply: bytes) -> None:
    with (
        a_plane(authority, tmp_path, reply=reply) as confused,
        pytest.raises(ControlPlaneUnreachable, match="a malformed reply"),
    ):
        client(authority, confused).send_report("key", TOLD, b"")


def test_living_node_agent_reports_before_it_counts_as_gone() -> None:
    """Also if it asks two control planes in vain before the one that decides."""
    assert (
        max(node_agent.PING_S, node_agent.MAX_BACKOFF_S) + 2 * control_plane_client.SHORT_TIMEOUT_S
        <= LATE_S
        < HEARD_S
    )


def test_node_agent_finds_the_newest_control_plane_after_many_others(
    authority: CertifiedKey, tmp_path: Path
) -> None:
    """Addresses change, and each reply names the current ones."""
    agent_client, gone = (
        client(authority),
        [f"https://127.0.0.1:{port}" for port in range(1, MAX_ADDRESSES + 2)],
    )
    for url in gone:
        agent_client.add_urls((url,))
    with a_plane(authority, tmp_path) as newest:
        agent_client.add_urls((newest,))
        assert agent_client.send_report("key", TOLD, b"").size == 7


def test_address_that_answered_is_asked_first_and_forgotten_ones_last(
    authority: CertifiedKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls: list[str] = []

    def post_to(url: str, *_: object) -> bytes:
        urls.append(url)
        if url != "https://b" or len(urls) > 2:
            raise ControlPlaneUnreachable("not now")
        return msgspec.json.encode(StatusReply(size=7, control_urls=("https://c", "https://b")))

    cluster = client(authority, "https://a", "https://b")
    monkeypatch.setattr(cluster, "_post_to", post_to)
    cluster.send_report("key", TOLD, b"")
    with pytest.raises(ControlPlaneUnreachable):
        cluster.send_report("key", TOLD, b"")
    assert urls[2:] == ["https://b", "https://c", "https://a"]
