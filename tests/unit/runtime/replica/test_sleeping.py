"""Servers that sleep: what counts is what they report afterwards."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shoal.clock import SystemClock
from shoal.runtime.replica.listeners import PortListener
from shoal.runtime.replica.probe import ServerProber, ServerSleep
from shoal.wire import ProbeSpec, ReplicaStatus, TaskCredentials

HERE = "127.0.0.1"


class Handler(http.server.BaseHTTPRequestHandler):
    """vLLM's three paths, or none of them. A `stubborn` server never wakes up."""

    kind = "able"
    is_asleep = False
    calls: list[str]

    def do_GET(self) -> None:
        body = b'{"is_sleeping": %b}' % (b"true" if type(self).is_asleep else b"false")
        self._answer(404 if self.kind == "unable" and self.path != "/health" else 200, body)

    def do_POST(self) -> None:
        type(self).calls.append(self.path)
        if self.kind in ("unable", "unable at all"):
            self._answer(404 if self.kind == "unable" else 501, b"")
            return
        if self.headers["x-shoal-secret"] == "s":
            type(self).is_asleep = self.path == "/sleep?level=1" or self.kind == "stubborn"
        self._answer(200, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def a_server(kind: str = "able", port: int = 0) -> Iterator[tuple[type[Handler], int]]:
    handler = type("OneHandler", (Handler,), {"kind": kind, "calls": []})
    server = http.server.ThreadingHTTPServer((HERE, port), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield handler, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def verdict_of(prober: ServerProber) -> str | None:
    return prober.verdict


def sleeper_at(port: int) -> ServerSleep:
    head = "Host: here\r\nx-shoal-secret: s\r\n"
    return ServerSleep(lambda timeout_s: socket.create_connection((HERE, port), timeout_s), head)


def test_server_sleeps_and_wakes_once_for_each_request() -> None:
    with a_server() as (server, port):
        sleeper = sleeper_at(port)
        for should_sleep in (False, True, True, False, False):
            assert sleeper.apply(should_sleep=should_sleep) is None
            assert sleeper.is_asleep == should_sleep == server.is_asleep
        assert server.calls == ["/sleep?level=1", "/wake_up"]


@pytest.mark.parametrize("kind", ["unable", "unable at all"])
def test_server_that_cannot_sleep_stays_awake_and_is_not_asked_twice(kind: str) -> None:
    with a_server(kind) as (server, port):
        sleeper = sleeper_at(port)
        for _ in range(2):
            assert sleeper.apply(should_sleep=True) is None
            assert not sleeper.is_asleep
        assert server.calls == ["/sleep?level=1"]


def test_server_that_does_not_wake_up_is_a_problem() -> None:
    with a_server("stubborn") as (_, port):
        sleeper = sleeper_at(port)
        assert sleeper.apply(should_sleep=True) is None
        assert sleeper.apply(should_sleep=False) == "POST /wake_up: status 200, and it sleeps on"
    assert "refused" in str(sleeper.apply(should_sleep=False))


def test_server_that_cannot_sleep_is_ended_and_counts_as_asleep() -> None:
    statuses, at = list[ReplicaStatus](), PortListener(HERE, None)
    probe = ProbeSpec(path="/health", interval_s=0.02, failures=1, dead_after_s=0.1, can_sleep=True)
    prober = ServerProber(probe, at, TaskCredentials(replica_secret="s"), SystemClock(), statuses.append)

    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline, statuses
            time.sleep(0.01)

    with a_server("unable", at.port):
        prober.start()
        until(lambda: bool(statuses) and statuses[-1].is_ready)
        assert not prober.should_end
        prober.set_should_sleep(True)
        until(lambda: prober.should_end)
    prober.set_ended(is_ended=True)
    until(lambda: statuses[-1].is_asleep)
    time.sleep(2 * probe.dead_after_s)
    assert prober.verdict is None
    prober.set_should_sleep(False)
    assert not prober.should_end
    with a_server("unable", at.port):
        prober.set_ended(is_ended=False)
        until(lambda: statuses[-1].is_ready and not statuses[-1].is_asleep)


@pytest.mark.parametrize("kind", ["able", "stubborn"])
def test_supervisor_reports_a_sleeping_server_and_gives_up_one_that_never_wakes(kind: str) -> None:
    statuses, at = list[ReplicaStatus](), PortListener(HERE, None)
    probe = ProbeSpec(path="/health", interval_s=0.02, failures=1, dead_after_s=0.2, can_sleep=True)
    prober = ServerProber(probe, at, TaskCredentials(replica_secret="s"), SystemClock(), statuses.append)

    def until_status(*wanted: tuple[bool, bool]) -> None:
        deadline = time.monotonic() + 30
        while not statuses or (statuses[-1].is_ready, statuses[-1].is_asleep) not in wanted:
            assert time.monotonic() < deadline, statuses
            time.sleep(0.01)

    with a_server(kind, at.port):
        prober.start()
        until_status((True, False))
        prober.set_should_sleep(True)
        until_status((False, True))
        assert statuses[-1].because == "asleep"
        assert prober.verdict is None
        prober.set_should_sleep(False)
        if kind == "able":
            until_status((True, False))
            return
        deadline = time.monotonic() + 30
        while verdict_of(prober) is None:
            assert time.monotonic() < deadline, statuses
            time.sleep(0.01)
        assert "it sleeps on" in str(prober.verdict)
