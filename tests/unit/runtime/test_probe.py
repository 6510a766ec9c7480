"""Whether a server can be given requests, and whose port is whose."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable

import pytest

from shoal.clock import SystemClock
from shoal.runtime.ports import hold_port
from shoal.runtime.probe import Prober
from shoal.wire import Credentials, Probe, Serving

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
            self.send_response(status[0] if self.headers["x-shoal-secret"] == "s" else 403)
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
    prober = Prober(probe, HERE, Credentials(replica_secret="s"), SystemClock(), heard.said.append)
    prober.start()
    heard.until(lambda said: said.because == "connection refused")
    server = server_at(prober.port, status)
    try:
        assert not heard.until(lambda said: said.because == "status 503").is_ready
        status[0] = 204
        ready = heard.until(lambda said: said.is_ready)
        assert ready.address == f"{HERE}:{prober.port}"
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


def test_port_that_is_held_is_given_to_nobody_else_and_lets_its_server_in() -> None:
    with hold_port(HERE, None) as one, hold_port(HERE, None) as other:
        ports = {held.getsockname()[1] for held in (one, other)}
        assert len(ports) == 2
        for port in ports:
            with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
                stranger.bind((HERE, port))
        with socket.create_server((HERE, one.getsockname()[1])) as server:
            socket.create_connection(server.getsockname()).close()


def test_port_that_was_asked_for_and_is_taken_is_said() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is taken"):
            hold_port(HERE, port)
