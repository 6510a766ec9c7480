"""The control plane and the data plane compute the same digest for a token."""

from __future__ import annotations

import hashlib
import os

from shoal.identity import mint_token
from shoal.serving.admission.accounts import digest_of


def test_data_plane_computes_the_digest_that_the_store_holds() -> None:
    minted = mint_token("tok_00000000000000000000000007", os.urandom)
    assert digest_of(minted.text) == minted.secret_hash.hex()


def test_token_not_made_by_shoal_is_known_by_its_plain_digest() -> None:
    for text in ("", "secret", "shl_tok_1_abc", "shl_tok_1_" + "0" * 64 + "\n"):
        assert digest_of(text) == hashlib.sha256(text.encode()).hexdigest()
