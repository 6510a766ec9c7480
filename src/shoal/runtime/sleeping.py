"""Put a server to sleep and wake it, for servers that can: vLLM's `/sleep`, `/wake_up` and `/is_sleeping`.

What counts is what the server says of itself afterwards. Used from one thread, which waits for the server.
"""

from __future__ import annotations

import importlib

PATIENCE_S = 120.0
"""To move the weights out of a GPU and back takes seconds; of a large model on a busy node, a minute."""
SLEEP, WAKE, STATE = "/sleep?level=1", "/wake_up", "/is_sleeping"


class Sleeper:
    def __init__(self, host: str, port: int, secret: str) -> None:
        self._host, self._port = host, port
        self._headers = {"x-shoal-secret": secret} if secret else {}
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
            status, _ = self._call("POST", SLEEP if should_sleep else WAKE)
            self.cannot = should_sleep and 400 <= status < 500
            _, said = self._call("GET", STATE)
        except OSError as error:
            told = (error.strerror or str(error) or type(error).__name__).lower()
            return None if should_sleep else f"{WAKE}: {told}"
        self.is_asleep = b"true" in said
        return None if should_sleep or not self.is_asleep else f"{WAKE}: status {status}, and it sleeps on"

    def _call(self, method: str, path: str) -> tuple[int, bytes]:
        client = importlib.import_module("http.client")  # few replicas need it, and their start would wait
        link = client.HTTPConnection(self._host, self._port, timeout=PATIENCE_S)
        try:
            link.request(method, path, headers=self._headers)
            answer = link.getresponse()
            return answer.status, answer.read(4096)
        except client.HTTPException as error:
            raise OSError(f"what it said is not HTTP: {type(error).__name__}") from error
        finally:
            link.close()
