"""Sealed secrets open with their own key, for their own job, unchanged, or not at all."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.identity import SecretsUnreadable, open_secrets, seal_secrets

KEY = bytes(range(32))


@given(st.dictionaries(st.text(), st.text()))
def test_what_was_sealed_is_what_opens(secrets: dict[str, str]) -> None:
    try:
        sealed = seal_secrets(KEY, "job_1", secrets, os.urandom)
    except UnicodeEncodeError:
        return
    assert open_secrets(KEY, "job_1", sealed) == secrets


def test_the_sealed_form_shows_neither_name_nor_value_and_is_never_the_same() -> None:
    sealed = [seal_secrets(KEY, "job_1", {"API_KEY": "hunter2"}, os.urandom) for _ in range(2)]
    assert sealed[0] != sealed[1]
    assert not any(word in blob for blob in sealed for word in (b"API_KEY", b"hunter2"))


@pytest.mark.parametrize("key,job_id", [(bytes(32), "job_1"), (KEY, "job_2")])
def test_another_key_or_job_opens_nothing(key: bytes, job_id: str) -> None:
    sealed = seal_secrets(KEY, "job_1", {"API_KEY": "hunter2"}, os.urandom)
    with pytest.raises(SecretsUnreadable) as caught:
        open_secrets(key, job_id, sealed)
    assert "hunter2" not in str(caught.value)


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_flipped_bit_anywhere_opens_nothing(at: int, mask: int) -> None:
    sealed = bytearray(seal_secrets(KEY, "job_1", {"A": "b"}, os.urandom))
    sealed[at % len(sealed)] ^= mask
    with pytest.raises(SecretsUnreadable):
        open_secrets(KEY, "job_1", bytes(sealed))


@pytest.mark.parametrize("length", [0, 1, 5, 12, 13, 20])
def test_a_cut_off_blob_opens_nothing(length: int) -> None:
    sealed = seal_secrets(KEY, "job_1", {"A": "b"}, os.urandom)
    with pytest.raises(SecretsUnreadable):
        open_secrets(KEY, "job_1", sealed[:length])
