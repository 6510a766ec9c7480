"""Ids: a short prefix for the kind of object, then a UUIDv7, so ids sort by creation time and are unique."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32: no i, l, o, u
LENGTH = 26
PAIRS = tuple(high + low for high in ALPHABET for low in ALPHABET)

POOL_BYTES = 640

IdFactory = Callable[[str], str]
"""Takes a prefix (`job`, `att`, `usr`, `tok`, `arr`) and returns a new id, never the same twice."""


def encode(value: int) -> str:
    """Encode 128 bits as 26 characters that sort like the number."""
    return "".join([PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)])


def uuid7(now: float, random: bytes) -> int:
    """RFC 9562 version 7: 48 bits of milliseconds, then `random` (10 bytes)."""
    value = (int(now * 1000) & ((1 << 48) - 1)) << 80 | int.from_bytes(random, "big")
    value = (value & ~(0xF << 76)) | (7 << 76)
    return (value & ~(0x3 << 62)) | (0x2 << 62)


class Pool:
    """Random bytes, read from the kernel in bulk. One call costs as much as all other work for an id."""

    def __init__(self) -> None:
        self._left = b""

    def __call__(self, count: int) -> bytes:
        """Return bytes that were never returned before. Not thread-safe."""
        if len(self._left) < count:
            self._left = os.urandom(max(count, POOL_BYTES))
        drawn, self._left = self._left[:count], self._left[count:]
        return drawn


def id_factory(now: Callable[[], float], random: Callable[[int], bytes] | None = None) -> IdFactory:
    """Return a function that makes ids from `now` and `random`. A simulation passes seeded ones.

    Each id is greater than the one before, also within a millisecond and when the clock is set back. So the
    elements of an array, which are made at once, sort by their index. The function is thread-safe.
    """
    last = 0
    draw = random or Pool()
    guard = threading.Lock()

    def new_id(prefix: str) -> str:
        nonlocal last
        with guard:
            last = max(last + 1, uuid7(now(), draw(10)))
            return f"{prefix}_{encode(last)}"

    return new_id
