"""The hash that chains an event to all before it. Changing this encoding breaks every existing log.

The chain shows that a log is whole and in order; that it is *the* log, with its tail, only an
anchor kept elsewhere can show (see `anchor`).
"""

from __future__ import annotations

from hashlib import sha256

GENESIS = "0" * 64
"""What the first entry follows."""


def link(before: str, seq: int, at: float, *texts: str | None) -> str:
    """SHA-256 in hex over `before`, `seq`, `at` and the texts, in this order.

    Each field is written with its length, and an absent one differs from an empty one, so two
    different entries never have the same encoding.
    """
    fields = (before, str(seq), at.hex(), *texts)
    return sha256(b"".join(_field(field) for field in fields)).hexdigest()


def _field(value: str | None) -> bytes:
    if value is None:
        return b"-"
    content = value.encode()
    return b"%d:%b" % (len(content), content)
