"""Ids: a short prefix that says what it names, then a UUIDv7, so ids sort by birth and never repeat."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32: no i, l, o, u
LENGTH = 26
PAIRS = tuple(high + low for high in ALPHABET for low in ALPHABET)

RANDOM_BYTES = 10
DRAWN_AT_ONCE = 64
"""Ids made of one call to `random`: a system call lets other threads in, and costs more than an id."""

IdFactory = Callable[[str], str]
"""Takes a prefix (`job`, `att`, `usr`, `tok`, `arr`) and returns a new id, never the same twice."""


def encode(value: int) -> str:
    """128 bits as 26 characters that sort as the number does."""
    return "".join([PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)])


def uuid7(now: float, random: bytes) -> int:
    """RFC 9562 version 7: 48 bits of milliseconds, then `random` (10 bytes)."""
    value = (int(now * 1000) & ((1 << 48) - 1)) << 80 | int.from_bytes(random, "big")
    value = (value & ~(0xF << 76)) | (7 << 76)
    return (value & ~(0x3 << 62)) | (0x2 << 62)


def id_factory(now: Callable[[], float], random: Callable[[int], bytes] = os.urandom) -> IdFactory:
    """Ids stamped with `now` and made unique by `random`; a simulation passes seeded ones.

    Each is greater than the one before, also within a millisecond and when the clock is set back: the
    elements of an array, made in one go, sort by their index. May be called from several threads.
    """
    last = 0
    pool = b""
    guard = threading.Lock()

    def new_id(prefix: str) -> str:
        nonlocal last, pool
        with guard:
            pool = pool or random(RANDOM_BYTES * DRAWN_AT_ONCE)
            drawn, pool = pool[:RANDOM_BYTES], pool[RANDOM_BYTES:]
            last = max(last + 1, uuid7(now(), drawn))
            return f"{prefix}_{encode(last)}"

    return new_id
