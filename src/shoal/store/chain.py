"""The hash that chains an event to all before it. Changing this encoding breaks every existing log.

It is made with the home's key: whoever can write the database alone changes and adds no entry that follows
from the others. That a log has its tail, only an anchor kept elsewhere can show (see `anchor`).
"""

from __future__ import annotations

import hmac

GENESIS = "0" * 64
"""What the first entry follows."""


def link(key: bytes, before: str, seq: int, at: float, *texts: str | None) -> str:
    """HMAC-SHA-256 in hex over `before`, `seq`, `at` and the texts, in this order.

    Each field is written with its length, and an absent one differs from an empty one, so two
    different entries never have the same encoding.
    """
    fields = (before, str(seq), at.hex(), *texts)
    return hmac.digest(key, b"".join(_field(field) for field in fields), "sha256").hex()


def _field(value: str | None) -> bytes:
    if value is None:
        return b"-"
    content = value.encode()
    return b"%d:%b" % (len(content), content)
