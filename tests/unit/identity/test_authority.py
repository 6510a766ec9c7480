"""The cluster's own authority: what its certificates are valid for, and when they are replaced."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from shoal.clock import SystemClock
from shoal.control.bootstrap import load_authority, load_certificate
from shoal.identity.authority import RENEW_DAYS, SERVER_DAYS, is_valid_server, make_authority, make_server
from shoal.settings import Settings

NOW = 1_800_000_000.0
DAY = 86400.0


def test_a_certificate_serves_its_names_until_it_is_old() -> None:
    authority = make_authority("cluster", NOW)
    server = make_server(authority, ["10.0.0.1", "login"], NOW)
    assert is_valid_server(server, authority, ["login"], NOW)
    assert is_valid_server(server, authority, ["10.0.0.1"], NOW + (SERVER_DAYS - RENEW_DAYS - 1) * DAY)
    assert not is_valid_server(server, authority, ["10.0.0.1"], NOW + (SERVER_DAYS - RENEW_DAYS + 1) * DAY)
    assert not is_valid_server(server, authority, ["10.0.0.2"], NOW)


def test_a_certificate_of_another_authority_does_not_serve() -> None:
    server = make_server(make_authority("cluster", NOW), ["login"], NOW)
    assert not is_valid_server(server, make_authority("cluster", NOW), ["login"], NOW)


def test_files_are_made_once_for_their_owner_alone_and_again_for_another_address(tmp_path: Path) -> None:
    clock = SystemClock()
    settings = Settings(home=tmp_path, nodes_host="10.0.0.1", nodes_port=7464)
    with pytest.raises(FileNotFoundError):  # running processes know only the old authority
        load_certificate(settings, clock)
    load_authority(tmp_path, clock)
    certificate, key = load_certificate(settings, clock)
    first = certificate.read_bytes()
    assert [path.stat().st_mode & 0o777 for path in (key, tmp_path / "keys" / "ca.key")] == [0o600, 0o600]
    assert load_certificate(settings, clock)[0].read_bytes() == first
    moved = Settings(home=tmp_path, nodes_host="10.0.0.2", nodes_port=7464)
    assert load_certificate(moved, clock)[0].read_bytes() != first


def test_certificate_that_does_not_fit_its_key_is_replaced(tmp_path: Path) -> None:
    clock, settings = SystemClock(), Settings(home=tmp_path, nodes_host="10.0.0.1", nodes_port=7464)
    authority = load_authority(tmp_path, clock)
    certificate, key = load_certificate(settings, clock)
    key.write_bytes(make_server(authority, ["10.0.0.1"], NOW).key)  # killed between the two
    load_certificate(settings, clock)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
