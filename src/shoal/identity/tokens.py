"""A user's bearer token: `shl_<token_id>_<secret>`. Only a hash of the secret is ever stored.

The secret has 256 random bits, so a plain SHA-256 is as hard to turn back as any slow hash, and the
comparison takes the same time wherever the difference is.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable

import msgspec

from shoal.model.people import Token

PREFIX = "shl"
SECRET_BYTES = 32
_TEXT = re.compile(r"shl_(?P<id>tok_[0-9a-z]{1,40})_(?P<secret>[0-9a-f]{64})", re.ASCII)
_NOBODY = Token(token_id="", user_id="", secret_hash=bytes(32))


class MintedToken(msgspec.Struct, frozen=True):
    """A new token: `text` is shown once, `secret_hash` is kept."""

    text: str
    secret_hash: bytes


class UserTokenText(msgspec.Struct, frozen=True):
    """The two halves of a token as it was presented. Nothing about it has been checked."""

    token_id: str
    secret: str

    def matches(self, token: Token | None) -> bool:
        """Whether the secret is this token's. Costs the same for a token that does not exist."""
        kept = token or _NOBODY
        is_same = hmac.compare_digest(hash_secret(self.token_id, self.secret), kept.secret_hash)
        return is_same and token is not None


def mint_token(token_id: str, random: Callable[[int], bytes]) -> MintedToken:
    """A new secret for `token_id`. `random` must be a cryptographic source (`os.urandom`)."""
    secret = random(SECRET_BYTES).hex()
    return MintedToken(f"{PREFIX}_{token_id}_{secret}", hash_secret(token_id, secret))


def parse_user_token(text: str) -> UserTokenText | None:
    """The halves of a well-formed token; None for any other text."""
    match = _TEXT.fullmatch(text)
    return UserTokenText(match["id"], match["secret"]) if match else None


def hash_secret(token_id: str, secret: str) -> bytes:
    """What the store keeps. Bound to the id: one token's hash is of no use for another."""
    return hashlib.sha256(f"shoal-token\0{token_id}\0{secret}".encode()).digest()
