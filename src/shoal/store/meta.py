"""Small facts about this installation, as text by name; and counters that only grow."""

from __future__ import annotations

from sqlalchemy import bindparam, insert, select, update

from shoal.store.prepared import Session
from shoal.store.schema import meta

INSERT = insert(meta)
GET = select(meta.c.value).where(meta.c.key == bindparam("named"))
SET = update(meta).where(meta.c.key == bindparam("named")).values(value=bindparam("to_value"))


class Meta:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def get(self, key: str) -> str | None:
        value: str | None = self._session.value(GET, {"named": key})
        return value

    def set(self, key: str, value: str) -> None:
        """Add, or replace."""
        if self._run(SET, {"named": key, "to_value": value}).rowcount == 0:
            self._run(INSERT, {"key": key, "value": value})

    def take(self, key: str, first: int) -> int:
        """The next value of a counter that begins at `first` and never gives one twice."""
        value = int(self.get(key) or first)
        self.set(key, str(value + 1))
        return value
