"""The addresses of a name, within a time: the system's resolver takes none, and as long as it likes.

With the usual `resolv.conf` a name server that is away costs half a minute, and more with further servers and
search domains: whoever renews a lease must not wait for that. So a thread asks, one for a name, and the last
answer serves while the next one does not come: who is at the other end has to prove himself there anyhow.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from shoal.clock import BootClock

Place = tuple[str, int]
Found = list[tuple[Any, Any, int, str, tuple[Any, ...]]]
"""As `socket.getaddrinfo` says it."""
PATIENCE_S = 1.0
"""So long a newer answer is waited for where an older one is known."""
CLOCK = BootClock()


class _LookUp:
    """One question to the resolver, for all who ask meanwhile."""

    def __init__(self) -> None:
        self.since = CLOCK.monotonic()
        self.is_over = threading.Event()
        self.error: OSError | None = None


class Names:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Place, Found] = {}
        self._asked: dict[Place, _LookUp] = {}

    def begin_anew(self) -> None:
        """In a forked process, which has none of the threads that ask: what is known stays known."""
        self._lock = threading.Lock()  # one of them may have held it
        self._asked = {}

    def addresses(self, host: str, port: int, timeout_s: float) -> Found:
        """Where it is now, or was at the last answer. Blocks for `timeout_s` at most. `OSError`: nobody has
        said, and perhaps will by the next time. `ValueError`: it is no name.
        """
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except OSError:
            pass  # no number: somebody has to be asked
        place = host, port
        asked = self._ask(place)
        with self._lock:
            is_known = place in self._known
        # Who asks time and again waits for a resolver that hangs once.
        patience_s = asked.since + PATIENCE_S - CLOCK.monotonic() if is_known else timeout_s
        asked.is_over.wait(max(0.0, min(patience_s, timeout_s)))
        with self._lock:
            found = self._known.get(place)
        if found is None:
            raise asked.error or TimeoutError(f"the look-up of `{host}` takes longer than {timeout_s:.1f} s")
        return found

    def _ask(self, place: Place) -> _LookUp:
        with self._lock:
            asked = self._asked.get(place)
            if asked is None:
                asked = self._asked[place] = _LookUp()
                self._begin(place, asked)
            return asked

    def _begin(self, place: Place, asked: _LookUp) -> None:
        thread = threading.Thread(target=self._look_up, args=(place, asked), name="look-up", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: as if nobody had answered
            del self._asked[place]
            asked.error = OSError(str(error))
            asked.is_over.set()

    def _look_up(self, place: Place, asked: _LookUp) -> None:
        found: Found = []
        try:
            found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
        except OSError as error:
            asked.error = error
        finally:
            with self._lock:
                if found:
                    self._known[place] = found
                del self._asked[place]
            asked.is_over.set()
