"""Whether the server that a replica of a service runs can be given requests, asked from a thread of its own.

A server is ready from its first good answer on. The thread only finds out and tells; that a dead server ends
the share is decided by the main loop, which looks at `verdict`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable

import msgspec

from shoal.clock import Clock
from shoal.errors import ShoalError
from shoal.runtime.confine.firewall import PORT_S
from shoal.runtime.listening import Listening
from shoal.runtime.ports import listened_to
from shoal.runtime.sleeping import Sleeper
from shoal.runtime.tree import descendants
from shoal.wire import Credentials, Probe, Serving

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")
HEAD_BYTES = 12
"""`HTTP/1.1 200`."""
FIRST_PAUSE_S = 0.05
"""Servers that start quickly are not kept waiting: the pause doubles up to the interval."""
BAD_STATUS = 400
MAX_READ = 1 << 16
ASLEEP = "asleep"
FIRST_LOOK_S, LOOK_EVERY_S = 2.0, 5.0
"""When and how often it is looked for the ports of a program that does not listen where it should."""
PROTECT_EVERY_S = 120.0


class Prober:
    """Asks `at`, which it lets go of when it is gone. `address`: where data planes are told to go, if not
    there.
    """

    def __init__(
        self,
        probe: Probe,
        at: Listening,
        credentials: Credentials,
        clock: Clock,
        tell: Callable[[Serving], None] | None,
        address: str = "",
        protect: Callable[[], None] | None = None,
    ) -> None:
        """`protect` keeps others away from the server's port for a while, and is called again in time."""
        self._probe = probe
        self._at = at
        self._secret = credentials.replica_secret
        self._clock = clock
        self._tell = tell
        self._state = Serving(address=address or at.address)
        self._thread: threading.Thread | None = None
        self._sleeper = Sleeper(at.connect, self._head())
        self._should_sleep = False
        self._is_ended = False
        self._elsewhere = ""
        self._look_at = 0.0
        self._protect = protect
        self._protected_at = clock.monotonic()
        self._protect_at = self._protected_at + PROTECT_EVERY_S
        self._unprotected: str | None = None
        self._pause = threading.Event()
        self.verdict: str | None = None
        """Why the server is as good as dead; None: it is not, or not known to be."""

    def start(self) -> None:
        """The server was started. May be repeated."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
            self._thread.start()

    def want_sleep(self, should_sleep: bool) -> None:  # noqa: FBT001 - given as it was heard
        """Put the server to sleep once it is ready, or wake it, from the thread. May be repeated."""
        if self._should_sleep != should_sleep:
            self._should_sleep = should_sleep
            self._pause.set()

    @property
    def should_end(self) -> bool:
        """Whether the server should be ended until somebody asks for it: it should sleep, and has no paths
        for that.
        """
        return self._should_sleep and self._sleeper.cannot

    def tell_ended(self, *, is_ended: bool) -> None:
        """The server was ended so that it sleeps; or it is being started again."""
        self._is_ended = is_ended
        self._pause.set()

    def _run(self) -> None:
        began = good_at = self._clock.monotonic()
        failures, was_ready, pause_s = 0, False, FIRST_PAUSE_S
        self._look_at = began + FIRST_LOOK_S
        self._say(is_ready=False, because="it was not asked yet")
        while True:
            unprotected = self._keep_protected()
            if self._is_ended:
                self._say(is_ready=False, because=ASLEEP)
                failures, was_ready, pause_s = 0, False, FIRST_PAUSE_S
                began = self._clock.monotonic()
                self._wait(self._probe.interval_s)
                continue
            problem = unprotected or self._ask()
            if problem is None and self._probe.can_sleep:
                problem = self._sleeper.obey(should_sleep=self._should_sleep)
            now = self._clock.monotonic()
            if problem is None:
                failures, good_at, was_ready, self.verdict = 0, now, True, None
            else:
                failures += 1
                since = good_at if was_ready else began
                self.verdict = self._judge(problem, now - since, was_ready=was_ready)
            if problem is None or not was_ready or failures >= self._probe.failures:
                is_asleep = self._sleeper.is_asleep
                because = ASLEEP if is_asleep and problem is None else problem or ""
                self._say(is_ready=problem is None and not is_asleep, because=because)
            self._wait(pause_s if not was_ready else self._probe.interval_s)
            pause_s = min(pause_s * 2, self._probe.interval_s)

    def _keep_protected(self) -> str | None:
        """Renew the protection of the port when it is time.

        Return why the port is about to be open; None: it is protected until the next turn and longer.
        """
        now = self._clock.monotonic()
        if self._protect is not None and now >= self._protect_at:
            self._protect_at = now + PROTECT_EVERY_S
            try:
                self._protect()
            except ShoalError as error:
                self._unprotected = f"its port could not be protected: {error.message}"
            else:
                self._protected_at, self._unprotected = now, None
        return self._unprotected if now - self._protected_at >= PORT_S - PROTECT_EVERY_S else None

    def _wait(self, at_most_s: float) -> None:
        self._pause.wait(at_most_s)
        self._pause.clear()

    def _judge(self, problem: str, for_s: float, *, was_ready: bool) -> str | None:
        limit_s = self._probe.dead_after_s if was_ready else self._probe.within_s
        if for_s < limit_s:
            return None
        told = "has not answered" if was_ready else "was not ready"
        return f"the server {told} at {self._probe.path} for {for_s:.0f} s: {problem}"

    def _say(self, *, is_ready: bool, because: str) -> None:
        before = self._state
        if (before.is_ready, before.because) == (is_ready, because) and before.at:
            return
        at = self._clock.now() if before.is_ready != is_ready or not before.at else before.at
        self._state = msgspec.structs.replace(
            before, is_ready=is_ready, because=because, at=at, is_asleep=because == ASLEEP
        )
        if self._tell is not None:
            self._tell(self._state)

    def _ask(self) -> str | None:
        """What is wrong; None: nothing."""
        question = f"GET {self._probe.path} HTTP/1.1\r\n{self._head()}Connection: close\r\n\r\n"
        try:
            answer = self._exchange(question.encode("ascii"))
        except OSError as error:
            why = (error.strerror or str(error) or type(error).__name__).lower()
            port = self._at.variables.get("PORT")
            place = "$SHOAL_SOCKET" if port is None else f"port {port}"
            return f"nothing answers at {place}, path {self._probe.path}: {why}{self._found(error)}"
        match = _STATUS.match(answer)
        if match is None:
            return f"what it said at {self._probe.path} is not HTTP"
        return f"status {match[1].decode()} at {self._probe.path}" if int(match[1]) >= BAD_STATUS else None

    def _found(self, error: OSError) -> str:
        """Where the program listens instead, looked for now and then; empty: nowhere, or nobody can say."""
        now = self._clock.monotonic()
        if isinstance(error, ConnectionRefusedError | FileNotFoundError) and now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            porch = self._state.address.rpartition(":")[2]
            ports = [port for port in listened_to(descendants(os.getpid())) if str(port) != porch]
            self._elsewhere = ""
            if ports:
                told, wanted = " and ".join(map(str, ports)), next(iter(self._at.variables))
                remedy = f"have it listen at ${wanted}, or write `port: {ports[0]}`"
                self._elsewhere = f"; the program listens at port {told}: {remedy}"
        return self._elsewhere

    def _head(self) -> str:
        """Lines of every question's head."""
        lines = [f"Host: {self._at.host}"]
        if self._secret:
            lines.append(f"x-shoal-secret: {self._secret}")
            lines += [] if self._probe.is_public else [f"Authorization: Bearer {self._secret}"]
        return "".join(f"{line}\r\n" for line in lines)

    def _exchange(self, question: bytes) -> bytes:
        answer = b""
        deadline = self._clock.monotonic() + self._probe.timeout_s
        with self._at.connect(self._probe.timeout_s) as link:
            link.sendall(question)
            while len(answer) < HEAD_BYTES:
                link.settimeout(max(0.001, deadline - self._clock.monotonic()))
                part = link.recv(HEAD_BYTES - len(answer))
                if not part:
                    break
                answer += part
            with contextlib.suppress(OSError):  # closed with words unread, it would see a reset
                link.recv(MAX_READ)
        return answer
