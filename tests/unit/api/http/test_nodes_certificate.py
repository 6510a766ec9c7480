"""The certificate for nodes does not expire in a running process: the live server loads a new one."""

from __future__ import annotations

import hashlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from structlog.testing import capture_logs

from shoal.api.http import server
from shoal.clock import Clock
from shoal.control.bootstrap import load_certificate
from shoal.engines.fake import VirtualClock
from shoal.identity.authority import RENEW_DAYS, SERVER_DAYS, valid_until
from shoal.settings import Settings
from tests.support.fakes import remote_engine
from tests.support.fakes.remote_engine import MailboxServer, ProcessEngine
from tests.support.runtime.tasks import until

DAY_S = 86400.0
AGE_S = (SERVER_DAYS - RENEW_DAYS + 1) * DAY_S


class AgingServer(MailboxServer):
    """A server so old, by its own clock, that its first certificate would have expired today."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.clock = self.time = VirtualClock(time.time() - AGE_S)
        self.ca = self.access().ca
        self.num_looks = 0

    def certify(self, settings: Settings, clock: Clock) -> tuple[Path, Path]:
        self.num_looks += 1
        return load_certificate(settings, clock)

    def look_twice(self) -> None:
        before = self.num_looks
        until(lambda: self.num_looks > before + 1)

    def shown(self) -> str:
        """The fingerprint of the certificate shown to a client that trusts only the authority."""
        address = urlsplit(self.settings.urls_for_supervisors[0])
        with (
            socket.create_connection((address.hostname, address.port), timeout=10) as plain,
            ssl.create_default_context(cadata=self.ca).wrap_socket(
                plain, server_hostname=address.hostname
            ) as secure,
        ):
            return hashlib.sha256(secure.getpeercert(binary_form=True) or b"").hexdigest()


@pytest.fixture
def aging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgingServer]:
    made = AgingServer(tmp_path)
    monkeypatch.setattr(server, "RENEW_EVERY_S", 0.01)
    monkeypatch.setattr(remote_engine, "load_certificate", made.certify)
    with made.serving(ProcessEngine(tmp_path, made.access(), {})):
        yield made


def test_renewed_certificate_is_used_while_the_server_runs(aging: AgingServer) -> None:
    first = aging.shown()
    aging.look_twice()
    assert aging.shown() == first
    aging.time.advance(AGE_S)
    until(lambda: aging.shown() != first)
    left_s = valid_until((aging.settings.home / "keys" / "nodes.pem").read_bytes()) - time.time()
    assert left_s > (SERVER_DAYS - 1) * DAY_S


def test_server_keeps_its_certificate_while_the_authority_is_away(aging: AgingServer) -> None:
    keys, first = aging.settings.home / "keys", aging.shown()
    keys.rename(keys.with_name("away"))
    aging.time.advance(AGE_S)
    with capture_logs() as entries:
        aging.look_twice()
    assert {line["event"] for line in entries} == {"nodes.certificate_not_renewed"}
    assert aging.shown() == first
    assert not keys.exists()
    keys.with_name("away").rename(keys)
    until(lambda: aging.shown() != first)
