"""Which control plane a supervisor asks next when one does not answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.runtime.lease.addresses import MAX_ADDRESSES, ControlPlaneAddresses
from tests.support.runtime.task_specs import change_task_spec
from tests.unit.runtime.supervisor.test_environment import ORDER

A, B, C = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"


def addresses(*urls: str, server_file: Path | None = None) -> ControlPlaneAddresses:
    task_spec = change_task_spec(ORDER, control_url=urls[0], control_urls=urls if urls[1:] else ())
    return ControlPlaneAddresses(task_spec.lease, str(server_file) if server_file else None)


def urls_asked(known_addresses: ControlPlaneAddresses, count: int) -> list[str]:
    urls = []
    for _ in range(count):
        urls.append(known_addresses.url)
        known_addresses.advance()
    return urls


def test_each_other_address_is_asked_after_one_that_does_not_answer() -> None:
    known_addresses = addresses(A, B, C)
    assert urls_asked(known_addresses, 7) == [A, B, C, A, B, C, A]


def test_only_address_is_asked_again() -> None:
    assert urls_asked(addresses(A), 3) == [A, A, A]


def test_addresses_in_a_reply_replace_those_of_the_task_spec() -> None:
    known_addresses = addresses(A)
    known_addresses.learn((B, C))
    assert urls_asked(known_addresses, 4) == [A, B, C, B]


def test_reply_without_addresses_changes_nothing() -> None:
    known_addresses = addresses(A, B)
    known_addresses.learn(())
    assert urls_asked(known_addresses, 3) == [A, B, A]


def test_address_that_answered_stays_first() -> None:
    known_addresses = addresses(A, B, C)
    known_addresses.advance()
    known_addresses.learn((A, B, C))
    assert known_addresses.url == B
    assert urls_asked(known_addresses, 4) == [B, A, C, A]


def test_address_in_the_leaders_file_is_asked_first(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    known_addresses = addresses(A, B, server_file=file)
    file.write_text(json.dumps({"url": f"{C}/", "others": [B], "tls_cert": "/ca.pem", "pid": 7}))
    assert urls_asked(known_addresses, 4) == [A, C, B, C]
    assert known_addresses.ca_file == "/ca.pem"


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1}'])
def test_empty_file_changes_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "server.json"
    file.write_text(text)
    assert urls_asked(addresses(A, B, server_file=file), 3) == [A, B, A]


def test_certificate_is_known_before_the_first_request(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    file.write_text(json.dumps({"url": "https://a:1", "tls_cert": "/ca.pem"}))
    known_addresses = addresses("https://a:1", server_file=file)
    assert (known_addresses.url, known_addresses.ca_file) == ("https://a:1", "/ca.pem")


def test_number_of_remembered_addresses_is_bounded() -> None:
    known_addresses = addresses(A)
    known_addresses.learn(tuple(f"http://127.0.0.1:{port}" for port in range(10, 100)))
    assert len(set(urls_asked(known_addresses, 200))) == MAX_ADDRESSES + 1
