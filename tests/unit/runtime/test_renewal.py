"""A stranger at the control plane's port takes a supervisor neither time nor memory, nor its voice."""

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
from shoal.runtime import http, renewal
from shoal.runtime.renewal import Renewer
from shoal.runtime.restarts import Restarts
from shoal.wire import EndKind, NodeOutcome, Phase, Renewal, RenewalAnswer
from tests.support.renewals import TOKEN, ControlPlane
from tests.support.shares import an_order, until

ASKED = Renewal(attempt_id="att_1", epoch=1, node="n1", phase=Phase.RUNNING)
NESTED = b'{"x":' + b"[" * 20_000
HEAD = b"HTTP/1.1 200 OK\r\n"

Words = Callable[[], Iterator[bytes]]


class Stranger:
    """Takes connections at a port, and says to each what it was given, until nobody listens."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self.said = 0
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
                        self.said += len(word)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def stranger() -> Iterator[Callable[[Words], Stranger]]:
    made: list[Stranger] = []

    def begin(words: Words) -> Stranger:
        made.append(Stranger(words))
        return made[-1]

    yield begin
    for one in made:
        one.close()


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


@pytest.mark.parametrize("words", [nested, a_drop_at_a_time, a_head_without_end, less_than_nothing])
def test_whatever_a_stranger_says_is_silence_and_takes_the_time_of_one(
    stranger: Callable[[Words], Stranger], words: Words
) -> None:
    there = stranger(words)
    began = time.monotonic()
    assert http.ask(there.url, TOKEN, ASKED, 0.5) is None
    assert time.monotonic() - began < 2.0
    assert there.said < 32 << 20, "no more than what the kernels hold is taken"


def test_who_proves_to_be_the_control_plane_is_heard() -> None:
    plane = ControlPlane()
    try:
        answer = http.ask(f"{plane.url}/renew", TOKEN, ASKED, 10.0)
    finally:
        plane.close()
    assert answer is not None
    assert plane.seen[0]["path"] == "/renew"


class Voice:
    """A renewer of one node of two, whose questions go where the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Renewal] = []
        self.answer: Callable[[Renewal], RenewalAnswer | None] = lambda _: RenewalAnswer()
        monkeypatch.setattr(http, "ask", self._ask)
        monkeypatch.setattr(renewal, "FIRST_BACKOFF_S", 0.01)
        monkeypatch.setattr(renewal, "LISTEN_AGAIN_S", 0.01)
        self.order = order = an_order(
            control_url="http://nowhere", nodes=("node-1", "node-2"), max_restarts=3, renew_s=0.05
        )
        meter: Any = SimpleNamespace(take=lambda **_: (), put_back=lambda _: None)
        self.wake, wake_w = os.pipe2(os.O_NONBLOCK)
        self.fds = (self.wake, wake_w)
        self.born_at = BootClock().monotonic()
        self.renewer = Renewer(order, TOKEN, None, BootClock(), wake_w, self.born_at, meter)

    def _ask(self, url: str, credentials: object, asked: Renewal, *_: object) -> RenewalAnswer | None:
        self.asked.append(asked)
        return self.answer(asked)

    def close(self) -> None:
        self.answer = lambda _: RenewalAnswer()
        self.renewer.finish(outcome_of("the test"))
        for thread in threading.enumerate():
            if thread.name == "news":
                thread.join(30)  # it wakes somebody by a descriptor
        for fd in self.fds:
            os.close(fd)


def outcome_of(message: str) -> NodeOutcome:
    return NodeOutcome(
        attempt_id="att_1", epoch=1, node="node-1", kind=EndKind.EXITED, ended_at=0.0, message=message
    )


@pytest.fixture
def voice(monkeypatch: pytest.MonkeyPatch) -> Iterator[Voice]:
    made = Voice(monkeypatch)
    yield made
    made.close()


def test_nothing_that_goes_wrong_ends_renewals_or_news(
    voice: Voice, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Renewal) -> RenewalAnswer:
        raise RuntimeError("nobody has foreseen this")

    voice.answer = fail
    voice.renewer.start()
    until(
        lambda: sum(one.wait_s > 0 for one in voice.asked) > 2 < sum(one.wait_s == 0 for one in voice.asked)
    )
    assert voice.renewer.answered_at == voice.born_at
    voice.answer = lambda _: RenewalAnswer()
    until(lambda: voice.renewer.answered_at > voice.born_at)
    assert capfd.readouterr().err.count("RuntimeError: nobody has foreseen this") == 1


def test_a_late_answer_to_one_failure_refuses_no_other(voice: Voice) -> None:
    """The news of the next group overtook it, and that group has failed meanwhile."""
    first, second = outcome_of("the first"), outcome_of("the second")
    late, arrived, is_counted = threading.Event(), threading.Event(), threading.Event()

    def answer(asked: Renewal) -> RenewalAnswer | None:
        if asked.wait_s > 0:
            return RenewalAnswer(generation=1, master_port=7)
        if asked.failure is first:
            arrived.set()
            late.wait(30)
        elif asked.failure is second:
            is_counted.wait(30)
            return RenewalAnswer(generation=2, master_port=8)
        return RenewalAnswer(generation=1, master_port=7)

    voice.answer = answer
    restarts = Restarts(voice.order, voice.renewer)
    voice.renewer.start()
    until(lambda: restarts.is_wanted)
    restarts.begin(first)
    assert arrived.wait(30)
    assert restarts.next(first) is not None, "another node's failure was counted already"
    restarts.begin(second)
    late.set()
    until(lambda: any(one.failure is second for one in voice.asked))
    assert not restarts.is_refused
    is_counted.set()
    until(lambda: restarts.is_wanted)
    assert not restarts.is_refused


def test_a_failure_that_is_answered_without_another_group_is_refused(voice: Voice) -> None:
    restarts = Restarts(voice.order, voice.renewer)
    voice.renewer.start()
    restarts.begin(outcome_of("the only one"))
    until(lambda: restarts.is_refused)
    assert restarts.next(None) is None
