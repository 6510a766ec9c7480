"""Put a server to sleep and wake it, for servers that can: vLLM's `/sleep`, `/wake_up` and `/is_sleeping`.

What counts is what the server says of itself afterwards. Used from one thread, which waits for the server.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

PATIENCE_S = 120.0
"""To move the weights out of a GPU and back takes seconds; of a large model on a busy node, a minute."""
SLEEP, WAKE, STATE = "POST /sleep?level=1", "POST /wake_up", "GET /is_sleeping"
MAX_BYTES = 1 << 16
NOT_IMPLEMENTED = 501
"""From servers that take no POST at all."""
_ANSWER = re.compile(rb"HTTP/1\.[01] ([0-9]{3}).*?\r\n\r\n(.*)", re.DOTALL)


class Sleeper:
    def __init__(self, connect: Callable[[float], socket.socket], head: str) -> None:
        """`connect`: to the server, within so many seconds. `head`: lines of every request's head."""
        self._connect = connect
        self._head = head
        self.is_asleep = False
        self.cannot = False
        """It has no such paths, as was found out when it should have slept."""

    def obey(self, *, should_sleep: bool) -> str | None:
        """Have it sleep or wake; nothing where it does. What keeps it from waking up; None: nothing.

        One that has no such paths is not asked twice.
        """
        if should_sleep == self.is_asleep or (should_sleep and self.cannot):
            return None
        try:
            status, _ = self._call(SLEEP if should_sleep else WAKE)
            self.cannot = should_sleep and (400 <= status < 500 or status == NOT_IMPLEMENTED)
            _, said = self._call(STATE)
        except OSError as error:
            told = (error.strerror or str(error) or type(error).__name__).lower()
            return None if should_sleep else f"{WAKE}: {told}"
        self.is_asleep = b"true" in said
        return None if should_sleep or not self.is_asleep else f"{WAKE}: status {status}, and it sleeps on"

    def _call(self, what: str) -> tuple[int, bytes]:
        question = f"{what} HTTP/1.1\r\n{self._head}Content-Length: 0\r\nConnection: close\r\n\r\n"
        answer = b""
        with self._connect(PATIENCE_S) as link:
            link.sendall(question.encode("ascii"))
            while len(answer) < MAX_BYTES and (part := link.recv(MAX_BYTES)):
                answer += part
        match = _ANSWER.match(answer)
        if match is None:
            raise OSError("what it said is not HTTP")
        return int(match[1]), match[2]
