"""Whom a supervisor asks next when the control plane does not answer."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from shoal.runtime.addresses import MAX_KNOWN, Addresses
from tests.unit.runtime.test_environment import ORDER

A, B, C = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"


def addresses(*urls: str, server_file: Path | None = None) -> Addresses:
    order = msgspec.structs.replace(ORDER, control_url=urls[0], control_urls=urls if urls[1:] else ())
    return Addresses(order, str(server_file) if server_file else None)


def asked(known: Addresses, count: int) -> list[str]:
    found = []
    for _ in range(count):
        found.append(known.url)
        known.turn()
    return found


def test_who_does_not_answer_is_followed_by_each_of_the_others_in_turn() -> None:
    known = addresses(A, B, C)
    assert asked(known, 7) == [A, B, C, A, B, C, A]


def test_the_only_one_is_asked_again() -> None:
    assert asked(addresses(A), 3) == [A, A, A]


def test_what_an_answer_named_replaces_what_the_order_did() -> None:
    known = addresses(A)
    known.learn((B, C))
    assert asked(known, 4) == [A, B, C, B]


def test_answer_that_names_nobody_changes_nothing() -> None:
    known = addresses(A, B)
    known.learn(())
    assert asked(known, 3) == [A, B, A]


def test_who_answered_is_asked_again_first() -> None:
    known = addresses(A, B, C)
    known.turn()
    known.learn((A, B, C))
    assert known.url == B
    assert asked(known, 4) == [B, A, C, A]


def test_file_of_the_leader_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    known = addresses(A, B, server_file=file)
    file.write_text(json.dumps({"url": f"{C}/", "others": [B], "tls_cert": "/ca.pem", "pid": 7}))
    assert asked(known, 4) == [A, C, B, C]
    assert known.ca_file == "/ca.pem"


@pytest.mark.parametrize("text", ["", "{", '{"pid": 1}'])
def test_file_that_says_nothing_changes_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "server.json"
    file.write_text(text)
    assert asked(addresses(A, B, server_file=file), 3) == [A, B, A]


def test_certificate_to_trust_is_known_before_the_first_question(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    file.write_text(json.dumps({"url": "https://a:1", "tls_cert": "/ca.pem"}))
    known = addresses("https://a:1", server_file=file)
    assert (known.url, known.ca_file) == ("https://a:1", "/ca.pem")


def test_no_answer_makes_it_remember_without_bound() -> None:
    known = addresses(A)
    known.learn(tuple(f"http://127.0.0.1:{port}" for port in range(10, 100)))
    assert len(set(asked(known, 200))) == MAX_KNOWN + 1
