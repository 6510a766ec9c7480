"""Where the control planes of the cluster may be: who answered last, and whom to ask when that one does not.

From the order, from the file beside which a control plane serves, and from what a proven answer named. Who of
them leads is not known here: whoever answers with a proof does.
"""

from __future__ import annotations

import contextlib

import msgspec

from shoal.wire import Order

MAX_KNOWN = 16


class ServerFile(msgspec.Struct):
    """The part of `server.json` a supervisor needs."""

    url: str
    tls_cert: str | None = None
    others: tuple[str, ...] = ()
    """Further control planes of the same cluster."""


class Addresses:
    """For one thread to change and any to read."""

    def __init__(self, order: Order, server_file: str | None) -> None:
        self._server_file = server_file
        self._told = tuple(dict.fromkeys((order.control_url or "", *order.control_urls)))
        self._tried: set[str] = set()
        self.url = self._told[0]
        """The one to ask now."""
        self.ca_file: str | None = None
        if self.url.startswith("https:"):
            self._read_file()  # the certificate to trust stands beside the address

    def learn(self, urls: tuple[str, ...]) -> None:
        """It answered, and named these."""
        self._tried.clear()
        if urls:
            self._told = urls[:MAX_KNOWN]

    def turn(self) -> None:
        """It did not answer: ask the next, each once before any of them again.

        The file goes first: a control plane that was restarted may listen elsewhere, and says where in it.
        """
        self._tried.add(self.url)
        known = tuple(dict.fromkeys((*self._read_file(), *self._told)))
        left = [url for url in known if url not in self._tried]
        if not left:
            self._tried.clear()
            left = [url for url in known if url != self.url] or list(known)
        self.url = left[0]

    def _read_file(self) -> tuple[str, ...]:
        if self._server_file is not None:
            with contextlib.suppress(OSError, msgspec.DecodeError), open(self._server_file, "rb") as file:
                server = msgspec.json.decode(file.read(), type=ServerFile)
                self.ca_file = server.tls_cert
                return tuple(url.rstrip("/") for url in (server.url, *server.others))
        return ()
