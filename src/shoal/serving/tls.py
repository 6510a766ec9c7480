"""TLS from a certificate and a key file, read again when they change: renewals need no restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)

EVERY_S = 10.0


class TlsFiles:
    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._seen = self._stamp()
        self.context.load_cert_chain(certificate, key)

    def refresh(self) -> None:
        """Connections from now on get what the files say now; if that is no good, what they said before."""
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                # A pair that does not fit leaves a context with the new certificate and without a key.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
                self.context.load_cert_chain(*self._files)
        except OSError as error:  # also what OpenSSL does not like
            log.warning("certificate %s not taken, the one before stays: %s", self._files[0], error)

    async def keep_fresh(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.refresh()

    def _stamp(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)
