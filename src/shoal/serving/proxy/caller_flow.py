"""Back-pressure on a caller's connection, in both directions.

The caller is held, so that no more is read from it, while nothing can take its bytes. It is stalled while it
does not read what was written to it.
"""

from __future__ import annotations

import asyncio

from shoal.serving.proxy.body_reader import BODY_RATE

STALL_S = 60.0
"""Interval of checks that a stalled caller reads: `BODY_RATE` bytes for each second."""


class CallerFlow:
    __slots__ = ("_num_unread", "_transport", "is_held", "is_stalled")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_held = False
        self.is_stalled = False
        self._num_unread = 0
        """Unsent bytes of replies at the last check; 0: not checked."""

    def hold(self) -> None:
        """Stop reading until `resume`. May be repeated."""
        if not self.is_held:
            self.is_held = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_held and not self._transport.is_closing():
            self.is_held = False
            self._transport.resume_reading()

    def stall(self) -> None:
        self.is_stalled = True
        self._num_unread = self._transport.get_write_buffer_size()

    def unstall(self) -> None:
        self.is_stalled = False
        self._num_unread = 0

    def has_read(self) -> bool:
        """Return whether the caller has read enough since the last check, and has more to read."""
        before, self._num_unread = self._num_unread, self._transport.get_write_buffer_size()
        return bool(self._num_unread) and (not before or before - self._num_unread >= BODY_RATE * STALL_S)
