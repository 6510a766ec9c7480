"""A foreign program at the control plane's port costs a supervisor neither time nor memory, nor its lease."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.clock import BootClock
from shoal.runtime.lease import http_exchange, renewal
from shoal.runtime.lease.renewal import LeaseRenewer
from shoal.runtime.supervisor.restarts import Restarts
from shoal.wire import EndKind, Renewal, RenewalReply, TaskOutcome, TaskPhase
from tests.support.runtime.tasks import TASK_CREDENTIALS, RenewalServer, a_task_spec, until

ASKED = Renewal(attempt_id="att_1", epoch=1, node="n1", phase=TaskPhase.RUNNING)
NESTED = b'{"x":' + b"[" * 20_000
HEAD = b"HTTP/1.1 200 OK\r\n"

Words = Callable[[], Iterator[bytes]]


class ForeignServer:
    """Accepts connections at a port and sends each one the given reply, until it is closed."""

    def __init__(self, reply: Words) -> None:
        self._words = reply
        self.num_sent = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                with link, contextlib.suppress(OSError):
                    link.recv(65536)
                    for word in self._words():
                        link.sendall(word)
                        self.num_sent += len(word)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def stranger() -> Iterator[Callable[[Words], ForeignServer]]:
    servers: list[ForeignServer] = []

    def begin(reply: Words) -> ForeignServer:
        servers.append(ForeignServer(reply))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def nested() -> Iterator[bytes]:
    yield HEAD + b"Content-Length: %d\r\n\r\n" % len(NESTED) + NESTED


def a_drop_at_a_time() -> Iterator[bytes]:
    yield HEAD + b"Content-Length: 5000\r\n\r\n"
    for _ in range(400):
        time.sleep(0.02)
        yield b" "


def a_head_without_end() -> Iterator[bytes]:
    for _ in range(400):
        time.sleep(0.02)
        yield b"HTTP/1.1 100 Continue\r\n\r\n"


def less_than_nothing() -> Iterator[bytes]:
    yield HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n"
    yield from itertools.repeat(b"x" * 65536, 4000)


@pytest.mark.parametrize("reply", [nested, a_drop_at_a_time, a_head_without_end, less_than_nothing])
def test_any_reply_of_a_foreign_program_is_silence_and_costs_no_more_time(
    stranger: Callable[[Words], ForeignServer], reply: Words
) -> None:
    there = stranger(reply)
    began = time.monotonic()
    assert http_exchange.ask(there.url, TASK_CREDENTIALS, ASKED, 0.5) is None
    assert time.monotonic() - began < 2.0
    assert there.num_sent < 32 << 20, "at most what the kernel's buffers hold is read"


def test_reply_with_a_proof_counts() -> None:
    plane = RenewalServer()
    try:
        answer = http_exchange.ask(f"{plane.url}/renew", TASK_CREDENTIALS, ASKED, 10.0)
    finally:
        plane.close()
    assert answer is not None
    assert plane.renewals[0]["path"] == "/renew"


class ScriptedRenewer:
    """A renewer of one node of two. The test decides what its requests get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[Renewal] = []
        self.answer: Callable[[Renewal], RenewalReply | None] = lambda _: RenewalReply()
        monkeypatch.setattr(http_exchange, "ask", self._ask)
        monkeypatch.setattr(renewal, "FIRST_BACKOFF_S", 0.01)
        monkeypatch.setattr(renewal, "LISTEN_AGAIN_S", 0.01)
        self.order = task_spec = a_task_spec(
            control_url="http://nowhere", nodes=("node-1", "node-2"), max_restarts=3, renew_s=0.05
        )
        meter: Any = SimpleNamespace(take=lambda **_: (), put_back=lambda _: None)
        self.wake, wake_w = os.pipe2(os.O_NONBLOCK)
        self.fds = (self.wake, wake_w)
        self.born_at = BootClock().monotonic()
        self.renewer = LeaseRenewer(
            task_spec, TASK_CREDENTIALS, None, BootClock(), wake_w, self.born_at, meter
        )

    def _ask(self, url: str, credentials: object, message: Renewal, *_: object) -> RenewalReply | None:
        self.requests.append(message)
        return self.answer(message)

    def close(self) -> None:
        self.answer = lambda _: RenewalReply()
        self.renewer.finish(outcome_of("the test"))
        for thread in threading.enumerate():
            if thread.name == "news":
                thread.join(30)  # the thread wakes the main loop by a descriptor
        for fd in self.fds:
            os.close(fd)


def outcome_of(message: str) -> TaskOutcome:
    return TaskOutcome(
        attempt_id="att_1", epoch=1, node="node-1", kind=EndKind.EXITED, ended_at=0.0, message=message
    )


@pytest.fixture
def renewer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedRenewer]:
    new_voice = ScriptedRenewer(monkeypatch)
    yield new_voice
    new_voice.close()


def test_no_error_ends_renewals_or_news(renewer: ScriptedRenewer, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(_: Renewal) -> RenewalReply:
        raise RuntimeError("an unexpected error")

    renewer.answer = fail
    renewer.renewer.start()
    until(
        lambda: (
            sum(sent.wait_s > 0 for sent in renewer.requests)
            > 2
            < sum(sent.wait_s == 0 for sent in renewer.requests)
        )
    )
    assert renewer.renewer.answered_at == renewer.born_at
    renewer.answer = lambda _: RenewalReply()
    until(lambda: renewer.renewer.answered_at > renewer.born_at)
    assert capfd.readouterr().err.count("RuntimeError: an unexpected error") == 1


def test_late_reply_to_one_failure_refuses_no_other(renewer: ScriptedRenewer) -> None:
    """The news of the next group came first, and that group has failed in the meantime."""
    first, second = outcome_of("the first"), outcome_of("the second")
    late, arrived, is_counted = threading.Event(), threading.Event(), threading.Event()

    def answer(message: Renewal) -> RenewalReply | None:
        if message.wait_s > 0:
            return RenewalReply(rendezvous_round=1, master_port=7)
        if message.failure is first:
            arrived.set()
            late.wait(30)
        elif message.failure is second:
            is_counted.wait(30)
            return RenewalReply(rendezvous_round=2, master_port=8)
        return RenewalReply(rendezvous_round=1, master_port=7)

    renewer.answer = answer
    restarts = Restarts(renewer.order.identity, renewer.order.ranks, renewer.renewer)
    renewer.renewer.start()
    until(lambda: restarts.is_wanted)
    restarts.begin(first)
    assert arrived.wait(30)
    assert restarts.next(first) is not None, "the other node's failure was counted already"
    restarts.begin(second)
    late.set()
    until(lambda: any(sent.failure is second for sent in renewer.requests))
    assert not restarts.is_refused
    is_counted.set()
    until(lambda: restarts.is_wanted)
    assert not restarts.is_refused


def test_failure_answered_without_another_group_is_refused(renewer: ScriptedRenewer) -> None:
    restarts = Restarts(renewer.order.identity, renewer.order.ranks, renewer.renewer)
    renewer.renewer.start()
    restarts.begin(outcome_of("the only one"))
    until(lambda: restarts.is_refused)
    assert restarts.next(None) is None
