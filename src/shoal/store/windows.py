"""Maintenance windows and reservations: one whole record each, gone once they are cancelled or long over."""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import bindparam, delete, insert, select

from shoal.model.window import Window
from shoal.store.codec import decode_window, encode
from shoal.store.prepared import Session
from shoal.store.schema import windows

MAX_KEPT = 1 << 10

INSERT = insert(windows)
BY_ID = select(windows.c.body).where(windows.c.window_id == bindparam("of"))
ALL = select(windows.c.body).order_by(windows.c.from_at, windows.c.window_id)
DELETE = delete(windows).where(windows.c.window_id == bindparam("of"))
PURGE = delete(windows).where(windows.c.until_at <= bindparam("now"))


_decoded = lru_cache(maxsize=MAX_KEPT)(decode_window)
"""Every plan looks at all of them, and few change."""


class Windows:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def add(self, window: Window) -> None:
        times = {"from_at": window.from_at, "until_at": window.until_at}
        self._run(INSERT, {"window_id": window.window_id, **times, "body": encode(window)})

    def get(self, window_id: str) -> Window | None:
        body = self._session.value(BY_ID, {"of": window_id})
        return None if body is None else decode_window(body)

    def all(self) -> list[Window]:
        """The first to begin first; some may be over."""
        return [_decoded(body) for (body,) in self._run(ALL)]

    def open(self, now: float) -> list[Window]:
        """Those that are not over."""
        return [window for window in self.all() if window.until_at > now]

    def remove(self, window_id: str) -> None:
        """May be repeated."""
        self._run(DELETE, {"of": window_id})

    def purge(self, now: float) -> None:
        """Forget those that were over by then."""
        self._run(PURGE, {"now": now})
