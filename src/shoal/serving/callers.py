"""How a data plane knows a caller: by a digest that the control plane has, too, and nobody can turn back."""

from __future__ import annotations

import hashlib
import re

_USER = re.compile(r"shl_(tok_[0-9a-z]{1,40})_([0-9a-f]{64})", re.ASCII)


_OURS = re.compile(r"\s*bearer\s+sh[a-z]_", re.IGNORECASE)


def is_ours(authorization: str) -> bool:
    """Whether this header shows a token of Shoal's, good or not: no program is to see one."""
    return _OURS.match(authorization) is not None


def digest_of(token: str) -> str:
    """What stands in the table for this token. Of one that is not of Shoal's making, as in a table written by
    hand, the SHA-256.
    """
    match = _USER.fullmatch(token)
    if match is None:
        return hashlib.sha256(token.encode()).hexdigest()
    # Bound to the token's id, as it is kept: see `identity.tokens.hash_secret`.
    return hashlib.sha256(f"shoal-token\0{match[1]}\0{match[2]}".encode()).hexdigest()
