"""A resolver that hangs does not keep a supervisor from renewing its lease."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.runtime.lease import http_exchange
from shoal.runtime.lease import resolver as resolver_module
from shoal.runtime.lease.http_exchange import BoundedConnection
from shoal.runtime.lease.resolver import AddressInfo, Resolver

NAME = "control.example"
LIMIT_S = 20.0


class StubResolver:
    """Resolves every `.example` to this machine, and can be made to hang or to fail."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.error: OSError | None = None
        self.lookups: list[str] = []
        self._real = socket.getaddrinfo

    def __call__(self, host: str, port: int, *more: int, **named: int) -> Any:
        is_number = named.get("flags", 0) & socket.AI_NUMERICHOST
        if is_number or not host.endswith(".example"):  # threads of other tests ask, too
            return self._real(host, port, *more, **named)
        self.lookups.append(host)
        self.answers.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return self._real("127.0.0.1", port, *more, **named)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubResolver]:
    stub = StubResolver()
    monkeypatch.setattr(socket, "getaddrinfo", stub)
    monkeypatch.setattr(http_exchange, "RESOLVER", Resolver())
    yield stub
    stub.answers.set()


@pytest.fixture
def port() -> Iterator[int]:
    class Answering(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def ask(port: int, timeout_s: float = 5.0) -> bytes:
    with BoundedConnection(f"http://{NAME}:{port}", None, timeout_s, 1 << 16) as connection:
        return connection.post("/", {}, b"{}").read()


def where(addresses: AddressInfo) -> list[str]:
    return [address[0] for *_, address in addresses]


def test_lookup_that_hangs_takes_no_longer_than_the_request(resolver: StubResolver, port: int) -> None:
    resolver.answers.clear()
    began = time.monotonic()
    with pytest.raises(OSError, match=f"look-up of `{NAME}`"):
        ask(port, timeout_s=0.2)
    assert time.monotonic() - began < 2.0


def test_last_address_serves_while_the_resolver_hangs(resolver: StubResolver, port: int) -> None:
    assert ask(port) == b"{}"
    resolver.answers.clear()
    began = time.monotonic()
    for _ in range(5):
        assert ask(port) == b"{}"
    assert time.monotonic() - began < resolver_module.PATIENCE_S + 2.0, "only one caller waits for it"
    assert len(resolver.lookups) == 2, "only one lookup at a time"


def test_failed_lookup_keeps_the_known_address(resolver: StubResolver, port: int) -> None:
    resolver.error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    with pytest.raises(socket.gaierror):
        ask(port)
    resolver.error = None
    assert ask(port) == b"{}"
    resolver.error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert ask(port) == b"{}"


def test_late_answer_serves_the_next_request(resolver: StubResolver) -> None:
    known_resolver = Resolver()
    resolver.answers.clear()
    with pytest.raises(TimeoutError):
        known_resolver.resolve(NAME, 80, 0.05)
    resolver.answers.set()
    assert where(known_resolver.resolve(NAME, 80, LIMIT_S)) == ["127.0.0.1"]


def test_address_is_not_looked_up(resolver: StubResolver) -> None:
    resolver.answers.clear()
    known_resolver = Resolver()
    assert where(known_resolver.resolve("10.1.2.3", 80, 0.0)) == ["10.1.2.3"]
    assert where(known_resolver.resolve("fe80::1", 80, 0.0)) == ["fe80::1"]
    assert resolver.lookups == []


def test_invalid_host_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="too long"):
        Resolver().resolve("x" * 70, 80, LIMIT_S)


def test_known_address_serves_if_no_thread_can_start(
    resolver: StubResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_resolver = Resolver()
    known_resolver.resolve(NAME, 80, LIMIT_S)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert where(known_resolver.resolve(NAME, 80, LIMIT_S)) == ["127.0.0.1"]
    with pytest.raises(OSError, match="can't start new thread"):
        known_resolver.resolve("other.example", 80, LIMIT_S)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_process_forked_during_a_lookup_starts_its_own(
    resolver: StubResolver,
) -> None:
    """As a node agent forks its supervisor: the thread that asks does not exist in the child."""
    http_exchange.RESOLVER.resolve("known.example", 80, LIMIT_S)
    resolver.answers.clear()
    with pytest.raises(TimeoutError):
        http_exchange.RESOLVER.resolve(NAME, 80, 0.05)
    with http_exchange.RESOLVER._lock:  # as that thread may
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            status = 1
            try:
                resolver.answers = threading.Event()
                assert where(http_exchange.RESOLVER.resolve("known.example", 80, 0.05)) == ["127.0.0.1"], (
                    "the address is still known"
                )
                resolver.answers.set()
                assert where(http_exchange.RESOLVER.resolve(NAME, 80, 5.0)) == ["127.0.0.1"]
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
