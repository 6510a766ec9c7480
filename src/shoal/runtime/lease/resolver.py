"""Resolve a host name with a timeout. `getaddrinfo` has none and may block for as long as it likes.

With the usual `resolv.conf`, a name server that is away costs half a minute, and more with further servers
and search domains. A lease renewal must not wait for that. So a thread looks the name up, at most one for
each name, and the last answer serves while the next one is late. An old answer does no harm, because the
server at the address has to prove itself anyway.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from shoal.clock import BootClock

Endpoint = tuple[str, int]
AddressInfo = list[tuple[Any, Any, int, str, tuple[Any, ...]]]
"""The type that `socket.getaddrinfo` returns."""
PATIENCE_S = 1.0
"""How long to wait for a newer answer if an older one is there."""
CLOCK = BootClock()


class _Lookup:
    """One lookup in progress, shared by all callers that ask for the name in the meantime."""

    def __init__(self) -> None:
        self.since = CLOCK.monotonic()
        self.is_over = threading.Event()
        self.error: OSError | None = None


class Resolver:
    """Resolves names for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[Endpoint, AddressInfo] = {}
        self._lookups: dict[Endpoint, _Lookup] = {}

    def reset_after_fork(self) -> None:
        """Forget the threads that look names up, which a forked process does not have. Answers stay."""
        self._lock = threading.Lock()  # one of those threads may have held it
        self._lookups = {}

    def resolve(self, host: str, port: int, timeout_s: float) -> AddressInfo:
        """Return the addresses of the host, or those of the last answer. Blocks for at most `timeout_s`.

        `OSError`: there is no answer, but a later call may have one. `ValueError`: it is not a host name.
        """
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except OSError:
            pass  # the host is a name, so it has to be looked up
        endpoint = host, port
        lookup = self._lookup_of(endpoint)
        with self._lock:
            is_known = endpoint in self._answers
        # A caller that asks again and again waits only once for a resolver that hangs.
        patience_s = lookup.since + PATIENCE_S - CLOCK.monotonic() if is_known else timeout_s
        lookup.is_over.wait(max(0.0, min(patience_s, timeout_s)))
        with self._lock:
            addresses = self._answers.get(endpoint)
        if addresses is None:
            raise lookup.error or TimeoutError(f"the look-up of `{host}` takes longer than {timeout_s:.1f} s")
        return addresses

    def _lookup_of(self, endpoint: Endpoint) -> _Lookup:
        with self._lock:
            lookup = self._lookups.get(endpoint)
            if lookup is None:
                lookup = self._lookups[endpoint] = _Lookup()
                self._start_lookup(endpoint, lookup)
            return lookup

    def _start_lookup(self, endpoint: Endpoint, lookup: _Lookup) -> None:
        thread = threading.Thread(target=self._look_up, args=(endpoint, lookup), name="look-up", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the same as no answer
            del self._lookups[endpoint]
            lookup.error = OSError(str(error))
            lookup.is_over.set()

    def _look_up(self, endpoint: Endpoint, lookup: _Lookup) -> None:
        addresses: AddressInfo = []
        try:
            addresses = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
        except OSError as error:
            lookup.error = error
        finally:
            with self._lock:
                if addresses:
                    self._answers[endpoint] = addresses
                del self._lookups[endpoint]
            lookup.is_over.set()
