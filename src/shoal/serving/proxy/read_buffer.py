"""Bytes of a caller that no request has taken: an unfinished head, or requests read ahead."""

from __future__ import annotations

from shoal.serving.admission.accounts import HeldBytes


class ReadBuffer:
    """They count as held by the process while they are here."""

    __slots__ = ("_held", "data", "num_searched")

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self.data = b""
        self.num_searched = 0
        """How many of these bytes are known to hold no end of a head."""

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the process may hold this number of bytes more."""
        return self._held.bytes + num_bytes <= self._held.max_bytes

    def set(self, data: bytes, *, num_searched: int = 0) -> None:
        """Hold these bytes, and no others."""
        self._held.bytes += len(data) - len(self.data)
        self.data = data
        self.num_searched = num_searched

    def take(self) -> bytes:
        """Return the bytes, which are no longer held."""
        data = self.data
        self.set(b"")
        return data
