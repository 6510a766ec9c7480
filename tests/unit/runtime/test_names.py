"""A resolver that hangs keeps nobody from renewing a lease."""

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

from shoal.runtime import line, names
from shoal.runtime.line import Line
from shoal.runtime.names import Found, Names

NAME = "control.example"
LIMIT_S = 20.0


class Resolver:
    """Knows where every `.example` is (here), and can be made to hang, or to fail."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.error: OSError | None = None
        self.asked: list[str] = []
        self._real = socket.getaddrinfo

    def __call__(self, host: str, port: int, *more: int, **named: int) -> Any:
        is_number = named.get("flags", 0) & socket.AI_NUMERICHOST
        if is_number or not host.endswith(".example"):  # threads of other tests ask, too
            return self._real(host, port, *more, **named)
        self.asked.append(host)
        self.answers.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return self._real("127.0.0.1", port, *more, **named)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    monkeypatch.setattr(line, "NAMES", Names())
    yield made
    made.answers.set()


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
    with Line(f"http://{NAME}:{port}", None, timeout_s, 1 << 16) as one:
        return one.post("/", {}, b"{}").read()


def where(found: Found) -> list[str]:
    return [address[0] for *_, address in found]


def test_a_name_that_nobody_can_look_up_takes_no_longer_than_the_whole_question(
    resolver: Resolver, port: int
) -> None:
    resolver.answers.clear()
    began = time.monotonic()
    with pytest.raises(OSError, match=f"look-up of `{NAME}`"):
        ask(port, timeout_s=0.2)
    assert time.monotonic() - began < 2.0


def test_while_the_resolver_hangs_the_last_address_serves(resolver: Resolver, port: int) -> None:
    assert ask(port) == b"{}"
    resolver.answers.clear()
    began = time.monotonic()
    for _ in range(5):
        assert ask(port) == b"{}"
    assert time.monotonic() - began < names.PATIENCE_S + 2.0, "it is waited for once"
    assert len(resolver.asked) == 2, "one question at a time"


def test_a_resolver_that_fails_takes_no_known_address_away(resolver: Resolver, port: int) -> None:
    resolver.error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    with pytest.raises(socket.gaierror):
        ask(port)
    resolver.error = None
    assert ask(port) == b"{}"
    resolver.error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert ask(port) == b"{}"


def test_a_late_answer_is_the_next_ones(resolver: Resolver) -> None:
    known = Names()
    resolver.answers.clear()
    with pytest.raises(TimeoutError):
        known.addresses(NAME, 80, 0.05)
    resolver.answers.set()
    assert where(known.addresses(NAME, 80, LIMIT_S)) == ["127.0.0.1"]


def test_an_address_is_no_name(resolver: Resolver) -> None:
    resolver.answers.clear()
    known = Names()
    assert where(known.addresses("10.1.2.3", 80, 0.0)) == ["10.1.2.3"]
    assert where(known.addresses("fe80::1", 80, 0.0)) == ["fe80::1"]
    assert resolver.asked == []


def test_what_is_no_name_at_all_has_no_address() -> None:
    with pytest.raises(ValueError, match="too long"):
        Names().addresses("x" * 70, 80, LIMIT_S)


def test_who_may_have_no_more_threads_goes_by_what_is_known(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Names()
    known.addresses(NAME, 80, LIMIT_S)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert where(known.addresses(NAME, 80, LIMIT_S)) == ["127.0.0.1"]
    with pytest.raises(OSError, match="can't start new thread"):
        known.addresses("other.example", 80, LIMIT_S)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_was_forked_while_a_name_was_looked_up_looks_it_up_itself(resolver: Resolver) -> None:
    """As a keeper forks its supervisor: the thread that asks is not there."""
    line.NAMES.addresses("known.example", 80, LIMIT_S)
    resolver.answers.clear()
    with pytest.raises(TimeoutError):
        line.NAMES.addresses(NAME, 80, 0.05)
    with line.NAMES._lock:  # as that thread may
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            status = 1
            try:
                resolver.answers = threading.Event()
                assert where(line.NAMES.addresses("known.example", 80, 0.05)) == ["127.0.0.1"], (
                    "it stays known"
                )
                resolver.answers.set()
                assert where(line.NAMES.addresses(NAME, 80, 5.0)) == ["127.0.0.1"]
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
