"""Servers that sleep: they do as they are told, and what counts is what they say of themselves."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shoal.clock import SystemClock
from shoal.runtime.listening import OnPort
from shoal.runtime.probe import Prober
from shoal.runtime.sleeping import Sleeper
from shoal.wire import Credentials, Probe, Serving

HERE = "127.0.0.1"


class Handler(http.server.BaseHTTPRequestHandler):
    """vLLM's three paths, or none of them; one that is `stubborn` never wakes up."""

    kind = "able"
    is_asleep = False
    calls: list[str]

    def do_GET(self) -> None:
        told = b'{"is_sleeping": %b}' % (b"true" if type(self).is_asleep else b"false")
        self._answer(404 if self.kind == "unable" and self.path != "/health" else 200, told)

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
        """Quiet."""


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


def verdict_of(prober: Prober) -> str | None:
    return prober.verdict


def sleeper_at(port: int) -> Sleeper:
    head = "Host: here\r\nx-shoal-secret: s\r\n"
    return Sleeper(lambda timeout_s: socket.create_connection((HERE, port), timeout_s), head)


def test_server_sleeps_and_wakes_once_each_time_it_should() -> None:
    with a_server() as (server, port):
        sleeper = sleeper_at(port)
        for should_sleep in (False, True, True, False, False):
            assert sleeper.obey(should_sleep=should_sleep) is None
            assert sleeper.is_asleep == should_sleep == server.is_asleep
        assert server.calls == ["/sleep?level=1", "/wake_up"]


@pytest.mark.parametrize("kind", ["unable", "unable at all"])
def test_server_that_cannot_sleep_stays_awake_and_is_not_asked_twice(kind: str) -> None:
    with a_server(kind) as (server, port):
        sleeper = sleeper_at(port)
        for _ in range(2):
            assert sleeper.obey(should_sleep=True) is None
            assert not sleeper.is_asleep
        assert server.calls == ["/sleep?level=1"]


def test_server_that_does_not_wake_up_is_not_well() -> None:
    with a_server("stubborn") as (_, port):
        sleeper = sleeper_at(port)
        assert sleeper.obey(should_sleep=True) is None
        assert sleeper.obey(should_sleep=False) == "POST /wake_up: status 200, and it sleeps on"
    assert "refused" in str(sleeper.obey(should_sleep=False))


def test_server_that_cannot_sleep_is_to_be_ended_and_is_asleep_until_it_is_started_again() -> None:
    said, at = list[Serving](), OnPort(HERE, None)
    probe = Probe(path="/health", interval_s=0.02, failures=1, dead_after_s=0.1, can_sleep=True)
    prober = Prober(probe, at, Credentials(replica_secret="s"), SystemClock(), said.append)

    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline, said
            time.sleep(0.01)

    with a_server("unable", at.port):
        prober.start()
        until(lambda: bool(said) and said[-1].is_ready)
        assert not prober.should_end
        prober.want_sleep(True)
        until(lambda: prober.should_end)
    prober.tell_ended(is_ended=True)
    until(lambda: said[-1].is_asleep)
    time.sleep(2 * probe.dead_after_s)
    assert prober.verdict is None
    prober.want_sleep(False)
    assert not prober.should_end
    with a_server("unable", at.port):
        prober.tell_ended(is_ended=False)
        until(lambda: said[-1].is_ready and not said[-1].is_asleep)


@pytest.mark.parametrize("kind", ["able", "stubborn"])
def test_supervisor_says_that_its_server_sleeps_and_gives_up_one_that_never_wakes(kind: str) -> None:
    said, at = list[Serving](), OnPort(HERE, None)
    probe = Probe(path="/health", interval_s=0.02, failures=1, dead_after_s=0.2, can_sleep=True)
    prober = Prober(probe, at, Credentials(replica_secret="s"), SystemClock(), said.append)

    def until_said(*wanted: tuple[bool, bool]) -> None:
        deadline = time.monotonic() + 30
        while not said or (said[-1].is_ready, said[-1].is_asleep) not in wanted:
            assert time.monotonic() < deadline, said
            time.sleep(0.01)

    with a_server(kind, at.port):
        prober.start()
        until_said((True, False))
        prober.want_sleep(True)
        until_said((False, True))
        assert said[-1].because == "asleep"
        assert prober.verdict is None
        prober.want_sleep(False)
        if kind == "able":
            until_said((True, False))
            return
        deadline = time.monotonic() + 30
        while verdict_of(prober) is None:
            assert time.monotonic() < deadline, said
            time.sleep(0.01)
        assert "it sleeps on" in str(prober.verdict)
