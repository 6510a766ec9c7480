"""The chain's encoding: fixed for ever, and different for different entries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.store.hash_chain import GENESIS, chain_hash

KEY = b"k" * 32
texts = st.lists(st.none() | st.text(max_size=4), min_size=2, max_size=4)


def test_hash_of_a_known_entry_never_changes() -> None:
    """Logs written by older versions must still verify."""
    first = chain_hash(KEY, GENESIS, 1, 0.1, "job.submitted", "user:ana", None, "", "ü")
    assert first == "58d75113f86088dd35133685740993293f2b7e92a7eb3cf4dc96639fc2f64ef8"


@given(texts, texts)
def test_different_entries_have_different_hashes(one: list[str | None], other: list[str | None]) -> None:
    assert (chain_hash(KEY, GENESIS, 1, 1.0, *one) == chain_hash(KEY, GENESIS, 1, 1.0, *other)) == (
        one == other
    )


def test_every_part_counts() -> None:
    base = chain_hash(KEY, GENESIS, 1, 1.0, "a")
    assert (
        len(
            {
                base,
                chain_hash(KEY, "1" * 64, 1, 1.0, "a"),
                chain_hash(KEY, GENESIS, 2, 1.0, "a"),
                chain_hash(KEY, GENESIS, 1, 2.0, "a"),
            }
        )
        == 4
    )
