"""Ask whether a replica's server is ready, and put it to sleep or wake it.

`ServerProber` asks from a thread of its own. A server is ready from its first good reply on. The thread only
reports. The main loop looks at `verdict`, and decides that a dead server ends the task.

`ServerSleep` is for servers that can sleep as vLLM does: `/sleep`, `/wake_up` and `/is_sleeping`. What counts
is what the server reports afterwards. The thread of the prober uses it and waits for the server.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable

import msgspec

from shoal.clock import Clock
from shoal.errors import ShoalError
from shoal.runtime.confine.firewall import PORT_S
from shoal.runtime.process.network import listening_ports
from shoal.runtime.process.tree import descendants
from shoal.runtime.replica.listeners import ServerListener
from shoal.wire import ProbeSpec, ReplicaStatus, TaskCredentials

PATIENCE_S = 120.0
"""Moving the weights out of a GPU and back takes seconds, and for a large model on a busy node a minute."""
SLEEP, WAKE, STATE = "POST /sleep?level=1", "POST /wake_up", "GET /is_sleeping"
MAX_BYTES = 1 << 16
NOT_IMPLEMENTED = 501
"""The status from servers that take no POST at all."""
_ANSWER = re.compile(rb"HTTP/1\.[01] ([0-9]{3}).*?\r\n\r\n(.*)", re.DOTALL)


class ServerSleep:
    def __init__(self, connect: Callable[[float], socket.socket], head: str) -> None:
        """`connect`: connects to the server within a timeout. `head`: header lines of every request."""
        self._connect = connect
        self._head = head
        self.is_asleep = False
        self.is_unsupported = False
        """The server has no such paths. Known after the first attempt to put it to sleep."""

    def apply(self, *, should_sleep: bool) -> str | None:
        """Have the server sleep or wake, unless it does already. Return why it cannot wake, or None.

        A server without such paths is asked only once.
        """
        if should_sleep == self.is_asleep or (should_sleep and self.is_unsupported):
            return None
        try:
            status, _ = self._call(SLEEP if should_sleep else WAKE)
            self.is_unsupported = should_sleep and (400 <= status < 500 or status == NOT_IMPLEMENTED)
            _, reply = self._call(STATE)
        except OSError as error:
            problem = (error.strerror or str(error) or type(error).__name__).lower()
            return None if should_sleep else f"{WAKE}: {problem}"
        self.is_asleep = b"true" in reply
        return None if should_sleep or not self.is_asleep else f"{WAKE}: status {status}, and it sleeps on"

    def _call(self, request_line: str) -> tuple[int, bytes]:
        request = f"{request_line} HTTP/1.1\r\n{self._head}Content-Length: 0\r\nConnection: close\r\n\r\n"
        answer = b""
        with self._connect(PATIENCE_S) as link:
            link.sendall(request.encode("ascii"))
            while len(answer) < MAX_BYTES and (part := link.recv(MAX_BYTES)):
                answer += part
        match = _ANSWER.match(answer)
        if match is None:
            raise OSError("its reply is not HTTP")
        return int(match[1]), match[2]


_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")
HEAD_BYTES = 12
"""The length of `HTTP/1.1 200`."""
FIRST_PAUSE_S = 0.05
"""The first pause is short for servers that start quickly. It doubles up to the interval."""
BAD_STATUS = 400
MAX_READ = 1 << 16
ASLEEP = "asleep"
FIRST_LOOK_S, LOOK_EVERY_S = 2.0, 5.0
"""When and how often to look for the ports of a program that does not listen where it should."""
PROTECT_EVERY_S = 120.0


class ServerProber:
    """Probes the server at a listener, and releases the listener when the server has ended.

    `address`: the address that data planes get, if it differs from the listener's.
    """

    def __init__(
        self,
        probe: ProbeSpec,
        listener: ServerListener,
        credentials: TaskCredentials,
        clock: Clock,
        report: Callable[[ReplicaStatus], None] | None,
        address: str = "",
        protect: Callable[[], None] | None = None,
    ) -> None:
        """`protect` keeps others away from the server's port for a while, and is called again in time."""
        self._probe = probe
        self._listener = listener
        self._secret = credentials.replica_secret
        self._clock = clock
        self._report = report
        self._status = ReplicaStatus(address=address or listener.address)
        self._thread: threading.Thread | None = None
        self._sleeper = ServerSleep(listener.connect, self._head())
        self._should_sleep = False
        self._is_ended = False
        self._port_hint = ""
        self._look_at = 0.0
        self._protect = protect
        self._protected_at = clock.monotonic()
        self._protect_at = self._protected_at + PROTECT_EVERY_S
        self._unprotected: str | None = None
        self._pause = threading.Event()
        self.verdict: str | None = None
        """Why the server counts as dead; None if it does not."""

    def start(self) -> None:
        """Start to probe, because the server was started. May be repeated."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
            self._thread.start()

    def set_should_sleep(self, should_sleep: bool) -> None:  # noqa: FBT001 - as in the control plane's reply
        """Have the thread put the server to sleep once it is ready, or wake it. May be repeated."""
        if self._should_sleep != should_sleep:
            self._should_sleep = should_sleep
            self._pause.set()

    @property
    def should_end(self) -> bool:
        """Whether to end the server until a request comes: it should sleep, but has no paths for that."""
        return self._should_sleep and self._sleeper.is_unsupported

    def set_ended(self, *, is_ended: bool) -> None:
        """Note that the server was ended so that it sleeps, or that it is being started again."""
        self._is_ended = is_ended
        self._pause.set()

    def _run(self) -> None:
        began = good_at = self._clock.monotonic()
        failures, was_ready, pause_s = 0, False, FIRST_PAUSE_S
        self._look_at = began + FIRST_LOOK_S
        self._report_status(is_ready=False, because="it was not asked yet")
        while True:
            unprotected = self._keep_protected()
            if self._is_ended:
                self._report_status(is_ready=False, because=ASLEEP)
                failures, was_ready, pause_s = 0, False, FIRST_PAUSE_S
                began = self._clock.monotonic()
                self._wait(self._probe.interval_s)
                continue
            problem = unprotected or self._problem()
            if problem is None and self._probe.can_sleep:
                problem = self._sleeper.apply(should_sleep=self._should_sleep)
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
                self._report_status(is_ready=problem is None and not is_asleep, because=because)
            self._wait(pause_s if not was_ready else self._probe.interval_s)
            pause_s = min(pause_s * 2, self._probe.interval_s)

    def _keep_protected(self) -> str | None:
        """Renew the protection of the port when it is time.

        Return why the port is about to be open. None: it stays protected beyond the next turn.
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
        verdict = "has not answered" if was_ready else "was not ready"
        return f"the server {verdict} at {self._probe.path} for {for_s:.0f} s: {problem}"

    def _report_status(self, *, is_ready: bool, because: str) -> None:
        before = self._status
        if (before.is_ready, before.because) == (is_ready, because) and before.at:
            return
        at = self._clock.now() if before.is_ready != is_ready or not before.at else before.at
        self._status = msgspec.structs.replace(
            before, is_ready=is_ready, because=because, at=at, is_asleep=because == ASLEEP
        )
        if self._report is not None:
            self._report(self._status)

    def _problem(self) -> str | None:
        """Return what is wrong with the server, or None."""
        request = f"GET {self._probe.path} HTTP/1.1\r\n{self._head()}Connection: close\r\n\r\n"
        try:
            reply = self._exchange(request.encode("ascii"))
        except OSError as error:
            why = (error.strerror or str(error) or type(error).__name__).lower()
            port = self._listener.variables.get("PORT")
            place = "$SHOAL_SOCKET" if port is None else f"port {port}"
            return f"nothing answers at {place}, path {self._probe.path}: {why}{self._find_port_hint(error)}"
        match = _STATUS.match(reply)
        if match is None:
            return f"its reply at {self._probe.path} is not HTTP"
        return f"status {match[1].decode()} at {self._probe.path}" if int(match[1]) >= BAD_STATUS else None

    def _find_port_hint(self, error: OSError) -> str:
        """Say at which other port the program listens, looked up now and then; empty if that is unknown."""
        now = self._clock.monotonic()
        if isinstance(error, ConnectionRefusedError | FileNotFoundError) and now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            sidecar_port = self._status.address.rpartition(":")[2]
            ports = [port for port in listening_ports(descendants(os.getpid())) if str(port) != sidecar_port]
            self._port_hint = ""
            if ports:
                shown, wanted = " and ".join(map(str, ports)), next(iter(self._listener.variables))
                remedy = f"have it listen at ${wanted}, or write `port: {ports[0]}`"
                self._port_hint = f"; the program listens at port {shown}: {remedy}"
        return self._port_hint

    def _head(self) -> str:
        """Header lines of every request."""
        lines = [f"Host: {self._listener.host}"]
        if self._secret:
            lines.append(f"x-shoal-secret: {self._secret}")
            lines += [] if self._probe.is_public else [f"Authorization: Bearer {self._secret}"]
        return "".join(f"{line}\r\n" for line in lines)

    def _exchange(self, request: bytes) -> bytes:
        answer = b""
        deadline = self._clock.monotonic() + self._probe.timeout_s
        with self._listener.connect(self._probe.timeout_s) as link:
            link.sendall(request)
            while len(answer) < HEAD_BYTES:
                link.settimeout(max(0.001, deadline - self._clock.monotonic()))
                part = link.recv(HEAD_BYTES - len(answer))
                if not part:
                    break
                answer += part
            with contextlib.suppress(OSError):  # if closed with unread bytes, the server would see a reset
                link.recv(MAX_READ)
        return answer
