"""Where the control planes of the cluster may be: the one that replied last, and which to ask after it.

The addresses come from the task spec, from the file `server.json` beside a control plane, and from replies
with a proof. Which control plane leads is not known here: the one that gives a proven reply does.
"""

from __future__ import annotations

import contextlib

import msgspec

from shoal.wire import TaskLease

MAX_ADDRESSES = 16


class ControlPlaneFile(msgspec.Struct):
    """The part of `server.json` a supervisor needs."""

    url: str
    tls_cert: str | None = None
    others: tuple[str, ...] = ()
    """Further control planes of the same cluster."""


class ControlPlaneAddresses:
    """The addresses. One thread changes them, any thread may read them."""

    def __init__(self, lease: TaskLease, server_file: str | None) -> None:
        self._server_file = server_file
        self._reported = tuple(dict.fromkeys((lease.control_url or "", *lease.control_urls)))
        self._tried: set[str] = set()
        self.url = self._reported[0]
        """The address to ask now."""
        self.ca_file: str | None = None
        if self.url.startswith("https:"):
            self._read_file()  # the certificate to trust stands beside the address

    def learn(self, urls: tuple[str, ...]) -> None:
        """Note the addresses in a reply, which the current address gave."""
        self._tried.clear()
        if urls:
            self._reported = urls[:MAX_ADDRESSES]

    def advance(self) -> None:
        """Go to the next address, because the current one did not reply. Each is tried once in a round.

        The file comes first: a restarted control plane may listen elsewhere, and its file says where.
        """
        self._tried.add(self.url)
        urls = tuple(dict.fromkeys((*self._read_file(), *self._reported)))
        left = [url for url in urls if url not in self._tried]
        if not left:
            self._tried.clear()
            left = [url for url in urls if url != self.url] or list(urls)
        self.url = left[0]

    def _read_file(self) -> tuple[str, ...]:
        if self._server_file is not None:
            with contextlib.suppress(OSError, msgspec.DecodeError), open(self._server_file, "rb") as file:
                server = msgspec.json.decode(file.read(), type=ControlPlaneFile)
                self.ca_file = server.tls_cert
                return tuple(url.rstrip("/") for url in (server.url, *server.others))
        return ()
