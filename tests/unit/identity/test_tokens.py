"""Token texts are made, parsed, hashed and compared, including the stateless ones."""

from __future__ import annotations

import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.identity import (
    job_token,
    mint_token,
    parse_signed,
    parse_user_token,
    proof_key,
)
from shoal.identity.credentials import SignedKind
from shoal.ids import id_factory
from shoal.model.people import Token
from shoal.proof import sign
from shoal.wire import Renewal, TaskPhase

KEY = bytes(range(32))
new_id = id_factory(lambda: 1_700_000_000.0)


def token_for(token_id: str, secret_hash: bytes) -> Token:
    return Token(token_id=token_id, user_id="usr_1", secret_hash=secret_hash)


def test_a_minted_token_matches_its_own_hash_and_no_other() -> None:
    one, two = new_id("tok"), new_id("tok")
    minted, other = mint_token(one, os.urandom), mint_token(two, os.urandom)
    read = parse_user_token(minted.text)
    assert read is not None
    assert read.token_id == one
    assert read.matches(token_for(one, minted.secret_hash))
    assert not read.matches(token_for(two, other.secret_hash))
    assert not read.matches(None)


def test_the_text_does_not_hold_the_hash_nor_the_hash_the_text() -> None:
    minted = mint_token(new_id("tok"), os.urandom)
    assert minted.secret_hash.hex() not in minted.text
    assert len(minted.secret_hash) == 32


def test_a_hash_is_bound_to_its_token() -> None:
    minted = mint_token("tok_a", lambda count: b"\1" * count)
    moved = mint_token("tok_b", lambda count: b"\1" * count)
    assert minted.secret_hash != moved.secret_hash


@given(st.text(max_size=200))
def test_text_that_is_no_token_is_none(text: str) -> None:
    assert parse_user_token(text) is None
    assert parse_signed(KEY, text) is None


@pytest.mark.parametrize("change", ["", "x", " ", "\n", "é"])
def test_a_token_with_anything_added_is_another_text(change: str) -> None:
    text = mint_token(new_id("tok"), os.urandom).text
    assert (parse_user_token(text + change) is not None) == (change == "")
    assert parse_user_token(f"{change}{text}" if change else "") is None


def said_by(attempt_id: str, node: str, body: bytes) -> str:
    renewal = Renewal(attempt_id=attempt_id, epoch=1, node=node, phase=TaskPhase.RUNNING)
    return sign(proof_key(KEY, attempt_id, node), renewal, body)


def test_signed_tokens_say_for_what_they_were_made() -> None:
    attempt = new_id("att")
    job, supervisor = job_token(KEY, attempt), said_by(attempt, "rack-1.node_7", b"alive")
    read_job, read_supervisor = parse_signed(KEY, job), parse_signed(KEY, supervisor)
    assert read_job is not None
    assert read_supervisor is not None
    assert (read_job.kind, read_job.attempt_id, read_job.node) == (SignedKind.JOB, attempt, None)
    assert (read_supervisor.kind, read_supervisor.attempt_id) == (SignedKind.SUPERVISOR, attempt)
    assert read_supervisor.node == "rack-1.node_7"
    assert read_supervisor.digest == hashlib.sha256(b"alive").hexdigest()


@given(st.integers(min_value=0), st.characters(min_codepoint=33, max_codepoint=126))
def test_a_signed_token_with_one_character_changed_is_refused(at: int, char: str) -> None:
    token = said_by("att_01h2", "node-1", b"alive")
    place = at % len(token)
    changed = token[:place] + char + token[place + 1 :]
    assert (parse_signed(KEY, changed) is not None) == (changed == token)


def test_another_key_makes_other_tokens() -> None:
    token = job_token(KEY, "att_01h2")
    assert parse_signed(bytes(32), token) is None


def test_a_short_key_is_no_key() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        job_token(b"short", "att_01h2")
